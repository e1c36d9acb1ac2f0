"""Products with packed weights (`llama_jax.quantization.packed`): values are unpacked in registers.

Three ways, by the number of rows of activations:
  few rows    `_vector_kernel` on the CUDA cores, float32 throughout;
  some rows   `_tile_kernel` on the tensor cores, for bfloat16 activations: weights are rounded to that type;
  many rows   the weight is unpacked whole, once for all rows, and XLA multiplies: a temporary of one tensor's size.
On a device other than an NVIDIA GPU of compute capability 8 or above, every product goes the last way.

Unpacking without conversions. An integer below 2^23, read as a float32, is a subnormal number: n * 2^-149. Arithmetic
on those costs a GPU nothing extra. So a code is masked where it stands in its word, at bit `position`, and multiplied
as code * 2^(position - 149) with an activation that was multiplied by 2^(96 - position) before: each product is
code * x * 2^-53, exactly as rounded as code * x itself, and the power of two goes into the scale of the group. Codes
above bit 22 need a shift first. Offsets and minima multiply the sum of a group's activations, which all rows share.
In interpret mode, where a CPU would flush subnormal numbers, integers are converted instead.

Instructions a weight of the compiled vector kernel (sm_90, Triton 3.9, 4096 inputs, one row of activations), with all
loads, sums and scales: Q8_0 2.8, Q4_0 2.9, Q4_K 3.1, Q5_K 3.8, Q2_K 4.2, Q6_K 4.6, Q3_K 4.8. 132 SMs at 1.755 GHz issue
29.7e12 a second, so Q4_K is unpacked as fast as 5.5 TB/s bring it, Q6_K as 5.3 TB/s, Q8_0 as 11 TB/s.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from llama_jax.kernels.backend import Backend, default_kernels
from llama_jax.quantization.packed import SUPER_BLOCK, PackedType, QuantizedTensor, dequantize_packed

VECTOR_ROWS = 4  # most rows of activations for the vector kernel, where the tile kernel can take more
VECTOR_ROWS_OTHER = 16  # the same for float32 and float16 activations, which the tile kernel does not take
TILE_ROWS = 64  # most rows for the tile kernel
_USABLE_BITS = 23  # of a subnormal number


class Blocks(NamedTuple):
    """How a kernel divides its work.

    Attributes:
      rows: rows of the weight a program computes.
      groups: groups of each row that a program takes at a time, a power of two; 4 a thread load 16 bytes at once.
      warps: of 32 threads.
      stages: of the software pipeline over steps along `in`.
      words: of each group that are taken at a time, a power of two; more is more code to compile and to keep apart.
    """

    rows: int
    groups: int
    warps: int
    stages: int = 2
    words: int = 8


def quantized_matmul(
    x: Array,
    weight: QuantizedTensor,
    dtype: DTypeLike | None = None,
    *,
    backend: Backend | None = None,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Array:
    """`x` [..., in] times the transpose of a packed `weight` [out, in]: [..., out], summed in float32.

    A weight that is divided over a mesh is multiplied where its parts lie; what is divided along `in` is summed up.

    Args:
      dtype: of the result; x's when None.
      backend: "triton" or "xla"; None is the process's, see `llama_jax.kernels.backend`.
      blocks: of the kernel, for measurements; None takes what measured well.
      interpret: run the kernels' code as array operations, on any device, for tests.
    """
    backend = backend or default_kernels().packed_products
    flat = x.reshape(-1, x.shape[-1])
    out = weight.shape[0]
    product = functools.partial(_by_rows, dtype=jnp.dtype(dtype or x.dtype), blocks=blocks, interpret=interpret)
    if backend == "xla":
        result = reference(flat, weight, dtype)
    elif weight.sharding is None:
        result = product(flat, weight)
    else:
        result = _sharded(product, flat, weight)
    return result.reshape(*x.shape[:-1], out)


def _by_rows(x: Array, weight: QuantizedTensor, dtype: DTypeLike, blocks: Blocks | None, interpret: bool) -> Array:
    return _product(x, weight, dtype, blocks, interpret)  # custom derivatives take no keywords


def reference(x: Array, weight: QuantizedTensor, dtype: DTypeLike | None = None) -> Array:
    """`x` [B, in] times the unpacked weight, rounded to x's dtype: [B, out]. Summed in float32, for any device."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    values = dequantize_packed(weight, x.dtype)
    return jnp.einsum("bi,oi->bo", x, values, precision=precision, preferred_element_type=dtype or x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _product(x: Array, weight: QuantizedTensor, dtype: DTypeLike, blocks: Blocks | None, interpret: bool) -> Array:
    """[B, in] to [B, out] on one device, by the number of rows. Differentiable in x."""
    n = x.shape[0]
    tiles = x.dtype == jnp.bfloat16
    if 0 < n <= (VECTOR_ROWS if tiles else VECTOR_ROWS_OTHER):
        return vector_product(x, weight, blocks, interpret).astype(dtype)
    if tiles and 0 < n <= TILE_ROWS:
        return tile_product(x, weight, blocks, interpret).astype(dtype)
    return reference(x, weight, dtype)


@_product.defjvp
def _product_jvp(dtype: DTypeLike, blocks: Blocks | None, interpret: bool, primals: Any, tangents: Any) -> Any:
    """A kernel has no derivative of its own; the product is linear in x, and of the weights none is wanted."""
    x, weight = primals
    return _product(x, weight, dtype, blocks, interpret), reference(tangents[0], weight, dtype)


def _sharded(product: Any, x: Array, weight: QuantizedTensor) -> Array:
    assert weight.sharding is not None
    mesh = weight.sharding.mesh
    rows, columns = weight.sharding.spec
    local = dataclasses.replace(weight, sharding=None)

    def multiply(x: Array, weight: QuantizedTensor) -> Array:
        result = product(x, weight, dtype=jnp.float32)
        return result if columns is None else lax.psum(result, columns)

    specs = jax.tree.map(lambda _: PartitionSpec(rows, None, columns), local)
    result = jax.shard_map(
        multiply,
        mesh=mesh,
        in_specs=(PartitionSpec(None, columns), specs),
        out_specs=PartitionSpec(None, rows),
        check_vma=False,
    )(x, local)
    return result.astype(product.keywords["dtype"])


def _position(t: PackedType, byte: int, field: int) -> int:
    """The bit at which `_fields` leaves the code of a field of a byte (0 to 3) of a word."""
    width = t.bits + t.high_bits
    if _has_byte_codes(t):
        return 8 * byte if 8 * byte + width <= _USABLE_BITS else 0
    start = 8 * byte + t.bits * field
    return start if start + width <= _USABLE_BITS else start - (32 - _USABLE_BITS)


def _has_byte_codes(t: PackedType) -> bool:
    """Whether `_fields` makes words of four codes, one a byte, before it takes them apart."""
    return t.high_bits > 0 or t.bits == 8


def _by_group(x: Array, t: PackedType, exponent: int) -> Array:
    """[B, in] -> [B, group, G]: neighbours are the same value of neighbouring groups, as in the packed words.

    Times 2^(exponent - position) of the code that each will meet.
    """
    size = t.bytes_per_group
    powers = [exponent - _position(t, value % size % 4, value // size) for value in range(t.group)]
    grouped = x.reshape(x.shape[0], -1, t.group).swapaxes(1, 2)
    return grouped * jnp.asarray([2.0**power for power in powers], x.dtype)[:, None]


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _shift(words: Array, places: int) -> Array:
    """`words` shifted to the left, or for negative `places` to the right, filled with zeros."""
    if places == 0:
        return words
    if places > 0:
        return words << places
    return lax.shift_right_logical(words, jnp.full(words.shape, -places, jnp.int32))


def _repeat(byte: int) -> int:
    return byte * 0x01010101


def _fields(t: PackedType, words: Array, high: Array | None) -> Iterator[tuple[int, int, Array]]:
    """Yields (value of the group less 4 j, position, code << position) for each code of the j-th words of groups.

    Args:
      words: the j-th word of each group, int32.
      high: the high bits of each group as `_high_of` gives them for word j.
    """
    mask = (1 << t.bits + t.high_bits) - 1
    later = _shift(words, _USABLE_BITS - 32)
    for i in range(t.fields):
        codes = words
        if high is not None:
            upper = _shift(high, t.bits - t.high_bits * i) & _repeat(mask >> t.bits << t.bits)
            codes = (_shift(words, -t.bits * i) & _repeat((1 << t.bits) - 1)) | upper
        for c in range(4):
            position = _position(t, c, i)
            if c == 3 and _has_byte_codes(t):
                bits = _shift(codes, -24)
            elif _has_byte_codes(t):
                bits = _shift(codes, position - 8 * c) & (mask << position)
            else:
                source = words if position == 8 * c + t.bits * i else later
                bits = source & (mask << position)
            yield c + t.bytes_per_group * i, position, bits


def _high_of(t: PackedType, high: Array, word: Array | int) -> Array:
    """The high bits of groups, int32, moved so that those of a word's first field are the lowest of each byte."""
    return lax.shift_right_logical(high, jnp.full(high.shape, word * (t.high_bits * t.fields), jnp.int32))


def _operands(weight: QuantizedTensor) -> list[Array]:
    return [array for array in (weight.codes, weight.high, weight.scales, weight.supers) if array is not None]


class _Tile:
    """Groups of one row or several that a program works on, in a kernel: [C], or [R, C] where `rows` is not None.

    Loads are masked where the weight does not fill the tile; masked scales and activations are zero.
    """

    def __init__(
        self, t: PackedType, refs: Any, row: Any, rows: int | None, column: Any, columns: int, interpret: bool
    ) -> None:
        self.t, self.interpret = t, interpret
        arrays = list(refs)
        self.codes = arrays.pop(0)
        self.high: Any = arrays.pop(0) if t.high_bits else None
        self.scales = arrays.pop(0)
        self.supers: Any = arrays.pop(0) if t.supers else None
        n_rows, _, n_groups = self.codes.shape
        self.columns = pl.ds(column, columns)
        column_ids = column + jnp.arange(columns, dtype=jnp.int32)
        self.column_mask = column_ids < n_groups if n_groups % columns else None
        if rows is None:
            self.rows, row_ids, self.shape = row, row, (columns,)
        else:
            self.rows, self.shape = pl.ds(row, rows), (rows, columns)
            row_ids = (row + jnp.arange(rows, dtype=jnp.int32))[:, None]
        self.row_ids = jnp.broadcast_to(row_ids, self.shape)
        self.super_ids = jnp.broadcast_to(column_ids // (SUPER_BLOCK // t.group), self.shape)
        self.mask = None if n_rows % (rows or 1) == 0 else self.row_ids < n_rows
        if self.column_mask is not None:
            inside = jnp.broadcast_to(self.column_mask, self.shape)
            self.mask = inside if self.mask is None else self.mask & inside

    def _load(self, ref: Any, index: Array | int, zero: bool = False) -> Array:
        other = jnp.zeros((), ref.dtype) if zero and self.mask is not None else None
        return plgpu.load(
            ref.at[self.rows, _int32(index), self.columns], mask=self.mask, other=other, eviction_policy="evict_first"
        )

    def _load_super(self, index: int) -> Array:
        other = None if self.mask is None else jnp.zeros((), self.supers.dtype)
        at = self.supers.at[self.row_ids, jnp.full(self.shape, index, jnp.int32), self.super_ids]
        return plgpu.load(at, mask=self.mask, other=other)

    def load_scales(self) -> tuple[list[Array], list[Array]]:
        """Scales and super-scales as they are stored."""
        supers = [self._load_super(i) for i in range(self.t.supers)]
        return [self._load(self.scales, i, zero=True) for i in range(self.t.scales)], supers

    def scale_and_shift(self, loaded: tuple[list[Array], list[Array]]) -> tuple[Array, Array | None]:
        """Float32, value = scale * code + shift: the shift stands for offset or minimum, None where there is none."""
        t = self.t
        first, second = loaded[0][0], loaded[0][1] if t.scales == 2 else None
        supers = [array.astype(jnp.float32) for array in loaded[1]]
        if not t.supers:
            scale = first.astype(jnp.float32)
            minimum = None if second is None else second.astype(jnp.float32)
        else:
            integers = first.astype(jnp.int32)
            minima = ((integers >> 4) & 15) if second is None else second.astype(jnp.int32)
            if t.has_minimum and second is None:
                integers &= 15
            scale = supers[0] * integers.astype(jnp.float32)
            minimum = -(supers[1] * minima.astype(jnp.float32)) if t.has_minimum else None
        return scale, minimum if minimum is not None or not t.offset else scale * -float(t.offset)

    def high_bits(self) -> Array | None:
        """The high bits of each group, spread over an int32; None for types without."""
        if self.high is None:
            return None
        high = self._load(self.high, 0).astype(jnp.int32)
        return (high & 0x0F0F) | ((high & 0xF0F0) << 12) if self.t.group * self.t.high_bits == 16 else high

    def words(self, word: Array | int) -> Array:
        """One word of each group."""
        return self._load(self.codes, word)

    def fields(self, word: Array | int, words: Array, high: Array | None) -> Iterator[tuple[Array | int, int, Array]]:
        """Yields (value of the group, position, float32 of code * 2^(position - `_unit`)) for the codes of a word."""
        high = None if high is None else _high_of(self.t, high, word)
        for value, position, bits in _fields(self.t, words, high):
            if self.interpret:
                yield 4 * word + value, position, bits.astype(jnp.float32)
            else:
                yield 4 * word + value, position, lax.bitcast_convert_type(bits, jnp.float32)

    def activations(self, x_ref: Any, row: Any, value: Array | int) -> Array:
        """One value of each group of x [B, group, G]; zero past the end. [C], or [B', C] for a slice of rows."""
        index = x_ref.at[_int32(row), _int32(value), self.columns]
        if self.column_mask is None:
            return plgpu.load(index, eviction_policy="evict_last")
        columns = self.shape[-1]
        mask = jnp.broadcast_to(self.column_mask, (columns,) if isinstance(row, int) else (row.size, columns))
        return plgpu.load(index, mask=mask, other=jnp.zeros((), x_ref.dtype), eviction_policy="evict_last")


def _int32(index: Any) -> Any:
    """An index as Pallas wants it: Python numbers as 32 bits, others as they are."""
    return np.int32(index) if isinstance(index, int) else index


def _unit(interpret: bool) -> int:
    """A masked integer n stands for n * 2^-unit."""
    return 0 if interpret else 149


def _lift(interpret: bool) -> int:
    """The power of two that keeps products with subnormal numbers in the normal range."""
    return 0 if interpret else 96


def _for_words(t: PackedType, n: int, load: Callable[[Any], Any], body: Callable[..., Any], carry: Any) -> Any:
    """`carry = body(word, load(word), carry)` for all words of a group, `n` of them written out at a time.

    Words are loaded one step before they are used, so that the memory works while these are multiplied.
    """

    def load_some(first: Array | int) -> list[Any]:
        return [load(first + i) for i in range(n)]

    def some(step: Array | int, state: Any, last: bool = False) -> Any:
        words, carry = state
        following = words if last else load_some(jnp.minimum((step + 1) * n, t.words - n))
        for i, word in enumerate(words):
            carry = body(step * n + i, word, carry)
        return following, carry

    n = min(n, t.words)
    state = load_some(0), carry
    return some(0, state, last=True)[1] if n == t.words else lax.fori_loop(0, t.words // n, some, state)[1]


def _vector_kernel(x_ref: Any, *refs: Any, t: PackedType, blocks: Blocks, interpret: bool) -> None:
    """Rows `blocks.rows * program_id` and on, for all rows of activations."""
    *weight_refs, out_ref = refs
    n_x = x_ref.shape[0]
    n_rows, _, n_groups = weight_refs[0].shape
    first_row = pl.program_id(0) * blocks.rows
    # Tiles have one axis: then all arrays are spread over the threads alike, four groups each, and none has to move.
    zeros = jnp.zeros(blocks.groups, jnp.float32)

    def step(index: Any, sums: list[list[Array]]) -> list[list[Array]]:
        column = index * blocks.groups
        tiles = [
            _Tile(t, weight_refs, jnp.minimum(first_row + r, n_rows - 1), None, column, blocks.groups, interpret)
            for r in range(blocks.rows)
        ]
        scales = [tile.load_scales() for tile in tiles]
        highs = [tile.high_bits() for tile in tiles]

        def multiply(word: Array | int, words: list[Array], carry: tuple[list[list[Array]], list[Array]]):
            """Adds the products of a word of each group, and the activations, times 2^lift."""
            products, totals = [list(row) for row in carry[0]], list(carry[1])
            rows = [tile.fields(word, low, high) for tile, low, high in zip(tiles, words, highs, strict=True)]
            for fields in zip(*rows, strict=True):
                value, position, _ = fields[0]
                for b in range(n_x):
                    x = tiles[0].activations(x_ref, b, value)
                    totals[b] += x * 2.0**position
                    for r, (_, _, code) in enumerate(fields):
                        products[r][b] += code * x
            return products, totals

        empty = [[zeros] * n_x for _ in tiles], [zeros] * n_x
        load = lambda word: [tile.words(word) for tile in tiles]  # noqa: E731
        products, totals = _for_words(t, blocks.words, load, multiply, empty)
        totals = [total * 2.0 ** -_lift(interpret) for total in totals]
        new = []
        for tile, loaded, product, old in zip(tiles, scales, products, sums, strict=True):
            scale, shift = tile.scale_and_shift(loaded)
            scale *= 2.0 ** (_unit(interpret) - _lift(interpret))
            row = [old[b] + scale * product[b] for b in range(n_x)]
            new.append(row if shift is None else [row[b] + shift * totals[b] for b in range(n_x)])
        return new

    steps = pl.cdiv(n_groups, blocks.groups)
    sums = [[zeros] * n_x for _ in range(blocks.rows)]
    # jax 0.12 refuses a slice that is known to pass an array's end, masked or not: this zero is not known beforehand.
    zero = pl.program_id(0) * 0
    sums = step(zero, sums) if steps == 1 else lax.fori_loop(0, steps, step, sums)
    ids = jnp.arange(blocks.rows, dtype=jnp.int32)
    mask = first_row + ids < n_rows if n_rows % blocks.rows else None
    for b in range(n_x):
        result = jnp.zeros(blocks.rows, jnp.float32)
        for r in range(blocks.rows):
            result = jnp.where(ids == r, jnp.sum(sums[r][b]), result)
        plgpu.store(out_ref.at[np.int32(b), pl.ds(first_row, blocks.rows)], result, mask=mask)


def vector_blocks(t: PackedType, n_x: int, out: int, groups: int) -> Blocks:
    """Blocks of the vector kernel for `n_x` rows of activations and a weight of `out` rows of `groups` groups.

    The threads of a program stand side by side along `in`, four groups each, and use the activations of their groups
    for all rows of the program. Registers limit rows times groups a thread times rows of activations; a program of one
    warp needs no barrier, but long rows want several. Two rows a program where four would leave units of the card idle.
    """
    warps = 1 if t.group == 16 else max(1, min(4, _power_of_two(groups) // 128))
    if n_x > 1:
        rows, a_thread = (4, 4) if n_x == 2 else (4, 2) if n_x <= 4 else (2, 1)
        return Blocks(rows, min(32 * a_thread, _power_of_two(groups)), warps=1, stages=1, words=1)
    rows = 4 if t.bits < 8 and out * warps >= 16384 else 2
    return Blocks(rows, min(128 * warps, _power_of_two(groups)), warps, stages=1, words=1)


def vector_product(x: Array, weight: QuantizedTensor, blocks: Blocks | None = None, interpret: bool = False) -> Array:
    """[B, in] times packed [out, in] for a few rows B, on the CUDA cores: [B, out] float32, all sums in float32."""
    t = weight.type
    out = weight.shape[0]
    blocks = blocks or vector_blocks(t, x.shape[0], out, weight.codes.shape[2])
    return pl.pallas_call(
        functools.partial(_vector_kernel, t=t, blocks=blocks, interpret=interpret),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], out), jnp.float32),
        grid=(pl.cdiv(out, blocks.rows),),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name=f"vector_{t.name.lower()}",
    )(_by_group(x.astype(jnp.float32), t, _lift(interpret)), *_operands(weight))


def _tile_kernel(x_ref: Any, *refs: Any, t: PackedType, blocks: Blocks, interpret: bool) -> None:
    """Rows `blocks.rows * program_id` and on, for all rows of activations, a power of two of them."""
    *weight_refs, out_ref = refs
    n_x = x_ref.shape[0]
    n_rows, _, n_groups = weight_refs[0].shape
    row = pl.program_id(0) * blocks.rows
    exponent = _lift(interpret) - _unit(interpret)

    def step(index: Any, sums: Array) -> Array:
        tile = _Tile(t, weight_refs, row, blocks.rows, index * blocks.groups, blocks.groups, interpret)
        scale, shift = tile.scale_and_shift(tile.load_scales())
        scale *= 2.0 ** _lift(interpret)
        high = tile.high_bits()

        def multiply(word: Array | int, words: Array, sums: Array) -> Array:
            for value, position, code in tile.fields(word, words, high):
                # The value times 2^(position + exponent), which the activations make up for.
                values = code * scale
                if shift is not None:
                    values += shift * 2.0 ** (position + exponent)
                x = tile.activations(x_ref, pl.ds(0, n_x), value)
                sums += jnp.dot(values.astype(x.dtype), x.T, preferred_element_type=jnp.float32)
            return sums

        return _for_words(t, blocks.words, tile.words, multiply, sums)

    sums = lax.fori_loop(0, pl.cdiv(n_groups, blocks.groups), step, jnp.zeros((blocks.rows, n_x), jnp.float32))
    mask = None
    if n_rows % blocks.rows:
        inside = row + jnp.arange(blocks.rows, dtype=jnp.int32) < n_rows
        mask = jnp.broadcast_to(inside[:, None], sums.shape)
    plgpu.store(out_ref.at[pl.ds(row, blocks.rows), pl.ds(0, n_x)], sums, mask=mask)


def tile_product(x: Array, weight: QuantizedTensor, blocks: Blocks | None = None, interpret: bool = False) -> Array:
    """[B, in] bfloat16 times packed [out, in] for B up to 64, on the tensor cores: [B, out] float32.

    Values of the weight are rounded to bfloat16 and products summed in float32. Rows of x are padded to a power of two.
    """
    t = weight.type
    out = weight.shape[0]
    n_x = max(16, _power_of_two(x.shape[0]))
    blocks = blocks or Blocks(rows=64, groups=32, warps=4, stages=1, words=1)
    padded = jnp.pad(x, ((0, n_x - x.shape[0]), (0, 0)))
    result = pl.pallas_call(
        functools.partial(_tile_kernel, t=t, blocks=blocks, interpret=interpret),
        out_shape=jax.ShapeDtypeStruct((out, n_x), jnp.float32),
        grid=(pl.cdiv(out, blocks.rows),),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name=f"tile_{t.name.lower()}",
    )(_by_group(padded, t, _unit(interpret) - _lift(interpret)), *_operands(weight))
    return result[:, : x.shape[0]].T
