"""Perplexity of a text by llama.cpp's rule: chunks of a fixed length, of which the second half is scored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from llama_jax import stages
from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError
from llama_jax.losses import token_losses
from llama_jax.model import Params, hidden_states


@dataclass(frozen=True)
class PerplexityEstimate:
    """What the chunks seen so far say."""

    chunks: int
    tokens: int  # scored
    mean: float  # nats per token
    squares: float  # mean of the squared losses

    @property
    def perplexity(self) -> float:
        """e to the mean loss."""
        return math.exp(self.mean)

    @property
    def error(self) -> float:
        """One standard error of the perplexity, if tokens were independent."""
        variance = max(self.squares - self.mean**2, 0.0)
        return math.sqrt(variance / max(self.tokens - 1, 1)) * self.perplexity


@jax.jit(static_argnames="config")
def _chunk_losses(params: Params, tokens: Array, config: LlamaConfig) -> Array:
    x, _ = hidden_states(params, tokens, config)
    return token_losses(params, x[:, :-1], tokens[:, 1:])


_token_losses = jax.jit(token_losses)


def _losses(params: Params, tokens: Array, config: LlamaConfig) -> Array:
    if not stages.has_stages(params):
        return _chunk_losses(params, tokens, config)
    x = stages.hidden_states(params, tokens, config, jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32))
    ends = params.replace(layers=())  # type: ignore[attr-defined]
    return _token_losses(ends, x[:, :-1], tokens[:, 1:])


def perplexity(
    params: Params,
    config: LlamaConfig,
    ids: Sequence[int],
    *,
    n_ctx: int = 512,
    n_batch: int = 512,
    bos_id: int | None = None,
) -> Iterator[PerplexityEstimate]:
    """Yields the running estimate after each chunk of `n_ctx` tokens of `ids`; a shorter rest is left out.

    In each chunk the tokens from place n_ctx / 2 + 1 on are scored, so that each has at least half a context before it.

    Args:
      n_batch: tokens in one run of the model; at least one chunk is run.
      bos_id: stands in for each chunk's first token; None leaves the text as it is.
    """
    if n_ctx < 4:
        raise ArgumentError(f"The chunk length is {n_ctx}; it must be at least 4.")
    n_chunks = len(ids) // n_ctx
    if n_chunks == 0:
        raise ArgumentError(f"The text has {len(ids)} tokens; at least one chunk of {n_ctx} is needed (lower -c).")
    chunks = np.array(ids[: n_chunks * n_ctx], np.int32).reshape(n_chunks, n_ctx)
    if bos_id is not None:
        chunks[:, 0] = bos_id
    rows = max(1, n_batch // n_ctx)
    total = squares = 0.0
    scored = n_ctx - 1 - n_ctx // 2
    for start in range(0, n_chunks, rows):
        part = chunks[start : start + rows]
        padded = np.pad(part, ((0, rows - len(part)), (0, 0)))
        losses = np.asarray(_losses(params, jnp.asarray(padded), config), np.float64)[:, n_ctx // 2 :]
        for done, row in enumerate(losses[: len(part)], start + 1):
            total += float(row.sum())
            squares += float((row**2).sum())
            yield PerplexityEstimate(done, done * scored, total / (done * scored), squares / (done * scored))
