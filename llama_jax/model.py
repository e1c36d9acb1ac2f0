"""The whole LLaMA model: parameters, their initialisation, and the forward pass.

Axis letters, used in einsum strings, shapes and comments everywhere in this package:
  B batch            T query tokens      S cache slots        D model width
  H query heads      K key/value heads   G = H / K            E head width
  F feed-forward     V vocabulary        L layers
"""

from __future__ import annotations

from flax import struct
from jax import Array


@struct.dataclass
class Layer:
    """The weights of one transformer block, each [out, in]; rotary rows of wq and wk in half-split order."""

    attention_norm: Array  # [D]
    wq: Array  # [H*E, D]
    wk: Array  # [K*E, D]
    wv: Array  # [K*E, D]
    wo: Array  # [D, H*E]
    ffn_norm: Array  # [D]
    w_gate: Array  # [F, D]
    w_up: Array  # [F, D]
    w_down: Array  # [D, F]


@struct.dataclass
class Params:
    """All weights of a model. `output_head` is None where the embedding serves as the head."""

    embedding: Array  # [V, D]
    layers: tuple[Layer, ...]  # L of them
    output_norm: Array  # [D]
    output_head: Array | None  # [V, D]
