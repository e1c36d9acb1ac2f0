"""From a request to a plan for the devices that are there, and what the plan came to in bytes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax

from llama_jax.cache import KVCache
from llama_jax.config import LlamaConfig
from llama_jax.model import Params
from llama_jax.placement.plan import Placement, Plan, Sizes, plan

logger = logging.getLogger("llama_jax.load")

_MEGABYTE = 1 << 20
_SCORES = 4 * 2**27 * 2  # bytes of attention scores and their softmax that plain operations hold at most


def gpus() -> tuple[Any, ...]:
    """The GPUs of all hosts, in jax's order."""
    return tuple(device for device in jax.devices() if device.platform == "gpu")


def free_memory(device: Any) -> int | None:
    """Bytes that a device can still give out; None where it does not tell."""
    stats = device.memory_stats() if device.process_index == jax.process_index() else None
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def memory_sizes(
    config: LlamaConfig,
    weight_bytes: Mapping[str, int],
    *,
    n_ctx: int,
    n_batch: int,
    itemsize: int,
    batch: int = 1,
) -> Sizes:
    """What `plan` has to know of a model's size.

    Args:
      weight_bytes: of each weight by parameter path, as it will be in memory.
      n_ctx, n_batch: tokens of context; prompt tokens in one run of the model.
      itemsize: bytes of an element of the cache and of activations.
      batch: sequences.
    """
    layers = [0] * config.n_layers
    for path, size in weight_bytes.items():
        if path.startswith("layers."):
            layers[int(path.split(".")[1])] += size
    cache = batch * n_ctx * config.kv_bytes_per_token(itemsize) // 2
    widths = 4 * config.d_model + 3 * config.d_ff + 2 * config.n_heads * config.head_dim
    activations = batch * n_batch * widths * max(itemsize, 4)
    scores = min(_SCORES, 2 * 4 * batch * config.n_heads * n_batch * n_ctx)
    unpacked = config.d_ff * config.d_model * itemsize  # of the largest matrix, where weights are packed
    return Sizes(
        layers=tuple(layers),
        embedding=weight_bytes.get("embedding", 0),
        output=weight_bytes.get("output_norm", 0) + weight_bytes.get("output_head", 0),
        k_cache=cache,
        v_cache=cache,
        temporaries=activations + scores + unpacked + 4 * batch * config.vocab_size * 4,
    )


def resolve(placement: Placement, n_layers: int, sizes: Sizes | None = None) -> Plan:
    """The plan for the GPUs that are there (or `placement.devices`), logged line by line.

    Several hosts without GPUs share the model among all their devices. A single one holds it on the default device, and
    each option that asks for something else is warned about.

    Raises:
      ArgumentError: what is asked for is not possible with these devices.
    """
    several = jax.devices() if jax.process_count() > 1 else ()
    devices = (gpus() or tuple(several)) if placement.devices is None else placement.devices
    if not devices:
        for name in placement.named_options():
            logger.warning("warning: jax finds no GPU (only %s); %s is ignored", jax.default_backend(), name)
    free = [free_memory(device) for device in devices] if placement.gpu_layers == "auto" else [None]
    chosen = plan(
        n_layers,
        sizes,
        devices,
        gpu_layers=placement.gpu_layers,
        low_vram=placement.low_vram,
        main_gpu=placement.main_gpu,
        tensor_split=placement.tensor_split,
        split_mode=placement.split_mode,
        free_memory=None if None in free else free,  # type: ignore[arg-type]
    )
    for line in chosen.log_lines():
        logger.info("%s", line)
    return chosen


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes in the memory of all this process's devices, from real arrays and compiled programs, and beside it.

    Attributes:
      weights, cache: on devices.
      temporaries: the most that one of the compiled programs needs besides.
      host_weights, host_cache: in host memory, streamed to the devices.
    """

    weights: int
    cache: int
    temporaries: int
    host_weights: int
    host_cache: int

    @property
    def total(self) -> int:
        """On devices."""
        return self.weights + self.cache + self.temporaries

    def log_line(self) -> str:
        """In llama.cpp's words; megabytes are of 2^20 bytes, rounded up."""

        def mb(size: int) -> str:
            return f"{-(-size // _MEGABYTE)} MB"

        parts = f"weights {mb(self.weights)}, cache {mb(self.cache)}, temporaries {mb(self.temporaries)}"
        line = f"total VRAM used: {mb(self.total)} ({parts})"
        if self.host_weights or self.host_cache:
            line += f"; in host memory: weights {mb(self.host_weights)}, cache {mb(self.host_cache)}"
        return line


def memory_report(params: Params, cache: KVCache, temporaries: int = 0) -> MemoryReport:
    """Where the arrays of a model and its cache are.

    Args:
      temporaries: bytes on each device, as `temporary_bytes` gives them.
    """
    weights, host_weights = _bytes_by_memory(params)
    buffers, host_buffers = _bytes_by_memory(cache)
    n_devices = max(len(cache.lengths.sharding.addressable_devices), len(cache.stages))
    return MemoryReport(weights, buffers, temporaries * n_devices, host_weights, host_buffers)


def temporary_bytes(program: Any, *arguments: Any) -> int:
    """Bytes on each device that a jitted function needs besides its arguments and results.

    What is compiled for this is kept: calling the function with the same arguments afterwards compiles nothing.
    """
    return program.lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def _bytes_by_memory(tree: Any) -> tuple[int, int]:
    """Bytes on devices and in host memory, of the parts that this process holds."""
    sums = {True: 0, False: 0}
    for array in jax.tree.leaves(tree):
        host = array.sharding.memory_kind in ("pinned_host", "unpinned_host")
        sums[host] += sum(shard.data.nbytes for shard in array.addressable_shards)
    return sums[False], sums[True]
