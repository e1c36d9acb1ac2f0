"""Which kernels serve this process: decided once, logged in one line."""

from __future__ import annotations

import functools
import logging
import os
from typing import Literal, cast, get_args

import jax

from llama_jax.errors import ArgumentError

Backend = Literal["triton", "xla"]

VARIABLE = "LLAMA_JAX_KERNELS"
_TRITON_CAPABILITY = 8.0  # Ampere, the first with bfloat16 matrix units

logger = logging.getLogger(__name__)


@functools.cache
def kernel_backend() -> Backend:
    """ "triton" (Pallas kernels) on an NVIDIA GPU of compute capability 8.0 or later, else "xla" (plain operations).

    The environment variable LLAMA_JAX_KERNELS asks for one of them by name.

    Raises:
      ArgumentError: the name is unknown, or the device cannot run it.
    """
    device = jax.devices()[0]
    capability = float(getattr(device, "compute_capability", None) or 0) if device.platform == "gpu" else 0.0
    able = capability >= _TRITON_CAPABILITY
    asked = os.environ.get(VARIABLE, "auto")
    if asked not in ("auto", *get_args(Backend)):
        raise ArgumentError(f"{VARIABLE} is {asked!r}; it must be one of auto, {', '.join(get_args(Backend))}.")
    if asked == "triton" and not able:
        raise ArgumentError(
            f"{VARIABLE} asks for 'triton', which needs an NVIDIA GPU of compute capability {_TRITON_CAPABILITY} or "
            f"later; this is {device.device_kind}. Use auto or xla."
        )
    chosen = cast(Backend, asked if asked != "auto" else "triton" if able else "xla")
    reason = f"{VARIABLE}={asked}" if asked != "auto" else f"{device.platform} of compute capability {capability}"
    reason = reason if able or asked != "auto" else f"no Pallas kernels for {device.device_kind}"
    logger.info("attention and products with packed weights: %s (%s); other products: xla", chosen, reason)
    return chosen
