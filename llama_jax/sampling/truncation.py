"""Samplers that take tokens out: each turns logits [B, C] into logits with -inf for what is out.

All keep at least one token, and where `min_keep` is given that many; "ordered" ones need the best token first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def remaining(logits: Array) -> Array:
    """How many tokens of each row are still in: [B] int32."""
    return jnp.sum((logits > -jnp.inf).astype(jnp.int32), axis=-1)


def entropy(logits: Array) -> Array:
    """Shannon entropy of softmax(`logits` [B, C]) in nats: [B] float32."""
    log_p = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.sum(jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0.0), axis=-1)


def _keep(logits: Array, inside: Array, min_keep: Array | None) -> Array:
    """`logits` where `inside`, and for the first tokens of ordered ones: one, or `min_keep` [B]."""
    rank = jnp.arange(logits.shape[1], dtype=jnp.int32)
    least = 1 if min_keep is None else jnp.maximum(min_keep, 1)[:, None]
    return jnp.where(inside | (rank < least), logits, -jnp.inf)


def keep_top_k(logits: Array, top_k: Array) -> Array:
    """Ordered: the first `top_k` [B] tokens (0: all)."""
    rank = jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.where((rank < top_k[:, None]) | (top_k[:, None] == 0), logits, -jnp.inf)


def keep_top_p(logits: Array, top_p: Array, min_keep: Array | None = None) -> Array:
    """Ordered: the shortest head whose probability reaches `top_p` [B] (1: all).

    Nucleus sampling, Holtzman et al. 2019 (arXiv:1904.09751).
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    return _keep(logits, (before < top_p[:, None]) | (top_p[:, None] >= 1), min_keep)


def keep_min_p(logits: Array, min_p: Array, min_keep: Array | None = None) -> Array:
    """Tokens with at least `min_p` [B] of the best one's probability (0: all); ordered if `min_keep` is given.

    Shares below float32's smallest normal number, 1.2e-38, count as 0. Nguyen et al. 2024 (arXiv:2407.01082).
    """
    best = jnp.max(logits, axis=-1, keepdims=True)
    min_p = jnp.where(min_p >= jnp.finfo(jnp.float32).tiny, min_p, 0.0)  # on some devices they are 0 anyway
    inside = logits >= best + jnp.log(min_p)[:, None]
    return jnp.where(inside, logits, -jnp.inf) if min_keep is None else _keep(logits, inside, min_keep)


def keep_typical(logits: Array, typical_p: Array, min_keep: Array | None = None) -> Array:
    """Tokens whose surprise is nearest to the entropy, as many as first exceed probability `typical_p` [B] (1: all).

    Meister et al. 2022 (arXiv:2202.00666). Equals count in the order in which they stand.
    """
    log_p = jax.nn.log_softmax(logits, axis=-1)
    distance = jnp.where(log_p > -jnp.inf, jnp.abs(-log_p - entropy(logits)[:, None]), jnp.inf)
    place = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    _, sorted_log_p, places = jax.lax.sort((distance, log_p, place), dimension=1, is_stable=True, num_keys=1)
    probabilities = jnp.exp(sorted_log_p)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = _keep(sorted_log_p, (before <= typical_p[:, None]) | (typical_p[:, None] >= 1), min_keep) > -jnp.inf
    _, kept = jax.lax.sort((places, kept.astype(jnp.int32)), dimension=1, num_keys=1)
    return jnp.where(kept > 0, logits, -jnp.inf)


def keep_tail_free(logits: Array, tfs_z: Array, min_keep: Array | None = None) -> Array:
    """Ordered: the head before the flat tail, where the curvature of the probabilities exceeds `tfs_z` [B] (1: all).

    The summed, normalised second differences decide. Tail-free sampling as llama.cpp had it until 2024, after
    https://www.trentonbricken.com/Tail-Free-Sampling/
    """
    C = logits.shape[1]
    if C < 3:
        return logits
    probabilities = jax.nn.softmax(logits, axis=-1)
    slope = probabilities[:, :-1] - probabilities[:, 1:]
    n = remaining(logits)[:, None] - 2  # second differences among the tokens that are in
    real = jnp.arange(C - 2, dtype=jnp.int32) < n
    curvature = jnp.where(real, jnp.abs(slope[:, :-1] - slope[:, 1:]), 0.0)
    total = jnp.sum(curvature, axis=-1, keepdims=True)
    even = jnp.where(real, 1.0 / jnp.maximum(n, 1).astype(jnp.float32), 0.0)
    share = jnp.where(total > 1e-6, curvature / jnp.maximum(total, 1e-6), even)
    inside = (jnp.cumsum(share, axis=-1) <= tfs_z[:, None]) | (tfs_z[:, None] >= 1)
    inside = jnp.pad(inside, ((0, 0), (0, 2)), mode="edge")
    return _keep(logits, inside, min_keep)


def keep_top_n_sigma(logits: Array, n_sigma: Array) -> Array:
    """Tokens at most `n_sigma` [B] standard deviations of the logits below the best (0 and less: all).

    Tang et al. 2024 (arXiv:2411.07641). Mean and deviation are of the tokens that are in.
    """
    inside = logits > -jnp.inf
    count = jnp.maximum(remaining(logits), 1).astype(jnp.float32)[:, None]
    mean = jnp.sum(jnp.where(inside, logits, 0.0), axis=-1, keepdims=True) / count
    variance = jnp.sum(jnp.where(inside, jnp.square(logits - mean), 0.0), axis=-1, keepdims=True) / count
    least = jnp.max(logits, axis=-1, keepdims=True) - n_sigma[:, None] * jnp.sqrt(variance)
    return jnp.where((logits >= least) | (n_sigma[:, None] <= 0), logits, -jnp.inf)


def exclude_top_choices(
    logits: Array, probability: Array, threshold: Array, chance: Array, min_keep: Array | None = None
) -> Array:
    """Ordered: of the tokens with probability `threshold` [B] or more only the least likely stays (XTC).

    That happens where `chance` [B], uniform in [0, 1), is below `probability` [B], and never for thresholds above 0.5,
    which two tokens cannot reach. Fewer than `min_keep` tokens are never left. As in llama.cpp, which refers to
    https://github.com/oobabooga/text-generation-webui/pull/6335
    """
    above = jax.nn.softmax(logits, axis=-1) >= threshold[:, None]
    last = jnp.sum(above.astype(jnp.int32), axis=-1) - 1
    happens = (chance < probability) & (threshold <= 0.5) & (last > 0)
    if min_keep is not None:
        happens &= remaining(logits) - last >= min_keep
    rank = jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.where(happens[:, None] & (rank < last[:, None]), -jnp.inf, logits)
