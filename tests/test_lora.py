"""LoRA: nothing from a fresh adapter, the definition's sum from a trained one, gradients, merging, several at once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax.errors import ArgumentError
from llama_jax.linear import LoraWeight, embed, linear
from llama_jax.lora import LAYER_MATRICES, LoraFactors, init_lora, map_weights, merge_lora, with_lora
from llama_jax.losses import loss
from llama_jax.model import forward, join_projections
from llama_jax.placement import param_shardings, place_beside, tensor_mesh
from llama_jax.quantization import pack
from tests.tiny import tiny_config, tiny_params

CONFIG = tiny_config(d_model=64, d_ff=64, n_layers=1, head_dim=16, n_kv_heads=4)
TOKENS = jnp.asarray([[3, 14, 15, 92, 65, 35], [8, 97, 93, 2, 38, 46]], jnp.int32)
EVERYTHING = (*LAYER_MATRICES, "embedding", "output_head")
FORWARD = jax.jit(forward, static_argnames="config")


@pytest.fixture(scope="module")
def params():
    return tiny_params(CONFIG)


def trained(config, targets=EVERYTHING, seed=1, rank=3):
    """An adapter whose b is not zero."""
    fresh = init_lora(jax.random.key(seed), config, rank=rank, alpha=2.0 * rank, targets=targets)
    keys = jax.random.split(jax.random.key(seed + 100), len(fresh))
    return {
        path: dataclasses.replace(f, b=0.1 * jax.random.normal(key, f.b.shape))
        for key, (path, f) in zip(keys, fresh.items(), strict=True)
    }


def packed(params, type_name="Q8_0", dtype=jnp.float32):
    """The parameters with packed matrices."""
    from gguf import GGMLQuantizationType, quants

    def rows(path, weight):
        if weight.ndim == 1:
            return weight
        data = quants.quantize(np.asarray(weight), GGMLQuantizationType[type_name])
        return jax.device_put(pack(data.reshape(-1), type_name, weight.shape, dtype))

    return map_weights(rows, params)


def logits(params, config=CONFIG):
    return np.asarray(FORWARD(params, TOKENS, config)[0])


def summed(params, adapter, scale=1.0):
    """The definition, in float64: every weight plus scale * b a."""

    def change(path, weight):
        if path not in adapter:
            return weight
        f = adapter[path]
        a, b, w = (np.asarray(x, np.float64) for x in (f.a, f.b, weight))
        return jnp.asarray(w + scale * f.scale * b @ a, jnp.float32)

    return map_weights(change, params)


@pytest.mark.parametrize(("kind", "dtype"), [("dense", jnp.float32), ("dense", jnp.bfloat16), ("packed", jnp.bfloat16)])
def test_a_fresh_adapter_changes_nothing_bit_for_bit(params, kind, dtype):
    if kind == "packed":
        weights = packed(params, dtype=dtype)
    else:
        weights = map_weights(lambda path, w: w if w.ndim == 1 else w.astype(dtype), params)
    fresh = init_lora(jax.random.key(0), CONFIG, rank=4, targets=EVERYTHING)
    adapted = with_lora(weights, fresh)
    assert isinstance(adapted.layers[0].w_down, LoraWeight)
    np.testing.assert_array_equal(logits(adapted).view(np.uint32), logits(weights).view(np.uint32))
    if kind == "dense":
        merged = merge_lora(adapted)
        for before, after in zip(jax.tree.leaves(weights), jax.tree.leaves(merged), strict=True):
            np.testing.assert_array_equal(np.asarray(before), np.asarray(after))


@pytest.mark.parametrize("target", EVERYTHING)
def test_each_weight_is_changed_as_defined(params, target):
    zero = {path: dataclasses.replace(f, b=0 * f.b) for path, f in trained(CONFIG).items()}  # one program for all
    path = target if target in zero else f"layers.0.{target}"
    adapter = zero | {path: trained(CONFIG)[path]}
    expected = logits(summed(params, adapter))
    assert np.abs(expected - logits(params)).max() > 0.01
    np.testing.assert_allclose(logits(with_lora(params, adapter)), expected, atol=1e-4, rtol=0)


def test_several_adapters_with_scales_add_up(params):
    first, second = trained(CONFIG, seed=1), trained(CONFIG, ["wq", "w_up"], seed=2, rank=5)
    adapted = with_lora(with_lora(params, first, 0.5), second, -2.0)
    expected = logits(summed(summed(params, first, 0.5), second, -2.0))
    np.testing.assert_allclose(logits(adapted), expected, atol=1e-3, rtol=0)
    np.testing.assert_allclose(logits(merge_lora(adapted)), expected, atol=1e-3, rtol=0)
    assert not any(isinstance(x, LoraWeight) for x in jax.tree.leaves(merge_lora(adapted)))


def test_a_packed_weight_stays_packed_beside_its_adapter_and_becomes_dense_when_merged(params):
    base = packed(params)
    adapter = trained(CONFIG, LAYER_MATRICES)
    adapted = with_lora(base, adapter)
    assert adapted.layers[0].wq.base is base.layers[0].wq
    merged = merge_lora(adapted)
    assert isinstance(merged.layers[0].wq, jax.Array)
    np.testing.assert_allclose(logits(adapted), logits(merged), atol=1e-3, rtol=0)
    assert np.abs(logits(adapted) - logits(base)).max() > 0.1


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_joined_weights_take_the_adapters_of_their_parts(params, kind):
    base = packed(params) if kind == "packed" else params
    adapter = {path: f for path, f in trained(CONFIG).items() if "wk" not in path}
    adapted = with_lora(with_lora(base, adapter, 0.5), trained(CONFIG, ["w_up"], seed=2), 2.0)
    joined = join_projections(jax.tree.map(jnp.copy, base))
    assert joined.layers[0].wk is None
    beside = with_lora(with_lora(joined, adapter, 0.5), trained(CONFIG, ["w_up"], seed=2), 2.0)
    np.testing.assert_allclose(logits(beside), logits(adapted), atol=1e-4, rtol=0)
    if kind == "packed":
        return
    np.testing.assert_allclose(logits(merge_lora(beside)), logits(adapted), atol=1e-3, rtol=0)
    fresh = with_lora(joined, init_lora(jax.random.key(0), CONFIG))
    np.testing.assert_array_equal(logits(fresh), logits(joined))
    one = jax.jit(lambda p: forward(p, TOKENS[:1, :1], CONFIG)[0])  # a single row, which has products of its own
    np.testing.assert_array_equal(one(fresh), one(joined))
    with pytest.raises(
        ArgumentError, match=r"changes a layers.0.wk of shape \(64, 32\); the model's has shape \(64, 64\)"
    ):
        with_lora(joined, {"layers.0.wk": factors(64, 32)})


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("n_tokens", [1, 6, 100])
def test_a_fresh_adapter_changes_no_bit_on_a_gpu(kind, n_tokens):
    config = tiny_config(vocab_size=512, d_model=512, d_ff=1024, n_heads=8, n_kv_heads=4, head_dim=64)
    params = tiny_params(config)
    if kind == "packed":
        base = packed(params, "Q4_0", jnp.bfloat16)
    else:
        base = map_weights(lambda path, w: w if w.ndim == 1 else w.astype(jnp.bfloat16), params)
    base = join_projections(base)
    fresh = with_lora(base, init_lora(jax.random.key(0), config, targets=EVERYTHING))
    tokens = jax.random.randint(jax.random.key(2), (1, n_tokens), 0, 512)
    got, expected = (np.asarray(FORWARD(p, tokens, config)[0]) for p in (fresh, base))
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_a_tied_embedding_and_its_head_are_changed_separately():
    config = dataclasses.replace(CONFIG, tied_embeddings=True)
    params = tiny_params(config)
    f = trained(CONFIG, ["embedding"])["embedding"]
    change = f.scale * np.asarray(f.b) @ np.asarray(f.a)
    whole = params.embedding + change
    apart = dataclasses.replace(params, embedding=whole, output_head=params.embedding)
    np.testing.assert_allclose(
        logits(with_lora(params, {"embedding": f}), config), logits(apart, config), atol=1e-4, rtol=0
    )
    apart = dataclasses.replace(params, output_head=whole)
    np.testing.assert_allclose(
        logits(with_lora(params, {"output_head": f}), config), logits(apart, config), atol=1e-4, rtol=0
    )


def test_a_norm_is_changed_at_once(params):
    rng = np.random.default_rng(0)
    f = LoraFactors(
        a=rng.normal(size=(2, 64)).astype(np.float32), b=rng.normal(size=(1, 2)).astype(np.float32), scale=0.5
    )
    got = with_lora(params, {"layers.0.ffn_norm": f}, 2.0).layers[0].ffn_norm
    np.testing.assert_allclose(got, 1.0 + (f.b @ f.a)[0], rtol=1e-6)


def test_gradients_reach_the_factors_and_are_those_of_the_summed_weights(params):
    adapter = trained(CONFIG, ["wq", "w_down"])

    def beside(adapter):
        return loss(with_lora(params, adapter), TOKENS[:, :-1], TOKENS[:, 1:], CONFIG)

    def inside(adapter):
        return loss(merge_lora(with_lora(params, adapter)), TOKENS[:, :-1], TOKENS[:, 1:], CONFIG)

    got, expected = jax.jit(jax.grad(beside))(adapter), jax.jit(jax.grad(inside))(adapter)
    for path, factors in expected.items():
        for side in "ab":
            wanted = np.asarray(getattr(factors, side))
            assert np.abs(wanted).max() > 1e-5, path
            np.testing.assert_allclose(getattr(got[path], side), wanted, atol=1e-4 * np.abs(wanted).max() + 1e-6)


def test_a_mesh_changes_nothing(params):
    adapter = trained(CONFIG)
    expected = logits(with_lora(params, adapter))
    mesh = tensor_mesh(4)
    divided = jax.device_put(params, param_shardings(CONFIG, mesh))
    weights = {"output_head": None}
    map_weights(weights.__setitem__, divided)
    placed = {path: place_beside(weights[path], f) for path, f in adapter.items()}
    assert placed["layers.0.wq"].b.sharding.spec[0] == "tensor"
    assert placed["layers.0.w_down"].a.sharding.spec[1] == "tensor"
    np.testing.assert_allclose(logits(with_lora(divided, placed)), expected, atol=1e-4, rtol=0)


def test_scales_of_a_fresh_adapter():
    assert init_lora(jax.random.key(0), CONFIG, rank=4, alpha=8.0)["layers.0.wq"].scale == 2.0
    assert init_lora(jax.random.key(0), CONFIG, rank=4, alpha=8.0, rslora=True)["layers.0.wq"].scale == 4.0
    adapter = init_lora(jax.random.key(0), CONFIG, targets=["wv", "embedding"], dtype=jnp.bfloat16)
    assert list(adapter) == ["embedding", "layers.0.wv"]
    for f in adapter.values():
        assert f.rank == 8
        assert f.a.dtype == f.b.dtype == jnp.bfloat16
        assert 0.9 < np.abs(np.asarray(f.a, np.float32)).max() * f.a.shape[1] ** 0.5 <= 1.01
        assert not np.asarray(f.b).any()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(rank=0), r"rank is 0; it must be an integer from 1 to 2147483647\."),
        (dict(alpha=-1), r"alpha is -1; it must be 0 or above\."),
        (dict(targets=["q_proj"]), r"targets is \['q_proj'\]; it must be a list of wq, wk, wv, wo, w_gate, w_up, "),
        (dict(targets="wq"), "targets is 'wq'"),
        (dict(targets=[]), r"targets is \[\]"),
    ],
)
def test_wrong_options_are_refused(options, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        init_lora(jax.random.key(0), CONFIG, **options)


def factors(n_out, n_in, rank=2, rank_b=None):
    return LoraFactors(a=jnp.ones((rank, n_in)), b=jnp.ones((n_out, rank_b or rank)), scale=1.0)


@pytest.mark.parametrize(
    ("adapter", "sentence"),
    [
        (
            {"layers.0.wq": factors(64, 32)},
            r"The adapter changes a layers.0.wq of shape \(64, 32\); the model's has shape \(64, 64\)\.",
        ),
        ({"layers.0.wq": factors(64, 64, 2, 3)}, r"factors of layers.0.wq have shapes a \(2, 64\) and b \(64, 3\)"),
        ({"layers.1.wq": factors(64, 64)}, r"changes 'layers.1.wq', which a model of this shape does not have\."),
        ({"layers.0.attention_norm": factors(64, 64)}, r"of shape \(64, 64\); the model's has shape \(64,\)\."),
    ],
)
def test_wrong_shapes_are_refused(params, adapter, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        with_lora(params, adapter)


def test_the_result_keeps_its_type():
    rng = np.random.default_rng(0)
    w, a, b = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((6, 8), (2, 8), (6, 2)))
    weight = LoraWeight(base=w, a=a, b=b, scale=jnp.float32(0.5))
    x = jnp.asarray(rng.normal(size=(3, 8)), jnp.bfloat16)
    assert linear(x, weight).dtype == jnp.bfloat16
    assert linear(x, weight, jnp.float32).dtype == jnp.float32
    assert embed(jnp.zeros((1, 2), jnp.int32), weight).dtype == jnp.bfloat16
    assert (weight.shape, weight.dtype) == ((6, 8), jnp.bfloat16)
