"""From prompt tokens to new tokens: pure prefill and decode steps, and the loop that runs on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from llama_jax.cache import KVCache, forget, init_cache
from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError
from llama_jax.model import Params, hidden_states, unembed
from llama_jax.sampling import SamplingParams, sample, sampling_params


@struct.dataclass
class DecodeState:
    """Where B sequences stand between two decode steps."""

    cache: KVCache  # everything up to, but without, `token`
    token: Array  # [B] int32, sampled last and not yet seen by the model
    n_generated: Array  # [B] int32, sampled so far, `token` included
    history: Array  # [B, W] int32, a ring of recent tokens for penalties, -1 where empty
    done: Array  # [B] bool


def prefill(params: Params, tokens: Array, config: LlamaConfig, cache: KVCache, counts: Array) -> tuple[Array, KVCache]:
    """Runs one chunk of prompt tokens: `(logits [B, V] after each row's last token, cache)`.

    Args:
      tokens: [B, T] int32, of which row b's first `counts[b]` are real.
    """
    x, new_cache = hidden_states(params, tokens, config, cache, counts)
    assert new_cache is not None
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    return unembed(params, jnp.take_along_axis(x, last, axis=1)[:, 0]), new_cache


def recent_tokens(tokens: Array, lengths: Array, window: int) -> Array:
    """The ring of the last `window` of `lengths` [B] tokens in `tokens` [B, T]: [B, window] int32, -1 where empty.

    Token number i stands in place i mod window.
    """
    place = jnp.arange(window, dtype=jnp.int32)
    i = (
        lengths[:, None] - 1 - (lengths[:, None] - 1 - place) % max(window, 1)
    )  # the latest i with i mod window == place
    found = jnp.take_along_axis(tokens, jnp.maximum(i, 0), axis=1)
    return jnp.where(i >= 0, found, -1)


def start_decoding(
    logits: Array,
    cache: KVCache,
    history: Array,
    sampling: SamplingParams,
    eos_ids: Array,
    running: Array | None = None,
) -> DecodeState:
    """Samples the first token from the prefill's `logits` [B, V].

    Args:
      history: as `recent_tokens` gives it for the prompt.
      eos_ids: [N] int32, tokens that end a row.
      running: [B] bool, False for rows that are to generate nothing; None means all run.
    """
    B = logits.shape[0]
    state = DecodeState(
        cache=cache,
        token=jnp.zeros(B, jnp.int32),
        n_generated=jnp.zeros(B, jnp.int32),
        history=history,
        done=jnp.zeros(B, jnp.bool_) if running is None else ~running,
    )
    return _sample_next(logits, state, sampling, eos_ids)


def _sample_next(logits: Array, state: DecodeState, sampling: SamplingParams, eos_ids: Array) -> DecodeState:
    """Gives each running row its next token; a row that cannot take it into its cache later is done after it."""
    token = sample(logits, sampling, state.history, state.n_generated)
    token = jnp.where(state.done, state.token, token)
    history = state.history
    if sampling.repeat_last_n:
        # The cache holds every token but the new one, so its length is the new token's number.
        place = jnp.where(state.done, sampling.repeat_last_n, state.cache.lengths % sampling.repeat_last_n)
        history = history.at[jnp.arange(token.shape[0]), place].set(token, mode="drop")
    ended = jnp.any(token[:, None] == eos_ids, axis=1) | (state.cache.lengths >= state.cache.capacity)
    return replace(
        state,
        token=token,
        n_generated=state.n_generated + (~state.done).astype(jnp.int32),
        history=history,
        done=state.done | ended,
    )


def decode_step(
    params: Params, config: LlamaConfig, state: DecodeState, sampling: SamplingParams, eos_ids: Array
) -> DecodeState:
    """Runs the model on each row's latest token and samples the next; rows that are done stay as they are."""
    counts = (~state.done).astype(jnp.int32)
    logits, cache = prefill(params, state.token[:, None], config, state.cache, counts)
    return _sample_next(logits, replace(state, cache=cache), sampling, eos_ids)


def shift_context(state: DecodeState, config: LlamaConfig, start: Array, count: Array) -> DecodeState:
    """Makes room in the cache: `cache.forget`s `count` [B] tokens of each row from number `start` [B] on."""
    W = state.history.shape[1]
    places = (jnp.arange(W, dtype=jnp.int32) + count[:, None]) % max(W, 1)  # the ring, since token numbers go down
    history = jnp.take_along_axis(state.history, places, axis=1)
    return replace(state, cache=forget(state.cache, config, start, count), history=history)


def decode(
    params: Params,
    config: LlamaConfig,
    state: DecodeState,
    sampling: SamplingParams,
    eos_ids: Array,
    max_steps: int,
    n_steps: Array,
) -> tuple[DecodeState, Array, Array]:
    """Up to `n_steps` [] int32 decode steps on the device, fewer when every row is done.

    Returns:
      state.
      tokens: [B, max_steps] int32, each row's new tokens from the left.
      counts: [B] int32, how many of them are real.
    """
    B = state.token.shape[0]
    first = state.n_generated

    def running(carry: tuple[DecodeState, Array, Array]) -> Array:
        state, _, step = carry
        return (step < jnp.minimum(n_steps, max_steps)) & ~jnp.all(state.done)

    def body(carry: tuple[DecodeState, Array, Array]) -> tuple[DecodeState, Array, Array]:
        state, tokens, step = carry
        new = decode_step(params, config, state, sampling, eos_ids)
        column = jnp.where(state.done, 0, new.token)
        return new, jax.lax.dynamic_update_slice(tokens, column[:, None], (0, step)), step + 1

    tokens = jnp.zeros((B, max_steps), jnp.int32)
    state, tokens, _ = jax.lax.while_loop(running, body, (state, tokens, jnp.int32(0)))
    return state, tokens, state.n_generated - first


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
      counts: [B] int32, how many are real.
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
    history = recent_tokens(tokens, lengths, sampling.repeat_last_n)
    state = start_decoding(logits, cache, history, sampling, eos_ids)
    first = state.token
    _, rest, counts = decode(
        params, config, state, sampling, eos_ids, max(max_tokens - 1, 1), jnp.int32(max_tokens - 1)
    )
    return jnp.concatenate([first[:, None], rest], axis=1)[:, :max_tokens], counts + 1
