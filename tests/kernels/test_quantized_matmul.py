"""Products with packed weights against float64 numpy: the kernels in interpret mode, and on a GPU with -m gpu."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_jax.kernels.quantized_matmul import (
    Blocks,
    quantized_matmul,
    reference,
    tile_product,
    vector_product,
)
from llama_jax.placement import place_params, tensor_mesh
from llama_jax.placement.sharding import part_shardings
from llama_jax.quantization import BLOCK_TYPES, PACKED_TYPES, dequantize, pack
from tests.quantization.blocks import random_rows
from tests.tiny import tiny_config

FLOAT32 = 1e-6  # of the sum of absolute products: rounding of a float32 sum
BFLOAT16 = 2.0**-8  # the same with weights rounded to bfloat16


def case(name, out, columns, rows, dtype=jnp.float32, seed=0):
    """A packed weight, activations, their product in float64, and the sum of absolute products."""
    raw = random_rows(name, out, columns, seed)
    weight = jax.device_put(pack(raw, name, (out, columns), dtype))
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(rows, columns)), dtype)
    values = dequantize(raw, name, (out, columns)).astype(np.float64)
    wide = np.asarray(x.astype(jnp.float32)).astype(np.float64)
    return x, weight, wide @ values.T, np.abs(wide) @ np.abs(values.T)


def assert_close(actual, expected, size, tolerance):
    assert actual.shape == expected.shape
    worst = np.max(np.abs(np.asarray(actual.astype(jnp.float32)) - expected) / size)
    assert worst <= tolerance


@pytest.mark.parametrize("name", PACKED_TYPES)
def test_vector_kernel(name):
    x, weight, expected, size = case(name, 9, 768, 1)  # neither rows nor groups fill their blocks
    actual = jax.jit(functools.partial(vector_product, interpret=True))(x, weight)
    assert_close(actual, expected, size, FLOAT32)


@pytest.mark.parametrize("name", ["Q6_K", "Q2_K"])  # what it unpacks with is the vector kernel's, too
def test_tile_kernel(name):
    x, weight, expected, size = case(name, 70, 768, 5, jnp.bfloat16)
    actual = jax.jit(functools.partial(tile_product, interpret=True))(x, weight)
    assert_close(actual, expected, size, BFLOAT16)
    assert_close(actual, np.asarray(reference(x, weight, jnp.float32)), size, 1e-5)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (0, "float32"),
        (2, "float32"),
        pytest.param(16, "float32", marks=pytest.mark.slow),
        (33, "bfloat16"),
        (512, "float32"),
        (3, "float16"),
    ],
)
def test_any_number_of_rows(rows, dtype):
    x, weight, expected, size = case("Q2_K", 33, 256, rows, jnp.dtype(dtype))
    actual = quantized_matmul(x[:, None], weight, jnp.float32, backend="triton", interpret=True)
    assert actual.shape == (rows, 1, 33)
    if rows:
        assert_close(actual[:, 0], expected, size, FLOAT32 if dtype != "bfloat16" else BFLOAT16)
    dense = quantized_matmul(x, weight, backend="xla")
    assert dense.dtype == jnp.dtype(dtype)


@settings(max_examples=4, deadline=None)
@given(
    st.sampled_from(["Q2_K", "Q3_K", "Q4_0"]),
    st.integers(1, 20),
    st.integers(1, 6),
    st.integers(1, 2),
    st.sampled_from([Blocks(1, 8, 1), Blocks(8, 2, 1), Blocks(2, 64, 2)]),
    st.integers(0, 2**32),
)
def test_any_shape_and_blocks(name, out, n_blocks, rows, blocks, seed):
    x, weight, expected, size = case(name, out, n_blocks * BLOCK_TYPES[name].block_size, rows, seed=seed)
    assert_close(vector_product(x, weight, blocks, interpret=True), expected, size, FLOAT32)


@pytest.mark.parametrize("rows", [1, 5])
def test_the_gradient_is_that_of_the_unpacked_product(rows):
    x, weight, *_ = case("Q4_0", 12, 64, rows)
    kernel = functools.partial(quantized_matmul, backend="triton", interpret=True)
    got = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(kernel(x, weight)))))(x)
    expected = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(reference(x, weight)))))(x)
    np.testing.assert_allclose(got, expected, atol=1e-4 * float(jnp.abs(expected).max()))


def test_masked_integers_are_subnormal_numbers():
    # What the kernels rely on, on a GPU: an integer below 2^23 read as a float32 is the integer times 2^-149.
    integers = np.array([1, 15, 0xF0000, 2**23 - 1], np.int32)
    np.testing.assert_array_equal(integers.view(np.float32).astype(np.float64), integers * 2.0**-149)


@pytest.mark.parametrize(("path", "name"), [("layers.0.w_gate", "Q4_K"), ("layers.0.w_down", "Q4_0")])
@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_a_weight_divided_over_a_mesh(path, name, backend):
    config = tiny_config(d_model=256, d_ff=512, n_heads=8, n_kv_heads=4)
    out, columns = (512, 256) if path.endswith("gate") else (256, 512)
    x, weight, expected, size = case(name, out, columns, 2)
    mesh = tensor_mesh(4)
    placed = place_params(config, mesh)(path, jax.tree.map(np.asarray, weight))
    shard = placed.codes.addressable_shards[0].data.shape
    assert shard == ((128, 4, 8) if path.endswith("gate") else (256, 4, 4))
    multiply = jax.jit(functools.partial(quantized_matmul, backend=backend, interpret=True))
    assert_close(multiply(x, placed), expected, size, FLOAT32)


def test_an_axis_that_would_cut_blocks_is_kept_whole():
    config = tiny_config(d_model=256, d_ff=512)
    raw = random_rows("Q4_K", 256, 512)
    placed = place_params(config, tensor_mesh(4))("layers.0.w_down", pack(raw, "Q4_K", (256, 512)))
    assert placed.codes.sharding.is_fully_replicated  # two blocks of 256 do not divide among four
    assert part_shardings(placed).codes == placed.codes.sharding


@pytest.mark.gpu
@pytest.mark.parametrize("name", PACKED_TYPES)
@pytest.mark.parametrize(("out", "columns"), [(4096, 4096), (32001, 768), (576, 1536), (1000, 14336)])
@pytest.mark.parametrize(("rows", "dtype"), [(1, "float32"), (16, "float32"), (1, "bfloat16"), (4, "bfloat16"),
                                             (16, "bfloat16"), (64, "bfloat16"), (512, "bfloat16")])  # fmt: skip
def test_kernels_on_the_gpu(name, out, columns, rows, dtype):
    x, weight, expected, size = case(name, out, columns, rows, jnp.dtype(dtype))
    actual = jax.jit(functools.partial(quantized_matmul, dtype=jnp.float32, backend="triton"))(x, weight)
    exact = dtype == "float32" or rows <= 4
    assert_close(actual, expected, size, FLOAT32 if exact else BFLOAT16)
