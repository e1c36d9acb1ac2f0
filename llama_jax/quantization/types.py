"""The table of tensor types: how many bytes hold how many values, and how to decode them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np

from llama_jax.quantization import k_quants, legacy

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True, slots=True)
class BlockType:
    """One tensor type of GGUF.

    Attributes:
      name: as in the file format's documents, such as "Q4_K".
      ggml_id: its number in a GGUF file.
      block_size: values in a block.
      block_bytes: bytes in a block.
      dtype: the numpy type of plain values, None for quantized blocks.
      decode: for quantized blocks, fills float32 [N, block_size] from uint8 [N, block_bytes].
    """

    name: str
    ggml_id: int
    block_size: int
    block_bytes: int
    dtype: np.dtype | None = None
    decode: Callable[[np.ndarray, np.ndarray], None] | None = None


def _plain(name: str, ggml_id: int, dtype: np.dtype) -> BlockType:
    return BlockType(name, ggml_id, 1, dtype.itemsize, dtype=dtype)


BLOCK_TYPES: dict[str, BlockType] = {
    t.name: t
    for t in (
        _plain("F32", 0, np.dtype("<f4")),
        _plain("F16", 1, np.dtype("<f2")),
        _plain("BF16", 30, BFLOAT16),
        _plain("F64", 28, np.dtype("<f8")),
        _plain("I8", 24, np.dtype("<i1")),
        _plain("I16", 25, np.dtype("<i2")),
        _plain("I32", 26, np.dtype("<i4")),
        _plain("I64", 27, np.dtype("<i8")),
        BlockType("Q4_0", 2, 32, 18, decode=legacy.decode_q4_0),
        BlockType("Q4_1", 3, 32, 20, decode=legacy.decode_q4_1),
        BlockType("Q5_0", 6, 32, 22, decode=legacy.decode_q5_0),
        BlockType("Q5_1", 7, 32, 24, decode=legacy.decode_q5_1),
        BlockType("Q8_0", 8, 32, 34, decode=legacy.decode_q8_0),
        BlockType("Q2_K", 10, 256, 84, decode=k_quants.decode_q2_k),
        BlockType("Q3_K", 11, 256, 110, decode=k_quants.decode_q3_k),
        BlockType("Q4_K", 12, 256, 144, decode=k_quants.decode_q4_k),
        BlockType("Q5_K", 13, 256, 176, decode=k_quants.decode_q5_k),
        BlockType("Q6_K", 14, 256, 210, decode=k_quants.decode_q6_k),
    )
}
"""Every tensor type that can be read, by name."""

BLOCK_TYPES_BY_ID: dict[int, BlockType] = {t.ggml_id: t for t in BLOCK_TYPES.values()}
"""The same table by the number that a GGUF file holds."""

UNSUPPORTED_TYPE_NAMES: dict[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""Names of ggml's other types, so that an error can say what a file holds."""
