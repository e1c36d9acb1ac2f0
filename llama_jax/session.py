"""A KV cache on the device and the host loop that feeds it: prompts in chunks, new tokens as they come."""

from __future__ import annotations

import functools
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from llama_jax import stages
from llama_jax.cache import KVCache, forget
from llama_jax.config import LlamaConfig
from llama_jax.drafter import Drafter
from llama_jax.errors import ArgumentError
from llama_jax.generate import (
    DecodeState,
    decode,
    next_logits,
    prefill,
    sample_next,
    shift_context,
    start_decoding,
)
from llama_jax.grammar import Constraint, TokenMasks
from llama_jax.model import Params
from llama_jax.placement import Plan, place_cache, temporary_bytes
from llama_jax.prompt_cache import Snapshot, fingerprint, saved_sampler, with_sampler
from llama_jax.report import Timings, TokenLogprobs, token_logprobs
from llama_jax.sampling import Logprobs, SamplingParams, start_state
from llama_jax.speculative import Speculation, speculate

_MAX_STEPS = 32  # decode steps in one dispatch
_MAX_ROUNDS = 8  # of drafting and checking in one dispatch
_LEAST_TO_SHIFT = 4  # tokens of context
_DISPATCH_SECONDS = 0.05  # what a reader of a stream does not notice


def _prefill_chunk(
    params: Params, tokens: Array, config: LlamaConfig, cache: KVCache, counts: Array, logits: Array
) -> tuple[Array, KVCache]:
    """`prefill`, in which a row without tokens keeps its `logits`."""
    new, cache = prefill(params, tokens, config, cache, counts)
    return jnp.where((counts > 0)[:, None], new, logits), cache


def _jit(function: Any, staged: Any, static: tuple[str, ...] = (), donate: tuple[str, ...] = ()) -> stages.ByStages:
    return stages.ByStages(jax.jit(function, static_argnames=static, donate_argnames=donate), staged)


_prefill_jit = _jit(_prefill_chunk, stages.prefill_chunk, ("config",), ("cache", "logits"))
_start_jit = _jit(start_decoding, stages.start, (), ("cache", "sampler"))
_forget_jit = _jit(forget, stages.forget_slots, ("config",), ("cache",))
_shift_jit = _jit(shift_context, stages.shift_context, ("config",), ("state",))
_decode_jit = _jit(decode, stages.decode, ("config", "max_steps"), ("state",))
_next_logits_jit = _jit(next_logits, stages.next_logits, ("config",), ("state",))
_sample_jit = _jit(sample_next, stages.sample, (), ("state",))
_speculate_jit = _jit(speculate, None, ("config", "options", "max_rounds"), ("state", "draft"))


def chunk_lengths(n_batch: int) -> tuple[int, ...]:
    """The few lengths that prompt chunks are padded to, so that a handful of programs serves all prompts."""
    return (*(n for n in (16, 64, 256) if n < n_batch), n_batch)


def check_prompt(prompt: Sequence[int], capacity: int, vocab_size: int) -> None:
    """Raises ArgumentError for a prompt that is empty, too long for the context, or holds what is not a token id."""
    if not prompt:
        raise ArgumentError("The prompt has no tokens; at least one is needed.")
    if len(prompt) > capacity:
        raise ArgumentError(f"The prompt has {len(prompt)} tokens; the context holds {capacity} (raise -c / n_ctx).")
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < vocab_size:
            raise ArgumentError(f"The prompt holds the token id {token}; ids go from 0 to {vocab_size - 1}.")


class Session:
    """B sequences in one KV cache. A prompt that starts like what the cache holds only runs what is new.

    Args:
      capacity: S, tokens that each sequence can hold, prompt and answer together.
      n_batch: most prompt tokens per sequence in one run of the model.
      dtype: of the cache, see `init_cache`; None takes the embedding's.
      speculation: draft tokens and check several in one run of the model; None runs it once for each token.
      draft: of the draft model, with as many rows and as much capacity; None drafts with n-grams.
    """

    def __init__(
        self,
        params: Params,
        config: LlamaConfig,
        *,
        capacity: int,
        batch: int = 1,
        n_batch: int = 512,
        dtype: DTypeLike | tuple[DTypeLike, ...] | None = None,
        mesh: Mesh | None = None,
        plan: Plan | None = None,
        speculation: Speculation | None = None,
        draft: Session | None = None,
    ) -> None:
        if n_batch < 1:
            raise ArgumentError(f"n_batch is {n_batch}; it must be at least 1.")
        self.params = params
        self.config = config
        self.mesh = mesh
        self.batch = batch
        self.capacity = capacity
        self.n_batch = min(n_batch, capacity)
        self.tokens: list[list[int]] = [[] for _ in range(batch)]  # what the cache holds
        self._exact = [capacity] * batch  # from this slot on, a shifted row has seen tokens that are gone
        self.timings = Timings()
        self.logprobs: list[list[TokenLogprobs]] = [[] for _ in range(batch)]  # of the running or latest generation
        self.cache = place_cache(config, batch, capacity, dtype or params.embedding.dtype, mesh, plan)
        self._sampler: dict[str, Any] = {}  # where the latest generation's sampling stands
        self.temporary_bytes = 0  # on each device, of the programs that `warm_up` has compiled
        self._seconds_per_step = _DISPATCH_SECONDS
        self._drafter = None
        if speculation is not None:
            if self.cache.stages:
                raise ArgumentError("Speculative decoding needs all layers on the same devices; here they are spread.")
            self._drafter = Drafter(speculation, draft)
            if draft is not None and (draft.batch, draft.capacity) != (batch, capacity):
                raise ArgumentError(
                    f"The draft model's session has {draft.batch} rows of {draft.capacity} tokens; it must have "
                    f"{batch} of {capacity}."
                )

    @property
    def intact(self) -> bool:
        """Whether the caches are there: an interrupt or a lack of memory amid a step loses them."""
        return not self.cache.lengths.is_deleted() and (self._drafter is None or self._drafter.intact)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Array:
        """Brings the cache to hold exactly `prompts`, one per row: the logits [B, V] after their last tokens.

        Raises:
          ArgumentError: a prompt is empty, longer than the capacity or holds a wrong id, or there are not B of them.
        """
        if len(prompts) != self.batch:
            raise ArgumentError(f"{len(prompts)} prompts were given to a session of {self.batch} sequences.")
        for prompt in prompts:
            check_prompt(prompt, self.capacity, self.config.vocab_size)
        done = [_common_prefix(held, prompt) for held, prompt in zip(self.tokens, prompts, strict=True)]
        done = [min(n, len(p) - 1, exact) for n, p, exact in zip(done, prompts, self._exact, strict=True)]
        self.timings = Timings(
            prompt_tokens=sum(len(p) - n for p, n in zip(prompts, done, strict=True)), cached_tokens=sum(done)
        )
        self._hold([prompt[:n] for prompt, n in zip(prompts, done, strict=True)])
        logits = jnp.zeros((self.batch, self.config.vocab_size), jnp.float32)
        while any(len(held) < len(prompt) for held, prompt in zip(self.tokens, prompts, strict=True)):
            chunks = [
                prompt[len(held) : len(held) + self.n_batch] for held, prompt in zip(self.tokens, prompts, strict=True)
            ]
            logits = self._run_chunk(chunks, logits)
            for held, chunk in zip(self.tokens, chunks, strict=True):
                held.extend(chunk)
        return logits

    @functools.cached_property
    def fingerprint(self) -> str:
        """See `prompt_cache.fingerprint`."""
        return fingerprint(self.params, self.config)

    def snapshot(self) -> Snapshot:
        """What the session holds, on the host."""
        n = max(map(len, self.tokens))
        return Snapshot(
            tokens=[list(row) for row in self.tokens],
            exact=[min(n, len(row)) for n, row in zip(self._exact, self.tokens, strict=True)],
            kv=[np.asarray(buffer)[:, :, :n] for buffer in jax.tree.leaves((self.cache.k, self.cache.v))],
            sampler={name: np.asarray(x) for name, x in self._sampler.items()},
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Takes up what a session held; of rows longer than the capacity, the beginning.

        Raises:
          ArgumentError: the snapshot's rows, or the shapes or type of its cache, are not those of this session.
        """
        buffers, structure = jax.tree.flatten((self.cache.k, self.cache.v))
        if [(len(snapshot.tokens), x.shape[1], x.shape[3:], x.dtype) for x in snapshot.kv] != [
            (self.batch, x.shape[1], x.shape[3:], x.dtype) for x in buffers
        ]:
            raise ArgumentError("The prompt cache holds other rows or another type of keys and values than are wanted.")
        fits = all(len(row) <= self.capacity for row in snapshot.tokens)

        def placed(buffer: Array, saved: np.ndarray) -> Array:
            n = min(saved.shape[2], self.capacity)
            whole = np.zeros(buffer.shape, buffer.dtype)
            whole[:, :, :n] = saved[:, :, :n]
            return jax.device_put(whole, buffer.sharding)

        placed_buffers = map(placed, buffers, snapshot.kv)
        k, v = jax.tree.unflatten(structure, placed_buffers)
        self.cache = replace(self.cache, k=k, v=v)
        self._hold([row[: self.capacity] for row in snapshot.tokens])
        self._exact = [n if n < len(row) else self.capacity for n, row in zip(snapshot.exact, self.tokens, strict=True)]
        self._sampler = dict(snapshot.sampler) if fits else {}

    def _hold(self, tokens: list[Sequence[int]]) -> None:
        """Forgets all but the first `len(tokens[b])` tokens of each row, which are `tokens`."""
        self.tokens = [list(row) for row in tokens]
        self._exact = [self.capacity] * self.batch
        self._sampler = {}
        lengths = jnp.asarray([len(row) for row in tokens], jnp.int32)
        if self.cache.lengths.committed:
            lengths = jax.device_put(lengths, self.cache.lengths.sharding)
        self.cache = replace(self.cache, lengths=lengths)

    def _run_chunk(self, chunks: Sequence[Sequence[int]], logits: Array) -> Array:
        longest = max(len(chunk) for chunk in chunks)
        padded = next(n for n in chunk_lengths(self.n_batch) if n >= longest)
        tokens = np.zeros((self.batch, padded), np.int32)
        for row, chunk in zip(tokens, chunks, strict=True):
            row[: len(chunk)] = chunk
        counts = jnp.asarray([len(chunk) for chunk in chunks], jnp.int32)
        logits, self.cache = _prefill_jit(self.params, jnp.asarray(tokens), self.config, self.cache, counts, logits)
        return logits

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        max_tokens: int,
        eos_ids: Sequence[int] = (),
        keep: Sequence[int] | None = None,
        constraints: Sequence[Constraint | None] = (),
    ) -> Generator[list[list[int]]]:
        """Yields each row's new tokens as they come, some at a time, `eos_ids` included, until all rows have ended.

        A row ends with one of `eos_ids`, after `max_tokens`, when its cache is full, or when its constraint allows
        nothing more. Closing the iterator ends all. Where `sampling` asks for log-probabilities, `self.logprobs` holds
        those of each row's tokens so far.

        Args:
          keep: how many of each row's first tokens stay when its cache is full. If given, a full row does not end but
            forgets the older half of its other tokens and goes on (llama.cpp's context shift).
          constraints: one per row, None for a free one; () leaves all free.

        Raises:
          ArgumentError: prompts or options do not fit, or the options let no token be taken.
        """
        if keep is not None and self.capacity < _LEAST_TO_SHIFT:
            raise ArgumentError(f"A context of {self.capacity} tokens cannot shift; at least {_LEAST_TO_SHIFT} can.")
        if sampling.batch != self.batch:
            raise ArgumentError(f"sampling is for {sampling.batch} rows; the session has {self.batch}.")
        if constraints and len(constraints) != self.batch:
            raise ArgumentError(f"{len(constraints)} constraints were given for {self.batch} rows.")
        masks = TokenMasks(constraints, self.config.vocab_size) if any(constraints) else None
        self.logprobs = [[] for _ in range(self.batch)]
        started = time.perf_counter()
        logits = self.prefill(prompts)
        if max_tokens < 1:
            logits.block_until_ready()
            self.timings.prompt_seconds = time.perf_counter() - started
            return
        if keep is not None and (cut := self._make_room(keep, [True] * self.batch, self.capacity)):
            self.cache = _forget_jit(self.cache, self.config, *cut)
        eos = jnp.asarray(list(eos_ids), jnp.int32)
        sampler = start_state(sampling, jnp.asarray(_recent_tokens(prompts, sampling.window)))
        mask = None if masks is None else jnp.asarray(masks.words())
        state = _start_jit(logits, self.cache, sampler, sampling, eos, mask=mask)
        self.cache = state.cache
        new = self._latest(state, np.ones(self.batch, np.int32))
        if masks is None and self._drafter is not None:
            self._drafter.prepare(self.tokens)
        self.timings.prompt_seconds = time.perf_counter() - started
        yield from self._go_on(state, new, sampling, eos, max_tokens, keep, masks)

    def resume(
        self,
        sampling: SamplingParams,
        *,
        max_tokens: int,
        eos_ids: Sequence[int] = (),
        keep: Sequence[int] | None = None,
    ) -> Iterator[list[list[int]]]:
        """Goes on with the latest generation, also a restored one, as if it had not ended after its `max_tokens`.

        Raises:
          ArgumentError: there is none, or its sampling options had other shapes.
        """
        if not self.resumable:
            raise ArgumentError("There is no generation to resume: the text has ended, or only a prompt has been run.")
        self.timings = Timings(cached_tokens=sum(map(len, self.tokens)))
        saved, self._sampler = self._sampler, {}
        eos = jnp.asarray(list(eos_ids), jnp.int32)
        self.logprobs = [[] for _ in range(self.batch)]
        logits = jnp.zeros((self.batch, self.config.vocab_size), jnp.float32)
        state = _start_jit(logits, self.cache, start_state(sampling), sampling, eos, mask=None)
        self.cache = state.cache
        state = with_sampler(state, saved)
        ended = jnp.any(state.token[:, None] == eos, axis=1) | (state.cache.lengths >= self.capacity)
        state = replace(state, done=ended)
        new = [[] for _ in range(self.batch)]
        unseen = [[token] for token in np.asarray(state.token).tolist()]
        yield from self._go_on(state, new, sampling, eos, max_tokens, keep, unseen=unseen)

    @property
    def resumable(self) -> bool:
        """Whether `resume` has something to go on with."""
        return bool(self._sampler)

    def end_text(self, unwanted: Sequence[int]) -> None:
        """Forgets the last `unwanted[b]` of the tokens that each row's latest generation gave; nothing resumes it."""
        exact = self._exact
        self._hold([row[: len(row) + min(0, 1 - n)] for row, n in zip(self.tokens, unwanted, strict=True)])
        self._exact = exact

    def _go_on(
        self,
        state: DecodeState,
        new: list[list[int]],
        sampling: SamplingParams,
        eos: Array,
        max_tokens: int,
        keep: Sequence[int] | None,
        masks: TokenMasks | None = None,
        unseen: list[list[int]] | None = None,
    ) -> Iterator[list[list[int]]]:
        """Yields `new`, then what further decode steps give.

        Args:
          unseen: earlier tokens of each row that the cache does not hold.
        """
        eos_ids = np.asarray(eos).tolist()
        unseen = [[] for _ in range(self.batch)] if unseen is None else unseen
        n_new = [len(row) for row in new]
        first_at = time.perf_counter()
        while True:
            if masks is not None:
                state = replace(state, done=state.done | jnp.asarray(masks.accept(new)))
            for row in range(self.batch):
                unseen[row].extend(new[row])
                self.tokens[row].extend(unseen[row][:-1])
                unseen[row] = unseen[row][-1:]
            self._sampler = {} if masks else saved_sampler(state) | {"seed": sampling.seed}
            if any(new):
                yield new
            left = [max_tokens - n for n in n_new]
            running = [n > 0 and not done for n, done in zip(left, np.asarray(state.done).tolist(), strict=True)]
            if not any(running):
                self.timings.context_full = any(
                    n > 0 and len(row) >= self.capacity and token not in eos_ids
                    for n, row, (token,) in zip(left, self.tokens, unseen, strict=True)
                )
                return
            full = self.capacity if keep is None else self.capacity - 1
            if keep is not None and (cut := self._make_room(keep, running, full)):
                state = _shift_jit(state, self.config, *cut)
                self.cache = state.cache
            if masks is not None:
                state, new = self._constrained_step(state, sampling, eos, masks)
            elif self._drafter is not None:
                left = jnp.asarray(left, jnp.int32)
                state, new = self._speculative_dispatch(state, sampling, eos, self._drafter, left, full)
            else:
                room = [full - len(row) for row in self.tokens]
                at_most = min(
                    n if keep is None else min(n, r) for n, r, runs in zip(left, room, running, strict=True) if runs
                )
                state, new = self._dispatch(state, sampling, eos, at_most)
            n_new = [n + len(row) for n, row in zip(n_new, new, strict=True)]
            self.timings.generated_tokens += sum(map(len, new))
            self.timings.decode_seconds = time.perf_counter() - first_at

    def _make_room(self, keep: Sequence[int], running: Sequence[bool], full: int) -> tuple[Array, Array] | None:
        """Forgets half of the tokens behind the first `keep[b]` in each running row that has come to `full`.

        Returns:
          The arguments `start` and `count` of `cache.forget`; None when no row is full.
        """
        start, count = np.zeros((2, self.batch), np.int32)
        for b, row in enumerate(self.tokens):
            if running[b] and len(row) >= full:
                start[b] = min(keep[b], len(row) - 2)
                count[b] = (len(row) - start[b]) // 2
                del row[start[b] : start[b] + count[b]]
                self._exact[b] = min(self._exact[b], start[b])
        if not count.any():
            return None
        self.timings.shifts += 1
        return jnp.asarray(start), jnp.asarray(count)

    def _dispatch(
        self, state: DecodeState, sampling: SamplingParams, eos: Array, at_most: int
    ) -> tuple[DecodeState, list[list[int]]]:
        """One dispatch of as many decode steps as fit into `_DISPATCH_SECONDS`."""
        wanted = int(_DISPATCH_SECONDS / self._seconds_per_step)
        if jax.process_count() > 1:  # whose clocks differ, while all have to do the same
            wanted = _MAX_STEPS
        n_steps = max(1, min(wanted, _MAX_STEPS, at_most))
        started = time.perf_counter()
        state, tokens, counts, logprobs = _decode_jit(
            self.params, self.config, state, sampling, eos, _MAX_STEPS, jnp.int32(n_steps)
        )
        self.cache = state.cache
        new = self._taken(tokens, counts, logprobs)
        self._seconds_per_step = (time.perf_counter() - started) / n_steps
        return state, new

    def _speculative_dispatch(
        self, state: DecodeState, sampling: SamplingParams, eos: Array, drafter: Drafter, left: Array, full: int
    ) -> tuple[DecodeState, list[list[int]]]:
        """One dispatch of as many rounds of drafting and checking as fit into `_DISPATCH_SECONDS`.

        Args:
          left: [B] int32, tokens that each row may still generate.
          full: tokens of cache that a row may fill.
        """
        drafter.prepare(self.tokens)
        latest = np.asarray(state.token).tolist()
        wanted = int(_DISPATCH_SECONDS / self._seconds_per_step)
        if jax.process_count() > 1:
            wanted = _MAX_ROUNDS
        n_rounds = max(1, min(wanted, _MAX_ROUNDS))
        started = time.perf_counter()
        state, made = self._speculate(state, sampling, eos, drafter, n_rounds, left, full)
        new = self._taken(made["tokens"], made["counts"], made["logprobs"])
        self._seconds_per_step = (time.perf_counter() - started) / n_rounds
        drafter.follow(latest, new)
        self.timings.drafted_tokens += int(np.sum(made["drafted"]))
        self.timings.accepted_tokens += int(np.sum(made["accepted"]))
        return state, new

    def _speculate(
        self,
        state: DecodeState,
        sampling: SamplingParams,
        eos: Array,
        drafter: Drafter,
        n_rounds: int,
        left: Array,
        full: int,
    ) -> tuple[DecodeState, dict[str, Any]]:
        draft = drafter.draft(self.tokens, np.asarray(state.token).tolist(), self.capacity)
        most = state.n_generated + left
        state, draft, made = _speculate_jit(
            self.params, drafter.params, self.config, state, draft, sampling, eos, drafter.options, _MAX_ROUNDS,
            jnp.int32(n_rounds), most, jnp.int32(full),
        )  # fmt: skip
        self.cache = state.cache
        drafter.keep(draft)
        return state, made

    def _constrained_step(
        self, state: DecodeState, sampling: SamplingParams, eos: Array, masks: TokenMasks
    ) -> tuple[DecodeState, list[list[int]]]:
        """One decode step; the host finds the allowed tokens while the device runs the model."""
        running = ~np.asarray(state.done)
        logits, state = _next_logits_jit(self.params, self.config, state)
        self.cache = state.cache
        state = _sample_jit(logits, state, sampling, eos, jnp.asarray(masks.words()))
        self.cache = state.cache
        return state, self._latest(state, running.astype(np.int32))

    def _latest(self, state: DecodeState, counts: np.ndarray) -> list[list[int]]:
        """The latest token of each row for which `counts` is 1."""
        return self._taken(state.token[:, None], counts, jax.tree.map(lambda x: x[:, None], state.logprobs))

    def _taken(self, tokens: Array, counts: Array | np.ndarray, logprobs: Logprobs | None) -> list[list[int]]:
        """The first `counts` [B] of each row's `tokens` [B, T]; their log-probabilities join `self.logprobs`."""
        tokens, counts, logprobs = jax.device_get((tokens, counts, logprobs))
        new = [row[:n].tolist() for row, n in zip(tokens, counts, strict=True)]
        for row, ids in enumerate(new):
            if -1 in ids:
                raise ArgumentError(
                    f"Sequence {row} cannot go on: logit bias, constraint and the end-of-generation tokens that are "
                    "ignored ban every token, or the model's logits are not numbers."
                )
            if logprobs is not None:
                self.logprobs[row] += token_logprobs(ids, logprobs, row)
        return new

    def warm_up(
        self,
        sampling: SamplingParams,
        *,
        longest_prompt: int,
        eos_ids: Sequence[int] = (),
        constrained: bool = False,
    ) -> None:
        """Compiles what a generation will need, by running it on nothing: no token is written.

        Args:
          longest_prompt: most new prompt tokens that will come.
          constrained: there will be constraints.
        """
        logits = self.warm_up_prompt(longest_prompt)
        nothing = jnp.zeros(self.batch, jnp.int32)
        eos = jnp.asarray(list(eos_ids), jnp.int32)
        mask = jnp.asarray(TokenMasks([None] * self.batch, self.config.vocab_size).words()) if constrained else None
        state = _start_jit(logits, self.cache, start_state(sampling), sampling, eos, mask=mask)
        if constrained:
            state = replace(state, done=jnp.ones(self.batch, jnp.bool_))
            logits, state = _next_logits_jit(self.params, self.config, state)
            self.cache = _sample_jit(logits, state, sampling, eos, mask).cache
        elif self._drafter is None:
            state, *_ = self._noted(
                _decode_jit, self.params, self.config, state, sampling, eos, _MAX_STEPS, jnp.int32(0)
            )
            self.cache = state.cache
        else:
            self._drafter.warm_up_prompt(longest_prompt)
            self._speculate(state, sampling, eos, self._drafter, 0, nothing, self.capacity)
        jax.block_until_ready(self.cache)

    def warm_up_prompt(self, longest: int) -> Array:
        """Compiles what running up to `longest` prompt tokens needs; returns logits that mean nothing."""
        logits = jnp.zeros((self.batch, self.config.vocab_size), jnp.float32)
        nothing = jnp.zeros(self.batch, jnp.int32)
        lengths = chunk_lengths(self.n_batch)
        full, rest = divmod(longest, self.n_batch)
        needed = {n for n in (lengths[-1] if full else 0, rest and next(n for n in lengths if n >= rest)) if n}
        for length in needed:
            tokens = jnp.zeros((self.batch, length), jnp.int32)
            logits, self.cache = self._noted(
                _prefill_jit, self.params, tokens, self.config, self.cache, nothing, logits
            )
        return logits

    def _noted(self, program: Any, *arguments: Any) -> Any:
        """What `program` returns; what it needs besides is noted."""
        if not self.cache.stages:
            self.temporary_bytes = max(self.temporary_bytes, temporary_bytes(program, *arguments))
        elif program is _prefill_jit:
            self.temporary_bytes = max(self.temporary_bytes, stages.temporary_bytes(*arguments[:4]))
        return program(*arguments)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _recent_tokens(prompts: Sequence[Sequence[int]], window: int) -> np.ndarray:
    """`sampling.recent_tokens` from lists: [B, window] int32."""
    recent = np.full((len(prompts), window), -1, np.int32)
    for row, prompt in zip(recent, prompts, strict=True):
        latest = prompt[max(0, len(prompt) - window) :][::-1]
        row[: len(latest)] = latest
    return recent
