"""What a LLaMA model is: every constant that its mathematics needs, read from the file and checked once."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from llama_jax.errors import ArgumentError, shown

RopeKind = Literal["none", "linear", "llama3", "yarn"]


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ArgumentError(f"{name} is {shown(value)}; it must be {allowed}.")


def is_finite(value: object) -> bool:
    """Whether the value is a number, and one that a float can hold."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond the floats
        return False


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    return is_finite(value) and value > 0  # type: ignore[operator]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary angles are stretched for contexts longer than the model was first trained on.

    Attributes:
      kind: "none"; "linear" divides every angle by `factor`; "llama3" divides the slow ones (Llama 3.1, appendix of
        the model card); "yarn" blends by wavelength and scales attention (Peng et al. 2023, arXiv:2309.00071).
      factor: how many times longer the context becomes.
      original_context_length: tokens the model was first trained on; needed by "llama3" and "yarn".
      low_freq_factor, high_freq_factor: the "llama3" blend's borders, as original context over wavelength.
      beta_fast, beta_slow: the "yarn" blend's borders, in rotations over the original context.
      attention_factor: "yarn" multiplies queries and keys by this; None means 0.1 * ln(factor) + 1.
    """

    kind: RopeKind = "none"
    factor: float = 1.0
    original_context_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _require(self.kind in get_args(RopeKind), "rope scaling kind", self.kind, f"one of {get_args(RopeKind)}")
        _require(_is_positive(self.factor), "rope scaling factor", self.factor, "a finite number above 0")
        if self.kind in ("llama3", "yarn"):
            _require(
                _is_int(self.original_context_length) and self.original_context_length > 0,
                "rope scaling original_context_length",
                self.original_context_length,
                f"a positive integer for kind {self.kind!r}",
            )
        if self.kind == "llama3":
            _require(_is_positive(self.low_freq_factor), "low_freq_factor", self.low_freq_factor, "above 0")
            _require(
                _is_positive(self.high_freq_factor) and self.high_freq_factor > self.low_freq_factor,
                "high_freq_factor",
                self.high_freq_factor,
                f"above low_freq_factor, {self.low_freq_factor}",
            )
        if self.kind == "yarn":
            _require(_is_positive(self.beta_slow), "beta_slow", self.beta_slow, "above 0")
            _require(
                _is_positive(self.beta_fast) and self.beta_fast > self.beta_slow,
                "beta_fast",
                self.beta_fast,
                f"above beta_slow, {self.beta_slow}",
            )
            _require(
                self.attention_factor is None or _is_positive(self.attention_factor),
                "attention_factor",
                self.attention_factor,
                "None or a finite number above 0",
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The constants of one LLaMA model: frozen, hashable, validated, the only static argument of the jitted functions.

    Attributes (axis letters as in model.py):
      vocab_size: V, rows of the embedding; may exceed the tokenizer's size.
      d_model: D, width of the residual stream.
      d_ff: F, width of the feed-forward layer.
      n_layers: L.
      n_heads: H, query heads.
      n_kv_heads: K, key/value heads; H is a multiple of K.
      head_dim: E, width of a head; even; need not be D / H.
      context_length: tokens the model was trained to handle; a limit for users, not used in the mathematics.
      norm_epsilon: added to the mean square in RMS normalisation.
      rope_theta: base of the rotary frequencies.
      rope_scaling: see `RopeScaling`.
      rope_divisors: E/2 numbers that divide the rotary frequencies, from a file's `rope_freqs` tensor; excludes
        `rope_scaling` other than "none".
      tied_embeddings: the output head is the embedding matrix.
      sliding_window: a token attends to itself and the `sliding_window - 1` tokens before it; None attends to all.
    """

    vocab_size: int
    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    context_length: int
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    rope_divisors: tuple[float, ...] | None = None
    tied_embeddings: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "d_model",
            "d_ff",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "context_length",
        ):
            value = getattr(self, name)
            _require(_is_int(value) and 0 < value < 2**31, name, value, "an integer from 1 to 2147483647")
        _require(
            self.n_heads % self.n_kv_heads == 0, "n_heads", self.n_heads, f"a multiple of n_kv_heads, {self.n_kv_heads}"
        )
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even, since rotary embedding turns pairs")
        _require(_is_positive(self.norm_epsilon), "norm_epsilon", self.norm_epsilon, "a finite number above 0")
        _require(_is_positive(self.rope_theta), "rope_theta", self.rope_theta, "a finite number above 0")
        if self.rope_divisors is not None:
            _require(
                len(self.rope_divisors) == self.head_dim // 2 and all(map(_is_positive, self.rope_divisors)),
                "rope_divisors",
                self.rope_divisors,
                f"{self.head_dim // 2} finite numbers above 0, half of head_dim",
            )
            _require(
                self.rope_scaling.kind == "none", "rope_scaling", self.rope_scaling.kind, "'none' beside rope_divisors"
            )
        _require(
            self.sliding_window is None or (_is_int(self.sliding_window) and self.sliding_window > 0),
            "sliding_window",
            self.sliding_window,
            "None or a positive integer",
        )

    @property
    def n_parameters(self) -> int:
        """Number of weights, a tied output head counted once."""
        attention = self.d_model * self.head_dim * 2 * (self.n_heads + self.n_kv_heads)
        per_layer = attention + 3 * self.d_model * self.d_ff + 2 * self.d_model
        heads = 1 if self.tied_embeddings else 2
        return self.n_layers * per_layer + heads * self.vocab_size * self.d_model + self.d_model

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes that one token takes in a KV cache whose elements have `itemsize` bytes."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * itemsize


_LLAMA3_SCALING = RopeScaling(kind="llama3", factor=8.0, original_context_length=8192)

_LLAMA2 = {"vocab_size": 32000, "context_length": 4096}
_LLAMA3 = {"vocab_size": 128256, "head_dim": 128, "n_kv_heads": 8, "rope_theta": 500000.0}

PRESETS: dict[str, LlamaConfig] = {
    name: LlamaConfig(**fields)
    for name, fields in {
        "llama-1-7b": dict(
            vocab_size=32000, context_length=2048, norm_epsilon=1e-6,
            d_model=4096, d_ff=11008, n_layers=32, n_heads=32, n_kv_heads=32, head_dim=128,
        ),
        "llama-2-7b": _LLAMA2 | dict(d_model=4096, d_ff=11008, n_layers=32, n_heads=32, n_kv_heads=32, head_dim=128),
        "llama-2-13b": _LLAMA2 | dict(d_model=5120, d_ff=13824, n_layers=40, n_heads=40, n_kv_heads=40, head_dim=128),
        "llama-2-70b": _LLAMA2 | dict(d_model=8192, d_ff=28672, n_layers=80, n_heads=64, n_kv_heads=8, head_dim=128),
        "llama-3-8b": _LLAMA3 | dict(context_length=8192, d_model=4096, d_ff=14336, n_layers=32, n_heads=32),
        "llama-3-70b": _LLAMA3 | dict(context_length=8192, d_model=8192, d_ff=28672, n_layers=80, n_heads=64),
        "llama-3.1-8b": _LLAMA3 | dict(
            context_length=131072, rope_scaling=_LLAMA3_SCALING, d_model=4096, d_ff=14336, n_layers=32, n_heads=32
        ),
        "llama-3.1-70b": _LLAMA3 | dict(
            context_length=131072, rope_scaling=_LLAMA3_SCALING, d_model=8192, d_ff=28672, n_layers=80, n_heads=64
        ),
        "llama-3.1-405b": _LLAMA3 | dict(
            context_length=131072, rope_scaling=_LLAMA3_SCALING, d_model=16384, d_ff=53248, n_layers=126, n_heads=128
        ),
        "llama-3.2-1b": _LLAMA3 | dict(
            context_length=131072, rope_scaling=dataclasses.replace(_LLAMA3_SCALING, factor=32.0), tied_embeddings=True,
            d_model=2048, d_ff=8192, n_layers=16, n_heads=32, head_dim=64,
        ),
        "llama-3.2-3b": _LLAMA3 | dict(
            context_length=131072, rope_scaling=dataclasses.replace(_LLAMA3_SCALING, factor=32.0), tied_embeddings=True,
            d_model=3072, d_ff=8192, n_layers=28, n_heads=24,
        ),
        "tinyllama-1.1b": dict(
            vocab_size=32000, context_length=2048,
            d_model=2048, d_ff=5632, n_layers=22, n_heads=32, n_kv_heads=4, head_dim=64,
        ),
        "smollm2-135m": dict(
            vocab_size=49152, context_length=8192, rope_theta=100000.0, tied_embeddings=True,
            d_model=576, d_ff=1536, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64,
        ),
        "mistral-7b": dict(
            vocab_size=32000, context_length=32768, sliding_window=4096,
            d_model=4096, d_ff=14336, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128,
        ),
    }.items()
}  # fmt: skip
"""Published shapes by name, as their config.json files state them."""
