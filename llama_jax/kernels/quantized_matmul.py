"""Products with packed weights (`llama_jax.quantization.packed`): values are unpacked in registers.

Three ways, by the number of rows of activations:
  few rows    `_vector_kernel` on the CUDA cores, float32 throughout;
  some rows   `_tile_kernel` on the tensor cores, for 16-bit activations: weights are rounded to that type;
  many rows   the weight is unpacked whole, once for all rows, and XLA multiplies: a temporary of one tensor's size.
On a device other than an NVIDIA GPU of compute capability 8 or above, every product goes the last way.

Unpacking without conversions. A float32 with exponent 0 is 1 + mantissa / 2^23. A shift brings the F fields of one
byte of a word to the top of the mantissa, and one AND-OR (a single LOP3 instruction) per field makes the float
1 + code / 2^(23 - position) of it. Sums over a group then carry the sum of its activations too, which is subtracted
once per group, not per weight:

  sum_e (1 + c_e / m) x_e = sum_e x_e + (sum_e c_e x_e) / m,   one m per field

Instructions a weight, with four rows of weights a program: 4 bits 0.5 shift + 1 LOP3 + 1 FMA; 5 and 6 bits
1 + 2 + 1; 8 bits 1 + 1 + 1; 2 bits 0.25 + 1 + 1; 3 bits 0.5 + 2 + 1; to that 0.25 for the sums of activations, and
0.2 (groups of 32) to 0.5 (groups of 16) for loads and scales. An SM issues 128 a cycle, so 132 of them at 1.7 GHz could
unpack 28.7e12 / 3 weights/s of 4 bits, the content of 5.4 TB/s.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from llama_jax.errors import ArgumentError
from llama_jax.quantization.packed import SUPER_BLOCK, PackedType, QuantizedTensor, dequantize_packed

VECTOR_ROWS = 4  # most rows of activations for the vector kernel, where the tile kernel can take more
VECTOR_ROWS_FLOAT32 = 16  # the same for float32 activations, which the tile kernel does not take
TILE_ROWS = 64  # most rows for the tile kernel
BACKENDS = ("triton", "xla")
_ONE = 0x3F800000  # the bits of 1.0


class Blocks(NamedTuple):
    """How a kernel divides its work.

    Attributes:
      rows: rows of the weight a program computes.
      groups: groups of each row that a program takes at a time, a power of two; 4 a thread load 16 bytes at once.
      warps: of 32 threads.
      stages: of the software pipeline over steps along `in`.
    """

    rows: int
    groups: int
    warps: int
    stages: int = 2


@functools.cache
def default_backend() -> str:
    """What computes products with packed weights on the default device: "triton", or "xla" where that cannot run."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    is_nvidia = device.platform == "gpu" and "NVIDIA" in device.device_kind
    return "triton" if is_nvidia and capability and float(capability) >= 8.0 else "xla"


def quantized_matmul(
    x: Array,
    weight: QuantizedTensor,
    dtype: DTypeLike | None = None,
    *,
    backend: str | None = None,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Array:
    """`x` [..., in] times the transpose of a packed `weight` [out, in]: [..., out], summed in float32.

    A weight that is divided over a mesh is multiplied where its parts lie; what is divided along `in` is summed up.

    Args:
      dtype: of the result; x's when None.
      backend: "triton" or "xla"; None is `default_backend()`.
      blocks: of the kernel, for measurements; None takes what measured well.
      interpret: run the kernels' code as array operations, on any device, for tests.
    """
    backend = backend or default_backend()
    if backend not in BACKENDS:
        raise ArgumentError(f"The back end is {backend!r}; it must be one of {', '.join(BACKENDS)}.")
    flat = x.reshape(-1, x.shape[-1])
    out = weight.shape[0]
    product = functools.partial(_product, dtype=dtype or x.dtype, blocks=blocks, interpret=interpret)
    if backend == "xla":
        result = reference(flat, weight, dtype)
    elif weight.sharding is None:
        result = product(flat, weight)
    else:
        result = _sharded(product, flat, weight)
    return result.reshape(*x.shape[:-1], out)


def reference(x: Array, weight: QuantizedTensor, dtype: DTypeLike | None = None) -> Array:
    """`x` [B, in] times the unpacked weight, rounded to x's dtype: [B, out]. Summed in float32, for any device."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    values = dequantize_packed(weight, x.dtype)
    out = jnp.einsum("bi,oi->bo", x, values, precision=precision, preferred_element_type=jnp.float32)
    return out.astype(dtype or x.dtype)


def _product(x: Array, weight: QuantizedTensor, dtype: DTypeLike, blocks: Blocks | None, interpret: bool) -> Array:
    """[B, in] to [B, out] on one device, by the number of rows."""
    n = x.shape[0]
    tiles = x.dtype != jnp.float32
    if 0 < n <= (VECTOR_ROWS if tiles else VECTOR_ROWS_FLOAT32):
        return vector_product(x, weight, blocks, interpret).astype(dtype)
    if tiles and 0 < n <= TILE_ROWS:
        return tile_product(x, weight, blocks, interpret).astype(dtype)
    return reference(x, weight, dtype)


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


def _by_group(x: Array, t: PackedType) -> Array:
    """[B, in] -> [B, group, G]: neighbours are the same value of neighbouring groups, as in the packed words."""
    return x.reshape(x.shape[0], -1, t.group).swapaxes(1, 2)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _shift(words: Array, places: int) -> Array:
    """`words` shifted to the left, or for negative `places` to the right; the caller masks what comes in."""
    return words << places if places >= 0 else words >> -places


def _operands(weight: QuantizedTensor) -> list[Array]:
    return [array for array in (weight.codes, weight.high, weight.scales, weight.supers) if array is not None]


class _Tile:
    """The groups [R, C] of rows and columns that a program works on, in a kernel.

    Loads are masked where the weight does not fill the tile; masked scales and activations are zero.
    """

    def __init__(self, t: PackedType, refs: Any, row: Any, rows: int, column: Any, columns: int) -> None:
        self.t = t
        arrays = list(refs)
        self.codes = arrays.pop(0)
        self.high: Any = arrays.pop(0) if t.high_bits else None
        self.scales = arrays.pop(0)
        self.supers: Any = arrays.pop(0) if t.supers else None
        n_rows, _, n_groups = self.codes.shape
        self.rows, self.columns = pl.ds(row, rows), pl.ds(column, columns)
        self.row_ids = row + jnp.arange(rows, dtype=jnp.int32)
        self.column_ids = column + jnp.arange(columns, dtype=jnp.int32)
        self.shape = (rows, columns)
        self.column_mask = self.column_ids < n_groups if n_groups % columns else None
        self.mask = None
        if n_rows % rows:
            self.mask = jnp.broadcast_to((self.row_ids < n_rows)[:, None], self.shape)
        if self.column_mask is not None:
            inside = jnp.broadcast_to(self.column_mask[None], self.shape)
            self.mask = inside if self.mask is None else self.mask & inside

    def _load(self, ref: Any, index: int, zero: bool = False) -> Array:
        other = jnp.zeros((), ref.dtype) if zero and self.mask is not None else None
        return plgpu.load(ref.at[self.rows, np.int32(index), self.columns], mask=self.mask, other=other)

    def _load_super(self, index: int) -> Array:
        groups = SUPER_BLOCK // self.t.group
        rows = jnp.broadcast_to(self.row_ids[:, None], self.shape)
        columns = jnp.broadcast_to((self.column_ids // groups)[None], self.shape)
        other = None if self.mask is None else jnp.zeros((), self.supers.dtype)
        return plgpu.load(self.supers.at[rows, np.int32(index), columns], mask=self.mask, other=other).astype(
            jnp.float32
        )

    def scale_and_minimum(self) -> tuple[Array, Array | None]:
        """Float32 [R, C] each; the minimum is what is added to a value, None where nothing is."""
        t = self.t
        first = self._load(self.scales, 0, zero=True)
        second = self._load(self.scales, 1, zero=True) if t.scales == 2 else None
        if not t.supers:
            return first.astype(jnp.float32), None if second is None else second.astype(jnp.float32)
        integers = first.astype(jnp.int32)
        if t.supers == 1:
            return self._load_super(0) * integers.astype(jnp.float32), None
        minima = ((integers >> 4) & 15) if second is None else second.astype(jnp.int32)
        scales = (integers & 15) if second is None else integers
        scale = self._load_super(0) * scales.astype(jnp.float32)
        return scale, -(self._load_super(1) * minima.astype(jnp.float32))

    def fields(self) -> Any:
        """Yields (value of the group, field i, float32 [R, C] of 1 + code / `multiplier(t, i)`), all of a group."""
        t = self.t
        high = None if self.high is None else self._load(self.high, 0).astype(jnp.int32)
        words: Any = None
        lowest = 15 - t.high_bits  # the bit that the lowest field of a byte is shifted to
        for u in range(t.bytes_per_group):
            word, byte = divmod(u, 4)
            if byte == 0:
                words = self._load(self.codes, word)
            shifted = _shift(words, lowest - 8 * byte)
            shifted_high = None if high is None else _shift(high, lowest + t.bits - t.high_position(u))
            for i in range(t.fields):
                position = lowest + t.bits * i
                bits = (shifted & (((1 << t.bits) - 1) << position)) | _ONE
                if shifted_high is not None:
                    bits |= shifted_high & (((1 << t.high_bits) - 1) << (position + t.bits))
                yield u + t.bytes_per_group * i, i, lax.bitcast_convert_type(bits, jnp.float32)

    def activations(self, x_ref: Any, row: Any, value: int) -> Array:
        """One value of each group of x [B, group, G]; zero past the end. [C], or [B', C] for a slice of rows."""
        index = x_ref.at[np.int32(row) if isinstance(row, int) else row, np.int32(value), self.columns]
        if self.column_mask is None:
            return plgpu.load(index)
        shape = (self.shape[1],) if isinstance(row, int) else (row.size, self.shape[1])
        mask = jnp.broadcast_to(self.column_mask, shape)
        return plgpu.load(index, mask=mask, other=jnp.zeros((), x_ref.dtype))


def multiplier(t: PackedType, field: int) -> float:
    """By what a code of this field of a byte is divided where it stands in a mantissa."""
    return 2.0 ** (8 + t.high_bits - t.bits * field)


def _vector_kernel(x_ref: Any, *refs: Any, t: PackedType, blocks: Blocks) -> None:
    """Rows `blocks.rows * program_id` and on, for all rows of activations."""
    *weight_refs, out_ref = refs
    n_x = x_ref.shape[0]
    n_rows, _, n_groups = weight_refs[0].shape
    row = pl.program_id(0) * blocks.rows
    shape = (blocks.rows, blocks.groups)

    def step(index: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        tile = _Tile(t, weight_refs, row, blocks.rows, index * blocks.groups, blocks.groups)
        products = [[jnp.zeros(shape, jnp.float32)] * t.fields for _ in range(n_x)]
        ones = [[jnp.zeros(shape[1:], jnp.float32)] * t.fields for _ in range(n_x)]
        for value, i, unpacked in tile.fields():
            for b in range(n_x):
                x = tile.activations(x_ref, b, value)
                products[b][i] += unpacked * x[None]
                ones[b][i] += x
        scale, minimum = tile.scale_and_minimum()
        new = []
        for b in range(n_x):
            total = sum(ones[b][1:], start=ones[b][0])  # of the activations of each group
            inner = sum((products[b][i] - ones[b][i][None]) * multiplier(t, i) for i in range(t.fields))
            if t.offset:
                inner -= (total * float(t.offset))[None]
            result = sums[b] + scale * inner
            new.append(result if minimum is None else result + minimum * total[None])
        return tuple(new)

    steps = pl.cdiv(n_groups, blocks.groups)
    sums = tuple(jnp.zeros(shape, jnp.float32) for _ in range(n_x))
    sums = step(0, sums) if steps == 1 else lax.fori_loop(0, steps, step, sums)
    mask = row + jnp.arange(blocks.rows, dtype=jnp.int32) < n_rows if n_rows % blocks.rows else None
    for b in range(n_x):
        plgpu.store(out_ref.at[np.int32(b), pl.ds(row, blocks.rows)], jnp.sum(sums[b], axis=1), mask=mask)


def vector_blocks(t: PackedType, n_x: int, groups: int) -> Blocks:
    """Blocks of the vector kernel for `n_x` rows of activations and `groups` groups along `in`.

    A program spans all of `in` up to 512 groups, its threads side by side, so that each reuses the activations of its
    groups for all rows of the program. Registers limit rows times groups a thread times rows of activations.
    """
    del t
    columns = min(512, _power_of_two(groups))
    rows, per_thread = {1: (4, 4), 2: (4, 2), 3: (2, 2), 4: (2, 2)}.get(n_x, (2, 1))
    return Blocks(rows, columns, max(1, min(8, columns // (32 * per_thread))))


def vector_product(x: Array, weight: QuantizedTensor, blocks: Blocks | None = None, interpret: bool = False) -> Array:
    """[B, in] times packed [out, in] for a few rows B, on the CUDA cores: [B, out] float32, all sums in float32."""
    t = weight.type
    out = weight.shape[0]
    blocks = blocks or vector_blocks(t, x.shape[0], weight.codes.shape[2])
    grouped = _by_group(x.astype(jnp.float32), t)
    return pl.pallas_call(
        functools.partial(_vector_kernel, t=t, blocks=blocks),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], out), jnp.float32),
        grid=(pl.cdiv(out, blocks.rows),),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name=f"vector_{t.name.lower()}",
    )(grouped, *_operands(weight))


def _tile_kernel(x_ref: Any, *refs: Any, t: PackedType, blocks: Blocks, n_x: int) -> None:
    """Rows `blocks.rows * program_id` and on, for `n_x` rows of activations, a power of two."""
    *weight_refs, out_ref = refs
    n_rows, _, n_groups = weight_refs[0].shape
    row = pl.program_id(0) * blocks.rows

    def step(index: Any, sums: Array) -> Array:
        tile = _Tile(t, weight_refs, row, blocks.rows, index * blocks.groups, blocks.groups)
        scale, minimum = tile.scale_and_minimum()
        # value = scale * m * unpacked + (minimum - scale * (m + offset)), one m per field
        factors = [scale * multiplier(t, i) for i in range(t.fields)]
        shifts = [-scale * (multiplier(t, i) + t.offset) for i in range(t.fields)]
        if minimum is not None:
            shifts = [shift + minimum for shift in shifts]
        for value, i, unpacked in tile.fields():
            values = (unpacked * factors[i] + shifts[i]).astype(x_ref.dtype)
            x = tile.activations(x_ref, pl.ds(0, n_x), value)
            sums += jnp.dot(values, x.T, preferred_element_type=jnp.float32)
        return sums

    sums = lax.fori_loop(0, pl.cdiv(n_groups, blocks.groups), step, jnp.zeros((blocks.rows, n_x), jnp.float32))
    mask = None
    if n_rows % blocks.rows:
        inside = row + jnp.arange(blocks.rows, dtype=jnp.int32) < n_rows
        mask = jnp.broadcast_to(inside[:, None], sums.shape)
    plgpu.store(out_ref.at[pl.ds(row, blocks.rows), pl.ds(0, n_x)], sums, mask=mask)


def tile_product(x: Array, weight: QuantizedTensor, blocks: Blocks | None = None, interpret: bool = False) -> Array:
    """[B, in] times packed [out, in] for B up to 64, on the tensor cores: [B, out] float32.

    Values are rounded to x's dtype, bfloat16 or float16, and summed in float32. Rows of x are padded to a power of two.
    """
    t = weight.type
    out = weight.shape[0]
    n_x = max(16, _power_of_two(x.shape[0]))
    blocks = blocks or Blocks(rows=64, groups=32, warps=4, stages=2)
    grouped = _by_group(jnp.pad(x, ((0, n_x - x.shape[0]), (0, 0))), t)
    result = pl.pallas_call(
        functools.partial(_tile_kernel, t=t, blocks=blocks, n_x=n_x),
        out_shape=jax.ShapeDtypeStruct((out, n_x), jnp.float32),
        grid=(pl.cdiv(out, blocks.rows),),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name=f"tile_{t.name.lower()}",
    )(grouped, *_operands(weight))
    return result[:, : x.shape[0]].T
