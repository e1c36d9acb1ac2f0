"""Small random models that the tests share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from llama_jax.config import LlamaConfig
from llama_jax.formats.load import open_model
from llama_jax.formats.save import save_gguf
from llama_jax.llama import Llama, shipped_model
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


def tiny_gguf(
    path: Path, types: str = "F32", vocabulary: Mapping[str, Any] | None = None, **changes: Any
) -> LlamaConfig:
    """Writes a model of one layer whose vocabulary is the letters from A on; returns its constants."""
    config = tiny_config(**(dict(vocab_size=64, d_ff=32, n_layers=1, head_dim=16) | changes))
    letters = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(chr(ord("A") + i) for i in range(61))],
        "tokenizer.ggml.scores": [0.0] * 64,
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 61],
    }
    save_gguf(path, tiny_params(config), config, metadata=letters | dict(vocabulary or {}), types=types)
    return config


def tiny_llama(n_ctx: int = 256, **changes: Any) -> Llama:
    """The shipped vocabulary before a model of one layer that has learnt nothing: quick to compile."""
    with open_model(shipped_model()) as file:
        tokenizer = file.tokenizer()
    config = tiny_config(**(dict(vocab_size=2048, n_layers=1, context_length=n_ctx) | changes))
    return Llama(config, tiny_params(config), tokenizer, n_ctx=n_ctx)
