"""The block families of 32 values: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

A block is a float16 scale d, for the `_1` kinds a float16 minimum m, and 32 codes. Layouts: ggml's `ggml-common.h`.
Each decoder takes blocks, uint8 [N, bytes of a block], and fills out, float32 [N, 32].
"""

from __future__ import annotations

import numpy as np

from llama_jax.quantization.bits import float16_columns, planes, unpack_bits


def decode_q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """d (2 bytes), 16 bytes of nibbles; value = d * (code - 8). Low nibbles are values 0-15, high ones 16-31."""
    codes = planes(blocks[:, 2:18], width=16, shifts=(0, 4), mask=0x0F).view(np.int8)
    codes -= 8
    out[...] = codes
    out *= float16_columns(blocks, 0)


def decode_q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, m (2 bytes each), 16 bytes of nibbles; value = d * code + m."""
    out[...] = planes(blocks[:, 4:20], width=16, shifts=(0, 4), mask=0x0F)
    out *= float16_columns(blocks, 0)
    out += float16_columns(blocks, 2)


def decode_q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """d (2 bytes), 32 fifth bits (4 bytes), 16 bytes of nibbles; value = d * (code - 16)."""
    codes = five_bit_codes(blocks[:, 2:6], blocks[:, 6:22]).view(np.int8)
    codes -= 16
    out[...] = codes
    out *= float16_columns(blocks, 0)


def decode_q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, m (2 bytes each), 32 fifth bits (4 bytes), 16 bytes of nibbles; value = d * code + m."""
    out[...] = five_bit_codes(blocks[:, 4:8], blocks[:, 8:24])
    out *= float16_columns(blocks, 0)
    out += float16_columns(blocks, 2)


def decode_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """d (2 bytes), 32 signed bytes; value = d * code."""
    out[...] = np.ascontiguousarray(blocks[:, 2:34]).view(np.int8)
    out *= float16_columns(blocks, 0)


def five_bit_codes(high: np.ndarray, nibbles: np.ndarray) -> np.ndarray:
    """Codes 0 to 31, uint8 [N, 32], from their fifth bits, uint8 [N, 4], and nibbles, uint8 [N, 16]."""
    codes = planes(nibbles, width=16, shifts=(0, 4), mask=0x0F)
    codes |= unpack_bits(high) << 4
    return codes
