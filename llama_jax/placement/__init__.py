"""What lives where: the only package that names devices."""

from llama_jax.placement.devices import memory_report, memory_sizes, resolve, temporary_bytes
from llama_jax.placement.distributed import shared_seed, start_hosts
from llama_jax.placement.plan import Placement, Plan, Sizes
from llama_jax.placement.sharding import (
    Place,
    check_devices,
    default_dtype,
    device_mesh,
    param_shardings,
    place_beside,
    place_cache,
    place_params,
    plan_mesh,
    sharding_notes,
    tensor_mesh,
    with_vocabulary,
)

__all__ = [
    "Place",
    "Placement",
    "Plan",
    "Sizes",
    "check_devices",
    "default_dtype",
    "device_mesh",
    "memory_report",
    "memory_sizes",
    "param_shardings",
    "place_beside",
    "place_cache",
    "place_params",
    "plan_mesh",
    "resolve",
    "sharding_notes",
    "shared_seed",
    "start_hosts",
    "temporary_bytes",
    "tensor_mesh",
    "with_vocabulary",
]
