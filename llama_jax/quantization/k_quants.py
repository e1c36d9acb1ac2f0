"""The block families of 256 values: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.

A block has 8 or 16 groups, each with a small integer scale (Q2_K, Q4_K, Q5_K: and minimum), and one float16 d (and
dmin) that multiply those. Layouts: ggml's `ggml-common.h`.
Each decoder takes blocks, uint8 [N, bytes of a block], and fills out, float32 [N, 256].
"""

from __future__ import annotations

import numpy as np

from llama_jax.quantization.bits import float16_columns, planes


def decode_q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """16 bytes (scale, min) nibbles, 64 bytes of two-bit codes, d, dmin; value = d * scale * code - dmin * min."""
    scales = blocks[:, :16]
    out[...] = codes_q2_k(blocks)
    _scale_groups(out, float16_columns(blocks, 80) * (scales & 0x0F), float16_columns(blocks, 82) * (scales >> 4))


def codes_q2_k(blocks: np.ndarray) -> np.ndarray:
    """Codes 0 to 3, uint8 [N, 256]."""
    return planes(blocks[:, 16:80], width=32, shifts=(0, 2, 4, 6), mask=0x03)


def decode_q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """32 bytes of third bits, 64 bytes of two-bit codes, 12 bytes of scales, d; value = d * scale * (code - 4)."""
    codes = codes_q3_k(blocks).view(np.int8)
    codes -= 4
    out[...] = codes
    _scale_groups(out, float16_columns(blocks, 108) * scales_q3_k(blocks))


def codes_q3_k(blocks: np.ndarray) -> np.ndarray:
    """Codes 0 to 7, uint8 [N, 256]."""
    codes = planes(blocks[:, 32:96], width=32, shifts=(0, 2, 4, 6), mask=0x03)
    codes |= planes(blocks[:, :32], width=32, shifts=range(8), mask=0x01) << 2
    return codes


def scales_q3_k(blocks: np.ndarray) -> np.ndarray:
    """Sixteen six-bit scales, int8 [N, 16]: low nibbles in bytes 0-7, the upper two bits in bytes 8-11."""
    low = np.concatenate([blocks[:, 96:104] & 0x0F, blocks[:, 96:104] >> 4], axis=1)
    high = np.concatenate([(blocks[:, 104:108] >> shift) & 0x03 for shift in (0, 2, 4, 6)], axis=1)
    return (low | (high << 4)).view(np.int8) - np.int8(32)


def decode_q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, dmin, 12 bytes of six-bit (scale, min), 128 bytes of nibbles; value = d * scale * code - dmin * min."""
    out[...] = planes(blocks[:, 16:144], width=32, shifts=(0, 4), mask=0x0F)
    _scale_groups(out, *_scales_and_minima(blocks))


def decode_q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """As Q4_K with 32 bytes of fifth bits before the nibbles; bit g of each belongs to group g."""
    out[...] = codes_q5_k(blocks)
    _scale_groups(out, *_scales_and_minima(blocks))


def codes_q5_k(blocks: np.ndarray) -> np.ndarray:
    """Codes 0 to 31, uint8 [N, 256]."""
    codes = planes(blocks[:, 48:176], width=32, shifts=(0, 4), mask=0x0F)
    codes |= planes(blocks[:, 16:48], width=32, shifts=range(8), mask=0x01) << 4
    return codes


def decode_q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """128 bytes of low nibbles, 64 bytes of upper bit pairs, 16 signed scales, d; value = d * scale * (code - 32)."""
    codes = codes_q6_k(blocks).view(np.int8)
    codes -= 32
    out[...] = codes
    _scale_groups(out, float16_columns(blocks, 208) * blocks[:, 192:208].view(np.int8))


def codes_q6_k(blocks: np.ndarray) -> np.ndarray:
    """Codes 0 to 63, uint8 [N, 256]."""
    codes = planes(blocks[:, :128], width=64, shifts=(0, 4), mask=0x0F)
    codes |= planes(blocks[:, 128:192], width=32, shifts=(0, 2, 4, 6), mask=0x03) << 4
    return codes


def scales_q4_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima of Q4_K and Q5_K, uint8 [N, 8] each: six bits a piece in 12 bytes behind d and dmin.

    Groups 0-3 have theirs in the low six bits of bytes 0-3 (scale) and 4-7 (min); groups 4-7 have the low four bits in
    the nibbles of bytes 8-11 and the upper two in the spare bits of bytes 0-3 and 4-7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    minima = np.concatenate([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)], axis=1)
    return scales, minima


def _scales_and_minima(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales, minima = scales_q4_k(blocks)
    return float16_columns(blocks, 0) * scales, float16_columns(blocks, 2) * minima


def _scale_groups(out: np.ndarray, scales: np.ndarray, minima: np.ndarray | None = None) -> None:
    grouped = out.reshape(*scales.shape, -1)  # [N, groups, values of a group]
    grouped *= scales[:, :, None]
    if minima is not None:
        grouped -= minima[:, :, None]
