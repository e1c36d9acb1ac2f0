"""Adapters of a loaded model: from files to parameters on its devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from llama_jax import checks
from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError
from llama_jax.formats.load import check_tensors, open_model
from llama_jax.formats.lora import load_lora
from llama_jax.formats.names import is_norm, parameter_shapes
from llama_jax.linear import Joined
from llama_jax.lora import Adapter, joined_paths, map_weights, merge_lora, with_lora
from llama_jax.model import Params
from llama_jax.placement import Place, place_beside

LoraSource = str | os.PathLike[str] | tuple[str | os.PathLike[str], float]
ScaledAdapter = tuple[Adapter, float]


def load_adapters(sources: Sequence[LoraSource], config: LlamaConfig) -> list[ScaledAdapter]:
    """Adapters in host memory, with their scales.

    Args:
      sources: paths, or pairs of a path and what the adapter's own scale is multiplied by.

    Raises:
      ArgumentError: a scale is no finite number, or as `load_lora`.
      FormatError: as `load_lora`.
    """
    if isinstance(sources, (str, bytes, os.PathLike)):
        raise ArgumentError(f"lora is {sources!r}; it must be a list of paths or (path, scale) pairs.")
    pairs = [source if isinstance(source, tuple) else (source, 1.0) for source in sources]
    return [
        (load_lora(os.fspath(path), config), checks.number("A LoRA scale", scale, -3e38, allowed="a finite number"))
        for path, scale in pairs
    ]


def apply_adapters(params: Params, adapters: Sequence[ScaledAdapter], *, merge: bool = False) -> Params:
    """The parameters with adapters beside the weights that they change, in the same memory, or added into them."""
    weights: dict[str, Any] = {"output_head": params.embedding}

    def note(path: str, weight: Any) -> None:
        if isinstance(weight, Joined):
            weights.update(dict.fromkeys(joined_paths(path, weight), weight.rows))
        else:
            weights[path] = weight

    map_weights(note, params)
    for adapter, scale in adapters:
        placed = {path: place_beside(weights[path], factors) for path, factors in adapter.items()}
        params = with_lora(params, placed, scale)
    return merge_lora(params) if merge else params


def with_base(
    params: Params,
    path: str | os.PathLike[str],
    adapters: Sequence[ScaledAdapter],
    config: LlamaConfig,
    dtype: DTypeLike,
    place: Place,
) -> Params:
    """`params` with every weight that an adapter changes read anew from another file of the same model.

    A quantized model has lost a little of what the adapter was trained on; an exact file gives it back.

    Raises:
      ArgumentError: the other file is a model of another shape.
    """
    changed = {parameter for adapter, _ in adapters for parameter in adapter}
    shapes = parameter_shapes(config)
    with open_model(Path(path)) as file:
        check_tensors(file)

        def exact(parameter: str, weight: Any) -> Any:
            if parameter not in changed:
                return weight
            shape = file.tensors[parameter].shape if parameter in file.tensors else None
            if shape != shapes[parameter]:
                raise ArgumentError(
                    f"{file.path} has a {parameter} of shape {shape}; the model's has {shapes[parameter]}."
                )
            return place(parameter, file.read(parameter, np.float32 if is_norm(parameter) else dtype))

        return map_weights(exact, params)
