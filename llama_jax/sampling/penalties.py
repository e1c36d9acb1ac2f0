"""Samplers that change single logits: constraints, bias, penalties for repetition.

Of a `history` [B, W] the latest token comes first. A change is [B, V]; `at` picks it for candidates in another order.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

_LOG_LARGEST = math.log(3.4028235e38)
_MOST_PENALTY = 1e30  # leaves a logit finite


def allow(logits: Array, mask: Array) -> Array:
    """`logits` [B, V] where `mask` has a 1 bit, elsewhere -inf.

    Args:
      mask: [B, ceil(V / 32)] int32; token i has bit i mod 32, counted from the lowest, of word i // 32.
    """
    return jnp.where(bits(mask, jnp.arange(logits.shape[1], dtype=jnp.int32)[None]), logits, -jnp.inf)


def bits(mask: Array, ids: Array) -> Array:
    """Whether `mask` [B, N] int32 has the bits `ids` [B, K] (or [1, K]): bool [B, K]; False beyond its end."""
    words = jnp.take_along_axis(mask, jnp.minimum(ids >> 5, mask.shape[1] - 1), axis=1)
    return (((words >> (ids & 31)) & 1) == 1) & (ids >= 0) & (ids < 32 * mask.shape[1])


def add_bias(logits: Array, ids: Array, bias: Array) -> Array:
    """Adds `bias` [B, N] to the logits of `ids` [B, N]; an id that does not exist changes nothing, -inf bans."""
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return logits.at[rows, ids].add(bias, mode="drop")


def recent_counts(history: Array, last_n: Array, n_vocab: int) -> Array:
    """How often each token stands among the latest `last_n` [B]: [B, V] int32."""
    rows = jnp.arange(history.shape[0], dtype=jnp.int32)[:, None]
    counted = (jnp.arange(history.shape[1], dtype=jnp.int32) < last_n[:, None]) & (history >= 0)
    places = jnp.where(counted, history, n_vocab)  # a negative index would count from the end
    return jnp.zeros((history.shape[0], n_vocab), jnp.int32).at[rows, places].add(1, mode="drop")


def penalize(logits: Array, counts: Array, repeat: Array, frequency: Array, presence: Array) -> Array:
    """Weakens tokens that were seen.

    A logit with a count above 0 is divided by `repeat` [B] if positive, else multiplied, once however often the token
    was seen (Keskar et al. 2019, arXiv:1909.05858); then count * `frequency` [B] + `presence` [B] is taken away.

    Args:
      logits, counts: [B, C].
    """
    repeat = repeat[:, None]
    weakened = jnp.where(logits > 0, logits / repeat, logits * repeat)
    weakened -= counts.astype(jnp.float32) * frequency[:, None] + presence[:, None]
    return jnp.where(counts > 0, weakened, logits)


def unbroken_length(history: Array, lengths: Array, breakers: Array, sequences: Array | None) -> Array:
    """How many of the latest tokens come after the latest breaker: [B] int32, at most `lengths` [B].

    Args:
      breakers: [B, N] int32, bits of the tokens that break on their own.
      sequences: [B, S, M] int32, breakers of several tokens in the order of the text, filled up with -1.
    """
    W = history.shape[1]
    place = jnp.arange(W, dtype=jnp.int32)
    # -1: no breaker begins here; else the number of its tokens after the first
    tail = jnp.where(bits(breakers, history) & (place < lengths[:, None]), 0, -1)
    if sequences is not None:
        M = sequences.shape[2]
        later = place[:, None] - jnp.arange(M, dtype=jnp.int32)  # [W, M], places of a sequence that begins at [W]
        window = jnp.where(later >= 0, history[:, jnp.maximum(later, 0)], -2)[:, :, None]  # [B, W, 1, M]
        wanted = sequences[:, None]
        found = jnp.all((window == wanted) | (wanted < 0), axis=3) & (wanted[..., 0] >= 0)
        found &= place[:, None] < lengths[:, None, None]
        n_tokens = jnp.sum((sequences >= 0).astype(jnp.int32), axis=2)[:, None]
        tail = jnp.maximum(tail, jnp.max(jnp.where(found, n_tokens - 1, -1), axis=2))
    first = jnp.argmax(tail >= 0, axis=1)[:, None]
    after = (first - jnp.take_along_axis(tail, first, axis=1))[:, 0]
    return jnp.where(jnp.any(tail >= 0, axis=1), after, lengths).astype(jnp.int32)


def repeat_lengths(history: Array, lengths: Array, limit: Array) -> Array:
    """How many of the latest tokens stand in the text again, d tokens earlier: [B, W] int32 for d = 0 ... W-1.

    Args:
      lengths: [B] int32, tokens of `history` that count.
      limit: [B] int32, most tokens of a repeat.
    """
    B, W = history.shape
    distance = jnp.arange(W, dtype=jnp.int32)
    padded = jnp.concatenate([history, jnp.full((B, W), -1, jnp.int32)], axis=1)

    def running(carry: tuple[Array, Array, Array]) -> Array:
        return jnp.any(carry[1])

    def body(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        k, alike, length = carry
        earlier = jax.lax.dynamic_slice(padded, (jnp.int32(0), k), (B, W))
        latest = jax.lax.dynamic_slice(padded, (jnp.int32(0), k), (B, 1))
        alike &= (earlier == latest) & (k + distance < lengths[:, None]) & (k < limit[:, None])
        return k + 1, alike, length + alike.astype(jnp.int32)

    start = (jnp.int32(0), jnp.broadcast_to(distance > 0, (B, W)), jnp.zeros((B, W), jnp.int32))
    return jax.lax.while_loop(running, body, start)[2]


def dry_penalty(
    history: Array,
    n_vocab: int,
    multiplier: Array,
    base: Array,
    allowed_length: Array,
    last_n: Array,
    breakers: Array,
    sequences: Array | None,
) -> Array:
    """What DRY takes from each logit: [B, V] float32.

    A token that would continue a repetition of n tokens, n at least `allowed_length` [B], loses
    `multiplier` * `base` ** (n - `allowed_length`). A repetition lies within the latest `last_n` [B] tokens and does
    not reach over a breaker; the longest counts. As in llama.cpp, after
    https://github.com/oobabooga/text-generation-webui/pull/5677
    """
    B, W = history.shape
    lengths = jnp.minimum(jnp.sum((history >= 0).astype(jnp.int32), axis=1), last_n)
    limit = unbroken_length(history, lengths, breakers, sequences)
    repeats = repeat_lengths(history, lengths, limit)[:, 1:]  # at distance d the token d - 1 followed
    inside = jnp.arange(1, W, dtype=jnp.int32) < lengths[:, None]
    rows = jnp.arange(B, dtype=jnp.int32)[:, None]
    places = jnp.where(inside, history[:, :-1], n_vocab)
    longest = jnp.full((B, n_vocab), -1, jnp.int32).at[rows, places].max(repeats, mode="drop")
    exponent = (longest - allowed_length[:, None]).astype(jnp.float32)
    most = jnp.where(base > 1.000001, jnp.floor(_LOG_LARGEST / jnp.log(jnp.maximum(base, 1.000001))), jnp.inf)
    penalty = multiplier[:, None] * base[:, None] ** jnp.minimum(exponent, most[:, None])
    applies = (longest >= jnp.maximum(allowed_length, 0)[:, None]) & (base >= 1)[:, None]
    return jnp.where(applies, jnp.minimum(penalty, _MOST_PENALTY), 0.0)


def at(change: Array, ids: Array | None) -> Array:
    """Of `change` [B, V] the columns `ids` [B, C]; None takes all."""
    return change if ids is None else jnp.take_along_axis(change, ids, axis=1)
