"""Models of a published shape with random weights, packed or not, made on the device: what the benchmarks run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax import by_path, init_params, parameter_specs
from llama_jax.config import LlamaConfig
from llama_jax.model import ParameterSpec, Params, join_projections
from llama_jax.placement import default_dtype
from llama_jax.quantization import PACKED_TYPES, QuantizedTensor, pack, row_bytes

MIXTURES = ("Q4_K_M",)


def packed_rows(name: str, columns: int, seed: int) -> QuantizedTensor:
    """1024 rows of a packed weight of random bytes, in host memory."""
    rng = np.random.default_rng(seed)
    some = pack(rng.integers(0, 256, 1024 * row_bytes(name, columns), np.uint8), name, (1024, columns), jnp.bfloat16)
    # Scales of random bytes may be infinite; ordinary ones do not slow anything down or speed it up.
    floats = "supers" if some.supers is not None else "scales"
    return some.replace(**{floats: np.full_like(getattr(some, floats), 2.0**-12)})  # type: ignore[attr-defined]


def random_packed(name: str, shape: tuple[int, int], seed: int) -> QuantizedTensor:
    """A packed weight of random bytes on the device; rows repeat after 1024, which no kernel can notice."""
    out, columns = shape
    some = packed_rows(name, columns, seed)
    return jax.tree.map(lambda part: jnp.resize(jnp.asarray(part), (out, *part.shape[1:])), some)


def type_of(path: str, mixture: str, config: LlamaConfig) -> str:
    """The type of a matrix in a file of this kind, as llama.cpp's quantize chooses it.

    The head is Q6_K but in Q8_0 files. Q4_K_M has Q6_K for wv and w_down of the first and last eighth of the layers and
    of every third between.
    """
    head = "embedding" if config.tied_embeddings else "output_head"
    if path == head and mixture != "Q8_0":
        return "Q6_K"
    if mixture != "Q4_K_M":
        return mixture
    if path.endswith(("wv", "w_down")):
        layer, eighth = int(path.split(".")[1]), config.n_layers // 8
        if layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2:
            return "Q6_K"
    return "Q4_K"


def random_params(config: LlamaConfig, quantization: str | None = None) -> Params:
    """Random weights: in the device's dtype, or packed as a file of a type (Q8_0, Q4_0 ...) or mixture (Q4_K_M)."""
    if quantization is None:
        return init_params(jax.random.key(0), config, default_dtype())
    made: dict[tuple[str, tuple[int, ...]], QuantizedTensor] = {}

    def make(path: str, spec: ParameterSpec) -> Any:
        if len(spec.shape) == 1:
            return jnp.ones(spec.shape, jnp.float32)
        kind = type_of(path, quantization, config)
        key = (kind, spec.shape)
        if key not in made:
            made[key] = random_packed(kind, (spec.shape[0], spec.shape[1]), len(made))
        return jax.tree.map(jnp.copy, made[key])

    specs = parameter_specs(config)
    structure = jax.tree.structure(specs, is_leaf=lambda leaf: isinstance(leaf, ParameterSpec))
    return jax.tree.unflatten(structure, [make(path, spec) for path, spec in by_path(specs).items()])


def made_params(config: LlamaConfig, weights: str) -> Params:
    """`random_params` of "dense" or a type, with projections joined where `llama_jax.load` joins them."""
    params = random_params(config, None if weights == "dense" else weights)
    return join_projections(params) if jax.default_backend() == "gpu" else params


QUANTIZATIONS = (*PACKED_TYPES, *MIXTURES)
