"""On two or more real GPUs: float32 models give the text of one GPU, however they are divided."""

import os

os.environ["NCCL_NVLS_ENABLE"] = "0"  # read when NCCL starts, by the first collective

import jax
import numpy as np
import pytest

from llama_jax import Placement, device_mesh, load
from tests.placement.test_sharding import ODD, placed
from tests.placement.test_sharding import run as run_odd
from tests.tiny import tiny_params

pytestmark = pytest.mark.gpu

PROMPTS = {"shipped": "KING HENRY.\n", "SmolLM2": "The three primary colours are"}


@pytest.fixture(scope="module", autouse=True)
def several_gpus():
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.fixture(scope="module", params=PROMPTS)
def model(request):
    """The prompt, the path, and what one GPU makes of them."""
    path = request.getfixturevalue("smollm2_path") if request.param == "SmolLM2" else None
    prompt = PROMPTS[request.param]
    return prompt, path, *run(prompt, path, placement=Placement(devices=jax.devices()[:1]))[:2]


def run(prompt, path, **options):
    llama = load(path, dtype="float32", packed=False, n_ctx=128, n_batch=32, **options)
    logits = np.asarray(llama.new_session().prefill([llama.tokenize_prompt(prompt)]))
    return logits, llama.generate(prompt, max_tokens=40, temperature=0.0), llama


def check(model, **options):
    prompt, path, logits, text = model
    new_logits, new_text, llama = run(prompt, path, **options)
    largest = np.abs(logits).max()
    print(f"largest difference {np.abs(new_logits - logits).max():.2e} of {largest:.1f}")
    np.testing.assert_allclose(new_logits, logits, atol=1e-4 * largest)
    assert new_text == text
    return llama


def devices_of(tree):
    return {device for leaf in jax.tree.leaves(tree) for device in leaf.devices()}


@pytest.mark.parametrize(
    "sizes", [dict(tensor=2), dict(tensor=4), dict(tensor=8), dict(data=2, tensor=2), dict(fsdp=2)], ids=str
)
def test_meshes(sizes, model):
    n = int(np.prod(list(sizes.values())))
    if n > jax.device_count():
        pytest.skip(f"needs {n} GPUs")
    assert devices_of(check(model, mesh=device_mesh(**sizes)).params) == set(jax.devices()[:n])


def test_shares_of_3_and_1(model):
    llama = check(model, placement=Placement(tensor_split=(3, 1), devices=jax.devices()[:2]))
    on = [devices_of(layer) for layer in llama.params.layers]
    first, second = ({device} for device in jax.devices()[:2])
    assert on == [first] * on.count(first) + [second] * on.count(second)
    assert abs(on.count(first) - 0.75 * len(on)) <= 1


def test_a_share_of_0_leaves_a_gpu_out(model):
    llama = check(model, placement=Placement(tensor_split=(0, 1), devices=jax.devices()[:2]))
    assert devices_of(llama.params) == {jax.devices()[1]}


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_a_vocabulary_of_32001(n):
    if n > jax.device_count():
        pytest.skip(f"needs {n} GPUs")
    params = tiny_params(ODD)
    logits, tokens, _ = run_odd(params, ODD)
    new_logits, new_tokens, cache = run_odd(placed(params, ODD, device_mesh(tensor=n)), ODD, device_mesh(tensor=n))
    assert new_logits.shape == (5, 32001)
    np.testing.assert_allclose(new_logits, logits, atol=1e-4 * np.abs(logits).max())
    np.testing.assert_array_equal(new_tokens, tokens)
    assert devices_of(cache) == set(jax.devices()[:n])
