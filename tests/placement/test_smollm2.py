"""A real model on meshes of fake devices: logits and greedy text as on one device."""

import jax
import numpy as np
import pytest

import llama_jax
from llama_jax import Placement, device_mesh

pytestmark = pytest.mark.slow

PROMPT = "The three primary colours are"
OPTIONS = [
    dict(mesh=dict(tensor=2)),
    dict(mesh=dict(tensor=3)),  # of 9 query and 3 key/value heads
    dict(mesh=dict(tensor=4)),
    dict(mesh=dict(tensor=8)),
    dict(mesh=dict(data=2, tensor=4)),
    dict(placement=dict(tensor_split=(3, 1), n=2)),
    dict(placement=dict(gpu_layers=10, low_vram=True, n=1)),
]


def run(path, **options):
    model = llama_jax.load(path, dtype="float32", n_ctx=64, n_batch=16, **options)
    logits = np.asarray(model.new_session().prefill([model.tokenize_prompt(PROMPT)]))
    return logits, model.generate(PROMPT, max_tokens=16, temperature=0.0)


@pytest.fixture(scope="module")
def on_one_device(smollm2_path):
    return run(smollm2_path)


@pytest.mark.parametrize("options", OPTIONS)
def test_smollm2(options, smollm2_path, on_one_device):
    if "mesh" in options:
        options = dict(mesh=device_mesh(**options["mesh"]))
    else:
        given = dict(options["placement"])
        options = dict(placement=Placement(devices=jax.devices()[: given.pop("n")], **given))
    logits, text = run(smollm2_path, **options)
    largest = np.abs(on_one_device[0]).max()
    print(f"largest difference {np.abs(logits - on_one_device[0]).max():.2e} of {largest:.1f}")
    np.testing.assert_allclose(logits, on_one_device[0], atol=1e-5 * largest)
    assert text == on_one_device[1]
