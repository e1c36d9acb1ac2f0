"""Texts as vectors: the hidden states after the last norm, pooled over the tokens of each text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from llama_jax import stages
from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError
from llama_jax.model import Params, hidden_states
from llama_jax.session import check_prompt

Pooling = Literal["none", "mean", "last"]
_SHORTEST = 16  # tokens that texts are padded to at least


def pooled_states(
    params: Params, tokens: Array, config: LlamaConfig, counts: Array, pooling: Pooling = "last", normalize: bool = True
) -> Array:
    """Vectors of B texts as a pure function; jit it with `config`, `pooling` and `normalize` static.

    Args:
      tokens: [B, T] int32, padded at the end.
      counts: [B] int32, real tokens of each row.
      pooling: "mean" over a text's tokens, its "last" token, or "none".
      normalize: divides every vector by its Euclidean length; with pooling "none" nothing is divided.

    Returns:
      float32 [B, D]; with pooling "none" [B, T, D], meaningless at padding.
    """
    return pool(hidden_states(params, tokens, config, counts=counts)[0], counts, pooling, normalize)


def pool(x: Array, counts: Array, pooling: Pooling, normalize: bool) -> Array:
    """The vectors that `pooled_states` makes of hidden states [B, T, D]."""
    x = x.astype(jnp.float32)
    if pooling == "none":
        return x
    if pooling == "mean":
        real = jnp.arange(x.shape[1], dtype=jnp.int32) < counts[:, None]
        pooled = jnp.sum(jnp.where(real[..., None], x, 0.0), axis=1)
        pooled = pooled / jnp.maximum(counts, 1)[:, None].astype(jnp.float32)
    else:
        pooled = jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    if not normalize:
        return pooled
    length = jnp.linalg.norm(pooled, axis=-1, keepdims=True)
    return pooled / jnp.maximum(length, jnp.finfo(jnp.float32).tiny)


_pooled_jit = jax.jit(pooled_states, static_argnames=("config", "pooling", "normalize"))
_pool_jit = jax.jit(pool, static_argnames=("pooling", "normalize"))


def _run(
    params: Params, tokens: Array, config: LlamaConfig, counts: Array, pooling: Pooling, normalize: bool
) -> np.ndarray:
    if not stages.has_stages(params):
        return np.asarray(_pooled_jit(params, tokens, config, counts, pooling, normalize))
    x = stages.hidden_states(params, tokens, config, counts)
    return np.asarray(_pool_jit(x, jax.device_put(counts, x.sharding), pooling, normalize))


def embed_texts(
    params: Params,
    config: LlamaConfig,
    texts: Sequence[Sequence[int]],
    *,
    pooling: Pooling = "last",
    normalize: bool = True,
    n_ctx: int,
    n_batch: int,
) -> Iterator[np.ndarray]:
    """Yields the vector of each text in turn; texts of like lengths run together.

    Args:
      texts: token ids.
      pooling, normalize: as in `pooled_states`.
      n_ctx: most tokens of a text.
      n_batch: most tokens in one run of the model, unless one text alone has more.

    Yields:
      float32 [D]; with pooling "none" [tokens, D].

    Raises:
      ArgumentError: a text is empty or longer than the context, or the pooling is unknown.
    """
    if pooling not in get_args(Pooling):
        raise ArgumentError(f"pooling is {pooling!r}; it must be one of {', '.join(get_args(Pooling))}.")
    for number, text in enumerate(texts):
        if not 0 < len(text) <= n_ctx:
            raise ArgumentError(f"Text {number} has {len(text)} tokens; it must have 1 to {n_ctx} (-c / n_ctx).")
        check_prompt(text, n_ctx, config.vocab_size)
    at = 0
    while at < len(texts):
        padded = _padded(len(texts[at]))
        rows = max(1, n_batch // padded)
        group = []
        while at < len(texts) and len(group) < rows and _padded(len(texts[at])) == padded:
            group.append(texts[at])
            at += 1
        tokens = np.zeros((rows, padded), np.int32)
        counts = np.zeros(rows, np.int32)
        for row, text in enumerate(group):
            tokens[row, : len(text)], counts[row] = text, len(text)
        vectors = _run(params, jnp.asarray(tokens), config, jnp.asarray(counts), pooling, normalize)
        for row, text in enumerate(group):
            yield vectors[row, : len(text)] if pooling == "none" else vectors[row]


def _padded(length: int) -> int:
    """The power of two that a text is padded to, so that a few programs serve all lengths."""
    return max(_SHORTEST, 1 << (length - 1).bit_length())
