"""Each sampler against its definition in float64 numpy.

Where a threshold decides, float32 may decide differently within 1e-5 of it: the tokens that stay must lie between those
of a slightly lower and a slightly higher threshold.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llama_jax.sampling import mirostat, penalties, truncation
from llama_jax.sampling.candidates import exact_argmax, exact_top_k
from llama_jax.sampling.temperature import dynamic_temperature, temper
from tests.sampling import reference

B, C = 4, 24
NEAR = 1e-5
SEEDS = st.integers(0, 10**6)
MIN_KEEP = st.sampled_from([None, 0, 1, 3, 30])
jitted = {
    name: jax.jit(getattr(module, name))
    for module, names in {
        truncation: ("keep_top_k", "keep_top_p", "keep_min_p", "keep_typical", "keep_tail_free", "keep_top_n_sigma"),
        penalties: ("penalize",),
        mirostat: ("keep_below_surprise", "next_mu"),
    }.items()
    for name in names
}
many = settings(deadline=None, max_examples=40)


def rows_of(seed: int, *, ordered: bool = True, spread: float | None = None) -> np.ndarray:
    """Logits [B, C] float32; some tokens of row 1 are out already, row 2 has one token, row 3 is nearly certain."""
    random = np.random.default_rng(seed)
    rows = random.normal(0, random.choice([0.1, 1, 3]) if spread is None else spread, (B, C)).astype(np.float32)
    rows[1, random.permutation(C)[:9]] = -np.inf
    rows[2, 1:] = -np.inf
    rows[3] *= 8
    return -np.sort(-rows, axis=1) if ordered else rows


def full(value: float, dtype=jnp.float32) -> jax.Array:
    return jnp.full(B, value, dtype)


def least(min_keep):
    return None if min_keep is None else full(min_keep, jnp.int32)


def assert_between(got, rows, lower, upper):
    """`got` keeps what `lower(row)` keeps and nothing that `upper(row)` does not, with logits as they were."""
    got = np.asarray(got)
    for new, row in zip(got, rows.astype(np.float64), strict=True):
        kept = new > -np.inf
        np.testing.assert_array_equal(new[kept], row[kept])
        assert kept[lower(row) > -np.inf].all()
        assert not kept[~(upper(row) > -np.inf)].any()
        assert kept.any()


@many
@given(seed=SEEDS, k=st.integers(0, C + 5))
def test_top_k(seed, k):
    rows = rows_of(seed)
    got = jitted["keep_top_k"](rows, full(k, jnp.int32))
    np.testing.assert_array_equal(got, [reference.top_k(row, k) for row in rows])


@many
@given(seed=SEEDS, p=st.floats(0.01, 1.0), keep=MIN_KEEP)
def test_top_p(seed, p, keep):
    rows = rows_of(seed)
    got = jitted["keep_top_p"](rows, full(p), least(keep))
    keep = keep or 0
    assert_between(
        got, rows, lambda row: reference.top_p(row, p - NEAR, keep), lambda row: reference.top_p(row, p + NEAR, keep)
    )


@many
@example(seed=915, p=1.401298464324817e-45, keep=None)
@given(seed=SEEDS, p=st.floats(0.0, 1.0), keep=MIN_KEEP)
def test_min_p(seed, p, keep):
    rows = rows_of(seed, ordered=keep is not None)
    got = jitted["keep_min_p"](rows, full(p), least(keep))
    keep, p = keep or 0, p if p >= np.finfo(np.float32).tiny else 0.0
    low, high = p * (1 - NEAR), p * (1 + NEAR)
    assert_between(got, rows, lambda row: reference.min_p(row, high, keep), lambda row: reference.min_p(row, low, keep))


@many
@given(seed=SEEDS, p=st.floats(0.01, 1.0), keep=MIN_KEEP)
def test_typical(seed, p, keep):
    rows = rows_of(seed)[:, ::-1]  # in no order that matters
    got = jitted["keep_typical"](rows, full(p), None if keep is None else least(keep))
    keep = keep or 0
    assert_between(
        got,
        rows,
        lambda row: reference.typical(row, p - NEAR, keep),
        lambda row: reference.typical(row, p + NEAR, keep),
    )


@many
@given(seed=SEEDS, z=st.floats(0.01, 1.0), keep=MIN_KEEP)
def test_tail_free(seed, z, keep):
    rows = rows_of(seed, spread=2.0)
    got = jitted["keep_tail_free"](rows, full(z), least(keep))
    keep = keep or 0
    assert_between(
        got,
        rows,
        lambda row: reference.tail_free(row, z - NEAR, keep),
        lambda row: reference.tail_free(row, z + NEAR, keep),
    )


def test_tail_free_of_equal_probabilities_keeps_the_share():
    rows = np.zeros((1, 12), np.float32)
    kept = np.isfinite(truncation.keep_tail_free(rows, jnp.asarray([0.55])))
    assert kept.sum() == np.isfinite(reference.tail_free(rows[0], 0.55)).sum() == 5


@many
@given(seed=SEEDS, n=st.one_of(st.floats(0.01, 4.0), st.sampled_from([-1.0, 0.0])))
def test_top_n_sigma(seed, n):
    rows = rows_of(seed, ordered=False)
    got = jitted["keep_top_n_sigma"](rows, full(n))
    near = NEAR if n > 0 else 0.0  # 0 is off
    assert_between(
        got, rows, lambda row: reference.top_n_sigma(row, n - near), lambda row: reference.top_n_sigma(row, n + near)
    )


@many
@given(
    seed=SEEDS, probability=st.floats(0, 1), threshold=st.floats(0.001, 1), chance=st.floats(0, 0.999), keep=MIN_KEEP
)
def test_xtc(seed, probability, threshold, chance, keep):
    rows = rows_of(seed)
    shares = np.array([reference.softmax(row) for row in rows.astype(np.float64)])
    if np.abs(shares - threshold).min() < NEAR or abs(np.float32(probability) - np.float32(chance)) < 1e-6:
        return
    if abs(threshold - 0.5) < 1e-6:
        return
    got = truncation.exclude_top_choices(
        jnp.asarray(rows), full(probability), full(threshold), full(chance), least(keep)
    )
    np.testing.assert_array_equal(got, [reference.xtc(row, probability, threshold, chance, keep or 0) for row in rows])


@many
@given(seed=SEEDS, temperature=st.floats(0.05, 3), half=st.floats(0, 2), exponent=st.floats(0.1, 4))
def test_dynamic_temperature(seed, temperature, half, exponent):
    rows = rows_of(seed)
    got = dynamic_temperature(jnp.asarray(rows), full(temperature), full(half), full(exponent))
    expected = [reference.dynamic_temperature(row, temperature, half, exponent) for row in rows.astype(np.float64)]
    # An entropy near 0 is off by 1e-6, which a small exponent makes much of.
    np.testing.assert_allclose(got, np.maximum(expected, 1e-6), rtol=1e-3, atol=2e-6 ** min(exponent, 1.0) * 4)


def test_no_temperature_is_too_low_or_too_high():
    rows = jnp.asarray(rows_of(1))
    for temperature in (1e-37, 1e-6, 1e6, 3e38):
        tempered = temper(rows, full(temperature))
        assert np.isfinite(tempered[:, 0]).all()
        assert not np.isnan(tempered).any()
    np.testing.assert_array_equal(temper(rows, full(0.0)), rows)
    np.testing.assert_allclose(temper(rows, full(2.0)), rows / 2, rtol=1e-6)


# What looks at the text


def text_of(seed: int, n_vocab: int, length: int) -> list[int]:
    """A text that repeats itself."""
    random = np.random.default_rng(seed)
    text: list[int] = []
    while len(text) < length:
        if len(text) > 4 and random.random() < 0.4:
            start = random.integers(0, len(text) - 2)
            text += text[start : start + random.integers(2, 9)]
        else:
            text += random.integers(0, n_vocab, 3).tolist()
    return text[:length]


def histories(texts, W: int) -> jax.Array:
    return jnp.asarray([(text[::-1] + [-1] * W)[:W] for text in texts], jnp.int32)


@many
@given(
    seed=SEEDS,
    last_n=st.integers(0, 40),
    repeat=st.floats(0.2, 5),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
    exempt=st.booleans(),
)
def test_penalties(seed, last_n, repeat, frequency, presence, exempt):
    V, W = 30, 40
    texts = [text_of(seed + row, V, 13 * row) for row in range(B)]
    logits = np.random.default_rng(seed).normal(0, 3, (B, V)).astype(np.float32)
    counts = penalties.recent_counts(histories(texts, W), full(last_n, jnp.int32), V)
    if exempt:
        counts = counts.at[:, 5].set(0)
    got = jitted["penalize"](logits, counts, full(repeat), full(frequency), full(presence))
    expected = [
        reference.penalize(row.astype(np.float64), text, last_n, repeat, frequency, presence, 5 if exempt else None)
        for row, text in zip(logits, texts, strict=True)
    ]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_each_repeated_token_is_weakened_once():
    history = jnp.asarray([[0, 0, 1, -1, -1]], jnp.int32)
    counts = penalties.recent_counts(history, jnp.asarray([5]), 4)
    assert counts.tolist() == [[2, 1, 0, 0]]
    weakened = penalties.penalize(
        jnp.asarray([[2.0, -2.0, 1.0, 0.5]]), counts, jnp.asarray([1.25]), jnp.zeros(1), jnp.zeros(1)
    )
    np.testing.assert_allclose(weakened, [[1.6, -2.5, 1.0, 0.5]])


BREAKERS = ([7], [3, 4], [3, 4, 5], [9, 9])
TABLE = jnp.asarray([[[3, 4, -1], [3, 4, 5], [9, 9, -1]]] * B, jnp.int32)
SINGLE = jnp.asarray([[1 << 7]] * B, jnp.int32)
jit_dry = jax.jit(penalties.dry_penalty, static_argnums=1)


@many
@given(
    seed=SEEDS,
    multiplier=st.floats(0.1, 3),
    base=st.floats(1, 3),
    allowed=st.integers(1, 5),
    last_n=st.integers(0, 60),
    broken=st.booleans(),
)
def test_dry(seed, multiplier, base, allowed, last_n, broken):
    V, W = 11, 60
    texts = [text_of(seed + row, V, 20 * row) for row in range(B)]
    single, table = (SINGLE, TABLE) if broken else (jnp.zeros((B, 1), jnp.int32), jnp.full_like(TABLE, -1))
    got = jit_dry(
        histories(texts, W), V, full(multiplier), full(base), full(allowed, jnp.int32), full(last_n, jnp.int32),
        single, table,
    )  # fmt: skip
    expected = [reference.dry(V, text, multiplier, base, allowed, last_n, BREAKERS if broken else []) for text in texts]
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_dry_without_end_stays_finite():
    penalty = jit_dry(
        jnp.zeros((1, 500), jnp.int32), 3, *(jnp.asarray([x]) for x in (1e6, 50.0)), jnp.asarray([2]),
        jnp.asarray([500]), jnp.zeros((1, 1), jnp.int32), None,
    )  # fmt: skip
    assert np.isfinite(penalty).all()
    assert penalty[0, 0] > 1e20
    assert penalty[0, 1] == 0


# Mirostat


@many
@given(seed=SEEDS, mu=st.floats(-1, 12))
def test_mirostat_2(seed, mu):
    rows = rows_of(seed, ordered=False)
    got = jitted["keep_below_surprise"](rows, full(mu))
    assert_between(
        got, rows, lambda row: reference.mirostat_2(row, mu - NEAR), lambda row: reference.mirostat_2(row, mu + NEAR)
    )


@many
@given(seed=SEEDS, mu=st.floats(0, 12), spread=st.sampled_from([0.5, 1.0, 3.0]))
def test_mirostat_1(seed, mu, spread):
    V = 150
    row = -np.sort(-np.random.default_rng(seed).normal(0, spread, V)).astype(np.float32)
    got = int(np.isfinite(mirostat.keep_estimated(jnp.asarray(row[None]), jnp.asarray([mu], jnp.float32), V)).sum())
    k = reference.mirostat_1(row.astype(np.float64), mu, V)
    assert max(1, min(V, int(k * (1 - 1e-3)))) <= got <= max(1, min(V, int(k * (1 + 1e-3))))


def test_mirostat_1_of_rows_without_a_slope():
    for row in (np.zeros(50), [3.0] + [-np.inf] * 49, [0.0, 0.0] + [-np.inf] * 48):
        logits = mirostat.keep_estimated(jnp.asarray([row], jnp.float32), jnp.asarray([4.0]), 50)
        assert np.isfinite(logits[0, 0])
        assert not np.isnan(logits).any()


@many
@given(seed=SEEDS, tau=st.floats(0, 10), eta=st.floats(0, 1))
def test_next_mu(seed, tau, eta):
    rows = rows_of(seed)
    taken = np.array([0, 3, 0, 1])
    logits = rows[np.arange(B), taken]
    got = jitted["next_mu"](full(2.0), rows, jnp.asarray(logits), full(tau), full(eta))
    expected = [
        reference.next_mu(row, token, 2.0, tau, eta) for row, token in zip(rows.astype(np.float64), taken, strict=True)
    ]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


# The search


@settings(deadline=None, max_examples=25)
@given(seed=SEEDS, shape=st.sampled_from([(1000, 4), (997, 16), (4096, 64), (50, 50), (300, 1)]), ties=st.booleans())
def test_the_two_steps_find_the_best_and_keep_the_order_of_equals(seed, shape, ties):
    V, k = shape
    random = np.random.default_rng(seed)
    rows = random.integers(0, 6, (2, V)) if ties else random.normal(size=(2, V))
    rows = rows.astype(np.float32)
    rows[1, random.permutation(V)[: V // 2]] = -np.inf
    values, places = jax.jit(exact_top_k, static_argnums=1)(rows, k)
    expected = np.argsort(-rows, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(rows, expected, axis=1))
    best, place = jax.jit(exact_argmax)(rows)
    np.testing.assert_array_equal(place, expected[:, 0])
    np.testing.assert_array_equal(best, rows.max(axis=1))


@pytest.mark.gpu
def test_equals_keep_their_order_on_a_gpu():
    rows = np.random.default_rng(0).integers(0, 50, (3, 128256)).astype(np.float32)
    for k in (64, 1024):
        _, places = jax.jit(exact_top_k, static_argnums=1)(rows, k)
        np.testing.assert_array_equal(places, np.argsort(-rows, axis=1, kind="stable")[:, :k])
    np.testing.assert_array_equal(jax.jit(exact_argmax)(rows)[1], rows.argmax(axis=1))
