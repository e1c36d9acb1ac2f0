"""Products with weights: the one place that knows how a weight is stored."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jax.typing import DTypeLike

from llama_jax.kernels.quantized_matmul import quantized_matmul
from llama_jax.offload import on_host
from llama_jax.quantization.packed import QuantizedTensor, take_rows


@struct.dataclass
class LoraWeight:
    """A weight [out, in] with a low-rank change beside it: base + scale * b a (Hu et al. 2021, arXiv:2106.09685).

    The base may itself be one, so that several adapters add up. `llama_jax.lora` makes them.
    """

    base: Any  # [out, in]: an array, a QuantizedTensor or a LoraWeight
    a: Any  # [r, in]
    b: Any  # [out, r]
    scale: Any  # [] float32

    @property
    def shape(self) -> tuple[int, int]:
        return self.base.shape

    @property
    def dtype(self) -> Any:
        return self.base.dtype


@struct.dataclass
class Joined:
    """Weights [out, in] of the same input, laid behind each other: one product serves all. See `join`.

    Attributes:
      rows: [sum of outs, in].
      outs: rows of each weight.
    """

    rows: Any
    outs: tuple[int, ...] = struct.field(pytree_node=False)


def join(*weights: Any) -> list[Any]:
    """Neighbours of the same kind as one `Joined` each, with None in the places of all but its first.

    What is joined is copied, and the single weights' memory is given back at once: they cannot be used any more.
    """
    result: list[Any] = []
    for _, neighbours in itertools.groupby(weights, _kind):
        alike = list(neighbours)
        if len(alike) == 1:
            result += alike
            continue
        rows = jax.tree.map(lambda *parts: jnp.concatenate(parts), *alike)
        jax.block_until_ready(rows)
        for leaf in jax.tree.leaves(alike):
            leaf.delete()
        result += [Joined(rows, tuple(weight.shape[0] for weight in alike)), *[None] * (len(alike) - 1)]
    return result


def separate(*weights: Any) -> list[Any]:
    """What `join` was given: the single weights, which are copies of the joined rows."""
    result: list[Any] = []
    for weight in weights:
        if isinstance(weight, Joined):
            borders = [0, *itertools.accumulate(weight.outs)]
            result += [rows_of(weight.rows, *border) for border in itertools.pairwise(borders)]
        elif weight is not None:
            result.append(weight)
    return result


def rows_of(weight: Any, start: int, stop: int | None) -> Any:
    """Rows of a weight [out, in] of any kind as a weight of the same kind."""
    if isinstance(weight, LoraWeight):
        return weight.replace(base=rows_of(weight.base, start, stop), b=weight.b[start:stop])  # type: ignore[attr-defined]
    return jax.tree.map(lambda part: part[start:stop], weight)


def _kind(weight: Any) -> Any:
    """Equal for weights that `join` may lay behind each other: those on a device."""
    if any(isinstance(leaf, Array) and on_host(leaf) for leaf in jax.tree.leaves(weight)):
        return object()
    if isinstance(weight, QuantizedTensor):
        return weight.type_name, weight.dtype, weight.shape[1:]
    return (weight.dtype, weight.shape[1:]) if isinstance(weight, Array) else object()


def linears(x: Array, *weights: Any) -> list[Array]:
    """The products of `x` [..., in] with several weights, each [..., out]; what `join` made of them is one product."""
    results: list[Array] = []
    for weight in weights:
        if isinstance(weight, Joined):
            borders = list(itertools.accumulate(weight.outs))[:-1]
            if isinstance(weight.rows, LoraWeight):
                changes = jnp.split(_change(x, weight.rows), borders, axis=-1)
                base = linears(x, Joined(weight.rows.base, weight.outs))
                results += [_changed(out, change) for out, change in zip(base, changes, strict=True)]
            elif x.size == x.shape[-1] and isinstance(weight.rows, Array):  # then XLA joins the sums by itself
                results += [linear(x, part) for part in jnp.split(weight.rows, borders)]
            else:
                results += jnp.split(linear(x, weight.rows), borders, axis=-1)
        elif weight is not None:
            results.append(linear(x, weight))
    return results


def linear(x: Array, weight: Array | QuantizedTensor | LoraWeight, dtype: DTypeLike | None = None) -> Array:
    """`x` [..., in] times the transpose of `weight` [out, in]: [..., out], summed in float32.

    The product is rounded once, to `dtype`; so are its gradients', which keeps them on the matrix units.
    float32 inputs are multiplied in full float32, never in the TF32 that a GPU would take by default.

    Args:
      dtype: of the result; x's when None.
    """
    dtype = jnp.dtype(dtype or x.dtype)
    if isinstance(weight, LoraWeight):
        # The base's product is the one that stands without an adapter, so that a change of zero leaves its bits.
        return _changed(linear(x, weight.base, dtype), _change(x, weight))
    if isinstance(weight, QuantizedTensor):
        return quantized_matmul(x, weight, dtype)
    weight = weight.astype(x.dtype)
    if x.size == x.shape[-1]:
        one_row, any_rows = functools.partial(_one_row, dtype=dtype), functools.partial(_any_rows, dtype=dtype)
        return lax.platform_dependent(x, weight, cuda=one_row, default=any_rows)
    return _any_rows(x, weight, dtype)


def _change(x: Array, weight: LoraWeight) -> Array:
    """What an adapter adds to a product, float32 [..., out]."""
    return weight.scale * linear(linear(x, weight.a), weight.b, jnp.float32)


def _changed(out: Array, change: Array) -> Array:
    return (out.astype(jnp.float32) + change).astype(out.dtype)


def _any_rows(x: Array, weight: Array, dtype: jnp.dtype) -> Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("...i,oi->...o", x, weight, precision=precision, preferred_element_type=dtype)


def _one_row(x: Array, weight: Array, dtype: jnp.dtype) -> Array:
    """The product of a single row as multiplication and sum.

    XLA makes of it a reduction that reads the weight at 3.6 to 4.6 TB/s on an H200 and takes in what stands around it
    (the norm's scale, SiLU, the conversion); its matrix product for one row reads at 2.2 to 3.8 and takes in nothing.
    """
    out = jnp.sum(weight.astype(jnp.float32) * x.reshape(-1).astype(jnp.float32), axis=-1)
    return out.reshape(*x.shape[:-1], -1).astype(dtype)


def embed(tokens: Array, weight: Array | QuantizedTensor | LoraWeight) -> Array:
    """Rows of `weight` [V, D] for `tokens` [B, T] int32: [B, T, D]. Ids outside of 0 ... V-1 are the caller's fault."""
    if isinstance(weight, LoraWeight):
        change = linear(embed(tokens, weight.b), weight.a.T, jnp.float32)
        return _changed(embed(tokens, weight.base), weight.scale * change)
    if isinstance(weight, QuantizedTensor):
        return take_rows(weight, tokens)
    return jnp.take(weight, tokens, axis=0, mode="clip")
