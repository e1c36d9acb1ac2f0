"""Attention with grouped heads: the plain operations that define it, and the choice between them and the kernels.

Query i of row b stands at position `q_start[b] + i`, key j at position j. With `causal` a query sees the keys at its
own position and before, at most `window` of them; without, all keys. `kv_lengths` and equal segment numbers narrow that
further. A query that sees no key gets zeros.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from llama_jax.errors import ArgumentError
from llama_jax.kernels.backend import Backend
from llama_jax.kernels.flash_attention import flash_attention

SelfAttention = Literal["xla", "triton", "cudnn"]
"""What can compute `self_attention`."""

_HIDDEN = -1e30  # finite, so that a query that sees no key gets numbers, not NaN
_MOST_SCORES = 2**27  # that plain operations hold at once: half a GiB in float32


def attention_reference(
    q: Array,
    k: Array,
    v: Array,
    q_start: Array,
    window: int | None = None,
    *,
    kv_lengths: Array | None = None,
    q_segments: Array | None = None,
    kv_segments: Array | None = None,
    causal: bool = True,
) -> Array:
    """Softmax attention in float32, as plain array operations that XLA compiles for any device.

    Args:
      q: [B, T, H, E]; head h attends to key/value head h // (H / K).
      k, v: [B, K, S, E].
      q_start: [B] int32.
      window: None for all keys.
      kv_lengths: [B] int32, keys that exist per row; None for all S.
      q_segments, kv_segments: [B, T] and [B, S] int32, packed sequences that do not see each other.
      causal: False lets every query see keys at any position.

    Returns:
      [B, T, H, E] in q's dtype.
    """
    B, T, H, E = q.shape
    K, S = k.shape[1:3]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    grouped = q.reshape(B, T, K, H // K, E)
    scores = jnp.einsum("btkge,bkse->bkgts", grouped, k, precision=precision, preferred_element_type=jnp.float32)
    slots = jnp.arange(S, dtype=jnp.int32)
    visible = jnp.ones((1, 1, S), bool)  # [B, T, S] after broadcasting
    if causal:
        distance = (q_start[:, None] + jnp.arange(T, dtype=jnp.int32))[:, :, None] - slots
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
    if kv_lengths is not None:
        visible &= slots < kv_lengths[:, None, None]
    if q_segments is not None and kv_segments is not None:
        visible &= q_segments[:, :, None] == kv_segments[:, None, :]
    visible = visible[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores * E**-0.5, _HIDDEN), axis=-1)
    if kv_lengths is not None or q_segments is not None:
        weights = jnp.where(visible, weights, 0.0)
    return jnp.einsum("bkgts,bkse->btkge", weights.astype(v.dtype), v, precision=precision).reshape(B, T, H, E)


def attention(
    q: Array,
    k: Array,
    v: Array,
    q_start: Array,
    window: int | None = None,
    *,
    kv_lengths: Array | None = None,
    q_segments: Array | None = None,
    kv_segments: Array | None = None,
    causal: bool = True,
    kernels: Backend = "xla",
) -> Array:
    """Softmax attention without quadratic memory, by plain operations or by kernels; differentiable in q, k and v.

    Args:
      k, v: of any float type; the products are taken in q's.
      kernels: what computes it, see `llama_jax.kernels.backend`; the other arguments as in `attention_reference`.

    Returns:
      [B, T, H, E] in q's dtype.

    Raises:
      ArgumentError: the arguments contradict each other.
    """
    if window is not None and (not causal or window < 1):
        raise ArgumentError(f"A window of {window} keys was asked for; it must be at least 1, and attention causal.")
    if (q_segments is None) != (kv_segments is None):
        raise ArgumentError("Segments are given for queries or for keys only; give both or none.")
    if q.shape[2] % k.shape[1]:
        raise ArgumentError(f"{q.shape[2]} query heads cannot share {k.shape[1]} key heads evenly.")
    options: dict[str, Any] = dict(kv_lengths=kv_lengths, kv_segments=kv_segments, causal=causal)
    if kernels == "triton":
        return flash_attention(q, k, v, q_start, window=window, q_segments=q_segments, **options)
    return _in_chunks(q, k.astype(q.dtype), v.astype(q.dtype), q_start, window, q_segments, options)


def self_attention(
    q: Array,
    k: Array,
    v: Array,
    window: int | None = None,
    segments: Array | None = None,
    kernels: SelfAttention = "xla",
) -> Array:
    """Causal attention of whole sequences to themselves, as training needs it; differentiable in q, k and v.

    Args:
      q: [B, T, H, E].
      k, v: [B, T, K, E].
      window: None for all keys before.
      segments: [B, T] int32, packed sequences that do not see each other; None for one a row.
      kernels: "xla", plain operations; "triton", `flash_attention`; "cudnn", NVIDIA's library, for 16-bit numbers on a
        GPU, where segments cost it a mask of T x T bits a row.

    Returns:
      [B, T, H, E] in q's dtype.
    """
    if kernels not in get_args(SelfAttention):
        raise ArgumentError(f"Attention by {kernels!r} was asked for; it must be one of {get_args(SelfAttention)}.")
    if kernels == "cudnn":
        mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]
        left = None if window is None else (window - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, is_causal=True, local_window_size=left, implementation="cudnn"
        )
    start = jnp.zeros(q.shape[0], jnp.int32)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    return attention(q, k, v, start, window, q_segments=segments, kv_segments=segments, kernels=kernels)


def _in_chunks(
    q: Array, k: Array, v: Array, q_start: Array, window: int | None, q_segments: Array | None, options: dict[str, Any]
) -> Array:
    """`attention_reference` for as many queries at a time as keep the scores small."""
    B, T, H, E = q.shape
    S = k.shape[2]
    if B * H * T * S <= _MOST_SCORES:
        return attention_reference(q, k, v, q_start, window, q_segments=q_segments, **options)
    n = -(-T // max(1, _MOST_SCORES // (B * H * S)))
    size = -(-T // n)

    def split(x: Array) -> Array:
        """[B, T, ...] to [n, B, size, ...], with padding behind the last query."""
        x = jnp.pad(x, [(0, 0), (0, n * size - T), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(B, n, size, *x.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint  # else the gradient would keep every chunk's scores
    def one(chunk: tuple[Array, Array, Array | None]) -> Array:
        index, q, q_segments = chunk
        return attention_reference(q, k, v, q_start + index * size, window, q_segments=q_segments, **options)

    segments = None if q_segments is None else split(q_segments)
    out = lax.map(one, (jnp.arange(n, dtype=jnp.int32), split(q), segments))
    return out.swapaxes(0, 1).reshape(B, n * size, H, E)[:, :T]
