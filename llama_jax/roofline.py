"""How fast a device could be at most, so that a run can state the share that it reached."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp

from llama_jax.config import LlamaConfig
from llama_jax.model import Params

# Device kind, as jax names it -> (bytes/s of memory, dense bfloat16 operations/s): the vendor's data sheets.
_DATA_SHEET = {
    "NVIDIA B200": (8.0e12, 2250e12),
    "NVIDIA H200": (4.8e12, 989e12),
    "NVIDIA H100 80GB HBM3": (3.35e12, 989e12),
    "NVIDIA H100 PCIe": (2.0e12, 756e12),
    "NVIDIA A100-SXM4-80GB": (2.04e12, 312e12),
    "NVIDIA A100-SXM4-40GB": (1.56e12, 312e12),
    "NVIDIA L40S": (0.864e12, 362e12),
    "NVIDIA L4": (0.3e12, 121e12),
    "NVIDIA GeForce RTX 4090": (1.008e12, 165e12),
    "NVIDIA GeForce RTX 3090": (0.936e12, 71e12),
}


def peak_operations() -> float | None:
    """Dense bfloat16 operations per second of the default device by its data sheet; None where it is not known."""
    return _DATA_SHEET.get(jax.devices()[0].device_kind, (None, None))[1]


@functools.cache
def peak_bandwidth() -> float | None:
    """Bytes per second of the default device's memory: its data sheet's, or measured for a CPU; None if not known."""
    device = jax.devices()[0]
    return _measured_bandwidth() if device.platform == "cpu" else _DATA_SHEET.get(device.device_kind, (None,))[0]


def _measured_bandwidth() -> float:
    """The best of a few matrix-vector products over 128 MiB."""
    matrix, vector = jnp.ones((8192, 4096)), jnp.ones(4096)
    product = jax.jit(lambda m, x: m @ x)
    product(matrix, vector).block_until_ready()

    def seconds() -> float:
        started = time.perf_counter()
        product(matrix, vector).block_until_ready()
        return time.perf_counter() - started

    return matrix.nbytes / min(seconds() for _ in range(5))


def decode_bytes(params: Params, config: LlamaConfig, tokens: float, cache_itemsize: int) -> float:
    """The fewest bytes that one decode step of one sequence reads: every weight once and the cache of `tokens` tokens.

    An embedding that is not also the output head gives one row only.
    """
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if params.output_head is not None:
        weights -= sum(leaf.nbytes for leaf in jax.tree.leaves(params.embedding))
    return weights + tokens * config.kv_bytes_per_token(cache_itemsize)


def prompt_operations(config: LlamaConfig, tokens: int, start: int = 0) -> float:
    """Multiplications and additions of running `tokens` tokens behind `start` others, without the output head.

    Two for each weight and token, and causal attention: two products, of the query with each key and of its weight with
    each value.
    """
    heads = 1 if config.tied_embeddings else 2
    weights = config.n_parameters - heads * config.vocab_size * config.d_model
    pairs = tokens * start + tokens * tokens / 2
    return 2 * weights * tokens + 4 * pairs * config.n_heads * config.head_dim * config.n_layers


def unembedding_operations(config: LlamaConfig) -> float:
    """Multiplications and additions of the logits of one position."""
    return 2 * config.vocab_size * config.d_model
