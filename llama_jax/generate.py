"""From prompt tokens to new tokens: pure prefill and decode steps, and the loop that runs on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from llama_jax.cache import KVCache, forget, gather_logits, init_cache
from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError
from llama_jax.model import Params, hidden_states, unembed
from llama_jax.sampling import (
    Logprobs,
    SamplerState,
    SamplingParams,
    log_probabilities,
    recent_tokens,
    sample,
    sampling_params,
    start_state,
)
from llama_jax.sampling.state import where_rows


@struct.dataclass
class DecodeState:
    """Where B sequences stand between two decode steps."""

    cache: KVCache  # everything up to, but without, `token`
    token: Array  # [B] int32, sampled last and not yet seen by the model; -1 where none may be taken
    sampler: SamplerState
    logprobs: Logprobs | None  # of `token`; None unless the sampling options ask for them
    done: Array  # [B] bool

    @property
    def n_generated(self) -> Array:
        """[B] int32, tokens sampled so far, `token` included."""
        return self.sampler.index


def prefill(params: Params, tokens: Array, config: LlamaConfig, cache: KVCache, counts: Array) -> tuple[Array, KVCache]:
    """Runs one chunk of prompt tokens: `(logits [B, V] after each row's last token, cache)`.

    Args:
      tokens: [B, T] int32, of which row b's first `counts[b]` are real.
    """
    x, new_cache = hidden_states(params, tokens, config, cache, counts)
    assert new_cache is not None
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    logits = unembed(params, jnp.take_along_axis(x, last, axis=1)[:, 0])
    return gather_logits(new_cache, logits), new_cache


def start_decoding(
    logits: Array,
    cache: KVCache,
    sampler: SamplerState,
    sampling: SamplingParams,
    eos_ids: Array,
    running: Array | None = None,
    mask: Array | None = None,
) -> DecodeState:
    """Samples the first token from the prefill's `logits` [B, V].

    Args:
      sampler: `start_state(sampling, recent_tokens(prompts, lengths, sampling.window))`.
      eos_ids: [N] int32, tokens that end a row.
      running: [B] bool, False for rows that are to generate nothing; None means all run.
      mask: the tokens that are allowed, as in `sample`.
    """
    B = logits.shape[0]
    state = DecodeState(
        cache=cache,
        token=jnp.zeros(B, jnp.int32),
        sampler=sampler,
        logprobs=None,
        done=jnp.zeros(B, jnp.bool_) if running is None else ~running,
    )
    return sample_next(logits, state, sampling, eos_ids, mask)


def sample_next(
    logits: Array, state: DecodeState, sampling: SamplingParams, eos_ids: Array, mask: Array | None = None
) -> DecodeState:
    """Gives each running row its next token from `logits` [B, V]; rows that are done stay as they are.

    A row is done after one of `eos_ids`, after a token that its cache cannot take later, and where no token may be
    taken. `mask` is as in `sample`.
    """
    token, sampler = sample(logits, sampling, state.sampler, mask)
    logprobs = None
    if sampling.logprobs is not None:
        logprobs = log_probabilities(logits, token, sampling.logprobs, sampling.vocab_limit)
    ended = jnp.any(token[:, None] == eos_ids, axis=1) | (token < 0) | (state.cache.lengths >= state.cache.capacity)
    return DecodeState(
        cache=state.cache,
        token=jnp.where(state.done, state.token, token),
        sampler=where_rows(~state.done, sampler, state.sampler),
        logprobs=logprobs,
        done=state.done | ended,
    )


def next_logits(
    params: Params, config: LlamaConfig, state: DecodeState, run: Callable[..., tuple[Array, KVCache]] = prefill
) -> tuple[Array, DecodeState]:
    """Runs the model, by `run`, on each running row's latest token: `(logits [B, V], state)`."""
    counts = (~state.done).astype(jnp.int32)
    logits, cache = run(params, state.token[:, None], config, state.cache, counts)
    return logits, replace(state, cache=cache)


def decode_step(
    params: Params,
    config: LlamaConfig,
    state: DecodeState,
    sampling: SamplingParams,
    eos_ids: Array,
    mask: Array | None = None,
) -> DecodeState:
    """Runs the model on each row's latest token and samples the next; rows that are done stay as they are."""
    logits, state = next_logits(params, config, state)
    return sample_next(logits, state, sampling, eos_ids, mask)


def shift_context(state: DecodeState, config: LlamaConfig, start: Array, count: Array) -> DecodeState:
    """Makes room in the cache: `cache.forget`s `count` [B] tokens of each row from number `start` [B] on."""
    return replace(state, cache=forget(state.cache, config, start, count))


_Carry = tuple[DecodeState, Array, Logprobs | None, Array]


def decode(
    params: Params,
    config: LlamaConfig,
    state: DecodeState,
    sampling: SamplingParams,
    eos_ids: Array,
    max_steps: int,
    n_steps: Array,
) -> tuple[DecodeState, Array, Array, Logprobs | None]:
    """Up to `n_steps` [] int32 decode steps on the device, fewer when every row is done.

    Returns:
      state.
      tokens: [B, max_steps] int32, each row's new tokens from the left.
      counts: [B] int32, how many of them are real.
      log-probabilities of the tokens, [B, max_steps, ...], if the sampling options ask for them.
    """
    B = state.token.shape[0]
    first = state.n_generated

    def running(carry: _Carry) -> Array:
        state, _, _, step = carry
        return (step < jnp.minimum(n_steps, max_steps)) & ~jnp.all(state.done)

    def put(column: Array, step: Array, table: Array) -> Array:
        start = (jnp.int32(0), step, *(jnp.int32(0),) * (table.ndim - 2))
        return jax.lax.dynamic_update_slice(table, column[:, None], start)

    def body(carry: _Carry) -> _Carry:
        state, tokens, logprobs, step = carry
        new = decode_step(params, config, state, sampling, eos_ids)
        tokens = put(jnp.where(state.done, 0, new.token), step, tokens)
        logprobs = jax.tree.map(lambda column, table: put(column, step, table), new.logprobs, logprobs)
        return new, tokens, logprobs, step + 1

    tokens = jnp.zeros((B, max_steps), jnp.int32)
    logprobs = jax.tree.map(lambda x: jnp.zeros((B, max_steps, *x.shape[1:]), x.dtype), state.logprobs)
    state, tokens, logprobs, _ = jax.lax.while_loop(running, body, (state, tokens, logprobs, jnp.int32(0)))
    return state, tokens, state.n_generated - first, logprobs


def generate_tokens(
    params: Params,
    tokens: Array,
    config: LlamaConfig,
    *,
    max_tokens: int,
    lengths: Array | None = None,
    sampling: SamplingParams | None = None,
    eos_ids: Sequence[int] | Array = (),
    cache: KVCache | None = None,
) -> tuple[Array, Array]:
    """Prefill and decode as one pure function; wrap it in your own `jax.jit` with `config` and `max_tokens` static.

    Args:
      tokens: [B, T] int32 prompts, padded at the end.
      lengths: [B] int32, real tokens per row, at least 1; None means T.
      sampling: None is greedy.
      eos_ids: a row ends with the first of these, which is the last token returned for it.
      cache: an empty one, to bound its size or set its type; None makes one that holds everything, in the embedding's
        type. A row whose cache is full ends.

    Returns:
      tokens: [B, max_tokens] int32, new tokens from the left, 0 behind them.
      counts: [B] int32, how many are real; the last of them is -1 where the options let no token be taken.
    """
    if max_tokens < 1:
        raise ArgumentError(f"max_tokens is {max_tokens}; it must be at least 1.")
    B, T = tokens.shape
    lengths = jnp.full(B, T, jnp.int32) if lengths is None else lengths
    sampling = sampling_params(B, temperature=0.0) if sampling is None else sampling
    if sampling.temperature.shape[0] != B:
        raise ArgumentError(f"sampling is for {sampling.temperature.shape[0]} rows; there are {B} prompts.")
    eos_ids = jnp.asarray(eos_ids, jnp.int32)
    if cache is None:
        cache = init_cache(config, B, T + max_tokens, params.embedding.dtype)
    elif cache.capacity < T:
        raise ArgumentError(f"The prompts have {T} tokens, more than the cache's capacity, {cache.capacity}.")
    logits, cache = prefill(params, tokens, config, cache, lengths)
    sampler = start_state(sampling, recent_tokens(tokens, lengths, sampling.window))
    state = start_decoding(logits, cache, sampler, sampling, eos_ids)
    first = state.token
    _, rest, counts, _ = decode(
        params, config, state, sampling, eos_ids, max(max_tokens - 1, 1), jnp.int32(max_tokens - 1)
    )
    return jnp.concatenate([first[:, None], rest], axis=1)[:, :max_tokens], counts + 1
