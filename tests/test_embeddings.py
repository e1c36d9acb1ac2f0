"""Embeddings against the float64 definition over the model's hidden states, alone and together, and the command."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import llama_jax
from llama_jax.cli import options
from llama_jax.cli.main import main
from llama_jax.embeddings import embed_texts
from llama_jax.errors import ArgumentError
from llama_jax.model import hidden_states
from tests.tiny import tiny_config, tiny_params

CONFIG = tiny_config(n_layers=1)
TEXTS = [[5, 7, 9], [1] * 17, [4], [8, 8, 2, 1], [3, 5]]
LIMITS = dict(n_ctx=64, n_batch=32)


@pytest.fixture(scope="module")
def params():
    return tiny_params(CONFIG)


@pytest.fixture(scope="module")
def states(params):
    run = jax.jit(lambda tokens: hidden_states(params, tokens, CONFIG)[0][0])
    padded = [jnp.asarray([text + [0] * (17 - len(text))], jnp.int32) for text in TEXTS]  # no token sees a later one
    return [np.asarray(run(tokens), np.float64)[: len(text)] for tokens, text in zip(padded, TEXTS, strict=True)]


def definition(x, pooling, normalize):
    if pooling == "none":
        return x
    x = x.mean(0) if pooling == "mean" else x[-1]
    return x / np.sqrt((x * x).sum()) if normalize else x


@pytest.mark.parametrize(("pooling", "normalize"), [("none", True), ("mean", True), ("mean", False), ("last", True)])
def test_each_text_is_pooled_as_defined(params, states, pooling, normalize):
    vectors = list(embed_texts(params, CONFIG, TEXTS, pooling=pooling, normalize=normalize, **LIMITS))
    assert len(vectors) == len(TEXTS)
    for x, vector in zip(states, vectors, strict=True):
        assert vector.dtype == np.float32
        expected = definition(x, pooling, normalize)
        assert vector.shape == expected.shape
        np.testing.assert_allclose(vector, expected, atol=1e-5)


def test_layers_on_several_devices_give_the_same():
    config = tiny_config(n_layers=2)
    params = tiny_params(config)
    first, second = jax.devices()[:2]
    layers = (jax.device_put(params.layers[0], second), jax.device_put(params.layers[1], first))
    spread = jax.device_put(params, first).replace(layers=layers)
    expected = list(embed_texts(params, config, TEXTS[:2], pooling="mean", **LIMITS))
    got = list(embed_texts(spread, config, TEXTS[:2], pooling="mean", **LIMITS))
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("texts", "options", "sentence"),
    [
        ([[1], []], {}, r"Text 1 has 0 tokens; it must have 1 to 64 \(-c / n_ctx\)"),
        ([[1] * 65], {}, "Text 0 has 65 tokens; it must have 1 to 64"),
        ([[101]], {}, "holds the token id 101; ids go from 0 to 100"),
        ([[1]], dict(pooling="cls"), "pooling is 'cls'; it must be one of none, mean, last"),
    ],
)
def test_wrong_texts_are_refused(params, texts, options, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        next(embed_texts(params, CONFIG, texts, **(LIMITS | options)))


@pytest.fixture(scope="module")
def shipped():
    return llama_jax.load(n_ctx=64)


def test_a_model_embeds_its_texts(shipped):
    texts = ["My lord", "My lord", "A pox upon it"]
    a, b, c = shipped.embed(texts, pooling="mean")
    np.testing.assert_array_equal(a, b)
    assert np.linalg.norm(a) == pytest.approx(1.0, abs=1e-5)
    assert a @ c < 0.99
    with pytest.raises(ArgumentError, match="texts is 'one'; it must be a list of texts"):
        shipped.embed("one")


def test_the_command_prints_vectors(shipped, capsys, monkeypatch):
    monkeypatch.setattr(options, "cache_compiled_programs", lambda: None)
    expected = shipped.embed(["My lord", "Sir"])
    arguments = ["embed", "-p", r"My lord\nSir", "-c", "64"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    np.testing.assert_allclose([[float(x) for x in line.split()] for line in lines], expected, rtol=1e-5)
    assert main([*arguments, "--embd-output-format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose([item["embedding"] for item in answer["data"]], expected, rtol=1e-6)
    n_tokens = sum(len(shipped.tokenizer.encode(text)) for text in ("My lord", "Sir"))
    assert answer["usage"] == dict(prompt_tokens=n_tokens, total_tokens=n_tokens)
    assert main([*arguments, "--pooling", "none", "--embd-output-format", "array"]) == 0
    first, _ = json.loads(capsys.readouterr().out)
    assert np.shape(first) == (len(shipped.tokenizer.encode("My lord")), shipped.config.d_model)
    assert main(["embed", "-p", "x", "--embd-separator", ""]) == 1
    assert "--embd-separator is ''; it must be at least one character." in capsys.readouterr().err
