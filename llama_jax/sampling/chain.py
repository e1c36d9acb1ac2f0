"""The chain of samplers and the draw.

Until a sampler needs the tokens in order, all V of them are worked on in place. Then the `n_candidates` best are found
without sorting the vocabulary if top-k comes first, which is exact, since n_candidates is at least every row's top_k;
without top-k the vocabulary is sorted whole. A sampler that no row uses is not in the program. Nothing here is
approximated but float32 itself, in which sums of probabilities may differ from exact ones by about 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

from llama_jax.sampling import mirostat, penalties, truncation
from llama_jax.sampling.candidates import Candidates, best, exact_argmax, order, token_ids
from llama_jax.sampling.params import SamplingParams
from llama_jax.sampling.state import SamplerState, push
from llama_jax.sampling.temperature import dynamic_temperature, temper

_XTC_NUMBER = 0xFFFFFFFF  # no token has this id


def sample(
    logits: Array, params: SamplingParams, state: SamplerState, mask: Array | None = None
) -> tuple[Array, SamplerState]:
    """The next token of each row, and the row's state after it.

    The draw depends on the row's seed, on how many tokens it has drawn and on the ids of the candidates, and on nothing
    else: a row's text does not depend on the rows beside it, nor on the program that serves them.

    Args:
      logits: [B, V] float32.
      state: `start_state(params, history)`, or what the call before returned.
      mask: [B, ceil(V / 32)] int32, bits of the allowed tokens (bit i mod 32 of word i // 32); None allows all.

    Returns:
      [B] int32, -1 for a row in which no token may be taken: all are banned, or a logit is not a number.
      The next state.
    """
    logits = _allowed(logits.astype(jnp.float32), params, mask)
    if params.greedy:
        taken, token = exact_argmax(_changed(logits, params, state))
        return jnp.where(jnp.isfinite(taken), token, -1), push(state, token)
    keys = _step_keys(params, state)
    token = jnp.full(logits.shape[0], -1, jnp.int32)
    if 0 in params.mirostat_versions:
        token, _ = _draw(_chain(logits, params, state, keys), params, keys)
    for version in params.mirostat_versions:
        if version == 0:
            continue
        kept = _mirostat(logits, params, state, version)
        its_token, its_logit = _draw(kept, params, keys)
        mu = mirostat.next_mu(
            _used(state.mu), kept.logits, its_logit, _used(params.mirostat_tau), _used(params.mirostat_eta)
        )
        rows = _used(params.mirostat) == version
        token = jnp.where(rows, its_token, token)
        state = replace(state, mu=jnp.where(rows & jnp.isfinite(mu) & (its_token >= 0), mu, _used(state.mu)))
    return token, push(state, token)


def distribution(
    logits: Array, params: SamplingParams, state: SamplerState, mask: Array | None = None
) -> tuple[Array, Array]:
    """What `sample` draws from, without mirostat: `(log-probabilities [B, C], token ids [B, C])`; -inf is never drawn.

    Rows of temperature 0 give their token 0 and the others -inf.
    """
    logits = _allowed(logits.astype(jnp.float32), params, mask)
    kept = order(_chain(logits, params, state, _step_keys(params, state)))
    first = jnp.arange(kept.logits.shape[1], dtype=jnp.int32) == 0
    greedy = (params.temperature <= 0)[:, None]
    only = jnp.where(first, 0.0, -jnp.inf)
    return jnp.where(greedy, only, jax.nn.log_softmax(kept.logits, axis=-1)), token_ids(kept)


def _allowed(logits: Array, params: SamplingParams, mask: Array | None) -> Array:
    """Padding of the vocabulary and what `mask` forbids become -inf; then the bias is added."""
    V = logits.shape[1]
    if params.vocab_limit is not None and params.vocab_limit < V:
        logits = jnp.where(jnp.arange(V) < params.vocab_limit, logits, -jnp.inf)
    if mask is not None:
        logits = penalties.allow(logits, mask)
    if params.bias_ids is not None:
        logits = penalties.add_bias(logits, params.bias_ids, _used(params.bias))
    return logits


def _changed(logits: Array, params: SamplingParams, state: SamplerState) -> Array:
    """What rows of temperature 0 choose from, by id: [B, V]."""
    candidates = _chain(logits, params, state, None)
    if candidates.ids is None:
        return candidates.logits
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return jnp.full_like(logits, -jnp.inf).at[rows, candidates.ids].set(candidates.logits)


def _chain(logits: Array, params: SamplingParams, state: SamplerState, keys: Array | None) -> Candidates:
    candidates = Candidates(logits=logits, ids=None, ordered=False)
    step = _Step(params=params, state=state, keys=keys, n_vocab=logits.shape[1])
    for name in params.samplers:
        candidates = _SAMPLERS[name](candidates, step)
    return candidates


def _step_keys(params: SamplingParams, state: SamplerState) -> Array:
    """A key [B] for each row's next token."""

    def key(seed: Array, index: Array) -> Array:
        return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), index)

    return jax.vmap(key)(params.seed, state.index)


def _random_bits(keys: Array, numbers: Array) -> Array:
    """32 random bits for each of `numbers` [B, N]: threefry's output for the key and the number."""
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))
    return jax.random.key_data(fold(keys, numbers))[..., 0]


def _draw(candidates: Candidates, params: SamplingParams, keys: Array) -> tuple[Array, Array]:
    """One token of each row by its probability (Gumbel's maximum): `(token [B], its logit [B])`.

    The noise belongs to a token's id, not to its place, so that it makes no difference how the candidates were found.
    """
    if candidates.ids is not None:
        candidates = order(candidates)  # equals by id
    bits = _random_bits(keys, token_ids(candidates))
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # -log(1 - u) instead of -log(u): the large values of the noise, which decide, come from the fine end of u.
    noise = -jnp.log(-jnp.log1p(-uniform))
    noise = jnp.where((params.temperature <= 0)[:, None], 0.0, noise)
    place = exact_argmax(candidates.logits + noise)[1][:, None]
    logit = jnp.take_along_axis(candidates.logits, place, axis=1)[:, 0]
    token = jnp.take_along_axis(token_ids(candidates), place, axis=1)[:, 0]
    return jnp.where(jnp.isfinite(logit), token, -1), logit


def _mirostat(logits: Array, params: SamplingParams, state: SamplerState, version: int) -> Candidates:
    """The candidates of mirostat's rows; of temperature 0 all, of which the draw takes the best."""
    candidates = Candidates(logits=temper(logits, params.temperature), ids=None, ordered=False)
    if version == 2:
        return replace(candidates, logits=mirostat.keep_below_surprise(candidates.logits, _used(state.mu)))
    candidates = order(candidates)
    n_vocab = min(params.vocab_limit or logits.shape[1], logits.shape[1])
    return replace(candidates, logits=mirostat.keep_estimated(candidates.logits, _used(state.mu), n_vocab))


# The samplers, on candidates


@dataclass(frozen=True, slots=True)
class _Step:
    """What samplers may look at."""

    params: SamplingParams
    state: SamplerState
    keys: Array | None  # of the rows; None where every row is greedy
    n_vocab: int

    def of_drawn_rows(self, value: Array | None, off: float) -> Array:
        """`value` [B] with `off` in rows of temperature 0, whose best token must stay."""
        return jnp.where(self.params.temperature > 0, _used(value), off)


def _used(field: Array | None) -> Array:
    """A field that is there because its sampler is in the chain."""
    assert field is not None
    return field


def _penalties(c: Candidates, step: _Step) -> Candidates:
    p = step.params
    counts = penalties.recent_counts(step.state.history, _used(p.repeat_last_n), step.n_vocab)
    counts = penalties.at(counts, c.ids)
    if p.exempt_id is not None:
        counts = jnp.where(token_ids(c) == p.exempt_id[:, None], 0, counts)
    logits = penalties.penalize(
        c.logits, counts, _used(p.repeat_penalty), _used(p.frequency_penalty), _used(p.presence_penalty)
    )
    return replace(c, logits=logits, ordered=False)


def _dry(c: Candidates, step: _Step) -> Candidates:
    p = step.params
    penalty = penalties.dry_penalty(
        step.state.history, step.n_vocab, _used(p.dry_multiplier), _used(p.dry_base), _used(p.dry_allowed_length),
        _used(p.dry_last_n), _used(p.dry_breakers), p.dry_sequences,
    )  # fmt: skip
    return replace(c, logits=c.logits - penalties.at(penalty, c.ids), ordered=False)


def _top_n_sigma(c: Candidates, step: _Step) -> Candidates:
    return replace(c, logits=truncation.keep_top_n_sigma(c.logits, _used(step.params.top_n_sigma)))


def _top_k(c: Candidates, step: _Step) -> Candidates:
    c = best(c, step.params.n_candidates) if step.params.n_candidates else order(c)
    return replace(c, logits=truncation.keep_top_k(c.logits, _used(step.params.top_k)))


def _tail_free(c: Candidates, step: _Step) -> Candidates:
    c = order(c)
    return replace(c, logits=truncation.keep_tail_free(c.logits, _used(step.params.tfs_z), step.params.min_keep))


def _typical(c: Candidates, step: _Step) -> Candidates:
    typical_p = step.of_drawn_rows(step.params.typical_p, 1.0)
    # Tokens go out amid the others: -inf between them is not in order.
    return replace(c, logits=truncation.keep_typical(c.logits, typical_p, step.params.min_keep), ordered=False)


def _top_p(c: Candidates, step: _Step) -> Candidates:
    c = order(c)
    return replace(c, logits=truncation.keep_top_p(c.logits, _used(step.params.top_p), step.params.min_keep))


def _min_p(c: Candidates, step: _Step) -> Candidates:
    if step.params.min_keep is not None:
        c = order(c)
    return replace(c, logits=truncation.keep_min_p(c.logits, _used(step.params.min_p), step.params.min_keep))


def _xtc(c: Candidates, step: _Step) -> Candidates:
    if step.keys is None:
        return c
    c = order(c)
    number = jnp.full((c.logits.shape[0], 1), _XTC_NUMBER, jnp.uint32)
    chance = (_random_bits(step.keys, number)[:, 0] >> 8).astype(jnp.float32) * 2.0**-24
    probability = step.of_drawn_rows(step.params.xtc_probability, 0.0)
    logits = truncation.exclude_top_choices(
        c.logits, probability, _used(step.params.xtc_threshold), chance, step.params.min_keep
    )
    return replace(c, logits=logits, ordered=False)


def _temperature(c: Candidates, step: _Step) -> Candidates:
    p = step.params
    temperature = p.temperature
    if p.dynatemp_range is not None:
        temperature = dynamic_temperature(c.logits, temperature, p.dynatemp_range, _used(p.dynatemp_exponent))
    return replace(c, logits=temper(c.logits, temperature))


_SAMPLERS: dict[str, Callable[[Candidates, _Step], Candidates]] = {
    "penalties": _penalties,
    "dry": _dry,
    "top_n_sigma": _top_n_sigma,
    "top_k": _top_k,
    "tfs_z": _tail_free,
    "typ_p": _typical,
    "top_p": _top_p,
    "min_p": _min_p,
    "xtc": _xtc,
    "temperature": _temperature,
}
