"""Block-quantized tensors: the table of types and their decoding."""

from llama_jax.quantization.dequantize import as_plain, dequantize, dequantize_into, row_bytes
from llama_jax.quantization.packed import PACKED_TYPES, QuantizedTensor, dequantize_packed, pack, take_rows
from llama_jax.quantization.types import BFLOAT16, BLOCK_TYPES, BlockType

__all__ = [
    "BFLOAT16",
    "BLOCK_TYPES",
    "PACKED_TYPES",
    "BlockType",
    "QuantizedTensor",
    "as_plain",
    "dequantize",
    "dequantize_into",
    "dequantize_packed",
    "pack",
    "row_bytes",
    "take_rows",
]
