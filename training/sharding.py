"""Training over several devices: where state and batches lie on a mesh of `llama_jax.device_mesh`.

`data` and `fsdp` divide the rows of a batch; `fsdp` divides the weights and the optimiser's state along D, too, and
gathers them where they are used (Zhao et al. 2023, arXiv:2304.11277); `tensor` divides heads, F and V.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError
from llama_jax.model import by_path, parameter_specs
from llama_jax.placement import param_shardings
from llama_jax.placement.sharding import AXES


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes for `llama_jax.device_mesh` from "data=2,fsdp=4"."""
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name.strip() not in AXES or not value.strip().isdigit():
            raise ArgumentError(f"The mesh is {text!r}; it must be like data=2,fsdp=4,tensor=1.")
        sizes[name.strip()] = int(value)
    return sizes


def state_shardings(state: Any, config: LlamaConfig, mesh: Mesh) -> Any:
    """Where each leaf of a training state lies: as the weight whose path and shape it has, else whole."""
    weights = by_path(param_shardings(config, mesh))
    shapes = {path: spec.shape for path, spec in by_path(parameter_specs(config)).items()}
    whole = NamedSharding(mesh, PartitionSpec())

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        for start in (name, *(name[i + 1 :] for i, letter in enumerate(name) if letter == ".")):
            if shapes.get(start) == leaf.shape:
                return weights[start]
        return whole

    return jax.tree_util.tree_map_with_path(sharding, state)


def place_batch(batch: dict[str, np.ndarray], mesh: Mesh | None) -> dict[str, jax.Array]:
    """A batch [B, T] with its rows divided over the mesh; without one, on the device. Every host gives all rows."""
    if mesh is None:
        return {name: jax.device_put(array) for name, array in batch.items()}
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    return {
        name: jax.make_array_from_callback(array.shape, rows, lambda index, array=array: array[index])
        for name, array in batch.items()
    }


def on_host(tree: Any, mesh: Mesh | None) -> Any:
    """The arrays as numpy's, whole, on every host; all hosts have to call it."""
    if mesh is not None and jax.process_count() > 1:
        tree = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)
    return jax.device_get(tree)
