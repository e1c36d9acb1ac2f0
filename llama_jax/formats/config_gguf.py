"""`LlamaConfig` from the metadata of a GGUF file of architecture `llama`, and back.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and llama.cpp where the page is silent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from llama_jax.config import LlamaConfig, RopeScaling
from llama_jax.errors import ArgumentError, FormatError, plain, shown
from llama_jax.formats.names import GGUF_TOP

ARCHITECTURE = "llama"

_HARMLESS = {
    "attention.layer_norm_epsilon",
    "context_length",
    "expert_used_count",
    "rope.scaling.finetuned",
    "vocab_size",
}
"""Keys that are read elsewhere or change nothing."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
"""Keys that would change the mathematics, with the values under which they do not."""

_READ = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}


class _Reader:
    """Typed access to the keys `llama.*`, with errors that name file, key and value."""

    def __init__(self, metadata: Mapping[str, Any], file: str) -> None:
        self.metadata = metadata
        self.file = file

    def fail(self, key: str, allowed: str) -> FormatError:
        value = self.metadata.get(f"{ARCHITECTURE}.{key}")
        return FormatError(f"{self.file}: {ARCHITECTURE}.{key} is {shown(value)}; it must be {allowed}.")

    def value(self, key: str, default: Any = None) -> Any:
        """A value; of an array whose elements are all equal, that element."""
        value = self.metadata.get(f"{ARCHITECTURE}.{key}", default)
        if isinstance(value, np.ndarray):
            if value.size == 0 or (value != value[0]).any():
                raise self.fail(key, "one number, or the same number for every layer")
            value = value[0].item()
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.value(key, default)
        if value is None:
            raise FormatError(f"{self.file}: the required key {ARCHITECTURE}.{key} is missing.")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise self.fail(key, "an integer from 0 to 2147483647")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key, default)
        if value is None:
            raise FormatError(f"{self.file}: the required key {ARCHITECTURE}.{key} is missing.")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.fail(key, "a finite number")
        # The file holds float32: the shortest decimal that rounds to it, so that 1e-5 is 1e-5 and not 9.99999975e-06.
        with np.errstate(over="ignore"):
            return float(str(np.float32(value)))


def config_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_divisors: np.ndarray | None = None,
    file: str = "GGUF metadata",
) -> LlamaConfig:
    """The constants of a model.

    Args:
      metadata: as `GGUFFile.metadata` gives it.
      shapes: GGUF tensor name to shape; the embedding's rows are the vocabulary size, a missing output tensor means
        tied embeddings. May be empty for a file that holds a vocabulary alone.
      rope_divisors: the values of the tensor `rope_freqs.weight`, [E/2], where the file has it.
      file: the name to use in errors.

    Raises:
      FormatError: the architecture is not `llama`, a required key is missing, or a key asks for something that this
        package does not compute.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture != ARCHITECTURE:
        raise FormatError(
            f"{file}: general.architecture is {shown(architecture)}; only {shown(ARCHITECTURE)} is supported."
        )
    read = _Reader(metadata, file)
    _refuse_unknown(read)
    d_model = read.integer("embedding_length")
    n_heads = read.integer("attention.head_count")
    head_dim = _head_dim(read, d_model, n_heads)
    scaling = _rope_scaling(read)
    divisors = None if rope_divisors is None else tuple(float(x) for x in rope_divisors.reshape(-1))
    if divisors is not None and all(x == 1 for x in divisors):
        divisors = None
    if divisors is not None and scaling.kind == "linear":
        divisors = tuple(x * scaling.factor for x in divisors)
        scaling = RopeScaling()
    try:
        return LlamaConfig(
            vocab_size=_vocab_size(read, shapes),
            d_model=d_model,
            d_ff=read.integer("feed_forward_length"),
            n_layers=read.integer("block_count"),
            n_heads=n_heads,
            n_kv_heads=read.integer("attention.head_count_kv", n_heads),
            head_dim=head_dim,
            context_length=read.integer("context_length"),
            norm_epsilon=read.number("attention.layer_norm_rms_epsilon"),
            rope_theta=read.number("rope.freq_base", 10000.0),
            rope_scaling=scaling,
            rope_divisors=divisors,
            tied_embeddings=bool(shapes) and GGUF_TOP["output_head"] not in shapes,
            sliding_window=read.integer("attention.sliding_window", 0) or None,
        )
    except ArgumentError as error:
        raise FormatError(f"{file}: {error}") from None


def _refuse_unknown(read: _Reader) -> None:
    prefix = f"{ARCHITECTURE}."
    for full_key in read.metadata:
        if not full_key.startswith(prefix):
            continue
        key = full_key[len(prefix) :]
        if key in _NEUTRAL:
            value = read.value(key)
            if value not in _NEUTRAL[key]:
                raise read.fail(key, " or ".join(map(repr, _NEUTRAL[key])))
        elif key not in _READ and key not in _HARMLESS:
            raise FormatError(
                f"{read.file}: the key {plain(full_key)} is not known, so the model might be computed wrongly."
            )


def _head_dim(read: _Reader, d_model: int, n_heads: int) -> int:
    if read.value("attention.key_length") is not None:
        head_dim = read.integer("attention.key_length")
    elif n_heads and d_model % n_heads == 0:
        head_dim = d_model // n_heads
    else:
        raise read.fail("attention.head_count", f"a divisor of the model width, {d_model}")
    for key in ("attention.value_length", "rope.dimension_count"):
        if read.integer(key, head_dim) != head_dim:
            raise read.fail(key, f"the head width, {head_dim}")
    return head_dim


def _vocab_size(read: _Reader, shapes: Mapping[str, tuple[int, ...]]) -> int:
    embedding = shapes.get(GGUF_TOP["embedding"])
    if embedding:
        return embedding[0]
    tokens = read.metadata.get("tokenizer.ggml.tokens")
    return read.integer("vocab_size", len(tokens) if isinstance(tokens, list) else None)


def _rope_scaling(read: _Reader) -> RopeScaling:
    kind = read.value("rope.scaling.type", "linear")
    factor = read.number("rope.scaling.factor", read.number("rope.scale_linear", 1.0)) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeScaling()
    try:
        if kind == "linear":
            return RopeScaling(kind="linear", factor=factor)
        if kind == "yarn":
            strength = read.number("rope.scaling.attn_factor", read.number("rope.scaling.yarn_attn_factor", 1.0))
            return RopeScaling(
                kind="yarn",
                factor=factor,
                original_context_length=read.integer(
                    "rope.scaling.original_context_length", read.integer("context_length")
                ),
                beta_fast=read.number("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=read.number("rope.scaling.yarn_beta_slow", 1.0),
                attention_factor=None if strength == 1.0 else strength * (1.0 + 0.1 * math.log(factor)),
            )
    except (ArgumentError, ValueError) as error:
        raise FormatError(f"{read.file}: {error}") from None
    raise read.fail("rope.scaling.type", "'none', 'linear' or 'yarn'")


def gguf_metadata(config: LlamaConfig) -> dict[str, Any]:
    """The keys `general.architecture` and `llama.*` that say what a config says; ints are u32, floats f32.

    A "llama3" scaling has no keys: it is a tensor, see `llama3_divisors`.
    """
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "embedding_length": config.d_model,
        "block_count": config.n_layers,
        "feed_forward_length": config.d_ff,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_epsilon),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_theta),
    }
    if config.sliding_window is not None:
        fields["attention.sliding_window"] = config.sliding_window
    scaling = config.rope_scaling
    if scaling.kind in ("linear", "yarn"):
        fields |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": float(scaling.factor)}
    if scaling.kind == "yarn":
        fields |= {
            "rope.scaling.original_context_length": scaling.original_context_length,
            "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
            "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
        }
        if scaling.attention_factor is not None:
            fields["rope.scaling.attn_factor"] = scaling.attention_factor / (1.0 + 0.1 * math.log(scaling.factor))
    return {"general.architecture": ARCHITECTURE} | {f"{ARCHITECTURE}.{key}": v for key, v in fields.items()}


def llama3_divisors(config: LlamaConfig) -> np.ndarray:
    """The frequency divisors that a "llama3" scaling amounts to, float32 [E/2], as GGUF stores them.

    1 for wavelengths under original context / high_freq_factor, `factor` over original context / low_freq_factor, and
    between them the inverse of a linear blend of the two frequencies (Llama 3.1's reference code).
    """
    scaling = config.rope_scaling
    frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    turns = scaling.original_context_length * frequencies / (2 * np.pi)  # over the original context
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = np.clip(share, 0.0, 1.0)
    return (1.0 / ((1.0 - share) / scaling.factor + share)).astype(np.float32)
