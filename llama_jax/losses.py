"""Cross-entropy of next tokens, computed a few positions at a time so that memory does not grow with T x V."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from llama_jax.config import LlamaConfig
from llama_jax.model import Params, hidden_states, unembed

_LOGITS_AT_ONCE = 2**25  # float32 numbers, 128 MiB


def token_losses(params: Params, x: Array, targets: Array) -> Array:
    """-log p(target) in nats, float32 [B, T], from the hidden states `x` [B, T, D] and `targets` [B, T] int32.

    The logits exist for one chunk of positions at a time, also in the backward pass, which computes them again.
    """
    B, T, D = x.shape
    head = params.embedding if params.output_head is None else params.output_head
    chunk = max(1, min(B * T, _LOGITS_AT_ONCE // head.shape[0]))
    n_chunks = -(-B * T // chunk)
    padding = n_chunks * chunk - B * T
    x = jnp.pad(x.reshape(B * T, D), ((0, padding), (0, 0))).reshape(n_chunks, chunk, D)
    targets = jnp.pad(targets.reshape(B * T), (0, padding)).reshape(n_chunks, chunk)

    @jax.checkpoint
    def chunk_losses(chunk_x: Array, chunk_targets: Array) -> Array:
        logits = unembed(params, chunk_x)
        chosen = jnp.take_along_axis(logits, chunk_targets[:, None], axis=-1, mode="clip")[:, 0]
        return jax.nn.logsumexp(logits, axis=-1) - chosen

    losses = jax.lax.map(lambda pair: chunk_losses(*pair), (x, targets))
    return losses.reshape(-1)[: B * T].reshape(B, T)


def summed_loss(
    params: Params, tokens: Array, targets: Array, config: LlamaConfig, weights: Array | None = None
) -> tuple[Array, Array]:
    """`(sum of weighted token losses in nats, sum of weights)`: what gradient accumulation adds up.

    Args:
      tokens, targets: [B, T] int32.
      weights: [B, T]; None counts every token once.
    """
    x, _ = hidden_states(params, tokens, config)
    losses = token_losses(params, x, targets)
    weights = jnp.ones_like(losses) if weights is None else weights.astype(jnp.float32)
    return jnp.sum(losses * weights), jnp.sum(weights)


def loss(params: Params, tokens: Array, targets: Array, config: LlamaConfig, weights: Array | None = None) -> Array:
    """Mean loss in nats per unit of weight, float32 []; arguments as in `summed_loss`. All weights 0 give 0."""
    total, weight = summed_loss(params, tokens, targets, config, weights)
    return total / jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)
