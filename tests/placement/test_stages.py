"""Layers spread over devices in stretches give the same text as on one device."""

import jax
import numpy as np
import pytest

from llama_jax import Placement, Session, sampling_params
from llama_jax.model import by_path
from llama_jax.placement import place_params, resolve
from tests.tiny import tiny_config, tiny_params

CONFIG = tiny_config(n_layers=4)
PROMPTS = [[5, 9, 77, 3, 14, 50, 2, 8, 1], [8, 1]]
PARAMS = tiny_params(CONFIG)


def run(params, plan=None, **sampling):
    session = Session(params, CONFIG, batch=2, capacity=24, n_batch=8, plan=plan)
    logits = np.asarray(session.prefill(PROMPTS))
    rows = [[], []]
    options = sampling_params(2, temperature=0.0, **sampling)
    for new in session.generate(PROMPTS, options, max_tokens=20, keep=[1, 1]):
        for row, tokens in zip(rows, new, strict=True):
            row.extend(tokens)
    return logits, rows, session


@pytest.fixture(scope="module")
def on_one_device():
    return run(PARAMS)


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        (dict(tensor_split=(3, 1)), (0, 3)),
        (dict(tensor_split=(1, 0, 1), main_gpu=2, split_mode="layer", gpu_layers=2), (0, 3)),
    ],
)
def test_stretches_of_layers_change_no_number(options, stages, on_one_device):
    plan = resolve(Placement(devices=tuple(jax.devices()[:3]), **options), CONFIG.n_layers)
    place = place_params(CONFIG, None, plan)
    leaves = [place(path, np.asarray(leaf)) for path, leaf in by_path(PARAMS).items()]
    params = jax.tree.unflatten(jax.tree.structure(PARAMS), leaves)
    logits, rows, session = run(params, plan)
    np.testing.assert_allclose(logits, on_one_device[0], atol=1e-5)
    assert rows == on_one_device[1]
    assert session.timings.shifts == on_one_device[2].timings.shifts > 0
    assert session.cache.stages == stages
    assert session.temporary_bytes == 0
    session.warm_up(sampling_params(2, temperature=0.0), longest_prompt=8)
    assert session.temporary_bytes > 2 * 8 * CONFIG.d_ff * 4  # at least one product of the feed-forward layer
    for index, layer in enumerate(params.layers):
        home = {plan.devices[plan.layer_devices[index]]}
        assert layer.wq.devices() == session.cache.k[index].devices() == home
        assert layer.wq.sharding.memory_kind == ("device" if plan.layer_on_gpu(index) else "pinned_host")
    assert params.embedding.devices() == session.cache.lengths.devices() == {plan.devices[plan.main]}
