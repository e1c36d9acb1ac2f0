"""`LlamaConfig` from a Hugging Face config.json of type `llama` or `mistral`, and back.

The meaning and the defaults of the keys are those of transformers' LlamaConfig, MistralConfig and rope utilities. Keys
that those do not read are ignored, since they change nothing there either.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from llama_jax.config import LlamaConfig, RopeScaling, is_finite
from llama_jax.errors import ArgumentError, FormatError, plain, shown
from llama_jax.formats.config_gguf import llama3_divisors

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
_DEFAULT_CONTEXT = {"llama": 2048, "mistral": 131072}
_DEFAULT_WINDOW = {"llama": None, "mistral": 4096}

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "logits_scaling": (None, 1),
    "mlp_bias": (False, None),
    "no_rope_layers": (None, []),
    "num_local_experts": (None, 0, 1),
    "partial_rotary_factor": (None, 1),
    "qk_norm": (None, False),
    "quantization_config": (None,),
    "residual_multiplier": (None, 1),
    "rope_interleaved": (None, False),
    "use_qk_norm": (None, False),
}
"""Keys that would change the mathematics, with the values under which they do not."""

_ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    },
}  # fmt: skip
_ROPE_KEYS_OF_ALL = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"}


class _Reader:
    """Typed access to the keys of a JSON object, with errors that name file, key and value."""

    def __init__(self, values: Mapping[str, Any], file: str, place: str = "") -> None:
        self.values = values
        self.file = file
        self.place = place

    def fail(self, key: str, allowed: str) -> FormatError:
        return FormatError(f"{self.file}: {self.place}{key} is {shown(self.values.get(key))}; it must be {allowed}.")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.fail(key, "an integer from 1 to 2147483647")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not is_finite(value):
            raise self.fail(key, "a finite number")
        return float(value)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise FormatError(f"{self.file}: the required key {self.place}{key} is missing.")
        return value


def config_from_hf(config: Mapping[str, Any], file: str = "config.json") -> LlamaConfig:
    """The constants of a model.

    Args:
      config: the parsed config.json.
      file: the name to use in errors.

    Raises:
      FormatError: the model type is not llama or mistral, a required key is missing, or a key asks for something that
        this package does not compute.
    """
    kind = _model_type(config, file)
    read = _Reader(config, file)
    for key, allowed in _NEUTRAL.items():
        if key in config and config[key] not in allowed:
            raise read.fail(key, " or ".join(map(repr, allowed)))
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(layer_type != "full_attention" for layer_type in layer_types):
        raise read.fail("layer_types", "absent, or 'full_attention' for every layer")
    if kind == "llama" and config.get("sliding_window") is not None:
        raise read.fail("sliding_window", "null or absent for model type 'llama'")
    window = config.get("sliding_window", _DEFAULT_WINDOW[kind])
    d_model = read.integer("hidden_size")
    n_heads = read.integer("num_attention_heads")
    if config.get("head_dim") is None and d_model % n_heads:
        raise read.fail("num_attention_heads", f"a divisor of hidden_size, {d_model}, where head_dim is absent")
    context_length = read.integer("max_position_embeddings", _DEFAULT_CONTEXT[kind])
    theta, scaling = _rope(config, context_length, file)
    # Absent is not null here: MistralConfig's default is 8, and null means as many as query heads.
    kv_heads = 8 if kind == "mistral" and "num_key_value_heads" not in config else n_heads
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise read.fail("tie_word_embeddings", "true or false")
    try:
        return LlamaConfig(
            vocab_size=read.integer("vocab_size"),
            d_model=d_model,
            d_ff=read.integer("intermediate_size"),
            n_layers=read.integer("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=read.integer("num_key_value_heads", kv_heads),
            head_dim=read.integer("head_dim", d_model // n_heads),
            context_length=context_length,
            norm_epsilon=read.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tied_embeddings=tied,
            sliding_window=None if window is None else read.integer("sliding_window", window),
        )
    except ArgumentError as error:
        raise FormatError(f"{file}: {error}") from None


def _model_type(config: Mapping[str, Any], file: str) -> str:
    kind = config.get("model_type")
    architectures = config.get("architectures") or []
    if kind is None:
        kind = next((k for k, name in _ARCHITECTURES.items() if architectures == [name]), None)
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        raise FormatError(f"{file}: model_type is {shown(kind)}; it must be 'llama' or 'mistral'.")
    if architectures and architectures != [_ARCHITECTURES[kind]]:
        raise FormatError(
            f"{file}: architectures is {shown(architectures)}; it must be [{shown(_ARCHITECTURES[kind])}]."
        )
    return kind


def _rope(config: Mapping[str, Any], context_length: int, file: str) -> tuple[float, RopeScaling]:
    """Base and scaling from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    place = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(place) or {}
    if not isinstance(rope, Mapping):
        raise FormatError(f"{file}: {place} is {shown(rope)}; it must be an object or null.")
    read = _Reader(rope, file, f"{place}.")
    theta = read.number("rope_theta", _Reader(config, file).number("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise FormatError(
            f"{file}: the rope type in {place} is {shown(kind)}; it must be one of {', '.join(_ROPE_KEYS)}."
        )
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise read.fail("partial_rotary_factor", "1 or absent")
    if kind == "default":
        return theta, RopeScaling()
    for key in rope:
        if key not in _ROPE_KEYS[kind] | _ROPE_KEYS_OF_ALL:
            raise FormatError(f"{file}: {place}.{plain(key)} is not a key of rope type {shown(kind)}.")
    try:
        return theta, _scaling(kind, read, config, context_length)
    except ArgumentError as error:
        raise FormatError(f"{file}: {error}") from None


def _scaling(kind: str, read: _Reader, config: Mapping[str, Any], context_length: int) -> RopeScaling:
    if kind == "linear":
        factor = read.number("factor")
        return RopeScaling() if factor == 1.0 else RopeScaling(kind="linear", factor=factor)
    if config.get("original_max_position_embeddings") is not None:
        original = _Reader(config, read.file).integer("original_max_position_embeddings")
    else:
        original = read.integer("original_max_position_embeddings", context_length)
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=read.number("factor"),
            original_context_length=original,
            low_freq_factor=read.number("low_freq_factor"),
            high_freq_factor=read.number("high_freq_factor"),
        )
    if read.values.get("truncate") not in (None, True):
        raise read.fail("truncate", "true or absent")
    factor = read.number("factor", context_length / original)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context_length=original,
        beta_fast=read.number("beta_fast", 32.0) or 32.0,
        beta_slow=read.number("beta_slow", 1.0) or 1.0,
        attention_factor=_yarn_attention_factor(read, factor),
    )


def _yarn_attention_factor(read: _Reader, factor: float) -> float | None:
    """What scales queries and keys, None for the paper's 0.1 ln(factor) + 1."""
    if read.values.get("attention_factor") is not None:
        return read.number("attention_factor")
    mscale, all_dim = read.number("mscale", 0.0), read.number("mscale_all_dim", 0.0)
    if factor <= 1.0:
        return 1.0
    if mscale and all_dim:
        log = 0.1 * math.log(factor)
        if not math.isfinite(ratio := (mscale * log + 1.0) / (all_dim * log + 1.0)):
            raise read.fail("mscale_all_dim", "a number that leaves attention finite")
        return ratio
    return None


def hf_config(config: LlamaConfig) -> dict[str, Any]:
    """A config.json's contents: model type `mistral` where there is a sliding window, else `llama`.

    Rope scaling is written in the form that transformers 4.43 and later and other readers understand.

    Raises:
      ArgumentError: the config has rope divisors that no published scaling gives; config.json cannot express them.
    """
    kind = "mistral" if config.sliding_window is not None else "llama"
    scaling = _scaling_of_divisors(config)
    rope: dict[str, Any] | None = None
    if scaling.kind != "none":
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
    if rope is not None and scaling.kind == "llama3":
        rope |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context_length,
        }
    if rope is not None and scaling.kind == "yarn":
        rope |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "original_max_position_embeddings": scaling.original_context_length,
        }
        if scaling.attention_factor is not None:
            rope["attention_factor"] = scaling.attention_factor
    result: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope,
        "tie_word_embeddings": config.tied_embeddings,
    }
    if kind == "mistral":
        result["sliding_window"] = config.sliding_window
    else:
        result |= {"attention_bias": False, "mlp_bias": False}
    return result


def _scaling_of_divisors(config: LlamaConfig) -> RopeScaling:
    """The config's scaling; for rope divisors, the one that gives them: linear, or Llama 3.1's with its constants."""
    if config.rope_divisors is None:
        return config.rope_scaling
    divisors = np.array(config.rope_divisors)
    factor = float(divisors.max())
    if (divisors == factor).all():
        return RopeScaling(kind="linear", factor=factor)
    llama3 = RopeScaling(kind="llama3", factor=factor, original_context_length=8192)
    plain = dataclasses.replace(config, rope_divisors=None, rope_scaling=llama3)
    if np.allclose(divisors, llama3_divisors(plain), rtol=1e-5, atol=0):
        return llama3
    raise ArgumentError(
        f"rope_divisors from {divisors.min():g} to {factor:g} are not those of a linear or Llama 3.1 scaling; "
        "a config.json cannot hold them, a GGUF file can."
    )
