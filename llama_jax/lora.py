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
from llama_jax.linear import LoraWeight
from llama_jax.model import Layer, Params, by_path, parameter_specs
from llama_jax.quantization.packed import QuantizedTensor, dequantize_packed

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
        factors = adapter.get(path)
        if factors is None:
            return weight
        used.add(path)
        shape, given = tuple(weight.shape), (factors.b.shape[0], factors.a.shape[1])
        if (1, *shape)[-2:] != given:
            raise ArgumentError(f"The adapter changes a {path} of shape {given}; the model's has shape {shape}.")
        total = jnp.asarray(scale, jnp.float32) * jnp.float32(factors.scale)
        if len(shape) == 1:  # a norm's vector is small enough to be changed at once
            return weight + (total * _product(factors)[0]).astype(weight.dtype)
        return LoraWeight(base=weight, a=factors.a, b=factors.b, scale=total)

    result = map_weights(wrap, params)
    unused = [path for path in adapter if path not in used]
    if unused:
        raise ArgumentError(f"The adapter changes {shown(unused[0])}, which a model of this shape does not have.")
    return result


def merge_lora(params: Params) -> Params:
    """Adds every adapter into its weight, which keeps its dtype; a packed weight becomes a dense one.

    An adapter that changes nothing gives back the bits of a dense weight.
    """
    return map_weights(lambda path, weight: _merged(weight) if isinstance(weight, LoraWeight) else weight, params)


def map_weights(change: Callable[[str, Any], Any], params: Params) -> Params:
    """`change(path, weight)` of every weight; a weight is an array, a `QuantizedTensor` or a `LoraWeight`."""
    layers = tuple(
        Layer(**{f.name: change(f"layers.{n}.{f.name}", getattr(layer, f.name)) for f in dataclasses.fields(layer)})
        for n, layer in enumerate(params.layers)
    )
    return Params(
        embedding=change("embedding", params.embedding),
        layers=layers,
        output_norm=change("output_norm", params.output_norm),
        output_head=None if params.output_head is None else change("output_head", params.output_head),
    )


def _check_factors(path: str, factors: LoraFactors) -> None:
    a, b = tuple(factors.a.shape), tuple(factors.b.shape)
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] < 1:
        raise ArgumentError(
            f"The adapter's factors of {path} have shapes a {a} and b {b}; a [r, in] and b [out, r] are needed."
        )


@jax.jit
def _merged(weight: LoraWeight) -> Array:
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
