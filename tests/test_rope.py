"""Frequencies against the published definitions, written out pair by pair in float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax import RopeScaling
from llama_jax.rope import apply_rope, rope_frequencies, rope_rotations
from tests.tiny import tiny_config


def plain(config) -> list[float]:
    return [config.rope_theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)]


def test_unscaled_and_linear():
    config = tiny_config(head_dim=128, rope_theta=500000.0)
    np.testing.assert_allclose(rope_frequencies(config)[0], plain(config), rtol=1e-6)
    scaled = tiny_config(head_dim=128, rope_theta=500000.0, rope_scaling=RopeScaling(kind="linear", factor=4.0))
    np.testing.assert_allclose(rope_frequencies(scaled)[0], np.array(plain(config)) / 4, rtol=1e-6)


def test_divisors():
    divisors = tuple(float(i + 1) for i in range(6))
    frequencies, _ = rope_frequencies(tiny_config(rope_divisors=divisors))
    np.testing.assert_allclose(frequencies, np.array(plain(tiny_config())) / divisors, rtol=1e-6)


def test_llama3():
    scaling = RopeScaling(kind="llama3", factor=8.0, original_context_length=8192)
    config = tiny_config(head_dim=128, rope_theta=500000.0, rope_scaling=scaling)
    expected = []
    for frequency in plain(config):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected.append(frequency)
        elif wavelength > 8192 / 1:
            expected.append(frequency / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    assert len({round(e / f, 3) for e, f in zip(expected, plain(config), strict=True)}) > 3  # all three branches
    frequencies, factor = rope_frequencies(config)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    assert factor == 1.0


@pytest.mark.parametrize(("attention_factor", "expected_factor"), [(None, 0.1 * math.log(16) + 1), (1.25, 1.25)])
def test_yarn(attention_factor, expected_factor):
    scaling = RopeScaling(kind="yarn", factor=16.0, original_context_length=4096, attention_factor=attention_factor)
    config = tiny_config(head_dim=128, rope_scaling=scaling)
    low = math.floor(128 * math.log(4096 / (32 * 2 * math.pi)) / (2 * math.log(10000)))
    high = math.ceil(128 * math.log(4096 / (1 * 2 * math.pi)) / (2 * math.log(10000)))
    expected = []
    for i, frequency in enumerate(plain(config)):
        ramp = min(max((i - low) / (high - low), 0), 1)
        expected.append(frequency / 16 * ramp + frequency * (1 - ramp))
    frequencies, factor = rope_frequencies(config)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    assert factor == pytest.approx(expected_factor)


def test_pairs_turn_by_position_times_frequency():
    config = tiny_config()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 4, 12)).astype(np.float32)
    positions = np.array([[0, 1, 2], [60, 61, 9000]], np.int32)
    turned = apply_rope(jnp.asarray(x), rope_rotations(jnp.asarray(positions), config))
    angles = positions[..., None] * np.array(plain(config))
    expected = (x[..., :6] + 1j * x[..., 6:]) * np.exp(1j * angles)[:, :, None]
    np.testing.assert_allclose(turned, np.concatenate([expected.real, expected.imag], -1), atol=2e-3)
    np.testing.assert_allclose(turned[0], np.concatenate([expected.real, expected.imag], -1)[0], atol=1e-6)


def test_bfloat16_heads_are_turned_in_float32():
    config = tiny_config()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 1, 12)), jnp.bfloat16)
    rotations = rope_rotations(jnp.array([[50001]], jnp.int32), config)
    exact = apply_rope(x.astype(jnp.float32), rotations)
    np.testing.assert_array_equal(apply_rope(x, rotations), exact.astype(jnp.bfloat16))
