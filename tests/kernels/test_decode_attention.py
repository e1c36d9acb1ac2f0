"""The kernel against its reference: in interpret mode here, compiled with -m gpu."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_jax import append_and_attend, init_cache
from llama_jax.kernels.decode_attention import decode_attention, decode_attention_reference, split_count
from llama_jax.quantization.heads import QuantizedHeads, quantize_heads
from llama_jax.rope import apply_rope
from tests.kernels.lowering import lower_for_h200
from tests.tiny import tiny_config

ON_GPU = jax.default_backend() == "gpu"


def inputs(seed: int, B: int, H: int, K: int, S: int, E: int, dtype=jnp.float32, quantized=()):
    """Queries, new keys and values, caches (those of the places in `quantized` as bytes), lengths."""
    rng = np.random.default_rng(seed)

    def random(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    lengths = jnp.asarray(rng.integers(0, S, B), jnp.int32)
    arrays = [random(B, H, E), random(B, K, E), random(B, K, E), random(B, K, S, E), random(B, K, S, E), lengths]
    return [quantize_heads(array) if place in quantized else array for place, array in enumerate(arrays)]


def rotations_of(lengths: jax.Array, E: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, 1, E/2] of some angles that differ by row and pair."""
    angles = 0.37 * (lengths[:, None] * jnp.arange(1, E // 2 + 1)).astype(jnp.float32)[:, None]
    return jnp.cos(angles), jnp.sin(angles)


def check(arrays, counts, window, tolerance, **options):
    kernel = jax.jit(lambda *a: decode_attention(*a, window, interpret=not ON_GPU, **options))
    rotations = rotations_of(arrays[-1], arrays[0].shape[-1])
    k_new = arrays[1]
    out, k, v = kernel(*arrays, counts, rotations)
    exact = [a.astype(jnp.float32) if getattr(a, "dtype", jnp.int32) != jnp.int32 else a for a in arrays]
    expected, expected_k, expected_v = decode_attention_reference(*exact, counts, rotations, window)
    running = np.asarray(counts > 0)
    error = np.linalg.norm(np.asarray(out, np.float32)[running] - expected[running])
    assert error <= tolerance * np.linalg.norm(expected[running])
    if isinstance(v, QuantizedHeads):
        apart = np.abs(np.asarray(v.codes, np.int32) - np.asarray(expected_v.codes, np.int32)).max()
        assert apart <= (1 if ON_GPU else 0)  # a GPU divides with another rounding
        np.testing.assert_allclose(v.scales, expected_v.scales, rtol=1e-6)
    else:
        np.testing.assert_array_equal(np.asarray(v, np.float32), expected_v)
    if isinstance(k, QuantizedHeads):  # rotated by other instructions: a code more or less where it lies between two
        assert np.abs(np.asarray(k.codes, np.int32) - np.asarray(expected_k.codes, np.int32)).max() <= 1
        np.testing.assert_allclose(k.scales, expected_k.scales, rtol=2e-6 if k_new.dtype == jnp.float32 else 1e-2)
    else:
        rounding = 2e-6 if k.dtype == jnp.float32 else float(jnp.finfo(k.dtype).eps)
        np.testing.assert_allclose(np.asarray(k, np.float32), expected_k, rtol=rounding, atol=rounding)
        old = np.arange(k.shape[2]) != np.asarray(arrays[-1])[:, None]
        np.testing.assert_array_equal(
            np.moveaxis(np.asarray(k, np.float32), 2, 1)[old], np.moveaxis(np.asarray(expected_k), 2, 1)[old]
        )


problems = st.fixed_dictionaries(
    dict(
        seed=st.integers(0, 1000),
        B=st.integers(1, 3),
        heads=st.sampled_from([(1, 1), (4, 4), (8, 2), (9, 3), (4, 1), (20, 1)]),
        S=st.integers(1, 90),
        E=st.sampled_from([16, 64, 80, 96, 128]),
        window=st.one_of(st.none(), st.integers(1, 40)),
        n_splits=st.sampled_from([None, 1, 2, 8]),
        quantized=st.sampled_from([(), (3,), (4,), (3, 4)]),
    )
)


def check_problem(seed, B, heads, S, E, window, n_splits, quantized):
    arrays = inputs(seed, B, *heads, S, E, quantized=quantized)
    check(arrays, jnp.ones(B, jnp.int32), window, 1e-3 if quantized else 1e-5, n_splits=n_splits, block=16)


@settings(deadline=None, max_examples=15)
@given(problems)
def test_equals_the_reference(problem):
    check_problem(**problem)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(problems)
def test_fuzzed(problem):
    check_problem(**problem)


def test_heads_are_kept_within_half_a_scale():
    x = jax.random.normal(jax.random.key(0), (5, 3, 64)) * jnp.asarray([0.0, 1e-20, 1.0, 7.0, 1e20])[:, None, None]
    quantized = quantize_heads(x)
    assert quantized.codes.dtype == jnp.int8
    error = np.abs(np.asarray(quantized.values(jnp.float32), np.float64) - np.asarray(x, np.float64)).max(-1)
    np.testing.assert_array_less(error, 0.5001 * np.abs(np.asarray(x, np.float64)).max(-1) / 127 + 1e-38)
    np.testing.assert_array_equal(quantized.values(jnp.float32)[0], 0)


def test_a_row_that_is_done_or_full_writes_nothing():
    q, k_new, v_new, k, v, _ = inputs(0, 3, 4, 2, 32, 16)
    lengths, counts = jnp.asarray([5, 32, 7], jnp.int32), jnp.asarray([0, 1, 1], jnp.int32)
    rotations = rotations_of(lengths, 16)
    out, new_k, new_v = decode_attention(
        q, k_new, v_new, k, v, lengths, counts, rotations, block=16, interpret=not ON_GPU
    )
    np.testing.assert_array_equal(new_k[:2], k[:2])
    np.testing.assert_array_equal(new_v[:2], v[:2])
    turned = apply_rope(k_new[:, None], rotations)[:, 0]
    np.testing.assert_allclose(new_k[2, :, 7], turned[2], atol=1e-6)
    np.testing.assert_array_equal(new_v[2, :, 7], v_new[2])
    assert np.isfinite(out).all()


def test_slots_behind_the_filled_ones_are_never_read():
    q, k_new, v_new, k, v, lengths = inputs(1, 2, 4, 2, 48, 16)
    filled = jnp.arange(48)[None, None, :, None] < lengths[:, None, None, None]
    poisoned = [jnp.where(filled, a, jnp.nan) for a in (k, v)]
    counts, rotations = jnp.ones(2, jnp.int32), rotations_of(lengths, 16)
    out, *_ = decode_attention(q, k_new, v_new, *poisoned, lengths, counts, rotations, block=16, interpret=not ON_GPU)
    expected, *_ = decode_attention_reference(q, k_new, v_new, k, v, lengths, counts, rotations)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_the_reference_is_append_and_attend_of_one_token():
    config = tiny_config()
    q, k_new, v_new, k, v, lengths = inputs(2, 3, 4, 2, 20, 12)
    cache = init_cache(config, 3, 20, jnp.float32).replace(k=(k, k), v=(v, v), lengths=lengths)
    counts = jnp.asarray([1, 0, 1], jnp.int32)
    rotations = rotations_of(lengths, 12)
    out, cache = append_and_attend(cache, 1, q[:, None], k_new[:, None], v_new[:, None], rotations, counts, 6)
    expected, new_k, new_v = decode_attention_reference(q, k_new, v_new, k, v, lengths, counts, rotations, 6)
    np.testing.assert_allclose(out[::2, 0], expected[::2], atol=1e-6)  # row 1 takes no token
    np.testing.assert_array_equal(cache.k[1], new_k)
    np.testing.assert_array_equal(cache.v[1], new_v)


@pytest.mark.parametrize(
    ("sequences", "capacity", "splits"), [(8, 2048, 32), (8, 64, 1), (512, 2048, 1), (1, 65536, 64), (256, 8192, 2)]
)
def test_splits_fill_the_card_and_no_more(sequences, capacity, splits):
    assert split_count(sequences, capacity, 64) == splits


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "shape", [(1, 32, 8, 8192, 128), (4, 9, 3, 777, 64), (3, 16, 16, 300, 80), (2, 8, 1, 1000, 256)]
)
@pytest.mark.parametrize("window", [None, 100])
def test_compiled_for_the_gpu(dtype, shape, window):
    B = shape[0]
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    for seed in range(3):
        check(inputs(seed, *shape, dtype), jnp.ones(B, jnp.int32), window, tolerance)
    check(inputs(3, *shape, dtype, quantized=(3, 4)), jnp.ones(B, jnp.int32), window, max(tolerance, 1e-3))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("E", [64, 80, 128])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("quantized", [False, True])
def test_lowers_for_an_h200(dtype, E, window, quantized):
    heads = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((2, 9, E), (2, 3, E), (2, 3, E))]
    caches: list = [jax.ShapeDtypeStruct((2, 3, 500, E), dtype)] * 2
    if quantized:
        caches = [jax.eval_shape(quantize_heads, caches[0])] * 2
    rows = [jax.ShapeDtypeStruct((2,), jnp.int32)] * 2
    angles = (jax.ShapeDtypeStruct((2, 1, E // 2), jnp.float32),) * 2
    text = lower_for_h200(lambda *a: decode_attention(*a[:-2], a[-2:], window), *heads, *caches, *rows, *angles)
    assert "decode_attention_split" in text
    assert "decode_attention_join" in text
