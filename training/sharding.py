"""Training over several devices: the axes of its mesh, and where state and batches lie on it.

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
from llama_jax.placement import device_mesh, param_shardings
from llama_jax.placement.sharding import AXES


def training_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh with the axes `AXES` over all devices of all hosts, or over the first data * fsdp * tensor of one host."""
    sizes = (data, fsdp, tensor)
    n, available = int(np.prod(sizes)), jax.device_count()
    if min(sizes) < 1 or n > available or (n < available and jax.process_count() > 1):
        raise ArgumentError(
            f"A mesh of data={data}, fsdp={fsdp}, tensor={tensor} was asked for; its product must be from 1 to the "
            f"{available} devices that there are, and all of them where there are several hosts."
        )
    return device_mesh(data, fsdp, tensor)


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes from "data=2,fsdp=4"."""
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name.strip() not in AXES or not value.strip().isdigit():
            raise ArgumentError(f"The mesh is {text!r}; it must be like data=2,fsdp=4,tensor=1.")
        sizes[name.strip()] = int(value)
    return sizes


def weight_shardings(config: LlamaConfig, mesh: Mesh) -> dict[str, NamedSharding]:
    """Where each weight lies, by parameter path; an axis whose size does not divide is kept whole."""
    return by_path(param_shardings(config, mesh))


def state_shardings(state: Any, config: LlamaConfig, mesh: Mesh) -> Any:
    """Where each leaf of a training state lies: as the weight whose path and shape it has, else whole."""
    weights = weight_shardings(config, mesh)
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
    """This process's rows [B / processes, T] as global arrays [B, T] on the mesh; without one, on the device."""
    if mesh is None:
        return {name: jax.device_put(array) for name, array in batch.items()}
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    return {name: jax.make_array_from_process_local_data(rows, array) for name, array in batch.items()}
