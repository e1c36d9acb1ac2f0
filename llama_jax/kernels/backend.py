"""Which kernels serve this process: decided once, logged in one line."""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from typing import Literal

import jax

from llama_jax.errors import ArgumentError

Backend = Literal["triton", "xla"]

VARIABLE = "LLAMA_JAX_KERNELS"
CHOICES = ("auto", "triton", "xla")
_TRITON_CAPABILITY = 8.0  # Ampere, the first with bfloat16 matrix units

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernels:
    """What computes each of three things: "triton", Pallas kernels, or "xla", plain operations on any device.

    Attributes:
      decode_attention: attention of one new token per sequence.
      attention: attention of prompts.
      packed_products: products with packed weights.
    """

    decode_attention: Backend = "xla"
    attention: Backend = "xla"
    packed_products: Backend = "xla"


XLA = Kernels()
TRITON = Kernels("triton", "triton", "triton")


@functools.cache
def default_kernels() -> Kernels:
    """What serves the default device: Pallas kernels on an NVIDIA GPU, plain operations elsewhere.

    The environment variable LLAMA_JAX_KERNELS asks for "triton" or "xla" for everything; Triton kernels need compute
    capability 8.0 or later.

    Raises:
      ArgumentError: the name is unknown, or the device cannot run it.
    """
    device = jax.devices()[0]
    capability = float(getattr(device, "compute_capability", None) or 0) if device.platform == "gpu" else 0.0
    able = capability >= _TRITON_CAPABILITY
    asked = os.environ.get(VARIABLE, "auto")
    if asked not in CHOICES:
        raise ArgumentError(f"{VARIABLE} is {asked!r}; it must be one of {', '.join(CHOICES)}.")
    if asked == "triton" and not able:
        raise ArgumentError(
            f"{VARIABLE} asks for 'triton', which needs an NVIDIA GPU of compute capability {_TRITON_CAPABILITY} or "
            f"later; this is {device.device_kind}. Use auto or xla."
        )
    chosen = {"xla": XLA, "triton": TRITON, "auto": TRITON if able else XLA}[asked]
    reason = f"{VARIABLE}={asked}" if asked != "auto" else f"{device.device_kind}, compute capability {capability}"
    logger.info(
        "decode attention: %s; prompt attention: %s; products with packed weights: %s (%s)",
        chosen.decode_attention, chosen.attention, chosen.packed_products,
        reason if able or asked != "auto" else f"{device.device_kind}, where no Pallas kernels run",
    )  # fmt: skip
    return chosen
