"""Small models, and where the real files of the tests lie."""

from __future__ import annotations

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax.config import LlamaConfig
from llama_jax.formats.names import parameter_shapes
from llama_jax.model import Layer, Params

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    path = Path(os.environ.get("LLAMA_JAX_SMOLLM2", _ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    return path


@pytest.fixture(scope="session")
def vocabularies() -> Path:
    path = Path(os.environ.get("LLAMA_JAX_TEST_DATA", _ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"{path} is absent")
    return path


def tiny_config(**changes) -> LlamaConfig:
    fields = dict(
        vocab_size=96,
        d_model=64,
        d_ff=128,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        context_length=512,
    )
    return LlamaConfig(**(fields | changes))


def random_params(config: LlamaConfig, dtype=jnp.float32, seed: int = 0) -> Params:
    rng = np.random.default_rng(seed)

    def make(path, shape):
        return jnp.asarray(rng.normal(size=shape).astype(np.float32), jnp.float32 if "norm" in path else dtype)

    leaves = {path: make(path, shape) for path, shape in parameter_shapes(config).items()}
    return Params(
        embedding=leaves["embedding"],
        layers=tuple(
            Layer(**{p.split(".")[2]: leaf for p, leaf in leaves.items() if p.startswith(f"layers.{n}.")})
            for n in range(config.n_layers)
        ),
        output_norm=leaves["output_norm"],
        output_head=leaves.get("output_head"),
    )
