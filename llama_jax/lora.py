"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): made, applied beside the weights, added into them.

An adapter is a dict of parameter path, as "layers.3.wq", to `LoraFactors`; its arrays are what training changes. The
weights of a model are left alone: `with_lora` gives `Params` in which a changed weight is a small pytree around the
dense or packed one, and `llama_jax.linear` multiplies with both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.typing import DTypeLike

from llama_jax import checks
from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError, shown
from llama_jax.linear import Joined, LoraWeight
from llama_jax.model import Layer, Params, by_path, parameter_specs
from llama_jax.offload import through_device
from llama_jax.quantization.packed import QuantizedTensor, dequantize_packed

_FIELDS = [field.name for field in dataclasses.fields(Layer)]
LAYER_MATRICES = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")


@struct.dataclass
class LoraFactors:
    """The change scale * b a of one weight [out, in].

    Attributes:
      scale: alpha / r, or alpha / sqrt(r) of a rank-stabilised adapter (Kalajdzievski 2023, arXiv:2312.03732).
    """

    a: Any  # [r, in]; of the embedding [r, D], of a norm [r, D]
    b: Any  # [out, r]; of the embedding [V, r], of a norm [1, r]
    scale: float = struct.field(pytree_node=False)

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]


Adapter = dict[str, LoraFactors]


def init_lora(
    key: Array,
    config: LlamaConfig,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    rslora: bool = False,
    targets: Sequence[str] = LAYER_MATRICES,
    dtype: DTypeLike = jnp.float32,
) -> Adapter:
    """A fresh adapter, which changes nothing: a is uniform in +-1/sqrt(in), b zero.

    Args:
      rank: r of every pair of factors.
      alpha: the change is scaled by alpha / r.
      rslora: scale by alpha / sqrt(r) instead.
      targets: fields of `Layer` (wq, wk, wv, wo, w_gate, w_up, w_down), "embedding" or "output_head".

    Raises:
      ArgumentError: a number is out of range or a target is unknown.
    """
    rank = checks.integer("rank", rank, 1)
    alpha = checks.number("alpha", alpha, 0, allowed="0 or above")
    shapes = {path: spec.shape for path, spec in by_path(parameter_specs(config)).items()}
    allowed = [*LAYER_MATRICES, "embedding", *(() if config.tied_embeddings else ("output_head",))]
    wrong = [target for target in targets if target not in allowed]
    if wrong or not targets or isinstance(targets, str):
        raise ArgumentError(f"targets is {shown(targets)}; it must be a list of {', '.join(allowed)}.")
    paths = [path for path in shapes if path.rpartition(".")[2] in targets]
    scale = alpha / (rank**0.5 if rslora else rank)

    def factors(key: Array, shape: tuple[int, ...]) -> LoraFactors:
        n_out, n_in = shape
        a = jax.random.uniform(key, (rank, n_in), jnp.float32, -1.0, 1.0) * n_in**-0.5
        return LoraFactors(a=a.astype(dtype), b=jnp.zeros((n_out, rank), dtype), scale=scale)

    keys = jax.random.split(key, len(paths))
    return {path: factors(k, shapes[path]) for k, path in zip(keys, paths, strict=True)}


def with_lora(params: Params, adapter: Adapter, scale: float | Array = 1.0) -> Params:
    """The parameters with an adapter beside them; pure, for use inside of jit and grad. May be applied repeatedly.

    Where the embedding is also the output head, a change of the one is no change of the other.

    Args:
      scale: multiplies the adapter's own, [] float32.

    Raises:
      ArgumentError: the adapter names a weight that the model has not, or has other shapes.
    """
    for path, factors in adapter.items():
        _check_factors(path, factors)
    if params.output_head is None and not {"embedding", "output_head"}.isdisjoint(adapter):
        params = dataclasses.replace(params, output_head=params.embedding)
    used: set[str] = set()

    def wrap(path: str, weight: Any) -> Any:
        paths = joined_paths(path, weight) if isinstance(weight, Joined) else [path]
        factors = [adapter.get(part) for part in paths]
        if not any(factors):
            return weight
        used.update(paths)
        shapes = [(n, *weight.rows.shape[1:]) for n in weight.outs] if isinstance(weight, Joined) else [weight.shape]
        for part, f, shape in zip(paths, factors, map(tuple, shapes), strict=True):
            given = (f.b.shape[0], f.a.shape[1]) if f else None
            if given and given != (1, *shape)[-2:]:
                raise ArgumentError(f"The adapter changes a {part} of shape {given}; the model's has shape {shape}.")
        if isinstance(weight, Joined):
            a, b = _stacked(factors, weight.outs)
            return Joined(LoraWeight(base=weight.rows, a=a, b=b, scale=jnp.asarray(scale, jnp.float32)), weight.outs)
        f = adapter[path]
        total = jnp.asarray(scale, jnp.float32) * jnp.float32(f.scale)
        if len(weight.shape) == 1:  # a norm's vector is small enough to be changed at once
            return weight + (total * _product(f)[0]).astype(weight.dtype)
        return LoraWeight(base=weight, a=f.a, b=f.b, scale=total)

    result = map_weights(wrap, params)
    unused = [path for path in adapter if path not in used]
    if unused:
        raise ArgumentError(f"The adapter changes {shown(unused[0])}, which a model of this shape does not have.")
    return result


def _stacked(factors: Sequence[LoraFactors | None], outs: Sequence[int]) -> tuple[Array, Array]:
    """One pair of factors for joined weights: each one's a behind the others', its b with its scale in a block.

    Returns:
      a: float32 [sum of ranks, in].
      b: float32 [sum of outs, sum of ranks].
    """
    given = [f for f in factors if f is not None]
    a = jnp.concatenate([f.a.astype(jnp.float32) for f in given])

    def row(f: LoraFactors | None, n_out: int) -> Array:
        blocks = [g.scale * g.b.astype(jnp.float32) if g is f else jnp.zeros((n_out, g.rank)) for g in given]
        return jnp.concatenate(blocks, axis=1)

    return a, jnp.concatenate([row(f, n_out) for f, n_out in zip(factors, outs, strict=True)])


def merge_lora(params: Params) -> Params:
    """Adds every adapter into its weight, which keeps its dtype; a packed weight becomes a dense one.

    An adapter that changes nothing gives back the bits of a dense weight.
    """

    def merge(path: str, weight: Any) -> Any:
        if isinstance(weight, Joined):
            return Joined(merge(path, weight.rows), weight.outs)
        return through_device(_merged, weight) if isinstance(weight, LoraWeight) else weight

    return map_weights(merge, params)


def dense_weight(weight: Any) -> Array:
    """A weight of any kind as an array of its dtype, with its adapters added."""
    return through_device(_merged, weight) if isinstance(weight, LoraWeight | QuantizedTensor) else weight


def map_weights(change: Callable[[str, Any], Any], params: Params) -> Params:
    """`change(path, weight)` of every weight: an array, a `QuantizedTensor`, a `LoraWeight` or a `Joined`.

    What is joined has the path of its first weight; the others' stay None.
    """

    def call(path: str, weight: Any) -> Any:
        return None if weight is None else change(path, weight)

    layers = tuple(
        Layer(**{field: call(f"layers.{n}.{field}", getattr(layer, field)) for field in _FIELDS})
        for n, layer in enumerate(params.layers)
    )
    return dataclasses.replace(
        params,
        embedding=call("embedding", params.embedding),
        layers=layers,
        output_norm=call("output_norm", params.output_norm),
        output_head=call("output_head", params.output_head),
    )


def joined_paths(path: str, weight: Joined) -> list[str]:
    """The paths of the weights that are joined in what stands at `path`."""
    layer, _, field = path.rpartition(".")
    first = _FIELDS.index(field)
    return [f"{layer}.{name}" for name in _FIELDS[first : first + len(weight.outs)]]


def _check_factors(path: str, factors: LoraFactors) -> None:
    a, b = tuple(factors.a.shape), tuple(factors.b.shape)
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] < 1:
        raise ArgumentError(
            f"The adapter's factors of {path} have shapes a {a} and b {b}; a [r, in] and b [out, r] are needed."
        )


@jax.jit
def _merged(weight: LoraWeight | QuantizedTensor) -> Array:
    def values(weight: Any) -> Array:
        if isinstance(weight, QuantizedTensor):
            return dequantize_packed(weight, jnp.float32)
        if not isinstance(weight, LoraWeight):
            return jnp.asarray(weight).astype(jnp.float32)
        return values(weight.base) + weight.scale * _product(weight)

    return values(weight).astype(weight.dtype)


def _product(factors: LoraFactors | LoraWeight) -> Array:
    """b a, float32 [out, in]."""
    a, b = (jnp.asarray(factor).astype(jnp.float32) for factor in (factors.a, factors.b))
    return jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)
