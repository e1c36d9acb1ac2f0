"""Cross-entropy of next tokens, computed a few positions at a time so that memory does not grow with T x V."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError
from llama_jax.kernels.attention import SelfAttention
from llama_jax.model import Params, Remat, hidden_states, unembed

_LOGITS_AT_ONCE = 2**26  # float32 numbers, 256 MiB; fewer would make the products with the head too small


def _positions_at_once(B: int, T: int, V: int) -> int:
    """Positions of every row whose logits exist together: as many as `_LOGITS_AT_ONCE` allows, in even chunks."""
    n_chunks = -(-T // max(1, _LOGITS_AT_ONCE // (B * V)))
    return -(-T // n_chunks)


def _in_chunks(array: Array, size: int) -> Array:
    """[B, T, ...] to [n, B, size, ...] with zeros at the end; a mesh that divides B stays as it is."""
    B, T = array.shape[:2]
    n = -(-T // size)
    array = jnp.pad(array, [(0, 0), (0, n * size - T), *[(0, 0)] * (array.ndim - 2)])
    return array.reshape(B, n, size, *array.shape[2:]).swapaxes(0, 1)


def _together(chunks: Array, T: int) -> Array:
    """The inverse of `_in_chunks`."""
    n, B, size = chunks.shape[:3]
    return chunks.swapaxes(0, 1).reshape(B, n * size, *chunks.shape[3:])[:, :T]


def token_losses(params: Params, x: Array, targets: Array) -> Array:
    """-log p(target) in nats, float32 [B, T], from the hidden states `x` [B, T, D] and `targets` [B, T] int32.

    The logits exist for one chunk of positions at a time, also in the backward pass, which computes them again.
    """
    (B, T), V = targets.shape, _head(params).shape[0]
    size = _positions_at_once(B, T, V)

    @jax.checkpoint
    def chunk_losses(chunk_x: Array, chunk_targets: Array) -> Array:
        logits = unembed(params, chunk_x)
        return jax.nn.logsumexp(logits, axis=-1) - _chosen(logits, chunk_targets)

    losses = lax.map(lambda pair: chunk_losses(*pair), (_in_chunks(x, size), _in_chunks(targets, size)))
    return _together(losses, T)


def _head(params: Params) -> Any:
    return params.embedding if params.output_head is None else params.output_head


def _chosen(logits: Array, targets: Array) -> Array:
    return jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def head_loss(x: Array, head: Array, targets: Array, weights: Array, z_loss: float) -> tuple[Array, Array]:
    """The weighted sum of token losses straight from hidden states, with gradients made along with the logits.

    The forward pass turns each chunk of logits into its share of the gradients while it is there, so nothing is
    computed twice and nothing of size T x V is kept.

    Args:
      x: [B, T, D].
      head: [V, D]; multiplied in x's dtype, its gradient is summed in float32.
      targets: [B, T] int32.
      weights: [B, T] float32.
      z_loss: factor of the squared log of the softmax's sum, which is added to a token's loss (Chowdhery et al. 2022,
        arXiv:2204.02311, section 5).

    Returns:
      total: float32 [], the sum with the z-loss.
      cross_entropy: float32 [], the sum without; it has no gradient of its own.
    """
    losses, z_losses, _ = _head_loss(x, head, targets, weights, z_loss, with_gradients=False)
    return jnp.sum(weights * (losses + z_losses)), jnp.sum(weights * losses)


def _head_loss(x: Array, head: Array, targets: Array, weights: Array, z_loss: float, *, with_gradients: bool):
    """Losses and z-losses of tokens [B, T], and the gradients of their sum: x's [B, T, D] and the head's [V, D]."""
    (B, T), V = targets.shape, head.shape[0]
    size = _positions_at_once(B, T, V)
    narrow = head.astype(x.dtype)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    wide = x.dtype if x.dtype.itemsize > 4 else jnp.float32  # what sums are made in

    def chunk(head_gradient: Array | None, inputs: tuple[Array, Array, Array]):
        x, targets, weights = inputs
        logits = jnp.einsum("btd,vd->btv", x, narrow, precision=precision, preferred_element_type=wide)
        log_sum = jax.nn.logsumexp(logits, axis=-1)
        losses, z_losses = log_sum - _chosen(logits, targets), z_loss * log_sum * log_sum
        if head_gradient is None:
            return None, (losses, z_losses, None)
        scale = (weights * (1 + 2 * z_loss * log_sum))[..., None]
        is_target = jnp.arange(V, dtype=jnp.int32) == targets[..., None]
        slope = jnp.exp(logits - log_sum[..., None]) * scale - jnp.where(is_target, weights[..., None], 0)
        slope = slope.astype(x.dtype)
        x_gradient = jnp.einsum("btv,vd->btd", slope, narrow, precision=precision, preferred_element_type=x.dtype)
        head_gradient = head_gradient + jnp.einsum(
            "btv,btd->vd", slope, x, precision=precision, preferred_element_type=wide
        )
        return head_gradient, (losses, z_losses, x_gradient)

    inputs = (_in_chunks(x, size), _in_chunks(targets, size), _in_chunks(weights, size))
    initial = jnp.zeros(head.shape, wide) if with_gradients else None
    head_gradient, (losses, z_losses, x_gradient) = lax.scan(chunk, initial, inputs)
    gradients = None if x_gradient is None else (_together(x_gradient, T), head_gradient)
    return _together(losses, T), _together(z_losses, T), gradients


def _head_loss_forward(x: Array, head: Array, targets: Array, weights: Array, z_loss: float):
    losses, z_losses, gradients = _head_loss(x, head, targets, weights, z_loss, with_gradients=True)
    total = jnp.sum(weights * (losses + z_losses))
    like = jnp.zeros((), head.dtype)  # carries the head's dtype
    return (total, jnp.sum(weights * losses)), (gradients, losses + z_losses, like)


def _head_loss_backward(z_loss: float, saved, cotangents: tuple[Array, Array]):
    (x_gradient, head_gradient), losses, like = saved
    scale = cotangents[0]
    x_gradient = (x_gradient.astype(scale.dtype) * scale).astype(x_gradient.dtype)
    return x_gradient, (head_gradient * scale).astype(like.dtype), None, losses * scale


head_loss.defvjp(_head_loss_forward, _head_loss_backward)


def summed_token_losses(
    params: Params, x: Array, targets: Array, weights: Array, z_loss: float = 0.0
) -> tuple[Array, Array]:
    """`head_loss` of the hidden states `x` [B, T, D] by whatever the model's head is, packed or adapted weights too."""
    head = _head(params)
    if isinstance(head, jax.Array):
        return head_loss(x, head[: params.vocab_size], targets, weights, z_loss)
    if z_loss:
        raise ArgumentError(f"z_loss is {z_loss}; a head that is not a plain array allows 0 only.")
    total = jnp.sum(token_losses(params, x, targets) * weights)
    return total, lax.stop_gradient(total)


def summed_loss(
    params: Params,
    tokens: Array,
    targets: Array,
    config: LlamaConfig,
    weights: Array | None = None,
    *,
    segments: Array | None = None,
    dtype: DTypeLike | None = None,
    kernels: SelfAttention = "xla",
    remat: Remat = "none",
) -> tuple[Array, Array]:
    """`(sum of weighted token losses in nats, sum of weights)`: what gradient accumulation adds up.

    Args:
      tokens, targets: [B, T] int32.
      weights: [B, T]; None counts every token once.
      segments, dtype, kernels, remat: as in `hidden_states`.
    """
    x, _ = hidden_states(params, tokens, config, segments=segments, dtype=dtype, kernels=kernels, remat=remat)
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)
    return summed_token_losses(params, x, targets, weights)[0], jnp.sum(weights)


def loss(
    params: Params,
    tokens: Array,
    targets: Array,
    config: LlamaConfig,
    weights: Array | None = None,
    **options: Any,
) -> Array:
    """Mean loss in nats per unit of weight, float32 []; arguments as in `summed_loss`. All weights 0 give 0."""
    total, weight = summed_loss(params, tokens, targets, config, weights, **options)
    return total / jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)
