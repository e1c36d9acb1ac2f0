"""Mirostat: the surprise of the text is kept near a target (Basu et al. 2020, arXiv:2007.14966).

`mu` [B], in bits, is the most surprise that a token may have; after each draw it moves by `eta` times what the surprise
exceeded the target `tau` by. Logits are tempered already.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

ESTIMATED_FROM = 100  # m, tokens that version 1 estimates the exponent from


def keep_below_surprise(logits: Array, mu: Array) -> Array:
    """Version 2: tokens whose surprise -log2 p is at most `mu` [B]; if there is none, the best of `logits` [B, C]."""
    surprise = -jax.nn.log_softmax(logits, axis=-1) / math.log(2)
    best = jnp.arange(logits.shape[1]) == jnp.argmax(logits, axis=-1)[:, None]
    return jnp.where((surprise <= mu[:, None]) | best, logits, -jnp.inf)


def keep_estimated(logits: Array, mu: Array, n_vocab: int) -> Array:
    """Version 1: of ordered `logits` [B, C] the first k, from a Zipf exponent fitted to the most likely tokens.

    k = (e * 2**mu / (1 - N**-e)) ** (1 / s) with e = s - 1, at least 1.
    """
    m = min(ESTIMATED_FROM, logits.shape[1])
    log_p = jax.nn.log_softmax(logits, axis=-1)[:, :m]
    place = jnp.arange(m - 1, dtype=jnp.float32)
    t = jnp.log((place + 2) / (place + 1))
    real = log_p[:, 1:] > -jnp.inf
    b = jnp.where(real, log_p[:, :-1] - log_p[:, 1:], 0.0)
    s = jnp.sum(t * b, axis=-1) / jnp.maximum(jnp.sum(jnp.where(real, t * t, 0.0), axis=-1), 1e-9)
    s = jnp.maximum(s, 1e-6)
    # e / (1 - N**-e), which tends to 1 / log N at e = 0
    e = jnp.where(jnp.abs(s - 1) < 1e-4, 1e-4, s - 1)
    log_k = (jnp.log(e / -jnp.expm1(-e * math.log(n_vocab))) + mu * math.log(2)) / s
    k = jnp.floor(jnp.exp(jnp.clip(log_k, 0.0, 21.0))).astype(jnp.int32)  # e**21 < 2**31
    rank = jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.where(rank < jnp.maximum(k, 1)[:, None], logits, -jnp.inf)


def next_mu(mu: Array, kept: Array, drawn: Array, tau: Array, eta: Array) -> Array:
    """`mu` [B] after the token with logit `drawn` [B] came out of `kept` [B, C], among which its surprise counts."""
    surprise = (jax.nn.logsumexp(kept, axis=-1) - drawn) / math.log(2)
    return mu - eta * (surprise - tau)
