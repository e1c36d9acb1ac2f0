"""Constants from published config.json files and GGUF metadata, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from llama_jax.config import PRESETS, RopeScaling
from llama_jax.errors import ArgumentError, FormatError
from llama_jax.formats.config_gguf import config_from_gguf, gguf_metadata, llama3_divisors
from llama_jax.formats.config_hf import config_from_hf, hf_config
from llama_jax.formats.gguf import GGUFFile

from .conftest import tiny_config

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
LLAMA3 = LLAMA | {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
LLAMA31 = LLAMA3 | {
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
LLAMA32 = LLAMA31 | {"tie_word_embeddings": True, "rope_scaling": LLAMA31["rope_scaling"] | {"factor": 32.0}}


def sizes(hidden, feed_forward, layers, heads, **more):
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return dict(zip(names, (hidden, feed_forward, layers, heads), strict=True)) | more


# The keys that matter of the config.json files as published.
PUBLISHED = {
    "llama-1-7b": LLAMA
    | sizes(4096, 11008, 32, 32)
    | {"vocab_size": 32000, "rms_norm_eps": 1e-06, "max_position_embeddings": 2048},
    "llama-2-7b": LLAMA
    | sizes(4096, 11008, 32, 32, num_key_value_heads=32)
    | {"vocab_size": 32000, "rms_norm_eps": 1e-05, "max_position_embeddings": 4096, "rope_scaling": None},
    "llama-2-70b": LLAMA
    | sizes(8192, 28672, 80, 64, num_key_value_heads=8)
    | {"vocab_size": 32000, "rms_norm_eps": 1e-05, "max_position_embeddings": 4096, "pretraining_tp": 1},
    "llama-3-8b": LLAMA3 | sizes(4096, 14336, 32, 32, max_position_embeddings=8192, rope_scaling=None),
    "llama-3.1-8b": LLAMA31 | sizes(4096, 14336, 32, 32),
    "llama-3.1-405b": LLAMA31 | sizes(16384, 53248, 126, 128),
    "llama-3.2-1b": LLAMA32 | sizes(2048, 8192, 16, 32, head_dim=64),
    "llama-3.2-3b": LLAMA32 | sizes(3072, 8192, 28, 24, head_dim=128),
    "tinyllama-1.1b": LLAMA
    | sizes(2048, 5632, 22, 32, num_key_value_heads=4)
    | {"vocab_size": 32000, "rms_norm_eps": 1e-05, "max_position_embeddings": 2048, "rope_scaling": None},
    "smollm2-135m": LLAMA
    | sizes(576, 1536, 30, 9, num_key_value_heads=3)
    | {"vocab_size": 49152, "rms_norm_eps": 1e-05, "max_position_embeddings": 8192, "rope_theta": 100000}
    | {"tie_word_embeddings": True, "rope_interleaved": False, "rope_scaling": None, "attention_bias": False},
    "mistral-7b": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu"}
    | sizes(4096, 14336, 32, 32, num_key_value_heads=8, sliding_window=4096)
    | {"vocab_size": 32000, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "max_position_embeddings": 32768},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_files_give_the_presets(name):
    assert config_from_hf(PUBLISHED[name]) == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_config_json(name):
    assert config_from_hf(hf_config(PRESETS[name])) == PRESETS[name]


def _through_float32(metadata):
    return {k: float(np.float32(v)) if isinstance(v, float) else v for k, v in metadata.items()}


def _shapes(config):
    tied = {} if config.tied_embeddings else {"output.weight": ()}
    return {"token_embd.weight": (config.vocab_size, config.d_model)} | tied


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_gguf_metadata(name):
    config = PRESETS[name]
    divisors = llama3_divisors(config) if config.rope_scaling.kind == "llama3" else None
    result = config_from_gguf(_through_float32(gguf_metadata(config)), _shapes(config), divisors)
    if divisors is not None:
        assert result.rope_divisors == tuple(map(float, divisors))
        # config.json recognises Llama 3.1's constants again.
        result = config_from_hf(hf_config(result))
    assert result == config


def test_real_vocabulary_files(vocabularies):
    for name, preset in (("llama-spm", "llama-2-7b"), ("llama-bpe", "llama-3-8b")):
        with GGUFFile(vocabularies / f"ggml-vocab-{name}.gguf") as file:
            assert config_from_gguf(file.metadata, {}) == PRESETS[preset]


def test_llama3_divisors_by_the_definition():
    config = PRESETS["llama-3.1-8b"]
    divisors = llama3_divisors(config)
    assert divisors.dtype == np.float32
    for i in range(64):
        wavelength = 2 * math.pi * 500000.0 ** (2 * i / 128)
        if wavelength < 8192 / 4:
            expected = 1.0
        elif wavelength > 8192 / 1:
            expected = 8.0
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = 1 / ((1 - smooth) / 8 + smooth)
        assert divisors[i] == pytest.approx(expected, rel=1e-6)
    assert sorted(set(divisors))[0] == 1.0
    assert divisors[-1] == 8.0


BASE = PUBLISHED["llama-2-7b"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def _yarn(**changes):
    return RopeScaling(**(dict(kind="yarn", factor=4.0, original_context_length=1024) | changes))


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeScaling(kind="linear", factor=2.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, RopeScaling(kind="linear", factor=2.0)),
        ({"rope_scaling": {"type": "linear", "factor": 1.0}}, RopeScaling()),
        ({"rope_scaling": {"rope_type": "default"}}, RopeScaling()),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}, "rope_theta": None}, RopeScaling()),
        ({"rope_scaling": YARN}, _yarn()),
        ({"rope_scaling": YARN | {"attention_factor": 0.5}}, _yarn(attention_factor=0.5)),
        ({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, _yarn(attention_factor=1.0)),
        ({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.0, "truncate": True}}, _yarn()),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, _yarn(original_context_length=4096)),
        ({"rope_scaling": YARN | {"factor": None}}, _yarn()),  # 4096 / 1024
        ({"rope_scaling": YARN | {"factor": 1.0}}, _yarn(factor=1.0, attention_factor=1.0)),
        ({"rope_scaling": YARN | {"beta_fast": 16, "beta_slow": 2}}, _yarn(beta_fast=16.0, beta_slow=2.0)),
    ],
)
def test_rope_scaling_of_config_json(rope, expected):
    config = config_from_hf(BASE | rope)
    assert config.rope_scaling == expected
    assert config.rope_theta == (7e5 if "rope_parameters" in rope else 1e4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2"}, "model_type is 'qwen2'; it must be 'llama' or 'mistral'"),
        ({"model_type": None, "architectures": None}, "model_type is None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be 'silu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is .*gptq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"hidden_size": None}, "required key hidden_size is missing"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"hidden_size": 4097}, "num_attention_heads is 32; it must be a divisor"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_key_value_heads": 5}, "n_heads is 32; it must be a multiple of n_kv_heads, 5"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "factor is 1000"),
        ({"layer_types": 5}, "layer_types is 5"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'; it must be one of default, linear"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "twist": 1}}, "rope_scaling.twist is not a key"),
        ({"rope_scaling": YARN | {"truncate": False}}, "rope_scaling.truncate is False"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast is 0.5"),
    ],
)
def test_config_json_that_is_refused(changes, message):
    with pytest.raises(FormatError, match=message) as caught:
        config_from_hf(BASE | changes, "folder/config.json")
    assert str(caught.value).startswith("folder/config.json: ")


@pytest.mark.parametrize("name", ["\x1b[2J\nevil", "long" * 9999])
def test_errors_are_short_and_without_control_characters(name):
    def error_of(function, *arguments):
        with pytest.raises(FormatError) as caught:
            function(*arguments)
        return str(caught.value)

    plain = gguf_metadata(PRESETS["llama-2-7b"])
    for message in (
        error_of(config_from_hf, BASE | {"model_type": name}),
        error_of(config_from_hf, BASE | {"model_type": [name] * 99}),
        error_of(config_from_hf, BASE | {"hidden_act": {name: name}}),
        error_of(config_from_hf, BASE | {"rope_scaling": {"type": "linear", "factor": 2.0, name: 1}}),
        error_of(config_from_hf, BASE | {"vocab_size": name}),
        error_of(config_from_gguf, plain | {"general.architecture": name}, {}),
        error_of(config_from_gguf, plain | {f"llama.{name}": 1}, {}),
        error_of(config_from_gguf, plain | {"llama.rope.scaling.type": [name] * 99}, {}),
    ):
        assert message.isprintable()
        assert len(message) < 300


def test_defaults_of_config_json():
    required = sizes(64, 128, 2, 4) | {"vocab_size": 96}
    llama = config_from_hf(required | {"architectures": ["LlamaForCausalLM"]})
    assert (llama.n_kv_heads, llama.norm_epsilon, llama.context_length, llama.sliding_window) == (4, 1e-6, 2048, None)
    assert (llama.rope_theta, llama.tied_embeddings, llama.head_dim) == (10000.0, False, 16)
    mistral = config_from_hf(required | {"model_type": "mistral", "num_attention_heads": 16, "head_dim": None})
    assert (mistral.n_kv_heads, mistral.sliding_window, mistral.context_length) == (8, 4096, 131072)
    null = config_from_hf(required | {"model_type": "mistral", "num_key_value_heads": None, "sliding_window": None})
    assert (null.n_kv_heads, null.sliding_window) == (4, None)


META = gguf_metadata(tiny_config())
SHAPES = _shapes(tiny_config())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"vocab_size": None, "attention.key_length": None, "attention.value_length": None}, {}),
        ({"rope.dimension_count": None, "rope.freq_base": None, "attention.head_count_kv": 4}, {"n_kv_heads": 4}),
        ({"attention.head_count_kv": None}, {"n_kv_heads": 4}),
        ({"attention.head_count_kv": np.array([2, 2], np.int32)}, {}),
        ({"feed_forward_length": np.array([128, 128], np.uint32)}, {}),
        ({"attention.sliding_window": 0}, {}),
        ({"attention.sliding_window": 64}, {"sliding_window": 64}),
        ({"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32}, {"head_dim": 32}),
        ({"expert_count": 0, "attention.causal": True, "rope.scaling.finetuned": False}, {}),
        ({"rope.scaling.factor": 2.0}, {"rope_scaling": RopeScaling(kind="linear", factor=2.0)}),
        ({"rope.scale_linear": 4.0}, {"rope_scaling": RopeScaling(kind="linear", factor=4.0)}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, {}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, {}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
            {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_context_length=128)},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5},
            {
                "rope_scaling": RopeScaling(
                    kind="yarn",
                    factor=4.0,
                    original_context_length=512,
                    attention_factor=0.5 * (1 + 0.1 * math.log(4.0)),
                )
            },
        ),
    ],
)
def test_gguf_metadata(changes, expected):
    metadata = META | {f"llama.{key}": value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    assert config_from_gguf(metadata, SHAPES) == dataclasses.replace(tiny_config(), **expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma"}, "general.architecture is 'gemma'; only 'llama'"),
        ({"general.architecture": None}, "general.architecture is None"),
        ({"llama.block_count": None}, "required key llama.block_count is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
        ({"llama.embedding_length": 2**63}, "embedding_length is 9223372036854775808"),
        ({"llama.embedding_length": "64"}, "embedding_length is '64'"),
        ({"llama.embedding_length": 0, "llama.attention.head_count": 0}, "d_model is 0"),
        ({"llama.attention.head_count": 3, "llama.attention.key_length": None}, "head_count is 3; .*divisor"),
        ({"llama.attention.head_count_kv": 0}, "n_kv_heads is 0"),
        ({"llama.attention.head_count_kv": np.array([2, 4], np.int32)}, r"\[2, 4\]; it must be one number"),
        ({"llama.attention.value_length": 32}, "value_length is 32; it must be the head width, 16"),
        ({"llama.rope.dimension_count": 8}, "dimension_count is 8"),
        ({"llama.expert_count": 8}, "expert_count is 8; it must be 0"),
        ({"llama.attention.causal": False}, "attention.causal is False"),
        ({"llama.logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"llama.attention.novelty": 1}, "llama.attention.novelty is not known"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'; it must be 'none', 'linear' or 'yarn'"),
        ({"llama.rope.scaling.factor": math.inf}, "factor is inf"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": -4.0}, "-4.0"),
        ({"llama.rope.freq_base": math.nan}, "freq_base is nan"),
        ({"general.architecture": np.array([1, 2])}, "general.architecture is "),
        ({"llama.rope.scaling.type": np.array([1, 2])}, "scaling.type is "),
        ({"llama.attention.causal": np.array([True, False])}, "causal is "),
    ],
)
def test_gguf_metadata_that_is_refused(changes, message):
    metadata = {key: value for key, value in (META | changes).items() if value is not None}
    with pytest.raises(FormatError, match=message) as caught:
        config_from_gguf(metadata, SHAPES, file="tiny.gguf")
    assert str(caught.value).startswith("tiny.gguf: ")


def test_rope_divisors():
    def with_divisors(values, **more):
        metadata = META | {f"llama.{k}": v for k, v in more.items()}
        return config_from_gguf(metadata, SHAPES, np.array(values, np.float32))

    assert with_divisors([1] * 8) == tiny_config()
    assert with_divisors(range(1, 9)).rope_divisors == tuple(map(float, range(1, 9)))
    linear = with_divisors(range(1, 9), **{"rope.scaling.factor": 2.0})
    assert linear.rope_divisors == tuple(map(float, range(2, 18, 2)))
    assert linear.rope_scaling.kind == "none"
    with pytest.raises(FormatError, match="8 finite numbers"):
        with_divisors([2, 1, 1])
    with pytest.raises(ArgumentError, match=r"config\.json cannot hold them"):
        hf_config(with_divisors(range(1, 9)))
    assert hf_config(with_divisors([4] * 8))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(kind="linear", factor=2.0),
        RopeScaling(kind="yarn", factor=4.0, original_context_length=128, beta_fast=16.0, beta_slow=2.0),
        RopeScaling(kind="yarn", factor=4.0, original_context_length=128, attention_factor=0.75),
    ],
)
def test_rope_scaling_survives_both_formats(scaling):
    config = tiny_config(rope_scaling=scaling, sliding_window=100)
    assert config_from_hf(hf_config(config)) == config
    back = config_from_gguf(_through_float32(gguf_metadata(config)), SHAPES)
    if scaling.attention_factor is not None:
        assert back.rope_scaling.attention_factor == pytest.approx(0.75, rel=1e-6)
        back = dataclasses.replace(
            back, rope_scaling=dataclasses.replace(back.rope_scaling, attention_factor=scaling.attention_factor)
        )
    assert back == config
