"""Taking packed codes apart, eight bytes at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_EVERY_BYTE = 0x0101010101010101


def planes(packed: np.ndarray, *, width: int, shifts: Sequence[int], mask: int) -> np.ndarray:
    """Split bytes into bit fields, field after field.

    Args:
      packed: uint8 [N, k * width].
      width: bytes that share a run, a multiple of 8: each run gives its first field for all its bytes, then its second.
      shifts: where the fields lie in a byte, in bits from the lowest.
      mask: the bits of a field once shifted down.

    Returns:
      Codes, uint8 [N, k * len(shifts) * width].
    """
    n = packed.shape[0]
    words = np.ascontiguousarray(packed).view(np.uint64).reshape(-1, width // 8)
    codes = np.empty((words.shape[0], len(shifts), width // 8), np.uint64)
    word_mask = np.uint64(mask * _EVERY_BYTE)
    # One column at a time: numpy's inner loop then runs over all blocks instead of over the few words of one.
    for j in range(width // 8):
        for i, shift in enumerate(shifts):
            shifted = words[:, j] >> np.uint64(shift) if shift else words[:, j]
            np.bitwise_and(shifted, word_mask, out=codes[:, i, j])
    return codes.view(np.uint8).reshape(n, packed.shape[1] * len(shifts))


def unpack_bits(packed: np.ndarray) -> np.ndarray:
    """Bits of each row, lowest bit of the first byte first: uint8 [N, b] to zeros and ones, uint8 [N, 8 * b]."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def float16_columns(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte `start` of each block as float32 [N, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)
