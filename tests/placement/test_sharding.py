"""A model divided over fake devices gives the same numbers as on one, also where nothing divides evenly."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from llama_jax import (
    ArgumentError,
    Placement,
    decode,
    device_mesh,
    load,
    loss,
    param_shardings,
    place_cache,
    place_params,
    prefill,
    sampling_params,
    save_gguf,
    start_decoding,
    tensor_mesh,
)
from llama_jax.generate import decode_step
from llama_jax.kernels.backend import TRITON
from llama_jax.placement import sharding_notes, with_vocabulary
from llama_jax.quantization.packed import QuantizedTensor, pack
from llama_jax.sampling import start_state
from tests.tiny import tiny_config, tiny_params

EVEN = tiny_config(vocab_size=128, d_ff=64, n_heads=8, n_kv_heads=4)
# Wizard's vocabulary, SmolLM2's heads, a feed-forward layer that three devices cannot share.
ODD = tiny_config(n_layers=1, vocab_size=32001, d_model=24, d_ff=40, n_heads=9, n_kv_heads=3, head_dim=4)
MESHES = {
    "1": dict(tensor=1),
    "2": dict(tensor=2),
    "3": dict(tensor=3),
    "4": dict(tensor=4),
    "8": dict(tensor=8),
    "2x4": dict(data=2, tensor=4),
}
NEW = 6  # tokens


def placed(params, config, mesh):
    """As `load` does it: weights, packed or not, from numpy."""
    place = place_params(config, mesh, pad_vocabulary=True)

    def move(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return place(name, jax.tree.map(np.asarray, leaf))

    new = jax.tree.map_with_path(move, params, is_leaf=lambda leaf: isinstance(leaf, QuantizedTensor))
    return with_vocabulary(new, config)


@functools.cache
def compiled(config):
    def run(params, tokens, counts, cache):
        logits, cache = prefill(params, tokens, config, cache, counts)
        sampling = sampling_params(tokens.shape[0], temperature=0.0)
        eos = jnp.zeros(0, jnp.int32)
        state = start_decoding(logits, cache, start_state(sampling), sampling, eos)
        first = state.token
        state, rest, *_ = decode(params, config, state, sampling, eos, NEW, jnp.int32(NEW))
        return logits, jnp.concatenate([first[:, None], rest], axis=1), state.cache

    return jax.jit(run)


def run(params, config, mesh=None, batch=5, kernels=None):
    """Logits after prompts of different lengths, then greedy tokens, and the cache."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (batch, 7), np.int32)
    cache = place_cache(config, batch, 16, np.float32, mesh)
    cache = cache if kernels is None else cache.replace(kernels=kernels)
    counts = jnp.asarray(rng.integers(1, 8, batch), jnp.int32)
    logits, new, cache = compiled(config)(params, tokens, counts, cache)
    return np.asarray(logits), np.asarray(new), cache


@functools.cache
def on_one_device(config, packed=False):
    params = tiny_params(config)
    if packed:
        params = with_packed(params)
    return params, *run(params, config)[:2]


def with_packed(params):
    rng = np.random.default_rng(0)

    def matrix(leaf):
        if leaf.ndim < 2 or leaf.shape[1] % 32:
            return leaf
        blocks = rng.integers(0, 256, (leaf.shape[0], leaf.shape[1] // 32, 18), np.uint8)
        blocks[:, :, :2] = np.array([0.02], np.float16).view(np.uint8)
        return pack(blocks, "Q4_0", leaf.shape)

    return jax.tree.map(matrix, params)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("config", "name"),
    [
        *((ODD, name) for name in ("3", "2x4")),
        *(pytest.param(ODD, name, marks=slow) for name in ("1", "2", "4", "8")),
        *(pytest.param(EVEN, name, marks=slow) for name in MESHES),
    ],
)
def test_a_mesh_changes_no_number(config, name):
    params, logits, tokens = on_one_device(config)
    mesh = device_mesh(**MESHES[name])
    new_logits, new_tokens, cache = run(placed(params, config, mesh), config, mesh)
    np.testing.assert_allclose(new_logits, logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(new_tokens, tokens)
    assert new_tokens.max() < config.vocab_size
    n = MESHES[name]["tensor"]
    share = n if config.n_kv_heads % n == 0 else 1
    assert cache.k[0].addressable_shards[0].data.shape[:2] == (5, config.n_kv_heads // share)
    assert all(new.sharding.is_equivalent_to(NamedSharding(mesh, cache.sharding.spec), 4) for new in cache.k)


def test_packed_weights_on_a_mesh():
    params, logits, tokens = on_one_device(EVEN, packed=True)
    mesh = device_mesh(data=2, tensor=4)
    divided = placed(params, EVEN, mesh)
    new_logits, new_tokens, cache = run(divided, EVEN, mesh, batch=5)
    np.testing.assert_allclose(new_logits, logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(new_tokens, tokens)
    layer = divided.layers[0]
    assert layer.w_gate.codes.addressable_shards[0].data.shape == (16, 4, 1)  # rows divided
    assert layer.w_down.codes.addressable_shards[0].data.shape == (32, 4, 2)  # two groups do not divide by four
    assert cache.k[0].addressable_shards[0].data.shape == (5, 1, 16, 12)


def test_rows_are_divided_over_data():
    mesh = device_mesh(data=2, tensor=2)
    params, *_ = on_one_device(EVEN)
    logits, tokens, _ = run(params, EVEN, batch=4)
    new_logits, new_tokens, cache = run(placed(params, EVEN, mesh), EVEN, mesh, batch=4)
    np.testing.assert_allclose(new_logits, logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(new_tokens, tokens)
    assert cache.k[0].addressable_shards[0].data.shape == (2, 2, 16, 12)


# Collectives


def collectives(config, mesh, batch=4):
    """Kinds of collectives in one compiled decode step, each with the number of values it moves."""
    params = placed(tiny_params(config), config, mesh)
    cache = place_cache(config, batch, 16, np.float32, mesh)
    sampling, eos = sampling_params(batch, temperature=0.0), jnp.zeros(0, jnp.int32)
    state = jax.eval_shape(
        lambda cache: start_decoding(
            jnp.zeros((batch, config.vocab_size)), cache, start_state(sampling), sampling, eos
        ),
        cache,
    )
    state = state.replace(cache=cache)
    step = jax.jit(decode_step, static_argnames="config", donate_argnames="state")
    text = step.lower(params, config, state, sampling, eos).compile().as_text()
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf"= \w+\[([\d,]*)\]\S* ({kinds})(?:-start)?\(", text)
    return [(kind, int(np.prod([int(n) for n in shape.split(",") if n]))) for shape, kind in found]


@pytest.mark.parametrize("name", ["4", "2x4"])
def test_collectives_are_those_of_the_split(name):
    """Two all-reduces a layer, one for the embedding's rows, and the logits gathered: no weight, key or value moves."""
    sizes = MESHES[name]
    rows = 4 // sizes.get("data", 1)
    found = collectives(EVEN, device_mesh(**sizes))
    reduces = [size for kind, size in found if kind == "all-reduce"]
    assert reduces == [rows * EVEN.d_model] * (2 * EVEN.n_layers + 1)
    gathers = [size for kind, size in found if kind != "all-reduce"]
    assert gathers == [rows * EVEN.vocab_size]


def test_one_device_needs_no_collective():
    assert collectives(EVEN, device_mesh()) == []


def test_attention_kernels_see_their_own_heads(monkeypatch):
    """A kernel is called for each device's share of heads and rows, not left to XLA to divide."""
    from llama_jax import cache as cache_module
    from llama_jax.kernels.decode_attention import decode_attention

    seen = []

    def kernel(q, *others, **options):
        seen.append((q.shape, others[2].shape))
        return decode_attention(q, *others, **options, interpret=True)

    monkeypatch.setattr(cache_module, "decode_attention", kernel)
    mesh = device_mesh(data=2, tensor=4)
    params = placed(tiny_params(EVEN), EVEN, mesh)
    cache = place_cache(EVEN, 4, 16, np.float32, mesh)
    tokens, counts = jnp.zeros((4, 1), jnp.int32), jnp.ones(4, jnp.int32)
    step = jax.jit(lambda p, c: prefill(p, tokens, EVEN, c, counts)[0])
    plain = np.asarray(step(params, cache))
    with_kernel = np.asarray(step(params, cache.replace(kernels=TRITON)))
    assert set(seen) == {((2, 2, 12), (2, 1, 16, 12))}
    np.testing.assert_allclose(with_kernel, plain, atol=1e-4)


# Training


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (EVEN, dict(data=2, fsdp=2, tensor=2)),
        pytest.param(ODD, dict(tensor=3), marks=slow),
        pytest.param(ODD, dict(data=2, tensor=4), marks=slow),
        pytest.param(ODD, dict(tensor=8), marks=slow),
        pytest.param(EVEN, dict(fsdp=8), marks=slow),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(config, sizes):
    params = tiny_params(config)
    rows = np.random.default_rng(0).integers(0, config.vocab_size, (4, 9), np.int32)

    def step(params, rows):
        return jax.value_and_grad(loss)(params, rows[:, :-1], rows[:, 1:], config)

    value, gradient = jax.jit(step)(params, rows)
    mesh = device_mesh(**sizes)
    shardings = param_shardings(config, mesh)
    divided = jax.tree.map(jax.device_put, params, shardings)
    axes = tuple(axis for axis in ("data", "fsdp") if sizes.get(axis, 1) > 1 and 4 % sizes[axis] == 0) or None
    there = jax.device_put(rows, NamedSharding(mesh, PartitionSpec(axes)))
    new_value, new_gradient = jax.jit(step, out_shardings=(None, shardings))(divided, there)
    np.testing.assert_allclose(new_value, value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), new_gradient, gradient)


# What lies where


@pytest.mark.parametrize(
    ("n_devices", "rows_of_gate", "rows_of_wq"), [(1, 64, 96), (4, 16, 24), (8, 8, 96), (3, 64, 96)]
)
def test_what_divides_is_divided(n_devices, rows_of_gate, rows_of_wq):
    layer = placed(tiny_params(EVEN), EVEN, tensor_mesh(n_devices)).layers[0]
    assert layer.w_gate.addressable_shards[0].data.shape == (rows_of_gate, 32)
    assert layer.w_down.addressable_shards[0].data.shape == (32, rows_of_gate)
    assert layer.wq.addressable_shards[0].data.shape == (rows_of_wq, 32)
    assert layer.attention_norm.sharding.is_fully_replicated


def test_fsdp_divides_the_width():
    layer = placed(tiny_params(EVEN), EVEN, device_mesh(fsdp=4, tensor=2)).layers[0]
    assert layer.w_gate.addressable_shards[0].data.shape == (32, 8)
    assert layer.w_down.addressable_shards[0].data.shape == (8, 32)


def test_what_does_not_divide_is_said(caplog):
    assert list(sharding_notes(ODD, tensor_mesh(4))) == [
        "vocabulary of 32001 padded to 32004, to divide by 4 devices",
        "attention whole on each device: 9 query and 3 key/value heads do not divide by 4 devices",
    ]
    assert list(sharding_notes(ODD, tensor_mesh(3))) == [
        "feed-forward layers whole on each device: 40 columns do not divide by 3 devices"
    ]
    assert not list(sharding_notes(EVEN, tensor_mesh(4)))
    assert not list(sharding_notes(EVEN, None))
    caplog.set_level(logging.INFO, "llama_jax")
    place_cache(EVEN, 5, 4, np.float32, device_mesh(data=2))
    assert "batch of 5 whole on each device: it does not divide by 2" in caplog.messages


def test_axis_types_are_stated():
    for mesh in (tensor_mesh(2), device_mesh(data=2, tensor=2)):
        assert set(mesh.axis_types) == {AxisType.Auto}
    assert device_mesh(fsdp=2).axis_names == ("data", "fsdp", "tensor")


def test_shardings_have_the_form_of_the_parameters():
    shardings = param_shardings(EVEN, tensor_mesh(2))
    jax.tree.map(lambda sharding, leaf: sharding.shard_shape(leaf.shape), shardings, tiny_params(EVEN))


def test_a_weight_is_read_a_shard_at_a_time():
    """No device, and no other array on the host, ever holds a divided weight whole."""

    class Watched(np.ndarray):
        read = []  # noqa: RUF012

        def __getitem__(self, index):
            part = super().__getitem__(index)
            self.read.append(part.shape)
            return np.asarray(part)

    weight = np.zeros((64, 64), np.float32).view(Watched)
    array = place_params(EVEN, tensor_mesh(4))("layers.0.w_gate", weight)
    assert Watched.read == [(16, 64)] * 4
    assert [shard.data.shape for shard in array.addressable_shards] == [(16, 64)] * 4


@pytest.mark.parametrize("n_devices", [0, 9, -1])
def test_a_mesh_of_devices_that_are_not_there_is_refused(n_devices):
    with pytest.raises(ArgumentError, match=f"mesh of {n_devices} devices"):
        tensor_mesh(n_devices)


@pytest.mark.parametrize("sizes", [dict(data=0), dict(data=3, tensor=3), dict(fsdp=-1)])
def test_an_impossible_mesh_is_refused(sizes):
    with pytest.raises(ArgumentError, match="devices was asked for; this process sees 8"):
        device_mesh(**sizes)


def test_mesh_and_placement_exclude_each_other():
    with pytest.raises(ArgumentError, match="mesh and placement were both given"):
        load(mesh=tensor_mesh(2), placement=Placement())


def test_weights_are_on_the_default_device_without_a_mesh():
    place = place_params(EVEN, None)
    array = place("embedding", np.ones((2, 2), np.float32))
    assert array.devices() == {jax.devices()[0]}
    assert array.dtype == jnp.float32


def test_a_padded_vocabulary_is_no_part_of_losses_and_files(tmp_path):
    config = tiny_config(vocab_size=101)
    params = tiny_params(config)
    divided = placed(params, config, tensor_mesh(4))
    assert divided.embedding.shape[0] == divided.output_head.shape[0] == 104
    rows = jnp.asarray(np.random.default_rng(0).integers(0, 101, (2, 9), np.int32))
    step = jax.jit(loss, static_argnames="config")
    wanted = step(params, rows[:, :-1], rows[:, 1:], config)
    np.testing.assert_allclose(step(divided, rows[:, :-1], rows[:, 1:], config), wanted, rtol=1e-5)
    save_gguf(tmp_path / "divided.gguf", divided, config, types="F32")
    save_gguf(tmp_path / "whole.gguf", params, config, types="F32")
    assert (tmp_path / "divided.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
