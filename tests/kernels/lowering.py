"""Lowering a kernel for an H200 on a machine without one: what Pallas refuses shows here, before any GPU sees it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


def lower_for_h200(function: Callable[..., Any], *arguments: jax.ShapeDtypeStruct) -> str:
    """The text of `function` lowered for CUDA."""
    device = AbstractDevice("NVIDIA H200", 132, "cuda")
    with warnings.catch_warnings(), use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
