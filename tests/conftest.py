"""Settings of every test: 8 fake CPU devices, full float32 products, no silent promotion of types."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct.Q4_1.gguf, as scripts/fetch_smollm2.py brings it."""
    path = Path(os.environ.get("LLAMA_JAX_SMOLLM2", REPOSITORY / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    if not path.exists():
        pytest.skip("SmolLM2 is not here; scripts/fetch_smollm2.py fetches it")
    return path


@pytest.fixture(scope="session")
def reference_folder() -> Path:
    """Values that other programs computed; not part of a clone."""
    path = SHARED / "reference"
    if not path.exists():
        pytest.skip("the reference values are not here")
    return path
