"""Small random models that the tests share."""

from __future__ import annotations

from typing import Any

import jax

from llama_jax.config import LlamaConfig
from llama_jax.model import Params, init_params


def tiny_config(**changes: Any) -> LlamaConfig:
    """Two layers, four query heads on two, a head width that is not D / H."""
    fields = dict(
        vocab_size=101, d_model=32, d_ff=48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=12, context_length=64
    )
    return LlamaConfig(**(fields | changes))


def tiny_params(config: LlamaConfig, seed: int = 0) -> Params:
    """Weights large enough that tokens and positions matter."""
    return init_params(jax.random.key(seed), config, scale=0.3)
