"""Block-quantized tensors: the table of types and their decoding."""

from llama_jax.quantization.dequantize import as_plain, dequantize, dequantize_into, row_bytes
from llama_jax.quantization.types import BFLOAT16, BLOCK_TYPES, BlockType

__all__ = ["BFLOAT16", "BLOCK_TYPES", "BlockType", "as_plain", "dequantize", "dequantize_into", "row_bytes"]
