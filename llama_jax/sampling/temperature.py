"""Temperature, fixed or by entropy."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from llama_jax.sampling.truncation import entropy, remaining

_LEAST = 1e-6  # a dynamic temperature of 0 leaves the best token alone


def temper(logits: Array, temperature: Array) -> Array:
    """`logits` [B, C] over `temperature` [B]; rows of temperature 0 stay as they are."""
    divisor = jnp.clip(temperature, 1e-30, 1e30)[:, None]  # bounds that change no choice and suit float32
    return jnp.where(temperature[:, None] > 0, logits / divisor, logits)


def dynamic_temperature(logits: Array, temperature: Array, half_range: Array, exponent: Array) -> Array:
    """The temperature [B] that the entropy of `logits` [B, C] asks for.

    From `temperature - half_range` (not below 0) for a certain choice to `temperature + half_range` for equal chances:
    low + (high - low) * (entropy / largest entropy)**exponent, as in llama.cpp. Rows with one token, with a half range
    of 0 or with temperature 0 keep their temperature.
    """
    n = remaining(logits)
    low, high = jnp.maximum(temperature - half_range, 0.0), temperature + half_range
    # Rounding may take the entropy of a certain choice below 0.
    share = jnp.clip(entropy(logits) / jnp.log(jnp.maximum(n, 2).astype(jnp.float32)), 0.0, 1.0)
    dynamic = jnp.maximum(low + (high - low) * share**exponent, _LEAST)
    return jnp.where((n > 1) & (half_range > 0) & (temperature > 0), dynamic, temperature)
