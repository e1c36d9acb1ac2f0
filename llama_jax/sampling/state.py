"""What a row remembers from one token to the next."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from llama_jax.sampling.params import SamplingParams


@struct.dataclass
class SamplerState:
    """Of B rows; `start_state` makes it and `sample` returns the next one."""

    history: Array  # [B, W] int32, prompt and answer, the latest token first, -1 where there is none
    index: Array  # [B] int32, tokens drawn so far
    mu: Array | None  # [B] float32, mirostat's bound in bits; None without mirostat


def start_state(params: SamplingParams, history: Array | None = None) -> SamplerState:
    """The state before the first draw.

    Args:
      history: [B, W] int32 as `recent_tokens` gives it, W being `params.window`; None is an empty one.
    """
    B = params.seed.shape[0]
    return SamplerState(
        history=jnp.full((B, params.window), -1, jnp.int32) if history is None else history,
        index=jnp.zeros(B, jnp.int32),
        mu=None if params.mirostat_tau is None else 2 * params.mirostat_tau,
    )


def recent_tokens(tokens: Array, lengths: Array, window: int) -> Array:
    """The last `window` of each row's `lengths` [B] first `tokens` [B, T], the latest first: [B, window] int32.

    Places without a token hold -1.
    """
    place = lengths[:, None] - 1 - jnp.arange(window, dtype=jnp.int32)
    found = jnp.take_along_axis(tokens, jnp.maximum(place, 0), axis=1)
    return jnp.where(place >= 0, found, -1)


def push(state: SamplerState, token: Array) -> SamplerState:
    """The state after `token` [B] int32."""
    history = state.history
    if history.shape[1]:
        history = jnp.concatenate([token[:, None], history[:, :-1]], axis=1)
    return SamplerState(history=history, index=state.index + 1, mu=state.mu)


def where_rows(rows: Array, new: SamplerState, old: SamplerState) -> SamplerState:
    """`new` in the rows where `rows` [B] is True, elsewhere `old`."""

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, new, old)
