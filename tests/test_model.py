"""The forward pass against float64 numpy, and what a cache and padding must not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import llama_jax
from llama_jax import PRESETS, ArgumentError, advance, append, init_cache, init_params, parameter_specs
from llama_jax.linear import join, linears
from llama_jax.model import ParameterSpec, join_projections
from tests.reference import llama_numpy
from tests.tiny import tiny_config, tiny_params

forward = jax.jit(llama_jax.forward, static_argnames="config")

TOKENS = np.random.default_rng(1).integers(0, 101, (3, 11)).astype(np.int32)

CONFIGS = {
    "grouped heads": tiny_config(),
    "one head each": tiny_config(n_kv_heads=4),
    "one shared head": tiny_config(n_kv_heads=1, head_dim=10),
    "tied": tiny_config(tied_embeddings=True),
    "sliding window": tiny_config(sliding_window=4),
    "other constants": tiny_config(norm_epsilon=1e-2, rope_theta=100.0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_float64(name):
    config = CONFIGS[name]
    params = tiny_params(config)
    logits, cache = forward(params, jnp.asarray(TOKENS), config)
    assert cache is None
    assert logits.dtype == jnp.float32
    expected = np.stack([llama_numpy.logits(params, row.tolist(), config) for row in TOKENS])
    np.testing.assert_allclose(logits, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["grouped heads", "sliding window"])
@pytest.mark.parametrize("chunk", [1, 3, 11])
def test_chunks_through_the_cache_equal_one_pass(name, chunk):
    config = CONFIGS[name]
    params = tiny_params(config)
    whole, _ = forward(params, jnp.asarray(TOKENS), config)
    cache = init_cache(config, 3, 16, jnp.float32)
    for start in range(0, 11, chunk):
        part = jnp.asarray(TOKENS[:, start : start + chunk])
        logits, cache = forward(params, part, config, cache)
        np.testing.assert_allclose(logits, whole[:, start : start + chunk], atol=2e-5, rtol=1e-4)
    assert cache.lengths.tolist() == [11, 11, 11]


def test_padding_takes_no_position_and_is_never_attended():
    config = tiny_config()
    params = tiny_params(config)
    counts = np.array([11, 4, 7], np.int32)
    for junk in (0, 55):
        padded = np.where(np.arange(11) < counts[:, None], TOKENS, junk)
        cache = init_cache(config, 3, 16, jnp.float32)
        _, cache = forward(params, jnp.asarray(padded), config, cache, jnp.asarray(counts))
        assert cache.lengths.tolist() == counts.tolist()
        more = jnp.asarray([[1, 2], [3, 4], [5, 6]], jnp.int32)
        logits, _ = forward(params, more, config, cache)
        for row, count in enumerate(counts):
            alone = [*TOKENS[row, :count].tolist(), *more[row].tolist()]
            expected = llama_numpy.logits(params, alone, config)[-2:]
            np.testing.assert_allclose(logits[row], expected, atol=2e-5, rtol=1e-4)


def test_a_row_without_tokens_leaves_no_trace():
    config = tiny_config()
    params = tiny_params(config)
    _, cache = forward(params, jnp.asarray(TOKENS), config, init_cache(config, 3, 16, jnp.float32))
    counts = jnp.array([0, 2, 0], jnp.int32)
    _, after = forward(params, jnp.asarray(TOKENS[:, :2]), config, cache, counts)
    assert after.lengths.tolist() == [11, 13, 11]
    for before, now in zip((*cache.k, *cache.v), (*after.k, *after.v), strict=True):
        np.testing.assert_array_equal(before[0], now[0])
        np.testing.assert_array_equal(before[2], now[2])
        assert (before[1] != now[1]).any()


def test_nothing_is_written_past_the_end():
    config = tiny_config()
    cache = init_cache(config, 2, 4, jnp.float32)
    cache = advance(cache, jnp.array([3, 0], jnp.int32))
    new = jnp.ones((2, 3, 2, 12), jnp.float32)
    cache = append(cache, 1, new, 2 * new, jnp.array([3, 3], jnp.int32))
    # row 0 had room for one token only: its slots 0 to 2 stay as they were
    assert cache.k[1][0, 0, :, 0].tolist() == [0, 0, 0, 1]
    assert cache.v[1][1, 1, :, 5].tolist() == [2, 2, 2, 0]
    assert not cache.k[0].any()
    assert advance(cache, jnp.array([3, 3], jnp.int32)).lengths.tolist() == [4, 3]


def test_tokens_that_cannot_fit_are_refused():
    config = tiny_config()
    cache = init_cache(config, 3, 4, jnp.float32)
    with pytest.raises(ArgumentError, match="11 tokens a row were given for a cache that holds 4"):
        forward(tiny_params(config), jnp.asarray(TOKENS), config, cache)
    with pytest.raises(ArgumentError, match=r"tokens has shape \(11,\)"):
        forward(tiny_params(config), jnp.asarray(TOKENS[0]), config)


def test_bfloat16_is_near_float32():
    config = tiny_config()
    params = tiny_params(config)
    exact, _ = forward(params, jnp.asarray(TOKENS), config)
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16) if w.ndim == 2 else w, params)
    logits, _ = forward(half, jnp.asarray(TOKENS), config)
    assert logits.dtype == jnp.float32
    error = jnp.linalg.norm(logits - exact) / jnp.linalg.norm(exact)
    assert 1e-4 < error < 3e-2  # eight bits of mantissa, through two layers


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3-8b", "smollm2-135m"])
def test_the_declaration_has_every_parameter_once(name):
    config = PRESETS[name]
    leaves = jax.tree.leaves(parameter_specs(config), is_leaf=lambda s: isinstance(s, ParameterSpec))
    assert sum(int(np.prod(spec.shape)) for spec in leaves) == config.n_parameters


def test_initial_weights():
    config = tiny_config(d_model=64, d_ff=256)
    params = init_params(jax.random.key(0), config, jnp.bfloat16)
    assert params.layers[0].w_gate.dtype == jnp.bfloat16
    assert params.output_norm.dtype == jnp.float32
    assert (params.layers[1].ffn_norm == 1).all()
    assert float(jnp.std(params.layers[0].w_gate.astype(jnp.float32))) == pytest.approx(0.02, rel=0.03)
    assert float(jnp.std(params.layers[0].w_down.astype(jnp.float32))) == pytest.approx(0.01, rel=0.03)
    assert (params.layers[0].wq != params.layers[1].wq).any()
    spec_shapes = jax.tree.map(
        lambda s: s.shape, parameter_specs(config), is_leaf=lambda s: isinstance(s, ParameterSpec)
    )
    assert jax.tree.map(lambda w: w.shape, params) == spec_shapes


@pytest.mark.parametrize("rows", [1, 3])
def test_joined_projections_give_the_same_logits(rows):
    config = tiny_config()
    params = init_params(jax.random.key(0), config)
    tokens = jnp.arange(rows, dtype=jnp.int32)[None]
    expected, _ = forward(params, tokens, config)
    joined = join_projections(params)
    assert params.layers[0].wq.is_deleted()  # the memory is not held twice
    assert len(jax.tree.leaves(joined)) < len(jax.tree.leaves(params))
    np.testing.assert_allclose(forward(joined, tokens, config)[0], expected, atol=1e-6)


def test_only_weights_of_the_same_kind_are_joined():
    wide, narrow = jnp.ones((4, 8)), jnp.ones((2, 8), jnp.bfloat16)
    first, second, third = join(wide, jnp.ones((3, 8)), narrow)
    assert first.outs == (4, 3)
    assert second is None
    assert third is narrow
    away = jax.device_put(jnp.ones((4, 8)), jax.memory.Space.Host)
    assert all(joined is away for joined in join(away, away))  # what lives in host memory is not brought together
    products = linears(jnp.ones((1, 8)), first, second)
    assert [product.shape for product in products] == [(1, 4), (1, 3)]
