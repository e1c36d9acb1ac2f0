"""Choosing the next token: pure functions of logits, one set of options per row, on the device.

The chain has llama.cpp's order: penalties, then top-k, top-p, min-p on the remaining candidates, temperature last, then
a draw. Everything after the penalties works on `n_candidates` tokens sorted by logit, so a vocabulary of 128k is
searched once and never sorted whole unless the options need it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from llama_jax import checks
from llama_jax.errors import ArgumentError

_CANDIDATE_BUCKETS = (64, 256, 1024)
_MOST_PENALISED = 2**20


@struct.dataclass
class SamplingParams:
    """Options of B rows. Make it with `sampling_params`, which checks the values.

    Arrays are [B]; the other fields are static: they shape the compiled program.
    """

    temperature: Array  # float32; 0 takes the best token, the lowest id among equals
    top_k: Array  # int32; 0 keeps all
    top_p: Array  # float32; the smallest set of best tokens with at least this probability
    min_p: Array  # float32; tokens with at least this share of the best one's probability
    repeat_penalty: Array  # float32; logits of recent tokens are divided (above 0) or multiplied (below) by it
    seed: Array  # uint32 [B, 2], the halves of a 64-bit seed
    n_candidates: int = struct.field(pytree_node=False)  # 1: greedy; 0: the whole vocabulary
    repeat_last_n: int = struct.field(pytree_node=False)  # W, how many recent tokens are penalised; 0: none
    vocab_limit: int | None = struct.field(pytree_node=False)  # ids from here on pad the vocabulary and are never taken


def random_seed() -> int:
    """A 32-bit seed from the operating system."""
    return secrets.randbits(32)


def sampling_params(
    batch: int = 1,
    *,
    temperature: float = 0.8,
    top_k: int = 40,
    top_p: float = 0.95,
    min_p: float = 0.05,
    repeat_penalty: float = 1.0,
    repeat_last_n: int = 64,
    seed: int | Sequence[int] | None = None,
    vocab_limit: int | None = None,
) -> SamplingParams:
    """The same options for `batch` rows, with llama.cpp's defaults.

    Args:
      seed: a 64-bit integer, or one per row; a single one is counted up from row to row, so that rows differ and row 0
        gives what a batch of one gives. None or -1 takes a random one.
      vocab_limit: number of ids that stand for something; None means all rows of the embedding.
    """
    temperature = checks.number("temperature", temperature, 0, allowed="0 or above")
    top_k = checks.integer("top_k", top_k, -checks.MOST, allowed="an integer; 0 or below keeps all tokens")
    top_p = checks.number("top_p", top_p, 0, 1, allowed="above 0 and at most 1", positive=True)
    min_p = checks.number("min_p", min_p, 0, 1, allowed="from 0 to 1")
    repeat_penalty = checks.number("repeat_penalty", repeat_penalty, 0, allowed="above 0", positive=True)
    repeat_last_n = checks.integer("repeat_last_n", repeat_last_n, 0, _MOST_PENALISED)
    single = None if isinstance(seed, (Sequence, np.ndarray)) else -1 if seed is None else seed
    if single is not None:
        first = checks.integer("seed", single, -(2**63), 2**64 - 1, "a 64-bit integer")
        first = random_seed() if first == -1 else first
        seeds = [first + row for row in range(batch)]
    else:
        assert isinstance(seed, (Sequence, np.ndarray))
        seeds = [checks.integer("seed", value, -(2**63), 2**64 - 1, "a 64-bit integer") for value in seed]
    if len(seeds) != batch:
        raise ArgumentError(f"{len(seeds)} seeds were given for {batch} rows; give one seed, or one per row.")
    halves = np.array([[(value >> 32) & 0xFFFFFFFF, value & 0xFFFFFFFF] for value in seeds], np.uint32)

    enough = next((bucket for bucket in _CANDIDATE_BUCKETS if 0 < top_k <= bucket), 0)

    def rows(value: float, dtype: type) -> Array:
        return jnp.full(batch, value, dtype)

    return SamplingParams(
        temperature=rows(temperature, jnp.float32),
        top_k=rows(max(top_k, 0), jnp.int32),
        top_p=rows(top_p, jnp.float32),
        min_p=rows(min_p, jnp.float32),
        repeat_penalty=rows(repeat_penalty, jnp.float32),
        seed=jnp.asarray(halves),
        n_candidates=1 if temperature == 0 else enough,
        repeat_last_n=repeat_last_n if repeat_penalty != 1.0 else 0,
        vocab_limit=vocab_limit,
    )


def penalize_repeats(logits: Array, history: Array, penalty: Array) -> Array:
    """Weakens the logits [B, V] of each token in `history` [B, W] once, however often it stands there.

    From Keskar et al. 2019 (arXiv:1909.05858); a negative logit is multiplied instead of divided, as llama.cpp does.

    Entries of `history` outside of 0 ... V-1 are empty places.
    """
    chosen = jnp.take_along_axis(logits, jnp.clip(history, 0, logits.shape[1] - 1), axis=1)
    weakened = jnp.where(chosen > 0, chosen / penalty[:, None], chosen * penalty[:, None])
    places = jnp.where(history < 0, logits.shape[1], history)
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return logits.at[rows, places].set(weakened, mode="drop")


def keep_top_k(logits: Array, top_k: Array) -> Array:
    """Of logits [B, C] sorted downwards, all behind the first `top_k` [B] become -inf; 0 keeps all."""
    rank = jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.where((rank < top_k[:, None]) | (top_k[:, None] == 0), logits, -jnp.inf)


def keep_top_p(logits: Array, top_p: Array) -> Array:
    """Of logits [B, C] sorted downwards, keeps the shortest head whose probability reaches `top_p` [B] (nucleus)."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    first = jnp.arange(logits.shape[1]) == 0
    return jnp.where((before < top_p[:, None]) | (top_p[:, None] >= 1) | first, logits, -jnp.inf)


def keep_min_p(logits: Array, min_p: Array) -> Array:
    """Of logits [B, C] sorted downwards, keeps those with at least `min_p` [B] of the best one's probability."""
    return jnp.where(logits >= logits[:, :1] + jnp.log(min_p)[:, None], logits, -jnp.inf)


def sample(logits: Array, params: SamplingParams, history: Array, index: Array) -> Array:
    """The next token of each row.

    The draw depends on a row's own seed and on how many tokens it has generated, so a row's text does not depend on the
    rows beside it.

    Args:
      logits: [B, V] float32.
      history: [B, W] int32, the row's latest tokens in any order, -1 where there is none; unused when W is 0.
      index: [B] int32, tokens generated so far.

    Returns:
      [B] int32.
    """
    if params.vocab_limit is not None and params.vocab_limit < logits.shape[1]:
        logits = jnp.where(jnp.arange(logits.shape[1]) < params.vocab_limit, logits, -jnp.inf)
    if params.repeat_last_n:
        logits = penalize_repeats(logits, history, params.repeat_penalty)
    if params.n_candidates == 1:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    sorted_logits, ids = jax.lax.top_k(logits, min(params.n_candidates or logits.shape[1], logits.shape[1]))
    kept = keep_top_k(sorted_logits, params.top_k)
    kept = keep_top_p(kept, params.top_p)
    kept = keep_min_p(kept, params.min_p)
    greedy = params.temperature <= 0
    kept = kept / jnp.where(greedy, 1.0, params.temperature)[:, None]

    def draw(seed: Array, index: Array, row: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), index)
        return jax.random.categorical(key, row)

    choice = jnp.where(greedy, 0, jax.vmap(draw)(params.seed, index, kept))
    return jnp.take_along_axis(ids, choice[:, None], axis=1)[:, 0].astype(jnp.int32)
