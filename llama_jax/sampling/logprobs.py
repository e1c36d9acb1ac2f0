"""Log-probabilities of what the model said, before any sampler."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from llama_jax.sampling.candidates import exact_top_k

LEAST = -9999.0  # stands for less than any float32 probability: every number is finite


@struct.dataclass
class Logprobs:
    """Natural logarithms of probabilities, of B tokens; behind `decode` there is an axis of steps after B."""

    token: Array  # [B] float32, of the token that was taken
    top_ids: Array  # [B, n] int32, the most likely tokens, best first
    top: Array  # [B, n] float32


def log_probabilities(logits: Array, token: Array, n: int, vocab_limit: int | None = None) -> Logprobs:
    """Log-probabilities of `token` [B] and of the `n` most likely tokens under softmax(`logits` [B, V]).

    Args:
      vocab_limit: ids from here on pad the vocabulary and count for nothing.

    Returns:
      Finite numbers; what is less likely than a float32 can say has -9999.
    """
    logits = logits.astype(jnp.float32)
    if vocab_limit is not None and vocab_limit < logits.shape[1]:
        logits = jnp.where(jnp.arange(logits.shape[1]) < vocab_limit, logits, -jnp.inf)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    taken = jnp.take_along_axis(logits, jnp.maximum(token, 0)[:, None], axis=1)
    n = min(n, logits.shape[1] if vocab_limit is None else min(vocab_limit, logits.shape[1]))
    if n:
        values, ids = exact_top_k(logits, n)
    else:
        values, ids = jnp.zeros((logits.shape[0], 0)), jnp.zeros((logits.shape[0], 0), jnp.int32)

    def finite(x: Array) -> Array:
        return jnp.maximum(jnp.nan_to_num(x, nan=LEAST), LEAST)

    return Logprobs(token=finite(taken - total)[:, 0], top_ids=ids, top=finite(values - total))
