"""Keys and values of a KV cache as bytes: one scale for each token and head."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.typing import DTypeLike


@struct.dataclass
class QuantizedHeads:
    """Heads [..., E] as codes, int8 [..., E], times scales, float32 [...]: 8 + 32 / E bits a value.

    A head's largest number becomes 127 or -127. llama.cpp's q8_0, whose name this has in options, has a float16 scale
    for every 32 values instead.
    """

    codes: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def values(self, dtype: DTypeLike) -> Array:
        """[..., E], each within half a scale of what was quantized."""
        return (self.codes.astype(jnp.float32) * self.scales[..., None]).astype(dtype)


def quantize_heads(x: Array) -> QuantizedHeads:
    """Rounds heads `x` [..., E] to the nearest codes; halves go up."""
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1) / 127.0
    codes = jnp.floor(x / jnp.where(scales > 0, scales, 1.0)[..., None] + 0.5)
    return QuantizedHeads(codes.astype(jnp.int8), scales)
