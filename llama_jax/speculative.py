"""Speculative decoding: tokens are drafted cheaply, and one run of the model checks them all.

Draws need no rejection sampling here. What `sample` draws depends on a row's seed, on the number of the token and on
the logits, so the model's own choice at every drafted place is known as soon as its logits are; a draft is accepted
while it is that choice. The text is therefore the one that plain decoding gives, token for token, whatever the samplers
are and whatever was drafted (as far as the logits of one run over several tokens equal those of several runs). A draft
model draws with the same numbers, which makes it agree as often as two distributions can be made to by the noise of
Gumbel's maximum (Daliri et al. 2025, arXiv:2408.07978); with temperature 0 that is Leviathan et al. 2023,
arXiv:2211.17192. Drafts from the text itself are prompt look-up decoding (Saxena 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from llama_jax import checks
from llama_jax.cache import KVCache
from llama_jax.config import LlamaConfig
from llama_jax.generate import DecodeState, next_logits, sample_next
from llama_jax.model import Params, hidden_states, unembed
from llama_jax.sampling import Logprobs, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How many tokens are drafted, and when.

    Args:
      n_max: N, most tokens of a draft.
      n_min: a shorter draft is dropped.
      p_min: a draft model's draft ends before a token to which it gives a smaller probability.
      ngram: draft what has followed the latest earlier place where the last `ngram` tokens stand; None drafts with a
        model.

    Raises:
      ArgumentError: a number is out of range.
    """

    n_max: int = 3
    n_min: int = 0
    p_min: float = 0.0
    ngram: int | None = None

    def __post_init__(self) -> None:
        checks.integer("n_max of drafts", self.n_max, 1, 256)
        checks.integer("n_min of drafts", self.n_min, 0, self.n_max)
        checks.number("p_min of drafts", self.p_min, 0, 1, allowed="from 0 to 1")
        if self.ngram is not None:
            checks.integer("ngram", self.ngram, 1, 64)


@struct.dataclass
class ModelDraft:
    """A draft model's cache, which holds what the target's holds."""

    cache: KVCache
    config: LlamaConfig = struct.field(pytree_node=False)

    def propose(
        self, params: Params, state: DecodeState, sampling: SamplingParams, options: Speculation
    ) -> tuple[Array, Array, ModelDraft]:
        """Drafts what may follow `state.token`.

        Returns:
          drafts: [B, N] int32.
          counts: [B] int32, how many of them are meant.
          draft: with the drafted tokens in its cache; `follow` takes back what is not accepted.
        """
        silent = replace(sampling, logprobs=None)
        no_eos = jnp.zeros(0, jnp.int32)

        def step(state: DecodeState, _: None) -> tuple[DecodeState, tuple[Array, Array]]:
            logits, state = next_logits(params, self.config, state)
            state = sample_next(logits, state, silent, no_eos)
            chosen = jnp.take_along_axis(logits, jnp.maximum(state.token, 0)[:, None], axis=1)[:, 0]
            probability = jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1))
            return state, (state.token, (state.token >= 0) & (probability >= options.p_min))

        start = DecodeState(cache=self.cache, token=state.token, sampler=state.sampler, logprobs=None, done=state.done)
        end, (drafts, sure) = jax.lax.scan(step, start, None, options.n_max)
        _, end = next_logits(params, self.config, end)  # the last one may be accepted, too
        counts = jnp.sum(jnp.cumprod(sure.astype(jnp.int32), axis=0), axis=0, dtype=jnp.int32)
        return jnp.maximum(drafts.T, 0), counts, replace(self, cache=end.cache)

    def follow(self, state: DecodeState, new: Array, counts: Array) -> ModelDraft:
        """Holds what the target's cache holds after `verify`."""
        return replace(self, cache=replace(self.cache, lengths=state.cache.lengths))


@struct.dataclass
class NgramDraft:
    """The rows' texts: `tokens` [B, S + 1] int32, of which the cache's and `state.token` are real."""

    tokens: Array

    def propose(
        self, params: Params | None, state: DecodeState, sampling: SamplingParams, options: Speculation
    ) -> tuple[Array, Array, NgramDraft]:
        """As `ModelDraft.propose`, from the latest earlier place where the text's last tokens stand."""
        assert options.ngram is not None
        drafts, counts = jax.vmap(look_up, (0, 0, None, None))(
            self.tokens, state.cache.lengths + 1, options.ngram, options.n_max
        )
        return drafts, counts, self

    def follow(self, state: DecodeState, new: Array, counts: Array) -> NgramDraft:
        """Takes up the first `counts` [B] of the tokens `new` [B, N + 1], the last of which the cache does not hold."""
        i = jnp.arange(new.shape[1], dtype=jnp.int32)
        places = state.cache.lengths[:, None] + 1 - counts[:, None] + i
        places = jnp.where(i < counts[:, None], places, self.tokens.shape[1])
        rows = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None]
        return NgramDraft(tokens=self.tokens.at[rows, places].set(new, mode="drop"))


Draft = ModelDraft | NgramDraft


def look_up(tokens: Array, length: Array, ngram: int, n_max: int) -> tuple[Array, Array]:
    """What has followed the latest earlier occurrence of a text's last tokens.

    Args:
      tokens: [S] int32, of which the first `length` [] are the text.
      ngram: how many tokens have to agree.
      n_max: N, most tokens that are given.

    Returns:
      [N] int32 tokens, and how many of them are real: 0 without such a place.
    """
    S = tokens.shape[0]
    ends = jnp.arange(S, dtype=jnp.int32)  # of the earlier occurrence
    agree = (ends >= ngram - 1) & (ends < length - 1)
    for back in range(ngram):
        last = tokens[jnp.maximum(length - 1 - back, 0)]
        agree &= jnp.roll(tokens, back) == last
    end = jnp.max(jnp.where(agree, ends, -1))
    follow = end + 1 + jnp.arange(n_max, dtype=jnp.int32)
    return tokens[jnp.minimum(follow, S - 1)], jnp.where(end >= 0, jnp.minimum(length - 1 - end, n_max), 0)


def verify(
    params: Params,
    config: LlamaConfig,
    state: DecodeState,
    drafts: Array,
    counts: Array,
    sampling: SamplingParams,
    eos_ids: Array,
    most: Array,
    full: Array,
) -> tuple[DecodeState, Array, Array, Array, Logprobs | None]:
    """One run of the model over each row's latest token and its draft, and the samples that follow.

    Args:
      drafts: [B, N] int32, of which `counts` [B] int32 are meant.
      most: [B] int32, the number of tokens generated at which a row pauses.
      full: [] int32, tokens that a cache holds at most; a row pauses there.

    Returns:
      state: its cache holds all new tokens but the last.
      new: [B, N + 1] int32, each row's new tokens from the left.
      n_new: [B] int32, how many are real: at least one in a row that runs.
      n_accepted: [B] int32, how many of the drafted tokens were right.
      log-probabilities of `new`, [B, N + 1, ...], if the sampling options ask for them.
    """
    start = state.cache.lengths
    runs = ~state.done & (state.n_generated < most) & (start < full)
    counts = jnp.minimum(counts, full - start - 1)
    tokens = jnp.concatenate([state.token[:, None], drafts], axis=1)
    x, cache = hidden_states(params, tokens, config, state.cache, jnp.where(runs, counts + 1, 0))
    assert cache is not None
    logits = unembed(params, x).swapaxes(0, 1)  # [N + 1, B, V]

    def step(carry: tuple[DecodeState, Array, Array], place: tuple[Array, Array, Array]) -> Any:
        state, active, n_accepted = carry
        i, logits, draft = place
        seen = replace(state.cache, lengths=start + i + 1)
        new = sample_next(logits, replace(state, cache=seen, done=~active), sampling, eos_ids)
        right = active & (i < counts) & (new.token == draft)
        n_new = active.astype(jnp.int32)
        state = replace(new, done=state.done | (active & new.done))
        goes_on = right & ~new.done & (state.n_generated < most)
        return (state, goes_on, n_accepted + right.astype(jnp.int32)), (new.token, n_new, new.logprobs)

    nothing = jnp.zeros_like(counts)
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32), logits, jnp.pad(drafts, ((0, 0), (0, 1))).T
    (state, _, n_accepted), (new, n_new, logprobs) = jax.lax.scan(
        step, (replace(state, cache=cache), runs, nothing), places
    )
    n_new = jnp.sum(n_new, axis=0, dtype=jnp.int32)
    logprobs = jax.tree.map(lambda x: x.swapaxes(0, 1), logprobs)
    state = replace(state, cache=replace(state.cache, lengths=start + n_new))
    return state, new.T, n_new, n_accepted, logprobs


def _once_if(condition: Array, f: Callable[[Any], Any], x: Any) -> Any:
    """`f(x)` if the condition holds, else `x`; a loop of at most one turn, since `lax.cond` copies buffers."""
    return jax.lax.while_loop(lambda carry: carry[0], lambda carry: (jnp.bool_(False), f(carry[1])), (condition, x))[1]


def speculate(
    params: Params,
    draft_params: Params | None,
    config: LlamaConfig,
    state: DecodeState,
    draft: Draft,
    sampling: SamplingParams,
    eos_ids: Array,
    options: Speculation,
    max_rounds: int,
    n_rounds: Array,
    most: Array,
    full: Array,
) -> tuple[DecodeState, Draft, dict[str, Any]]:
    """Up to `n_rounds` [] int32 rounds of drafting and checking on the device.

    Args:
      draft_params: of the draft model; None with n-grams.
      most, full: as in `verify`. When a row that is not done reaches `full`, the rounds end.

    Returns:
      state, draft.
      made: of each row, `tokens` [B, max_rounds * (N + 1)] int32 from the left, `counts` [B] how many, `logprobs` of
        them or None, and `drafted`, `accepted` [B], tokens in drafts and right ones among them.
    """
    B, width = state.token.shape[0], options.n_max + 1
    rows = jnp.arange(B, dtype=jnp.int32)[:, None]
    zero = jnp.zeros(B, jnp.int32)
    made: dict[str, Any] = dict(
        tokens=jnp.zeros((B, max_rounds * width), jnp.int32),
        logprobs=jax.tree.map(lambda x: jnp.zeros((B, max_rounds * width, *x.shape[1:]), x.dtype), state.logprobs),
        counts=zero,
        drafted=zero,
        accepted=zero,
    )

    def runs(state: DecodeState) -> Array:
        return ~state.done & (state.n_generated < most)

    def goes_on(carry: Any) -> Array:
        state, _, _, done_rounds = carry
        waiting = ~state.done & (state.cache.lengths >= full)
        return (done_rounds < jnp.minimum(n_rounds, max_rounds)) & jnp.any(runs(state)) & ~jnp.any(waiting)

    def one_round(carry: Any) -> Any:
        state, draft, made, done_rounds = carry
        drafts, counts, draft = draft.propose(draft_params, state, sampling, options)
        room = jnp.minimum(most - state.n_generated, full - state.cache.lengths) - 1
        counts = jnp.clip(counts, 0, jnp.maximum(room, 0))
        counts = jnp.where(runs(state) & (counts >= options.n_min), counts, 0)

        def check(drafts: Array, result: Any) -> Any:
            state, *made = verify(params, config, result[0], drafts, counts, sampling, eos_ids, most, full)
            return state, jax.tree.map(lambda x, y: y.at[:, : x.shape[1]].set(x) if y.ndim > 1 else x, made, result[1])

        # Without a draft a run over one token does.
        drafted = jnp.any(counts > 0)
        nothing = [made["tokens"][:, :width], zero, zero, jax.tree.map(lambda x: x[:, :width], made["logprobs"])]
        result = _once_if(drafted, lambda result: check(drafts, result), (state, nothing))
        result = _once_if(~drafted, lambda result: check(drafts[:, :0], result), result)
        state, (new, n_new, n_accepted, logprobs) = result
        i = jnp.arange(width, dtype=jnp.int32)
        places = jnp.where(i < n_new[:, None], made["counts"][:, None] + i, max_rounds * width)

        def put(table: Array, values: Array) -> Array:
            return table.at[rows, places].set(values, mode="drop")

        made = dict(
            tokens=put(made["tokens"], new),
            logprobs=jax.tree.map(put, made["logprobs"], logprobs),
            counts=made["counts"] + n_new,
            drafted=made["drafted"] + counts,
            accepted=made["accepted"] + n_accepted,
        )
        return state, draft.follow(state, new, n_new), made, done_rounds + 1

    state, draft, made, _ = jax.lax.while_loop(goes_on, one_round, (state, draft, made, jnp.int32(0)))
    return state, draft, made
