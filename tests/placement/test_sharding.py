"""A model divided over fake devices gives the same numbers as on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax import ArgumentError, Session, param_shardings, place_params, sampling_params, tensor_mesh
from llama_jax.model import by_path
from tests.tiny import tiny_config, tiny_params

CONFIG = tiny_config(vocab_size=128, d_ff=64, n_heads=8, n_kv_heads=4)
PROMPTS = [[5, 9, 77, 3, 14, 50, 2], [8, 1]]


def placed(params, mesh):
    place = place_params(CONFIG, mesh)
    new = [place(path, np.asarray(leaf)) for path, leaf in by_path(params).items()]
    return jax.tree.unflatten(jax.tree.structure(params), new)


def run(params, mesh):
    session = Session(params, CONFIG, batch=2, capacity=32, mesh=mesh)
    logits = np.asarray(session.prefill(PROMPTS))
    rows = [[], []]
    for new in session.generate(PROMPTS, sampling_params(2, temperature=0.0), max_tokens=12):
        for row, tokens in zip(rows, new, strict=True):
            row.extend(tokens)
    return logits, rows, session


@pytest.mark.parametrize("n_devices", [2, 3, 4, 8])
def test_a_mesh_changes_no_number(n_devices):
    params = tiny_params(CONFIG)
    logits, rows, _ = run(params, None)
    mesh = tensor_mesh(n_devices)
    sharded_logits, sharded_rows, session = run(placed(params, mesh), mesh)
    np.testing.assert_allclose(sharded_logits, logits, atol=1e-5)
    assert sharded_rows == rows
    divided = n_devices in (2, 4)  # of 4 key/value heads
    share = n_devices if divided else 1
    assert session.cache.k[0].addressable_shards[0].data.shape == (2, 4 // share, 32, 12)


@pytest.mark.parametrize(
    ("n_devices", "rows_of_gate", "rows_of_wq"), [(1, 64, 96), (4, 16, 24), (8, 8, 96), (3, 64, 96)]
)
def test_what_divides_is_divided(n_devices, rows_of_gate, rows_of_wq):
    layer = placed(tiny_params(CONFIG), tensor_mesh(n_devices)).layers[0]
    assert layer.w_gate.addressable_shards[0].data.shape == (rows_of_gate, 32)
    assert layer.w_down.addressable_shards[0].data.shape == (32, rows_of_gate)
    assert layer.wq.addressable_shards[0].data.shape == (rows_of_wq, 32)
    assert layer.attention_norm.sharding.is_fully_replicated


def test_shardings_have_the_form_of_the_parameters():
    shardings = param_shardings(CONFIG, tensor_mesh(2))
    jax.tree.map(lambda sharding, leaf: sharding.shard_shape(leaf.shape), shardings, tiny_params(CONFIG))


@pytest.mark.parametrize("n_devices", [0, 9, -1])
def test_a_mesh_of_devices_that_are_not_there_is_refused(n_devices):
    with pytest.raises(ArgumentError, match=f"mesh of {n_devices} devices"):
        tensor_mesh(n_devices)


def test_weights_are_on_the_default_device_without_a_mesh():
    place = place_params(CONFIG, None)
    array = place("embedding", np.ones((2, 2), np.float32))
    assert array.devices() == {jax.devices()[0]}
    assert array.dtype == jnp.float32
