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
from llama_jax.formats.hub import PREFIX, resolve_path
from llama_jax.formats.load import check_tensors, open_model
from llama_jax.formats.lora import load_lora
from llama_jax.formats.names import is_norm, parameter_shapes
from llama_jax.linear import Joined
from llama_jax.lora import Adapter, joined_paths, map_weights, with_lora
from llama_jax.model import Params
from llama_jax.placement import Place, place_beside

LoraSource = str | os.PathLike[str] | tuple[str | os.PathLike[str], float]
ScaledAdapter = tuple[Adapter, float]


def load_adapters(sources: Sequence[LoraSource], config: LlamaConfig) -> list[ScaledAdapter]:
    """Adapters in host memory, with their scales.

    Args:
      sources: paths ("hf:owner/name" too), or pairs of a path and what the adapter's own scale is multiplied by.

    Raises:
      ArgumentError: a scale is no finite number, or as `load_lora`.
      FormatError: as `load_lora`.
    """
    if isinstance(sources, (str, bytes, os.PathLike)):
        raise ArgumentError(f"lora is {sources!r}; it must be a list of paths or (path, scale) pairs.")
    pairs = [source if isinstance(source, tuple) else (source, 1.0) for source in sources]
    return [(load_lora(_local(path), config), _checked_scale(scale)) for path, scale in pairs]


def _local(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    return resolve_path(text) if text.startswith(PREFIX) else Path(os.path.expanduser(text))


class AppliedAdapters:
    """Adapters beside the weights that they change, in the same memory; their scales may change at any time.

    Attributes:
      scales: what each adapter's own scale is multiplied by.
    """

    def __init__(self, base: Params, adapters: Sequence[ScaledAdapter]) -> None:
        weights: dict[str, Any] = {"output_head": base.embedding}

        def note(path: str, weight: Any) -> None:
            if isinstance(weight, Joined):
                weights.update(dict.fromkeys(joined_paths(path, weight), weight.rows))
            else:
                weights[path] = weight

        map_weights(note, base)
        self._base = base
        self._adapters = [
            {path: place_beside(weights[path], factors) for path, factors in adapter.items()} for adapter, _ in adapters
        ]
        self.scales = tuple(scale for _, scale in adapters)

    def params(self) -> Params:
        """The parameters with every adapter at its scale; another scale needs no other program."""
        params = self._base
        for adapter, scale in zip(self._adapters, self.scales, strict=True):
            params = with_lora(params, adapter, scale)
        return params

    def rescale(self, scales: Sequence[float]) -> Params:
        """The parameters with other scales, one for each adapter.

        Raises:
          ArgumentError: there are more or fewer scales than adapters, or one is no finite number.
        """
        if len(scales) != len(self.scales):
            raise ArgumentError(f"{len(scales)} scales were given for {len(self.scales)} adapters.")
        self.scales = tuple(map(_checked_scale, scales))
        return self.params()


def _checked_scale(scale: Any) -> float:
    return checks.number("A LoRA scale", scale, -3e38, allowed="a finite number")


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
