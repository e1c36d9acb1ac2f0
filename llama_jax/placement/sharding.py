"""Which device and which memory holds each array: meshes, shardings, and the functions that bring arrays there."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from llama_jax.cache import KVCache, init_cache
from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError
from llama_jax.linear import LoraWeight
from llama_jax.lora import LoraFactors
from llama_jax.model import ParameterSpec, Params, by_path, parameter_specs
from llama_jax.placement.plan import Plan
from llama_jax.quantization.packed import QuantizedTensor

Place = Callable[[str, Any], Any]  # (parameter path, host array or QuantizedTensor of them) -> the same where it lives

AXES = ("data", "fsdp", "tensor")  # of a mesh, outermost first: rows of a batch; D; heads, F and V

logger = logging.getLogger(__name__)


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


def device_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh with the axes `data`, `fsdp` and `tensor` over the first data * fsdp * tensor devices of all hosts.

    Rows of a batch are divided over `data` and `fsdp`, the weights' D over `fsdp` and their heads, F and V over
    `tensor`.

    Raises:
      ArgumentError: a size is below 1, or there are fewer devices.
    """
    sizes = dict(data=data, fsdp=fsdp, tensor=tensor)
    n = data * fsdp * tensor
    available = jax.device_count()
    if min(sizes.values()) < 1 or n > available:
        shape = " x ".join(map(str, sizes.values()))
        raise ArgumentError(f"A mesh of {shape} devices was asked for; this process sees {available}.")
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=types, devices=jax.devices()[:n])


def tensor_mesh(n_devices: int | None = None) -> Mesh:
    """A mesh with one axis, `tensor`, over the first `n_devices` devices (all when None)."""
    available = jax.device_count()
    n_devices = available if n_devices is None else n_devices
    if not 1 <= n_devices <= available:
        raise ArgumentError(f"A mesh of {n_devices} devices was asked for; this process sees {available}.")
    return _tensor_mesh(tuple(jax.devices()[:n_devices]))


def _tensor_mesh(devices: tuple[Any, ...]) -> Mesh:
    return jax.make_mesh((len(devices),), ("tensor",), axis_types=(AxisType.Auto,), devices=devices)


def plan_mesh(plan: Plan | None) -> Mesh | None:
    """The mesh over which a plan divides weights; None where one device holds each of them whole."""
    return _tensor_mesh(plan.devices) if plan is not None and plan.mode == "tensor" else None


def _size(mesh: Mesh, axis: str) -> int:
    return mesh.shape.get(axis, 1)


def param_shardings(config: LlamaConfig, mesh: Mesh, *, pad_vocabulary: bool = False) -> Params:
    """Where each weight lives on a mesh: heads, F and V are divided over its axis `tensor`, D of matrices over `fsdp`.

    An axis whose size does not divide is kept whole on every device: slower, never different.

    Args:
      pad_vocabulary: V is filled up to a size that divides, as `place_params` does.
    """
    n, fsdp = _size(mesh, "tensor"), _size(mesh, "fsdp")
    divided = {
        "HE": config.n_kv_heads % n == 0,
        "KE": config.n_kv_heads % n == 0,
        "F": config.d_ff % n == 0,
        "V": pad_vocabulary or config.vocab_size % n == 0,
        "D": False,
    }

    def name(axis: str, spec: ParameterSpec) -> str | None:
        if axis == "D":
            return "fsdp" if fsdp > 1 and len(spec.shape) == 2 and config.d_model % fsdp == 0 else None
        return "tensor" if n > 1 and divided[axis] else None

    def sharding(spec: ParameterSpec) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(name(axis, spec) for axis in spec.axes)))

    return jax.tree.map(sharding, parameter_specs(config), is_leaf=lambda s: isinstance(s, ParameterSpec))


def sharding_notes(config: LlamaConfig, mesh: Mesh | None) -> Iterator[str]:
    """A sentence for everything that a mesh cannot divide evenly."""
    n = 1 if mesh is None else _size(mesh, "tensor")
    if padding := -config.vocab_size % n:
        yield f"vocabulary of {config.vocab_size} padded to {config.vocab_size + padding}, to divide by {n} devices"
    if config.n_kv_heads % n:
        yield (
            f"attention whole on each device: {config.n_heads} query and {config.n_kv_heads} key/value heads "
            f"do not divide by {n} devices"
        )
    if config.d_ff % n:
        yield f"feed-forward layers whole on each device: {config.d_ff} columns do not divide by {n} devices"


def weight_shardings(
    config: LlamaConfig, mesh: Mesh | None, plan: Plan | None, *, pad_vocabulary: bool = False
) -> dict[str, Sharding | None]:
    """Device and memory of each weight by parameter path; None is the default device.

    Norm weights are always on a device: they are too small to be worth a transfer each.
    """
    shardings = by_path(param_shardings(config, mesh, pad_vocabulary=pad_vocabulary)) if mesh is not None else {}

    def place(path: str, spec: ParameterSpec) -> Sharding | None:
        layer = int(path.split(".")[1]) if path.startswith("layers.") else None
        if mesh is not None:
            sharding = shardings[path]
        elif plan is None or not plan.devices:
            return None
        else:
            device = plan.devices[plan.main if layer is None else plan.layer_devices[layer]]
            sharding = SingleDeviceSharding(device)
        if plan is None or not plan.devices or len(spec.shape) == 1 or path == "embedding":
            return sharding
        on_gpu = plan.output_on_gpu if layer is None else plan.layer_on_gpu(layer)
        return sharding if on_gpu else sharding.with_memory_kind("pinned_host")

    return {path: place(path, spec) for path, spec in by_path(parameter_specs(config)).items()}


def place_params(
    config: LlamaConfig, mesh: Mesh | None, plan: Plan | None = None, *, pad_vocabulary: bool = False
) -> Place:
    """The function that moves one weight, named by its parameter path, from the host to where it lives.

    It returns when the weight is there, so that a loader holds one host array at a time; of each array a process reads
    only the parts that its own devices hold.

    Args:
      mesh: None is one device, or the stretches of layers of `plan`.
      plan: None keeps everything on devices.
      pad_vocabulary: a vocabulary that does not divide over the mesh is filled up with rows of zeros instead of being
        kept whole on each device; pass the parameters through `with_vocabulary` then.
    """
    shardings = weight_shardings(config, mesh, plan, pad_vocabulary=pad_vocabulary)
    n = _size(mesh, "tensor") if mesh is not None and pad_vocabulary else 1

    def place(path: str, weight: Any) -> Any:
        sharding = shardings[path]
        if mesh is None:
            return jax.block_until_ready(jax.device_put(weight, sharding))
        if path in ("embedding", "output_head"):
            weight = _with_rows(weight, config.vocab_size + -config.vocab_size % n)
        assert isinstance(sharding, NamedSharding)
        if isinstance(weight, QuantizedTensor):
            weight = dataclasses.replace(weight, sharding=packed_sharding(weight, sharding))
            return jax.block_until_ready(jax.tree.map(_put, weight, part_shardings(weight)))
        return jax.block_until_ready(_put(weight, sharding))

    return place


def _put(array: Any, sharding: Sharding) -> jax.Array:
    """`array` where it is to be; of a numpy array each process reads only what its devices hold."""
    if isinstance(array, jax.Array) or isinstance(sharding, SingleDeviceSharding):
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _with_rows(weight: Any, rows: int) -> Any:
    """`weight` [out, ...] or each array of a packed one, filled up with zeros to `rows` rows."""

    def pad(array: Any) -> Any:
        xp = jnp if isinstance(array, jax.Array) else np
        return xp.pad(array, [(0, rows - array.shape[0]), *[(0, 0)] * (array.ndim - 1)])

    return weight if weight.shape[0] == rows else jax.tree.map(pad, weight)


def place_beside(weight: Any, factors: LoraFactors) -> LoraFactors:
    """An adapter's factors where the weight lies that they change: on its device, or divided and padded as it is."""
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
    whole = _with_rows(factors.b, weight.shape[0])
    return dataclasses.replace(factors, a=jax.device_put(factors.a, a), b=jax.device_put(whole, b))


def with_vocabulary(params: Params, config: LlamaConfig) -> Params:
    """`params` that know their vocabulary's size where their embedding was padded."""
    padded = params.embedding.shape[0] != config.vocab_size
    return dataclasses.replace(params, vocab_size=config.vocab_size) if padded else params


def packed_sharding(weight: QuantizedTensor, sharding: NamedSharding) -> NamedSharding:
    """`sharding` of a matrix [out, in], without the axis along `in` where it would cut through blocks."""
    rows, columns = sharding.spec
    n = 1 if columns is None else sharding.mesh.shape[columns]
    whole = all(array.shape[2] % n == 0 for array in jax.tree.leaves(weight))
    spec = PartitionSpec(rows, columns if whole else None)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def part_shardings(weight: QuantizedTensor) -> QuantizedTensor:
    """Where the arrays of a packed weight lie: [out, ..., groups], divided as its `sharding` divides [out, in]."""
    assert weight.sharding is not None
    rows, columns = weight.sharding.spec
    spec = PartitionSpec(rows, None, columns)
    parts = NamedSharding(weight.sharding.mesh, spec, memory_kind=weight.sharding.memory_kind)
    return jax.tree.map(lambda _: parts, weight)


def batch_axes(mesh: Mesh, batch: int) -> tuple[str, ...] | None:
    """The axes of a mesh over which `batch` rows are divided; None where they do not divide and each device has all."""
    axes = tuple(axis for axis in ("data", "fsdp") if _size(mesh, axis) > 1)
    n = int(np.prod([_size(mesh, axis) for axis in axes], dtype=int))
    if axes and batch % n:
        logger.info("batch of %d whole on each device: it does not divide by %d", batch, n)
    return axes if axes and batch % n == 0 else None


def place_cache(
    config: LlamaConfig,
    batch: int,
    capacity: int,
    dtype: Any,
    mesh: Mesh | None,
    plan: Plan | None = None,
) -> KVCache:
    """An empty cache where the weights of `param_shardings` want it: key/value heads divided over `tensor`.

    Args:
      dtype: see `init_cache`; the other arguments as in `place_params`.
    """
    if mesh is None and (plan is None or not plan.devices):
        return init_cache(config, batch, capacity, dtype)

    spec = PartitionSpec()
    if mesh is not None:
        heads = "tensor" if config.n_kv_heads % _size(mesh, "tensor") == 0 else None
        spec = PartitionSpec(batch_axes(mesh, batch), heads)
        by_layer: list[Sharding] = [NamedSharding(mesh, spec)] * config.n_layers
        lengths: Sharding = NamedSharding(mesh, PartitionSpec())
    else:
        assert plan is not None
        by_layer = [SingleDeviceSharding(plan.devices[d]) for d in plan.layer_devices]
        lengths = SingleDeviceSharding(plan.devices[plan.main])

    def empty(buffers: tuple[Any, ...], on_gpu: bool) -> tuple[Any, ...]:
        places = by_layer if on_gpu else [s.with_memory_kind("pinned_host") for s in by_layer]
        return tuple(jax.tree.map(lambda b, s=s: _zeros(b, s), layer) for layer, s in zip(buffers, places, strict=True))

    shapes = jax.eval_shape(lambda: init_cache(config, batch, capacity, dtype))
    k_on_gpu, v_on_gpu = (plan.k_cache_on_gpu, plan.v_cache_on_gpu) if plan is not None else (True, True)
    devices = plan.layer_devices if plan is not None and plan.mode == "layer" else ()
    return dataclasses.replace(
        shapes,
        sharding=None if mesh is None else NamedSharding(mesh, spec),
        stages=tuple(i for i, device in enumerate(devices) if i == 0 or device != devices[i - 1]),
        k=empty(shapes.k, k_on_gpu),
        v=empty(shapes.v, v_on_gpu),
        lengths=_zeros(shapes.lengths, lengths),
    )


def _zeros(shape: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
    """Zeros made where they are to be; those in host memory never pass through a device's."""
    if sharding.memory_kind != "pinned_host":
        return jnp.zeros(shape.shape, shape.dtype, device=sharding)
    return _put(np.broadcast_to(np.zeros((), shape.dtype), shape.shape), sharding)
