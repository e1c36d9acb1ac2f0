"""Attention against float64 numpy: the plain operations, and the kernels in interpret mode (compiled with -m gpu)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_jax import append_and_attend, init_cache
from llama_jax.errors import ArgumentError
from llama_jax.kernels import attention as attention_module
from llama_jax.kernels.attention import attention, attention_reference
from llama_jax.kernels.backend import TRITON
from llama_jax.kernels.flash_attention import Tiles, Tiling, default_tiling, flash_attention
from tests.kernels.lowering import lower_for_h200
from tests.tiny import tiny_config

ON_GPU = jax.default_backend() == "gpu"
SMALL = Tiling(forward=Tiles(16, 32, 4, 2), dkv=Tiles(32, 16, 4, 2), dq=Tiles(16, 16, 4, 2))


def exact_weights(q, k, q_start, window=None, kv_lengths=None, q_segments=None, kv_segments=None, causal=True):
    """The shares [B, H, T, S] of the keys for each query, in float64 numpy, from the definition."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    B, T, H, E = q.shape
    S = k.shape[2]
    k = k.repeat(H // k.shape[1], axis=1)
    behind = (np.asarray(q_start)[:, None] + np.arange(T))[:, :, None] - np.arange(S)
    seen = np.ones((B, T, S), bool)
    if causal:
        seen &= behind >= 0
    if window is not None:
        seen &= behind < window
    if kv_lengths is not None:
        seen &= np.arange(S) < np.asarray(kv_lengths)[:, None, None]
    if q_segments is not None:
        seen &= np.asarray(q_segments)[:, :, None] == np.asarray(kv_segments)[:, None, :]
    weights = np.exp(np.einsum("bthe,bhse->bhts", q, k) / np.sqrt(E)) * seen[:, None]
    return weights / np.maximum(weights.sum(-1, keepdims=True), np.finfo(np.float64).tiny)


def exact(q, k, v, q_start, **options):
    """What attention gives, [B, T, H, E] in float64."""
    v = np.asarray(v, np.float64).repeat(q.shape[2] // k.shape[1], axis=1)
    return np.einsum("bhts,bhse->bthe", exact_weights(q, k, q_start, **options), v)


def exact_gradients(q, k, v, do, q_start, **options):
    """Those of the sum of do times the result, by q, k and v, in float64: the derivative of softmax by hand."""
    B, _, H, E = q.shape
    K, S = k.shape[1:3]
    weights = exact_weights(q, k, q_start, **options)
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    k, v = (x.repeat(H // K, axis=1) for x in (k, v))
    dweights = np.einsum("bthe,bhse->bhts", do, v)
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True)) / np.sqrt(E)
    dk, dv = np.einsum("bhts,bthe->bhse", dscores, q), np.einsum("bhts,bthe->bhse", weights, do)
    dk, dv = (x.reshape(B, K, H // K, S, E).sum(2) for x in (dk, dv))
    return np.einsum("bhts,bhse->bthe", dscores, k), dk, dv


def inputs(seed, B, T, H, K, S, E, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in ((B, T, H, E), (B, K, S, E), (B, K, S, E))]


def distance(got, expected, least=0.1):
    """Of the norms, relative; against `least` where about nothing is expected."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(got - expected) / max(np.linalg.norm(expected), least)


def flash(q, k, v, q_start, **options):
    return flash_attention(q, k, v, q_start, interpret=not ON_GPU, **options)


def check(arrays, q_start, tolerance, **options):
    tiling = options.pop("tiling", SMALL)
    static = {name: options.pop(name) for name in ("window", "causal") if name in options}
    kernel = jax.jit(lambda *a, **o: flash(*a, tiling=tiling, **static, **o))
    out = kernel(*arrays, q_start, **options)
    assert out.dtype == arrays[0].dtype
    assert distance(out, exact(*arrays, q_start, **static, **options)) <= tolerance


def check_gradients(arrays, q_start, tolerance, **options):
    """Relative to each gradient, or to a tenth of the largest of the three where its own terms cancel."""
    tiling = options.pop("tiling", SMALL)
    static = {name: options.pop(name) for name in ("window", "causal") if name in options}
    do = jax.random.normal(jax.random.key(1), arrays[0].shape)

    def loss(q, k, v, options):
        return jnp.sum(do * flash(q, k, v, q_start, tiling=tiling, **static, **options).astype(jnp.float32))

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays, options)
    expected = exact_gradients(*arrays, do, q_start, **static, **options)
    least = max(0.1, *(0.1 * np.linalg.norm(want) for want in expected))
    for got, want, like in zip(gradients, expected, arrays, strict=True):
        assert got.dtype == like.dtype
        assert distance(got, want, least) <= tolerance


@st.composite
def problems(draw):
    """Shapes, and what narrows the view."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    B, T, S = draw(st.integers(1, 2)), draw(st.integers(1, 50)), draw(st.integers(1, 70))
    H, K = draw(st.sampled_from([(1, 1), (4, 2), (9, 3), (4, 1)]))
    E = draw(st.sampled_from([8, 16, 20, 64, 80]))
    options = {"causal": draw(st.booleans())}
    if options["causal"] and draw(st.booleans()):
        options["window"] = draw(st.integers(1, 60))
    if draw(st.booleans()):
        options["kv_lengths"] = jnp.asarray(rng.integers(0, S + 1, B), jnp.int32)
    if draw(st.booleans()):
        for name, size in (("q_segments", T), ("kv_segments", S)):
            options[name] = jnp.asarray(np.sort(rng.integers(0, 4, (B, size))), jnp.int32)
    q_start = jnp.asarray(rng.integers(0, max(S - T, 0) + 5, B), jnp.int32)
    return inputs(int(rng.integers(1000)), B, T, H, K, S, E), q_start, options


@settings(deadline=None, max_examples=6)
@given(problems())
def test_flash_equals_float64(problem):
    arrays, q_start, options = problem
    check(arrays, q_start, 1e-5, **options)


@settings(deadline=None, max_examples=3)
@given(problems())
def test_flash_gradients_equal_the_references(problem):
    arrays, q_start, options = problem
    check_gradients(arrays, q_start, 1e-5, **options)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(problems())
def test_flash_fuzzed(problem):
    arrays, q_start, options = problem
    check(arrays, q_start, 1e-5, **options)
    check_gradients(arrays, q_start, 1e-5, **options)


@settings(deadline=None, max_examples=8)
@given(problems())
def test_plain_operations_equal_float64(problem):
    arrays, q_start, options = problem
    plain = jax.jit(attention, static_argnames=("window", "causal"))
    assert distance(plain(*arrays, q_start, **options), exact(*arrays, q_start, **options)) <= 1e-5


@pytest.mark.parametrize("masked", [True, False])
def test_gradients_equal_float64_central_differences(masked):
    """The shapes of llama.cpp's test-grad0 of 2023: tiny, more keys than queries, masked from the last query back."""
    step = 1e-5
    for seed, (E, N, more) in enumerate([(3, 4, 2), (1, 2, 4)]):
        arrays = inputs(seed, 2, N, 4, 2, N + more, E)
        q_start = jnp.full(2, more, jnp.int32)
        rng = np.random.default_rng(seed)
        weights = rng.standard_normal(arrays[0].shape)

        def loss(q, k, v, q_start=q_start, weights=weights):
            out = flash(q, k, v, q_start, causal=masked, tiling=SMALL)
            return jnp.sum(jnp.asarray(weights, jnp.float32) * out)

        gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)
        exacts = [np.asarray(x, np.float64) for x in arrays]
        for which in range(3):
            numeric = np.zeros(exacts[which].shape)
            for index in np.ndindex(numeric.shape):
                ends = []
                for sign in (1, -1):
                    moved = [x.copy() for x in exacts]
                    moved[which][index] += sign * step
                    ends.append(np.sum(weights * exact(*moved, q_start, causal=masked)))
                numeric[index] = (ends[0] - ends[1]) / (2 * step)
            assert distance(gradients[which], numeric) <= 1e-4


def test_keys_that_no_query_sees_are_never_read():
    arrays = inputs(3, 2, 20, 4, 2, 64, 16)
    q_start, kv_lengths = jnp.asarray([13, 0], jnp.int32), jnp.asarray([64, 17], jnp.int32)
    real = jnp.arange(64) < jnp.minimum(kv_lengths, q_start + 20)[:, None]
    poisoned = [arrays[0], *(jnp.where(real[:, None, :, None], x, jnp.nan) for x in arrays[1:])]

    def loss(q, k, v):
        return jnp.sum(flash(q, k, v, q_start, kv_lengths=kv_lengths, tiling=SMALL) ** 2)

    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*poisoned)
    expected = np.sum(exact(*arrays, q_start, kv_lengths=kv_lengths) ** 2)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for gradient in gradients:
        assert np.isfinite(gradient).all()
    assert not np.asarray(gradients[1])[~np.asarray(real)[:, None].repeat(2, 1)].any()


@pytest.mark.parametrize("function", [flash, attention_reference])
def test_queries_that_see_no_key_give_zeros(function):
    arrays = inputs(4, 2, 5, 2, 1, 7, 16)
    q_start, kv_lengths = jnp.asarray([2, 2], jnp.int32), jnp.asarray([0, 7], jnp.int32)

    def loss(q, k, v):
        out = function(q, k, v, q_start, kv_lengths=kv_lengths)
        return jnp.sum(out**2), out

    gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    assert not np.asarray(out[0]).any()
    assert np.asarray(out[1]).all()
    for gradient in gradients:
        assert not np.asarray(gradient[0]).any()
        assert np.isfinite(gradient).all()


def test_half_precision_inputs_and_a_cache_of_another_type():
    q, k, v = inputs(5, 1, 19, 4, 2, 33, 16)
    q_start = jnp.asarray([14], jnp.int32)
    for q_type, kv_type in ((jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)):
        check([q.astype(q_type), k.astype(kv_type), v.astype(kv_type)], q_start, 1e-2)
    check_gradients([x.astype(jnp.bfloat16) for x in (q, k, v)], q_start, 2e-2)


@pytest.mark.parametrize("segmented", [True, False])
def test_chunks_of_queries_give_the_same_numbers(monkeypatch, segmented):
    arrays = inputs(6, 2, 23, 4, 2, 31, 16)
    q_start = jnp.asarray([8, 3], jnp.int32)
    options = {"window": 9, "kv_lengths": jnp.asarray([31, 20], jnp.int32)}
    if segmented:
        options["q_segments"] = jnp.arange(46, dtype=jnp.int32).reshape(2, 23) // 5
        options["kv_segments"] = jnp.arange(62, dtype=jnp.int32).reshape(2, 31) // 7

    def loss(function):
        return lambda q, k, v: jnp.sum(function(q, k, v, q_start, **options) ** 2)

    monkeypatch.setattr(attention_module, "_MOST_SCORES", 2 * 4 * 31 * 5)
    got = jax.jit(jax.value_and_grad(loss(attention), (0, 1, 2)))(*arrays)
    expected = jax.jit(jax.value_and_grad(loss(attention_reference), (0, 1, 2)))(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


def test_long_prompts_need_no_quadratic_memory():
    T = 32768
    q = jax.ShapeDtypeStruct((1, T, 8, 64), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((1, 2, T, 64), jnp.bfloat16)
    start = jax.ShapeDtypeStruct((1,), jnp.int32)

    def loss(q, k, v, start):
        return jnp.sum(attention(q, k, v, start).astype(jnp.float32))

    for function in (attention, jax.grad(loss, (0, 1, 2))):
        memory = jax.jit(function).lower(q, kv, kv, start).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 8 * T * T  # a byte a score; all scores in float32 take four


def test_arguments_that_contradict_each_other():
    q, k, v = inputs(0, 1, 4, 3, 2, 4, 16)
    start = jnp.zeros(1, jnp.int32)
    with pytest.raises(ArgumentError, match="3 query heads cannot share 2"):
        attention(q, k, v, start)
    q = q[:, :, :2]
    with pytest.raises(ArgumentError, match="window of 3"):
        attention(q, k, v, start, 3, causal=False)
    with pytest.raises(ArgumentError, match="window of 0"):
        attention(q, k, v, start, 0)
    with pytest.raises(ArgumentError, match="give both or none"):
        attention(q, k, v, start, q_segments=jnp.zeros((1, 4), jnp.int32))


def abstract(E, dtype, kv_dtype=None):
    q, kv = jax.ShapeDtypeStruct((2, 300, 9, E), dtype), jax.ShapeDtypeStruct((2, 3, 500, E), kv_dtype or dtype)
    return q, kv, kv, jax.ShapeDtypeStruct((2,), jnp.int32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("E", [64, 80, 96, 128, 256])
def test_lowers_for_an_h200(dtype, E):
    def gradients(q, k, v, start):
        return jax.grad(lambda *a: flash_attention(*a, start).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    text = lower_for_h200(gradients, *abstract(E, dtype))
    for name in ("forward", "dkv", "dq"):
        assert f"flash_attention_{name}" in text


@pytest.mark.parametrize("options", [{"window": 100}, {"causal": False}, {"segmented": True}], ids=str)
def test_every_way_of_masking_lowers_for_an_h200(options):
    options = dict(options)
    segments = options.pop("segmented", False)

    def gradients(q, k, v, start, kv_lengths, q_segments, kv_segments):
        more = dict(q_segments=q_segments, kv_segments=kv_segments) if segments else {}

        def loss(q, k, v):
            return flash_attention(q, k, v, start, kv_lengths=kv_lengths, **options, **more).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    ids = [jax.ShapeDtypeStruct((2, size), jnp.int32) for size in (300, 500)]
    arguments = abstract(128, jnp.bfloat16, jnp.float16)
    assert "flash_attention_dq" in lower_for_h200(gradients, *arguments, arguments[-1], *ids)


@pytest.mark.parametrize("E", [64, 80, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_default_tiles_fit_into_shared_memory(E, itemsize):
    """227 KiB a block on Hopper (CUDA C++ programming guide, compute capability 9.0)."""
    tiling = default_tiling(E, itemsize)
    width = max(64, 2 ** (E - 1).bit_length()) * itemsize
    for tiles, stay, pass_by in (
        (tiling.forward, tiling.forward.block_q, 2 * tiling.forward.block_k),
        (tiling.dkv, 2 * tiling.dkv.block_k, 2 * tiling.dkv.block_q),
        (tiling.dq, 2 * tiling.dq.block_q, 2 * tiling.dq.block_k),
    ):
        assert (stay + tiles.n_stages * pass_by) * width <= 227 * 1024


def test_prompts_in_a_cache_take_the_kernel():
    config = tiny_config()
    cache = jax.eval_shape(lambda: init_cache(config, 2, 64, jnp.bfloat16, TRITON))
    q = jax.ShapeDtypeStruct((2, 16, config.n_heads, config.head_dim), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((2, 16, config.n_kv_heads, config.head_dim), jnp.bfloat16)
    angles = jax.ShapeDtypeStruct((2, 16, config.head_dim // 2), jnp.float32)
    counts = jax.ShapeDtypeStruct((2,), jnp.int32)
    text = lower_for_h200(
        lambda cache, q, k, v, angles, counts: append_and_attend(cache, 1, q, k, v, (angles, angles), counts, None)[0],
        cache, q, new, new, angles, counts,
    )  # fmt: skip
    assert "flash_attention_forward" in text


GPU_SHAPES = [(2, 512, 32, 8, 512, 128), (2, 300, 9, 3, 777, 64), (1, 129, 4, 4, 300, 80), (1, 200, 4, 2, 333, 96)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [*GPU_SHAPES, (2, 150, 4, 2, 260, 256), (1, 7, 8, 1, 1000, 128)])
@pytest.mark.parametrize("narrow", ["nothing", "window", "unmasked", "lengths", "segments"])
def test_compiled_for_the_gpu(dtype, shape, narrow):
    B, T, _, _, S, E = shape
    arrays = inputs(0, *shape, dtype)
    rng = np.random.default_rng(1)
    q_start = jnp.asarray(rng.integers(0, S - T + 1, B), jnp.int32)
    options = {
        "nothing": {},
        "window": {"window": 100},
        "unmasked": {"causal": False},
        "lengths": {"kv_lengths": jnp.asarray(rng.integers(0, S + 1, B), jnp.int32)},
        "segments": {
            "q_segments": jnp.asarray(np.sort(rng.integers(0, 4, (B, T))), jnp.int32),
            "kv_segments": jnp.asarray(np.sort(rng.integers(0, 4, (B, S))), jnp.int32),
        },
    }[narrow]
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    out = jax.jit(flash, static_argnames=("window", "causal"))(*arrays, q_start, **options)
    expected = attention_reference(*(x.astype(jnp.float32) for x in arrays), q_start, **options)
    assert distance(out, expected) <= tolerance
    tiling = default_tiling(E, arrays[0].dtype.itemsize)
    check_gradients(arrays, q_start, 10 * tolerance if dtype == jnp.float32 else 2e-2, tiling=tiling, **options)
