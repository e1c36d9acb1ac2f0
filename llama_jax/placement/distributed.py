"""Several hosts that run one model together: each starts the same command, and jax connects them."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from llama_jax import checks
from llama_jax.errors import ArgumentError

AUTO = "auto"


def start_hosts(coordinator: str | None = None, num_hosts: int | None = None, host_id: int | None = None) -> None:
    """Joins the other hosts; to be called once, before anything else touches a device. Without arguments: one host.

    Afterwards `jax.devices()` are those of all hosts. Every host has to make the same calls with the same arguments.

    Args:
      coordinator: "address:port" of host 0, which every host can reach; or "auto", where SLURM, Open MPI or Kubernetes
        has started the processes and tells the rest.
      num_hosts: how many there are.
      host_id: this host's number, from 0.

    Raises:
      ArgumentError: the arguments are incomplete or wrong, or the hosts do not find each other.
    """
    if jax.distributed.is_initialized() or (coordinator, num_hosts, host_id) == (None, None, None):
        return
    options: dict[str, Any] = {}
    if coordinator != AUTO:
        options = _checked(coordinator, num_hosts, host_id)
    elif num_hosts is not None or host_id is not None:
        raise ArgumentError("The coordinator is 'auto', which finds out the number of hosts; do not give it as well.")
    try:
        jax.distributed.initialize(**options)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ArgumentError(f"The hosts cannot be joined with the coordinator {coordinator!r}: {reason}.") from None


def _checked(coordinator: str | None, num_hosts: int | None, host_id: int | None) -> dict[str, Any]:
    if coordinator is None or num_hosts is None or host_id is None:
        raise ArgumentError(
            "Several hosts need all of --coordinator, --num-hosts and --host-id, or --coordinator auto alone."
        )
    if not re.fullmatch(r"[^\s:]+:\d+|\[[0-9a-fA-F:]+\]:\d+", coordinator):
        raise ArgumentError(f"The coordinator is {coordinator!r}; it must be like address:port, or 'auto'.")
    num_hosts = checks.integer("num_hosts", num_hosts, 1)
    allowed = f"a number from 0 to {num_hosts - 1}"
    host_id = checks.integer("host_id", host_id, 0, num_hosts - 1, allowed=allowed)
    return dict(coordinator_address=coordinator, num_processes=num_hosts, process_id=host_id)


def shared_seed() -> int:
    """A random number that all hosts have in common."""
    number = np.random.default_rng().integers(2**31, dtype=np.int32)
    return int(multihost_utils.broadcast_one_to_all(number) if jax.process_count() > 1 else number)
