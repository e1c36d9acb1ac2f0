"""What lives where: the only module that names devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from llama_jax.cache import KVCache, init_cache
from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError
from llama_jax.kernels.backend import XLA
from llama_jax.linear import LoraWeight
from llama_jax.lora import LoraFactors
from llama_jax.model import ParameterSpec, Params, by_path, parameter_specs
from llama_jax.quantization.packed import QuantizedTensor

Place = Callable[[str, Any], Any]  # (parameter path, host array or QuantizedTensor of them) -> the same where it lives


def check_devices() -> None:
    """Raises ArgumentError where jax finds no device that it may use."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else "its plug-in cannot be used"
        platforms = jax.config.values["jax_platforms"]
        raise ArgumentError(f"jax finds no device with JAX_PLATFORMS={platforms or ''}: {reason}") from error


def default_dtype() -> np.dtype:
    """bfloat16 on a GPU; float32 on a CPU, whose bfloat16 products are ten times slower."""
    return np.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def tensor_mesh(n_devices: int | None = None) -> Mesh:
    """A mesh with one axis, `tensor`, over the first `n_devices` devices (all when None)."""
    available = jax.device_count()
    n_devices = available if n_devices is None else n_devices
    if not 1 <= n_devices <= available:
        raise ArgumentError(f"A mesh of {n_devices} devices was asked for; this process sees {available}.")
    devices = jax.devices()[:n_devices]
    return jax.make_mesh((n_devices,), ("tensor",), axis_types=(AxisType.Auto,), devices=devices)


def param_shardings(config: LlamaConfig, mesh: Mesh) -> Params:
    """Where each weight lives on a mesh with an axis `tensor`: heads, F and V are divided over it.

    An axis whose size does not divide is kept whole on every device: slower, never different.
    """
    n = mesh.shape["tensor"]
    divided = {
        "HE": config.n_kv_heads % n == 0,
        "KE": config.n_kv_heads % n == 0,
        "F": config.d_ff % n == 0,
        "V": config.vocab_size % n == 0,
        "D": False,
    }

    def sharding(spec: ParameterSpec) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*("tensor" if divided[axis] else None for axis in spec.axes)))

    return jax.tree.map(sharding, parameter_specs(config), is_leaf=lambda s: isinstance(s, ParameterSpec))


def place_params(config: LlamaConfig, mesh: Mesh | None) -> Place:
    """The function that moves one weight, named by its parameter path, from the host to where it lives.

    It returns when the weight is there, so that a loader holds one host array at a time.

    Args:
      mesh: None is the default device.
    """
    if mesh is None:
        return lambda path, array: jax.block_until_ready(jax.device_put(array))
    shardings = by_path(param_shardings(config, mesh))

    def place(path: str, weight: Any) -> Any:
        if isinstance(weight, QuantizedTensor):
            weight = dataclasses.replace(weight, sharding=packed_sharding(weight, shardings[path]))
            return jax.block_until_ready(jax.device_put(weight, part_shardings(weight)))
        return jax.block_until_ready(jax.device_put(weight, shardings[path]))

    return place


def place_beside(weight: Any, factors: LoraFactors) -> LoraFactors:
    """An adapter's factors where the weight lies that they change: on its device, or divided as it is divided."""
    while isinstance(weight, LoraWeight):
        weight = weight.base
    sharding = weight.sharding
    if isinstance(weight, QuantizedTensor) and sharding is None:
        sharding = weight.codes.sharding
    if isinstance(sharding, NamedSharding):
        rows, columns = (*sharding.spec, None, None)[:2] if len(weight.shape) == 2 else (None, None)
        kind = sharding.memory_kind
        a = NamedSharding(sharding.mesh, PartitionSpec(None, columns), memory_kind=kind)
        b = NamedSharding(sharding.mesh, PartitionSpec(rows, None), memory_kind=kind)
    else:
        a = b = sharding
    return dataclasses.replace(factors, a=jax.device_put(factors.a, a), b=jax.device_put(factors.b, b))


def packed_sharding(weight: QuantizedTensor, sharding: NamedSharding) -> NamedSharding:
    """`sharding` of a matrix [out, in], without the axis along `in` where it would cut through blocks."""
    rows, columns = sharding.spec
    n = 1 if columns is None else sharding.mesh.shape[columns]
    whole = all(array.shape[2] % n == 0 for array in jax.tree.leaves(weight))
    return NamedSharding(sharding.mesh, PartitionSpec(rows, columns if whole else None))


def part_shardings(weight: QuantizedTensor) -> QuantizedTensor:
    """Where the arrays of a packed weight lie: [out, ..., groups], divided as its `sharding` divides [out, in]."""
    assert weight.sharding is not None
    rows, columns = weight.sharding.spec
    parts = NamedSharding(weight.sharding.mesh, PartitionSpec(rows, None, columns))
    return jax.tree.map(lambda _: parts, weight)


def place_cache(config: LlamaConfig, batch: int, capacity: int, dtype: Any, mesh: Mesh | None) -> KVCache:
    """An empty cache where the weights of `param_shardings` want it: key/value heads divided over `tensor`.

    A divided cache is served by plain operations, which XLA divides; a Pallas kernel sees one device only.
    """
    if mesh is None:
        return init_cache(config, batch, capacity, dtype)
    heads = "tensor" if config.n_kv_heads % mesh.shape["tensor"] == 0 else None
    buffers = (NamedSharding(mesh, PartitionSpec(None, heads)),) * config.n_layers
    shardings = KVCache(k=buffers, v=buffers, lengths=NamedSharding(mesh, PartitionSpec()))  # type: ignore[arg-type]
    return jax.jit(lambda: init_cache(config, batch, capacity, dtype, XLA), out_shardings=shardings)()
