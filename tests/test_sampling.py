"""Each step of the chain against its definition in float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_jax import ArgumentError, join_params, sample, sampling_params, start_state
from llama_jax.sampling.truncation import keep_min_p, keep_top_k, keep_top_p

V = 50


def draws(logits: np.ndarray, n: int, history=None, **options) -> np.ndarray:
    """`n` draws from one row of logits [V], each as another row of the batch."""
    params = sampling_params(n, **options)
    rows = jnp.tile(jnp.asarray(logits, jnp.float32), (n, 1))
    return np.asarray(jax.jit(sample)(rows, params, start_state(params, history))[0])


def sorted_rows(seed: int, rows: int = 3) -> np.ndarray:
    return -np.sort(-np.random.default_rng(seed).normal(0, 3, (rows, V)).astype(np.float32), axis=1)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), k=st.integers(0, V + 5))
def test_top_k(seed, k):
    rows = sorted_rows(seed)
    kept = np.isfinite(keep_top_k(jnp.asarray(rows), jnp.full(3, k, jnp.int32)))
    assert (kept.sum(1) == (min(k, V) if k else V)).all()
    assert kept[:, 0].all()


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 1000), p=st.floats(0.01, 1.0))
def test_top_p(seed, p):
    rows = sorted_rows(seed)
    kept = np.isfinite(keep_top_p(jnp.asarray(rows), jnp.full(3, p, jnp.float32)))
    for row, mask in zip(rows.astype(np.float64), kept, strict=True):
        probabilities = np.exp(row - row.max())
        probabilities /= probabilities.sum()
        total = np.cumsum(probabilities)
        n = int(mask.sum())
        assert mask[:n].all()
        if p >= 1:
            assert n == V
        else:  # the shortest head that reaches p, up to rounding of the sum
            assert total[n - 1] >= p - 1e-5
            assert n == 1 or total[n - 2] < p + 1e-5


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 1000), p=st.floats(0.0, 1.0))
def test_min_p(seed, p):
    rows = sorted_rows(seed)
    kept = np.isfinite(keep_min_p(jnp.asarray(rows), jnp.full(3, p, jnp.float32)))
    share = np.exp(rows.astype(np.float64) - rows[:, :1])
    assert kept[share > p * (1 + 1e-4)].all()
    assert not kept[share < p * (1 - 1e-4)].any()
    assert kept[:, 0].all()


def test_draws_follow_the_distribution():
    logits = np.random.default_rng(3).normal(0, 1.5, 10)
    got = draws(logits, 20000, temperature=0.7, top_k=0, top_p=1.0, min_p=0.0, seed=11)
    expected = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    observed = np.bincount(got, minlength=10) / 20000
    # five standard deviations of each frequency
    np.testing.assert_array_less(np.abs(observed - expected), 5 * np.sqrt(expected * (1 - expected) / 20000) + 1e-9)


def test_top_p_sees_probabilities_before_temperature():
    # Untempered, the best token has 0.88 of the probability: top-p 0.85 keeps it alone, whatever the temperature.
    logits = np.array([2.0, 0.0, -10.0])
    assert set(draws(logits, 200, temperature=5.0, top_p=0.85, min_p=0.0, seed=1)) == {0}
    assert set(draws(logits, 200, temperature=5.0, top_p=0.95, min_p=0.0, seed=1)) == {0, 1}


@pytest.mark.parametrize("top_k", [1, 40, 64, 65, 1000, 2000, 0])
def test_no_candidate_bucket_changes_what_may_be_drawn(top_k):
    logits = np.random.default_rng(4).normal(0, 1, 3000)
    got = draws(logits, 500, temperature=3.0, top_k=top_k, top_p=1.0, min_p=0.0, seed=5)
    rank = np.argsort(np.argsort(-logits))
    assert rank[got].max() < (top_k or 3000)
    assert len(set(got)) > (0 if top_k == 1 else 10)


def test_greedy_takes_the_lowest_of_equals():
    logits = np.zeros(V)
    logits[[7, 9]] = 1.0
    assert draws(logits, 1, temperature=0.0).tolist() == [7]
    mixed = join_params([sampling_params(temperature=0.0), sampling_params(temperature=0.5, top_k=5, seed=0)])
    rows = jnp.tile(jnp.asarray(logits, jnp.float32), (2, 1))
    assert sample(rows, mixed, start_state(mixed))[0][0] == 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_of_the_vocabulary_is_never_taken(temperature):
    logits = np.zeros(V)
    logits[40:] = 100.0
    got = draws(logits, 300, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=2, vocab_limit=40)
    assert got.max() < 40


def test_a_seed_gives_the_same_token_alone_and_in_a_batch():
    logits = np.random.default_rng(5).normal(0, 1, 200)
    options = dict(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0)
    batch = draws(logits, 8, seed=100, **options)
    alone = [draws(logits, 1, seed=100 + row, **options)[0] for row in range(8)]
    assert batch.tolist() == alone
    assert len(set(alone)) > 1


def test_all_64_bits_of_a_seed_count():
    logits = np.zeros(10_000)
    seeds = [7, 7 + 2**32, 7 + 2**63, -7]
    options = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    assert len({int(draws(logits, 1, seed=seed, **options)[0]) for seed in seeds}) == 4


def test_no_seed_is_a_random_one():
    first, second = sampling_params(), sampling_params(seed=-1)
    assert (first.seed != second.seed).any()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repeat_penalty": 0.0},
        {"repeat_last_n": -1},
        {"top_k": 1.5},
        {"seed": 2**65},
        {"seed": [1, 2, 3]},
    ],
)
def test_a_wrong_option_is_named(options):
    with pytest.raises(ArgumentError, match=next(iter(options))):
        sampling_params(2, **options)
