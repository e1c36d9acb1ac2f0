import dataclasses

import pytest

from llama_jax import PRESETS, ArgumentError, LlamaConfig, RopeScaling
from tests.tiny import tiny_config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"d_model": 2**40}, "2147483647"),
        ({"n_layers": True}, "n_layers is True"),
        ({"n_heads": 3}, "multiple of n_kv_heads, 2"),
        ({"head_dim": 7}, "head_dim is 7; it must be even"),
        ({"norm_epsilon": 0.0}, "norm_epsilon is 0.0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"rope_divisors": (1.0, 2.0)}, "6 finite numbers"),
        ({"rope_divisors": (1.0,) * 6, "rope_scaling": RopeScaling(kind="linear", factor=2.0)}, "beside rope_divisors"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(changes, words):
    with pytest.raises(ArgumentError, match=words):
        tiny_config(**changes)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "dynamic"}, "'dynamic'.*'yarn'"),
        ({"kind": "linear", "factor": 0.0}, "factor is 0.0"),
        ({"kind": "llama3", "factor": 8.0}, "original_context_length is 0"),
        ({"kind": "llama3", "original_context_length": 8, "high_freq_factor": 1.0}, "above low_freq_factor"),
        ({"kind": "yarn", "original_context_length": 8, "beta_fast": 0.5}, "above beta_slow"),
        ({"kind": "yarn", "original_context_length": 8, "attention_factor": -1.0}, "attention_factor is -1.0"),
    ],
)
def test_a_wrong_scaling_is_named(fields, words):
    with pytest.raises(ArgumentError, match=words):
        RopeScaling(**fields)


def test_a_config_is_a_key():
    assert hash(tiny_config()) == hash(tiny_config())
    assert tiny_config() != tiny_config(n_layers=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_config().n_layers = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as the models' cards and files state them
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("tinyllama-1.1b", 1_100_048_384),
        ("smollm2-135m", 134_515_008),
        ("mistral-7b", 7_241_732_096),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, parameters: int):
    config = PRESETS[name]
    assert isinstance(config, LlamaConfig)
    assert config.n_parameters == parameters


def test_cache_bytes_per_token():
    # 32 layers x (key + value) x 8 heads x 128 x 2 bytes = 128 KiB
    assert PRESETS["llama-3-8b"].kv_bytes_per_token(2) == 131072
