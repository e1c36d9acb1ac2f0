"""Products with weights: the one place that knows how a weight is stored."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from llama_jax.kernels.quantized_matmul import quantized_matmul
from llama_jax.quantization.packed import QuantizedTensor, take_rows


def linear(x: Array, weight: Array | QuantizedTensor, dtype: DTypeLike | None = None) -> Array:
    """`x` [..., in] times the transpose of `weight` [out, in]: [..., out], summed in float32.

    float32 inputs are multiplied in full float32, never in the TF32 that a GPU would take by default.

    Args:
      dtype: of the result; x's when None.
    """
    if isinstance(weight, QuantizedTensor):
        return quantized_matmul(x, weight, dtype)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jnp.einsum(
        "...i,oi->...o", x, weight.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32
    )
    return out.astype(dtype or x.dtype)


def embed(tokens: Array, weight: Array | QuantizedTensor) -> Array:
    """Rows of `weight` [V, D] for `tokens` [B, T] int32: [B, T, D]. Ids outside of 0 ... V-1 are the caller's fault."""
    if isinstance(weight, QuantizedTensor):
        return take_rows(weight, tokens)
    return jnp.take(weight, tokens, axis=0, mode="clip")
