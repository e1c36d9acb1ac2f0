"""Packing changes no value, and takes as little memory as its table says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llama_jax
from llama_jax import sampling_params
from llama_jax.errors import ArgumentError, FormatError
from llama_jax.formats.load import load_params, loaded_bytes, open_model
from llama_jax.linear import embed, linear
from llama_jax.model import by_path
from llama_jax.quantization import BLOCK_TYPES, PACKED_TYPES, dequantize, dequantize_packed, pack, row_bytes, take_rows
from llama_jax.quantization.packed import packed_nbytes
from llama_jax.roofline import decode_bytes
from tests.quantization.blocks import random_rows

# Bits a value in memory over bits in the file: the table of llama_jax/quantization/packed.py.
RATIOS = dict.fromkeys(PACKED_TYPES, 1.0) | {"Q3_K": 3.5625 / 3.4375, "Q4_K": 4.625 / 4.5, "Q5_K": 5.625 / 5.5}


def assert_same_bits(actual, expected):
    np.testing.assert_array_equal(np.asarray(actual).view(np.uint32), expected.view(np.uint32))


def test_every_quantized_type_is_packed():
    assert list(PACKED_TYPES) == [name for name, t in BLOCK_TYPES.items() if t.decode is not None]


@pytest.mark.parametrize("name", PACKED_TYPES)
def test_unpacking_gives_the_bits_of_the_host_decoder(name):
    shape = (67, 1024)
    rows = random_rows(name, *shape)
    weight = pack(rows, name, shape)
    assert weight.shape == shape
    values = jax.jit(dequantize_packed)(weight)
    assert values.dtype == jnp.float32
    assert_same_bits(values, dequantize(rows, name, shape))
    assert weight.nbytes == packed_nbytes(name, shape) == sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
    assert weight.nbytes / rows.size == pytest.approx(RATIOS[name])


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(list(PACKED_TYPES)), st.integers(1, 70), st.integers(1, 5), st.integers(0, 2**32))
def test_any_shape_keeps_its_values(name, out, blocks, seed):
    shape = (out, blocks * BLOCK_TYPES[name].block_size)
    rows = random_rows(name, *shape, seed)
    with jax.disable_jit():
        assert_same_bits(dequantize_packed(pack(rows, name, shape)), dequantize(rows, name, shape))


@pytest.mark.parametrize("name", ["Q4_0", "Q2_K", "Q6_K"])
def test_rows_of_an_embedding(name):
    shape = (40, 512)
    rows = random_rows(name, *shape)
    weight = jax.device_put(pack(rows, name, shape, jnp.bfloat16))
    tokens = jnp.asarray([[3, 39, 0], [3, 1, 7]], jnp.int32)
    taken = jax.jit(take_rows)(weight, tokens)
    expected = dequantize(rows, name, shape).astype(jnp.bfloat16)[np.asarray(tokens)]
    assert taken.shape == (2, 3, 512)
    np.testing.assert_array_equal(np.asarray(taken), expected)
    np.testing.assert_array_equal(embed(tokens, weight), taken)


def test_linear_takes_a_packed_weight():
    rows = random_rows("Q5_1", 48, 64)
    weight = pack(rows, "Q5_1", (48, 64))
    x = jax.random.normal(jax.random.key(0), (2, 3, 64))
    dense = linear(x, jnp.asarray(dequantize(rows, "Q5_1", (48, 64))))
    np.testing.assert_allclose(linear(x, weight), dense, rtol=1e-5, atol=1e-4)
    assert linear(x.astype(jnp.bfloat16), weight).dtype == jnp.bfloat16
    assert linear(x.astype(jnp.bfloat16), weight, dtype=jnp.float32).dtype == jnp.float32


def test_wrong_sizes_and_types_are_refused():
    with pytest.raises(FormatError, match="needs 36 bytes; there are 18"):
        pack(np.zeros(18, np.uint8), "Q4_0", (2, 32))
    with pytest.raises(ArgumentError, match=r"'F16'.*Q4_0"):
        pack(np.zeros(64, np.uint8), "F16", (1, 32))


def mixture(types: dict[str, list[tuple[int, int]]]) -> tuple[int, int]:
    """Bytes packed and bytes in the file of matrices by type."""
    in_memory = sum(packed_nbytes(name, shape) for name, shapes in types.items() for shape in shapes)
    in_file = sum(shape[0] * row_bytes(name, shape[1]) for name, shapes in types.items() for shape in shapes)
    return in_memory, in_file


def test_an_8b_model_takes_hardly_more_than_its_file():
    # Llama-3-8B in Q4_K_M: the head, and half of wv and w_down, are Q6_K.
    attention = [(4096, 4096)] * 2 + [(1024, 4096)]
    layer = [*attention, (14336, 4096), (14336, 4096)]
    heavy = [(1024, 4096), (4096, 14336)]
    types = {"Q4_K": [(128256, 4096)] + layer * 32 + heavy * 16, "Q6_K": [(128256, 4096)] + heavy * 16}
    in_memory, in_file = mixture(types)
    assert in_file == pytest.approx(4.9e9, rel=0.02)
    assert in_memory <= 1.05 * in_file
    assert in_memory / in_file == pytest.approx(1.02, abs=2e-3)  # as the module's text says


def greedy(model, prompt, steps):
    session = model.new_session()
    new = session.generate([model.tokenize_prompt(prompt)], sampling_params(temperature=0.0), max_tokens=steps)
    return [token for (tokens,) in new for token in tokens]


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    """Packed, and unpacked on the host."""
    with open_model(smollm2_path) as file:
        in_file = sum(info.nbytes for info in file.tensors.values())
        total = loaded_bytes(file, "float32", packed=True)
        tokenizer, config = file.tokenizer(), file.config
        dense = load_params(file, np.float32, lambda path, array: jnp.asarray(array))
    told = []
    packed = llama_jax.load(
        smollm2_path, dtype="float32", n_ctx=64, packed=True, progress=lambda *now: told.append(now)
    )
    in_memory = sum(leaf.nbytes for leaf in jax.tree.leaves(packed.params))
    assert in_memory <= 1.001 * in_file  # every type of this file keeps its size
    assert told[-1] == (total, total) == (in_memory, in_memory)
    assert packed.params.embedding.dtype == np.float32
    assert decode_bytes(packed.params, config, 0, 4) == in_memory  # the embedding is the head, too
    return packed, llama_jax.Llama(config, dense, tokenizer, n_ctx=64)


def test_smollm2_packed_has_the_same_logits(smollm2):
    packed, dense = smollm2
    ids = packed.tokenize_prompt("The capital of France is Paris. The capital of Italy is")
    logits, expected = (
        np.asarray(jax.jit(llama_jax.forward, static_argnums=2)(m.params, jnp.asarray([ids], jnp.int32), m.config)[0])
        for m in (packed, dense)
    )
    np.testing.assert_allclose(logits, expected, atol=2e-3)
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.slow
def test_smollm2_packed_says_the_same(smollm2):
    packed, dense = smollm2
    assert greedy(packed, "The capital of France is", 16) == greedy(dense, "The capital of France is", 16)


def test_an_embedding_beside_a_head_counts_by_rows():
    weight = pack(random_rows("Q4_0", 64, 64), "Q4_0", (64, 64))
    params = llama_jax.Params(embedding=weight, layers=(), output_norm=jnp.ones(64), output_head=weight)
    assert decode_bytes(params, llama_jax.PRESETS["llama-3-8b"], 0, 2) == weight.nbytes + 64 * 4
    assert "embedding.codes" in by_path(params)
