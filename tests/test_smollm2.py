"""A real model against transformers in float32, from reference values computed once."""

import json
from functools import partial
from itertools import chain
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import llama_jax
from llama_jax import hidden_states, sampling_params, token_losses
from llama_jax.formats.load import load_params, open_model
from llama_jax.formats.save import save_hf
from llama_jax.perplexity import perplexity

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reference(reference_folder):
    return json.loads((reference_folder / "smollm2_hf_f32.json").read_text())


def write_tokenizer_json(folder, file) -> None:
    """The file's vocabulary as Hugging Face's tokenizers keep it."""
    tokens, types = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.token_type"]
    data = json.loads(file.tokenizer()._library.to_str())
    data["model"]["vocab"] = {text: i for i, text in enumerate(tokens)}
    data["decoder"] = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    data["added_tokens"] = [dict(id=i, content=tokens[i], **flags) for i in np.flatnonzero(types == 3).tolist()]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    settings = dict(bos_token="<|im_start|>", eos_token="<|im_end|>", add_bos_token=False)
    settings["chat_template"] = file.metadata["tokenizer.chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module", params=["gguf", "folder"])
def model(request, smollm2_path, tmp_path_factory):
    """The same weights and vocabulary from the GGUF file, and from a Hugging Face folder written from it."""
    if request.param == "gguf":
        return llama_jax.load(smollm2_path, dtype="float32", n_ctx=256)
    folder = tmp_path_factory.mktemp("smollm2")
    with open_model(smollm2_path) as file:
        save_hf(folder, load_params(file, np.float32, lambda path, array: jnp.asarray(array)), file.config)
        write_tokenizer_json(folder, file)
    return llama_jax.load(folder, dtype="float32", n_ctx=256)


def test_ids(model, reference):
    for case in reference:
        assert model.tokenizer.encode(case["prompt"]) == case["ids"]


@pytest.mark.parametrize("n_batch", [512, 3])
def test_logits_and_losses(model, reference, n_batch):
    for case in reference:
        session = llama_jax.Session(model.params, model.config, capacity=64, n_batch=n_batch)
        logits = np.asarray(session.prefill([case["ids"]]))[0]
        ids, values = zip(*case["last_top20"], strict=True)
        np.testing.assert_allclose(logits[list(ids)], values, atol=2e-3)
        assert np.log(np.exp(logits.astype(np.float64)).sum()) == pytest.approx(case["last_logsumexp"], abs=2e-3)


def test_token_losses(model, reference):
    @partial(jax.jit, static_argnames="config")
    def losses(params, tokens, config):
        x, _ = hidden_states(params, tokens, config)
        return token_losses(params, x[:, :-1], tokens[:, 1:])

    for case in reference:
        got = losses(model.params, jnp.asarray([case["ids"]], jnp.int32), model.config)
        np.testing.assert_allclose(got[0], case["nll"], atol=1e-3)


@pytest.mark.parametrize("n_batch", [512, 3])
def test_greedy_tokens(model, reference, n_batch):
    compared = 0
    for case in reference:
        session = llama_jax.Session(model.params, model.config, capacity=64, n_batch=n_batch)
        new = session.generate([case["ids"]], sampling_params(temperature=0.0), max_tokens=40)
        got = list(chain.from_iterable(tokens for (tokens,) in new))
        sure = next((i for i, margin in enumerate(case["margins"]) if margin < 0.05), 40)
        assert got[:sure] == case["greedy_ids"][:sure]
        compared += sure
    assert compared >= 40


def test_text(model):
    assert model.generate("The capital of France is", max_tokens=16, temperature=0.0).startswith(" Paris.")
    chunked = llama_jax.Llama(model.config, model.params, model.tokenizer, n_ctx=256, n_batch=3)
    answer = dict(max_tokens=24, temperature=0.0)
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    assert "Paris" in model.chat(messages, **answer)
    assert model.chat(messages, **answer) == chunked.chat(messages, **answer)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_greedy_tokens_in_bfloat16(smollm2_path, reference, packed):
    """The reference's own continuation is given, and what is likeliest next compared wherever the reference is sure."""
    model = llama_jax.load(smollm2_path, n_ctx=256, packed=packed)
    assert model.params.embedding.dtype == jnp.bfloat16
    compared = 0
    for case in reference:
        session = model.new_session()
        for i, (expected, margin) in enumerate(zip(case["greedy_ids"], case["margins"], strict=True)):
            logits = session.prefill([case["ids"] + case["greedy_ids"][:i]])
            if margin >= 0.25:
                assert int(jnp.argmax(logits[0])) == expected
                compared += 1
    assert compared >= 80
    assert model.generate("The capital of France is", max_tokens=16, temperature=0.0).startswith(" Paris")


@pytest.mark.gpu
def test_perplexity_of_packed_weights_is_that_of_float32_on_the_cpu(smollm2_path):
    text = (Path(__file__).parent.parent / "LICENSE").read_text()
    packed = llama_jax.load(smollm2_path, packed=True)
    ids = packed.tokenizer.encode(text)
    cpu = jax.devices("cpu")[0]
    with open_model(smollm2_path) as file, jax.default_device(cpu):
        exact = load_params(file, np.float32, lambda path, array: jax.device_put(array, cpu))
        *_, expected = perplexity(exact, file.config, ids)
    *_, got = perplexity(packed.params, packed.config, ids)
    assert expected.tokens >= 1000
    assert got.perplexity == pytest.approx(expected.perplexity, rel=0.005)
