"""Causal attention with grouped heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

_HIDDEN = -1e30  # finite, so that a query that sees no key gets numbers, not NaN


def attention(q: Array, k: Array, v: Array, q_start: Array, window: int | None = None) -> Array:
    """Softmax attention in float32, as plain array operations that XLA compiles for any device.

    Query i of row b stands at position `q_start[b] + i`, key j at position j; a query sees the keys at its own position
    and before, at most `window` of them.

    Args:
      q: [B, T, H, E]; head h attends to key/value head h // (H / K).
      k, v: [B, K, S, E].
      q_start: [B] int32.
      window: None for all keys.

    Returns:
      [B, T, H, E] in q's dtype.
    """
    B, T, H, E = q.shape
    K, S = k.shape[1:3]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    grouped = q.reshape(B, T, K, H // K, E)
    scores = jnp.einsum("btkge,bkse->bkgts", grouped, k, precision=precision, preferred_element_type=jnp.float32)
    distance = (q_start[:, None] + jnp.arange(T, dtype=jnp.int32))[:, :, None] - jnp.arange(S, dtype=jnp.int32)
    visible = distance >= 0  # [B, T, S]
    if window is not None:
        visible &= distance < window
    scores = jnp.where(visible[:, None, None], scores * E**-0.5, _HIDDEN)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bkse->btkge", weights, v, precision=precision).reshape(B, T, H, E)
