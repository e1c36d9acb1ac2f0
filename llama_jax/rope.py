"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its scaled forms.

Pairs are half-split, as in Hugging Face's files: element i of a head turns together with element i + E/2.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from llama_jax.config import LlamaConfig, RopeScaling


def rope_frequencies(config: LlamaConfig) -> tuple[np.ndarray, float]:
    """Angles per token and the factor that scales rotated vectors.

    In float32 throughout, rounded like the PyTorch code that models are trained with: at position 10,000 the last bit
    of a frequency moves an angle by more than a thousandth.

    Returns:
      frequencies: float32 [E/2], radians by which each pair turns from one position to the next.
      attention_factor: multiplies rotated queries and keys; 1 but for yarn.
    """
    E = config.head_dim
    exponents = (np.arange(0, E, 2) / np.float32(E)).astype(np.float32)
    frequencies = np.float32(1) / (config.rope_theta ** exponents.astype(np.float64)).astype(np.float32)
    attention_factor = 1.0
    scaling = config.rope_scaling
    if config.rope_divisors is not None:
        frequencies = frequencies / np.asarray(config.rope_divisors, np.float32)
    elif scaling.kind == "linear":
        frequencies = frequencies / np.float32(scaling.factor)
    elif scaling.kind == "llama3":
        frequencies = _blend(frequencies, scaling.factor, _llama3_share_kept(frequencies, scaling))
    elif scaling.kind == "yarn":
        frequencies = _blend(frequencies, scaling.factor, _yarn_share_kept(config))
        attention_factor = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0
    return frequencies, attention_factor


def _blend(frequencies: np.ndarray, factor: float, share_kept: np.ndarray) -> np.ndarray:
    share_kept = share_kept.astype(np.float32)
    return (1 - share_kept) * frequencies / np.float32(factor) + share_kept * frequencies


def _llama3_share_kept(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """1 for pairs that turn often within the original context, 0 for slow ones, linear in between."""
    wavelengths = np.float32(2 * math.pi) / frequencies
    turns = np.float32(scaling.original_context_length) / wavelengths
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    share = (turns - low) / (high - low)
    return np.clip(share, 0.0, 1.0)


def _yarn_share_kept(config: LlamaConfig) -> np.ndarray:
    """1 for pairs that turn `beta_fast` times over the original context, 0 for `beta_slow`, linear in the index."""
    scaling, E = config.rope_scaling, config.head_dim

    def pair_with_turns(turns: float) -> float:
        wavelength = scaling.original_context_length / turns
        return E * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.rope_theta))

    first = max(math.floor(pair_with_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_with_turns(scaling.beta_slow)), E - 1)
    width = max(last - first, 1e-3)
    return 1.0 - np.clip((np.arange(E // 2) - first) / width, 0.0, 1.0)


def rope_rotations(positions: Array, config: LlamaConfig) -> tuple[Array, Array]:
    """Cosines and sines for `positions` [B, T] int32, each float32 [B, T, E/2]."""
    frequencies, attention_factor = rope_frequencies(config)
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies)
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def rotate_back(x: Array, distance: Array, config: LlamaConfig) -> Array:
    """Turns heads `x` [B, N, S, E] that stand at some positions to those `distance` [B] int32 earlier.

    Turning changes no length: a yarn factor that `x` already has stays as it is.
    """
    angles = -distance.astype(jnp.float32)[:, None, None] * jnp.asarray(rope_frequencies(config)[0])
    return apply_rope(x, (jnp.cos(angles), jnp.sin(angles)))


def apply_rope(x: Array, rotations: tuple[Array, Array]) -> Array:
    """Turns the heads `x` [B, T, N, E] by `rotations`; computed in float32, returned in x's dtype."""
    cos, sin = (r[:, :, None, :] for r in rotations)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)
