"""Quantized weights as they lie in memory: about as large as in the file, in an order that a GPU unpacks cheaply.

A row of a weight [out, in] is cut into groups of 16 or 32 values that share a scale. Arrays keep the group as the last
axis, so that threads which own neighbouring groups read neighbouring words, and everything about a group (its words,
its scale, its minimum) has the same index:

  codes   int32 [out, W, G]     low bits of a group's codes, W words a group
  high    int32 or int16 [out, 1, G]  the remaining bits of codes of 3, 5 and 6 bits, else None
  scales  float16 [out, S, G]   scale (and minimum, S = 2) of a group; or their small integers as int8, where
  supers  float16 [out, S', in / 256]  multiplies them: scale (and minimum) of 256 values; None where scales are float16

Order of bits. A group's words are U bytes; with `bits` low bits a code, a byte holds F = 8 / bits fields, and field i
of byte u belongs to value u + U * i of the group. Field i of the four bytes of a word has its high bits in the same
four bytes of `high`, so that two shifts and two AND-ORs give four whole codes, one a byte; a `high` of 16 bits keeps
those of bytes 2 and 3 in the upper nibbles of bytes 0 and 1. Words are little-endian. Codes of eight bits are kept
unsigned (128 added).

  value = scale * (code - offset) [+ minimum];  of K types scale = super * integer and minimum = -super_min * integer

| type | bits: low + high, scales, supers a value | file | ratio |
|---|---|---|---|
| Q4_0, Q4_1 | 4 + 0.5 or 1 | 4.5, 5 | 1 |
| Q5_0, Q5_1 | 4 + 1 + 0.5 or 1 | 5.5, 6 | 1 |
| Q8_0 | 8 + 0.5 | 8.5 | 1 |
| Q2_K | 2 + 0.5 (two nibbles in a byte) + 0.125 = 2.625 | 2.625 | 1 |
| Q3_K | 2 + 1 + 0.5 + 0.0625 = 3.5625 | 3.4375 | 1.036 |
| Q4_K | 4 + 0.5 + 0.125 = 4.625 | 4.5 | 1.028 |
| Q5_K | 4 + 1 + 0.5 + 0.125 = 5.625 | 5.5 | 1.023 |
| Q6_K | 4 + 2 + 0.5 + 0.0625 = 6.5625 | 6.5625 | 1 |

The usual mixtures lie between their types: Q4_K_M (Q4_K with Q6_K for the head and half of wv and w_down) of Llama-3-8B
takes 1.020 times its file, Q5_K_M 1.018, Q3_K_M (Q3_K, Q4_K, Q5_K, Q6_K) 1.028, Q4_0, Q6_K and Q8_0 files 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from llama_jax.errors import ArgumentError, FormatError
from llama_jax.quantization import k_quants, legacy
from llama_jax.quantization.dequantize import block_type, row_bytes

SUPER_BLOCK = 256
_CHUNK_VALUES = 1 << 17  # values packed at a time: input, result and temporaries of a chunk stay in the cache

Part = tuple[np.ndarray, np.ndarray | None, np.ndarray, np.ndarray | None]  # codes, high, scales, supers of blocks


@dataclasses.dataclass(frozen=True, slots=True)
class PackedType:
    """How a block type is packed.

    Attributes:
      name: the GGUF type.
      group: values that share a scale.
      bits: low bits of a code, 2, 4 or 8.
      high_bits: further bits of a code, 0, 1 or 2.
      offset: what a code of zero stands for, negated.
      scales: arrays of scales, S: 2 with minima. Q2_K keeps scale and minimum as nibbles of one.
      supers: super-scales, S': 0, 1, or 2 with one for the minima.
      parts: from blocks, uint8 [N, bytes of a block], with n groups a block: codes int32 [W, N * n], high
        [N * n] or None, scales [S, N * n], supers float16 [S', N] or None.
    """

    name: str
    group: int
    bits: int
    high_bits: int
    offset: int
    scales: int
    supers: int
    parts: Callable[[np.ndarray], Part]

    @property
    def bytes_per_group(self) -> int:
        """U, bytes of low bits."""
        return self.group * self.bits // 8

    @property
    def fields(self) -> int:
        """F, codes in a byte of low bits."""
        return 8 // self.bits

    @property
    def words(self) -> int:
        """W, words of low bits a group."""
        return self.bytes_per_group // 4

    @property
    def has_minimum(self) -> bool:
        return self.scales == 2 or self.supers == 2

    def high_position(self, word: int, byte: int, field: int) -> int:
        """The lowest of the bits in `high` that belong to a field of a byte (0 to 3) of a word."""
        slot = self.high_bits * (word * self.fields + field)
        if self.group * self.high_bits == 16:
            return 8 * (byte % 2) + 4 * (byte // 2) + slot
        return 8 * byte + slot


@struct.dataclass
class QuantizedTensor:
    """A weight [out, in] as packed codes and scales; see the module's text for the arrays.

    Attributes:
      type_name: the GGUF type, a key of `PACKED_TYPES`.
      dtype: of what stands in for it: dequantized values and the activations that an embedding gives.
      sharding: how a mesh divides [out, in], None on one device.
    """

    codes: Any
    high: Any
    scales: Any
    supers: Any
    type_name: str = struct.field(pytree_node=False)
    dtype: np.dtype = struct.field(pytree_node=False)
    sharding: NamedSharding | None = struct.field(pytree_node=False, default=None)

    @property
    def type(self) -> PackedType:
        return PACKED_TYPES[self.type_name]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[2] * self.type.group

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.codes, self.high, self.scales, self.supers) if array is not None)


def pack(rows: np.ndarray, type_name: str, shape: Sequence[int], dtype: DTypeLike = np.float32) -> QuantizedTensor:
    """Brings the bytes of a quantized tensor into packed order. No value changes.

    Args:
      rows: its bytes, uint8, contiguous, any shape.
      type_name: a key of `PACKED_TYPES`.
      shape: [out, in].
      dtype: what `QuantizedTensor.dtype` is to be.

    Returns:
      Packed numpy arrays. While they are made, a few MiB are used besides.

    Raises:
      ArgumentError: the type is not quantized, or unknown.
      FormatError: the bytes do not match the shape.
    """
    if type_name not in PACKED_TYPES:
        raise ArgumentError(f"The tensor type is {type_name!r}; it must be one of {', '.join(PACKED_TYPES)}.")
    t = PACKED_TYPES[type_name]
    out, columns = shape
    width = row_bytes(type_name, columns)
    if rows.dtype != np.uint8 or rows.size != out * width:
        raise FormatError(
            f"A tensor of type {type_name} and shape {tuple(shape)} needs {out * width} bytes; "
            f"there are {rows.size} of {rows.dtype}."
        )
    groups = columns // t.group
    rows = rows.reshape(out, width)
    codes = np.empty((out, t.words, groups), np.int32)
    high = np.empty((out, 1, groups), _high_dtype(t)) if t.high_bits else None
    scales = np.empty((out, t.scales, groups), np.int8 if t.supers else np.float16)
    supers = np.empty((out, t.supers, columns // SUPER_BLOCK), np.float16) if t.supers else None
    step = max(1, _CHUNK_VALUES // columns)
    for start in range(0, out, step):
        chunk = rows[start : start + step]
        n = len(chunk)
        parts = t.parts(chunk.reshape(-1, block_type(type_name).block_bytes))
        for target, part in zip((codes, high, scales, supers), parts, strict=True):
            if target is not None and part is not None:
                target[start : start + n] = part.reshape(-1, n, target.shape[2]).swapaxes(0, 1)
    return QuantizedTensor(codes, high, scales, supers, type_name, np.dtype(dtype))


def _high_dtype(t: PackedType) -> np.dtype:
    return np.dtype(f"int{t.group * t.high_bits}")


def group_codes(weight: QuantizedTensor) -> Array:
    """The codes of all values, int32 [out, in], zero and above."""
    t = weight.type
    out, columns = weight.shape
    u, i = np.arange(t.bytes_per_group, dtype=np.int32), np.arange(t.fields, dtype=np.int32)[:, None]
    # [out, W, G] -> [out, G, F, U]: value u + U * i of a group is field i of byte u.
    words = jnp.repeat(jnp.asarray(weight.codes).swapaxes(1, 2)[:, :, None], 4, axis=3)
    codes = (words >> jnp.asarray(8 * (u % 4) + t.bits * i)) & ((1 << t.bits) - 1)
    if t.high_bits:
        positions = np.array(
            [[t.high_position(*divmod(u, 4), i) for u in range(t.bytes_per_group)] for i in range(t.fields)], np.int32
        )
        high = jnp.asarray(weight.high).astype(jnp.int32).swapaxes(1, 2)[..., None]  # [out, G, 1, 1]
        codes |= ((high >> jnp.asarray(positions)) & ((1 << t.high_bits) - 1)) << t.bits
    return codes.reshape(out, columns)


def group_scales(weight: QuantizedTensor) -> tuple[Array, Array | None]:
    """Scale, and what is added to a group's values or None: float32 [out, G] each, exact."""
    t = weight.type
    scales = jnp.asarray(weight.scales)
    if not t.supers:
        wide = scales.astype(jnp.float32)
        return wide[:, 0], wide[:, 1] if t.has_minimum else None
    supers = jnp.repeat(jnp.asarray(weight.supers).astype(jnp.float32), SUPER_BLOCK // t.group, axis=2)
    integers = scales.astype(jnp.int32)
    if not t.has_minimum:
        return supers[:, 0] * integers[:, 0].astype(jnp.float32), None
    scale, minimum = (integers[:, 0] & 15, (integers[:, 0] >> 4) & 15) if t.scales == 1 else integers.swapaxes(0, 1)
    return supers[:, 0] * scale.astype(jnp.float32), -(supers[:, 1] * minimum.astype(jnp.float32))


def dequantize_packed(weight: QuantizedTensor, dtype: DTypeLike | None = None) -> Array:
    """The values [out, in], to the bit what `llama_jax.quantization.dequantize` makes of the same bytes.

    Args:
      dtype: of the result, rounded once from float32; the weight's own when None.
    """
    t = weight.type
    codes = (group_codes(weight) - t.offset).astype(jnp.float32)
    scale, minimum = group_scales(weight)
    # A product of code and scale has at most 24 significant bits: fused into the sum or not, it is exact.
    values = codes.reshape(*scale.shape, t.group) * scale[:, :, None]
    if minimum is not None:
        values += minimum[:, :, None]
    return values.reshape(weight.shape).astype(dtype or weight.dtype)


def take_rows(weight: QuantizedTensor, tokens: Array) -> Array:
    """Rows of `weight` [V, D] for `tokens` int32, any shape: [..., D] in the weight's dtype. Only they are unpacked."""
    flat = tokens.reshape(-1)
    rows = jax.tree.map(lambda array: jnp.take(jnp.asarray(array), flat, axis=0, mode="clip"), weight)
    return dequantize_packed(rows).reshape(*tokens.shape, weight.shape[1])


def _words(codes: np.ndarray, t: PackedType) -> tuple[np.ndarray, np.ndarray | None]:
    """Packs codes, uint8 [N, groups * group], to low words [W, N * groups] and high bits [N * groups]."""
    fields, size = t.fields, t.bytes_per_group
    codes = codes.reshape(-1, fields, size)  # [groups, F, U]
    low_mask = np.uint8((1 << t.bits) - 1)
    low = codes[:, 0] & low_mask
    for i in range(1, fields):
        low |= (codes[:, i] & low_mask) << np.uint8(t.bits * i)
    words = np.ascontiguousarray(low).view("<i4").T
    if not t.high_bits:
        return words, None
    upper = (codes >> np.uint8(t.bits)).reshape(-1, fields, t.words, 4)
    high = upper[:, 0, 0].copy()
    for slot in range(1, fields * t.words):
        high |= upper[:, slot % fields, slot // fields] << np.uint8(t.high_bits * slot)
    if t.group * t.high_bits == 16:
        high = high[:, :2] | (high[:, 2:] << np.uint8(4))
    return words, high.view(_high_dtype(t).newbyteorder("<")).reshape(-1)


def _halves(blocks: np.ndarray, *starts: int) -> np.ndarray:
    """The float16 at each of the given bytes of each block: [len(starts), N]."""
    return np.stack([np.ascontiguousarray(blocks[:, s : s + 2]).view("<f2")[:, 0] for s in starts])


def _nibble_words(blocks: np.ndarray, start: int) -> np.ndarray:
    """The 16 bytes of nibbles of the types of 32 values: they are in packed order already."""
    return np.ascontiguousarray(blocks[:, start : start + 16]).view("<i4").T


def _parts_q4_0(blocks: np.ndarray) -> Part:
    return _nibble_words(blocks, 2), None, _halves(blocks, 0), None


def _parts_q4_1(blocks: np.ndarray) -> Part:
    return _nibble_words(blocks, 4), None, _halves(blocks, 0, 2), None


def _parts_q5_0(blocks: np.ndarray) -> Part:
    codes = legacy.five_bit_codes(blocks[:, 2:6], blocks[:, 6:22])
    return *_words(codes, PACKED_TYPES["Q5_0"]), _halves(blocks, 0), None


def _parts_q5_1(blocks: np.ndarray) -> Part:
    codes = legacy.five_bit_codes(blocks[:, 4:8], blocks[:, 8:24])
    return *_words(codes, PACKED_TYPES["Q5_1"]), _halves(blocks, 0, 2), None


def _parts_q8_0(blocks: np.ndarray) -> Part:
    words = np.ascontiguousarray(blocks[:, 2:34]).view("<u4") ^ np.uint32(0x80808080)
    return words.view(np.int32).T, None, _halves(blocks, 0), None


def _parts_q2_k(blocks: np.ndarray) -> Part:
    codes = k_quants.codes_q2_k(blocks)
    scales = np.ascontiguousarray(blocks[:, :16]).view(np.int8).reshape(1, -1)
    return *_words(codes, PACKED_TYPES["Q2_K"]), scales, _halves(blocks, 80, 82)


def _parts_q3_k(blocks: np.ndarray) -> Part:
    scales = k_quants.scales_q3_k(blocks).reshape(1, -1)
    return *_words(k_quants.codes_q3_k(blocks), PACKED_TYPES["Q3_K"]), scales, _halves(blocks, 108)


def _parts_q4_k(blocks: np.ndarray) -> Part:
    # Low nibbles of 32 bytes are one group and high nibbles the next: pair them inside each group.
    packed = np.ascontiguousarray(blocks[:, 16:144]).view("<u4").reshape(len(blocks), 4, 2, 4)
    first, second = packed[:, :, 0], packed[:, :, 1]  # bytes 0-15 and 16-31
    low, high = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0)
    words = np.empty((4, len(blocks), 4, 2), np.uint32)  # [W, N, pair of groups, which]
    words[..., 0] = ((first & low) | ((second & low) << np.uint32(4))).transpose(2, 0, 1)
    words[..., 1] = (((first & high) >> np.uint32(4)) | (second & high)).transpose(2, 0, 1)
    return words.view(np.int32).reshape(4, -1), None, _integer_scales(blocks), _halves(blocks, 0, 2)


def _parts_q5_k(blocks: np.ndarray) -> Part:
    codes = k_quants.codes_q5_k(blocks)
    return *_words(codes, PACKED_TYPES["Q5_K"]), _integer_scales(blocks), _halves(blocks, 0, 2)


def _parts_q6_k(blocks: np.ndarray) -> Part:
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).reshape(1, -1)
    return *_words(k_quants.codes_q6_k(blocks), PACKED_TYPES["Q6_K"]), scales, _halves(blocks, 208)


def _integer_scales(blocks: np.ndarray) -> np.ndarray:
    return np.stack([part.view(np.int8).reshape(-1) for part in k_quants.scales_q4_k(blocks)])


PACKED_TYPES: dict[str, PackedType] = {
    t.name: t
    for t in (
        #           name  group bits high offset scales supers
        PackedType("Q4_0", 32, 4, 0, 8, 1, 0, _parts_q4_0),
        PackedType("Q4_1", 32, 4, 0, 0, 2, 0, _parts_q4_1),
        PackedType("Q5_0", 32, 4, 1, 16, 1, 0, _parts_q5_0),
        PackedType("Q5_1", 32, 4, 1, 0, 2, 0, _parts_q5_1),
        PackedType("Q8_0", 32, 8, 0, 128, 1, 0, _parts_q8_0),
        PackedType("Q2_K", 16, 2, 0, 0, 1, 2, _parts_q2_k),
        PackedType("Q3_K", 16, 2, 1, 4, 1, 1, _parts_q3_k),
        PackedType("Q4_K", 32, 4, 0, 0, 2, 2, _parts_q4_k),
        PackedType("Q5_K", 32, 4, 1, 0, 2, 2, _parts_q5_k),
        PackedType("Q6_K", 16, 4, 2, 32, 1, 1, _parts_q6_k),
    )
}
"""Every quantized type of `llama_jax.quantization.BLOCK_TYPES`, by name."""


def packed_nbytes(type_name: str, shape: Sequence[int]) -> int:
    """Bytes that `pack` makes of a tensor [out, in] of this type."""
    t = PACKED_TYPES[type_name]
    groups = math.prod(shape) // t.group
    high = t.group * t.high_bits // 8
    return groups * (4 * t.words + high + t.scales * (1 if t.supers else 2)) + math.prod(shape) // 256 * 2 * t.supers
