"""The chain as a whole: against the same chain in float64 numpy, and what it promises about seeds, bans and batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_jax import (
    ArgumentError,
    distribution,
    join_params,
    log_probabilities,
    recent_tokens,
    sample,
    sampling_params,
    start_state,
)
from llama_jax.sampling import SAMPLERS
from llama_jax.sampling.params import sampler_order
from tests.sampling import reference

V = 50
FREE = dict(top_k=0, top_p=1.0, min_p=0.0)  # every token may be drawn
TEXT = [3, 9, 9, 14, 3, 9, 20, 41, 3, 9]  # 3 9 was followed by 9 and by 20
jit_sample = jax.jit(sample)


@jax.jit
def both(logits, params, state):
    """The distribution and a draw, in one program."""
    return *distribution(logits, params, state), sample(logits, params, state)[0]


def history_of(params, text=TEXT) -> jax.Array:
    n = params.batch
    return recent_tokens(jnp.asarray([text] * n, jnp.int32), jnp.full(n, len(text), jnp.int32), params.window)


def draws(logits: np.ndarray, n: int, **options) -> np.ndarray:
    """`n` draws from one row of logits [V], each as another row of the batch."""
    params = sampling_params(n, **options)
    rows = jnp.tile(jnp.asarray(logits, jnp.float32), (n, 1))
    return np.asarray(jit_sample(rows, params, start_state(params))[0])


def numpy_chain(logits, *, samplers=None, **options) -> np.ndarray:
    """Probabilities of one row after the chain, from the definitions."""
    get = options.get
    keep = get("min_keep", 0)
    steps = {
        "penalties": lambda x: reference.penalize(
            x, TEXT, get("repeat_last_n", 64), get("repeat_penalty", 1), get("frequency_penalty", 0),
            get("presence_penalty", 0), get("exempt_id"),
        ),
        "dry": lambda x: x - reference.dry(
            len(x), TEXT, get("dry_multiplier", 0), get("dry_base", 1.75), get("dry_allowed_length", 2),
            get("dry_penalty_last_n", 64), get("dry_breakers", ()),
        ),
        "top_n_sigma": lambda x: reference.top_n_sigma(x, get("top_n_sigma", -1)),
        "top_k": lambda x: reference.top_k(x, get("top_k", 40)),
        "tfs_z": lambda x: reference.tail_free(x, get("tfs_z", 1), keep),
        "typ_p": lambda x: reference.typical(x, get("typical_p", 1), keep),
        "top_p": lambda x: reference.top_p(x, get("top_p", 0.95), keep),
        "min_p": lambda x: reference.min_p(x, get("min_p", 0.05), keep),
        "temperature": lambda x: x / reference.dynamic_temperature(
            x, get("temperature", 0.8), get("dynatemp_range", 0), get("dynatemp_exponent", 1)
        ),
    }  # fmt: skip
    for name in samplers or [name for name in SAMPLERS if name != "xtc"]:
        logits = steps[name](logits)
    return reference.softmax(logits)


CHAINS = [
    {},
    dict(temperature=1.7, top_k=7),
    dict(FREE, temperature=0.3),
    dict(top_k=0, top_p=0.8),
    dict(top_k=0, top_p=1.0, min_p=0.1),
    dict(top_k=30, min_keep=9, top_p=0.1, min_p=0.5, typical_p=0.2, tfs_z=0.2),
    dict(repeat_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.2, exempt_id=9, logit_bias={1: 4.0, 3: 1.0}),
    dict(dry_multiplier=0.9, dry_allowed_length=1, dry_breakers=[[41], [20, 7]], repeat_penalty=1.1, repeat_last_n=4),
    dict(top_n_sigma=1.2, dynatemp_range=0.6, dynatemp_exponent=1.3),
    dict(tfs_z=0.9, typical_p=0.7, top_k=0),
    dict(samplers=["temperature", "top_p", "penalties", "top_k"], repeat_penalty=2.0, top_k=3, temperature=2.0),
    dict(samplers=["top_k", "penalties", "dry", "typ_p", "min_p"], frequency_penalty=1.0, dry_multiplier=1.0,
         typical_p=0.8, top_k=20),
    dict(samplers=["min_p", "top_n_sigma", "top_k", "temperature"], min_p=0.02, top_n_sigma=2.5),
]  # fmt: skip


@pytest.mark.parametrize("options", CHAINS, ids=str)
def test_the_chain_is_that_of_its_definitions(options):
    params = sampling_params(8, **options)
    rows = np.random.default_rng(0).normal(0, 1.5, (8, V)).astype(np.float32)
    log_p, ids, tokens = both(rows, params, start_state(params, history_of(params)))
    got = np.zeros((8, V))
    np.put_along_axis(got, np.asarray(ids), np.exp(np.asarray(log_p, np.float64)), axis=1)
    biased = rows.astype(np.float64)
    for token, bias in options.get("logit_bias", {}).items():
        biased[:, token] += bias
    expected = [numpy_chain(row, **options) for row in biased]
    np.testing.assert_allclose(got, expected, atol=2e-5)
    assert all(expected[row][token] > 0 for row, token in enumerate(tokens.tolist()))


def test_draws_follow_the_distribution():
    logits = np.random.default_rng(3).normal(0, 1.5, 10)
    got = draws(logits, 20000, temperature=0.7, seed=11, **FREE)
    expected = reference.softmax(logits / 0.7)
    observed = np.bincount(got, minlength=10) / 20000
    # five standard deviations of each frequency
    np.testing.assert_array_less(np.abs(observed - expected), 5 * np.sqrt(expected * (1 - expected) / 20000) + 1e-9)


def test_successive_draws_are_independent():
    params = sampling_params(2000, temperature=1.0, seed=1, **FREE)
    state, columns = start_state(params), []
    for _ in range(3):
        token, state = jit_sample(jnp.zeros((2000, 2)), params, state)
        columns.append(np.asarray(token))
    pairs = np.bincount(columns[0] * 4 + columns[1] * 2 + columns[2], minlength=8)
    assert np.abs(pairs / 2000 - 1 / 8).max() < 5 * np.sqrt(1 / 8 * 7 / 8 / 2000)


def test_xtc_happens_as_often_as_it_should():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    got = draws(logits, 4000, temperature=1.0, xtc_probability=0.4, xtc_threshold=0.2, seed=2, **FREE)
    # Token 0 is out in 0.4 of the draws, and then 1, 2 and 3 share the rest by their probabilities.
    expected = 0.6 * np.exp(logits) + 0.4 * np.array([0, 0.3, 0.15, 0.05]) / 0.5
    observed = np.bincount(got, minlength=4) / 4000
    np.testing.assert_array_less(np.abs(observed - expected), 5 * np.sqrt(expected * (1 - expected) / 4000))


def test_top_p_sees_probabilities_before_temperature():
    # Untempered, the best token has 0.88 of the probability: top-p 0.85 keeps it alone, whatever the temperature.
    logits = np.array([2.0, 0.0, -10.0])
    assert set(draws(logits, 200, temperature=5.0, top_p=0.85, min_p=0.0, seed=1)) == {0}
    assert set(draws(logits, 200, temperature=5.0, top_p=0.95, min_p=0.0, seed=1)) == {0, 1}
    first = dict(temperature=5.0, top_p=0.85, samplers="temperature;top_p")
    assert set(draws(logits, 200, seed=1, **first)) == {0, 1}


@pytest.mark.parametrize("top_k", [1, 40, 64, 65, 1000, 2000, 0])
def test_no_candidate_bucket_changes_what_may_be_drawn(top_k):
    logits = np.random.default_rng(4).normal(0, 1, 3000)
    got = draws(logits, 500, temperature=3.0, top_k=top_k, top_p=1.0, min_p=0.0, seed=5)
    rank = np.argsort(np.argsort(-logits))
    assert rank[got].max() < (top_k or 3000)
    assert len(set(got)) > (0 if top_k == 1 else 10)


# Temperature 0


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_temperature_0_takes_the_lowest_of_the_best_whatever_truncates(seed):
    logits = np.random.default_rng(seed).integers(0, 4, (3, V)).astype(np.float32)
    best = np.argmax(logits, axis=1)
    for params in (GREEDY, GREEDY_WITH_OTHERS):
        token, _ = jit_sample(logits, params, start_state(params))
        np.testing.assert_array_equal(token[:2], best[:2])


_ODD = dict(typical_p=0.2, xtc_probability=1.0, xtc_threshold=0.01, tfs_z=0.3, top_n_sigma=0.1, dynatemp_range=1.0)
GREEDY = sampling_params(3, temperature=0.0, **_ODD)
GREEDY_WITH_OTHERS = join_params([sampling_params(2, temperature=0.0, **_ODD), sampling_params(1, seed=1, **_ODD)])


def test_temperature_0_is_a_plain_argmax_in_the_program():
    assert GREEDY.greedy
    assert GREEDY.samplers == ()
    assert GREEDY.window == 0
    assert sampling_params(temperature=0.0, repeat_penalty=1.1).samplers == ("penalties",)


def test_penalties_count_at_temperature_0():
    logits = np.zeros((1, V), np.float32)
    logits[0, [9, 30]] = [2.0, 1.5]
    options = dict(temperature=0.0, repeat_penalty=2.0)
    for samplers in (None, "top_k;penalties"):
        params = sampling_params(samplers=samplers, **options)
        assert jit_sample(logits, params, start_state(params, history_of(params)))[0].tolist() == [30]
    alone = sampling_params(samplers="top_k;penalties", top_k=1, **options)
    assert jit_sample(logits, alone, start_state(alone, history_of(alone)))[0].tolist() == [9]


# What is never taken


WAYS = [dict(temperature=0.0), {}, FREE, dict(mirostat=1), dict(mirostat=2)]
BANNED = {7: float("-inf"), 8: -1e9}


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_padding_bans_and_masks(options):
    logits = np.zeros((50, V), np.float32)
    logits[:, 40:] = 100.0
    logits[:, 7] = 50.0
    params = sampling_params(50, seed=2, vocab_limit=40, logit_bias=BANNED, **options)
    words = np.zeros((3, 50, 2), np.int32)
    words[0] = -1  # everything
    for token in (3, 7, 31, 32, 39, 45):
        words[1, :, token // 32] |= np.array(1 << (token % 32)).astype(np.int32)
    free, masked, nothing = (set(jit_sample(logits, params, start_state(params), mask)[0].tolist()) for mask in words)
    assert free <= set(range(40)) - {7, 8}
    assert masked <= {3, 31, 32, 39}
    assert nothing == {-1}


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_logits_that_are_no_numbers_give_no_token(options):
    params = sampling_params(50, seed=2, vocab_limit=40, logit_bias=BANNED, **options)
    for bad in (np.nan, np.inf, -np.inf):
        logits, mask = np.full((50, V), bad, np.float32), np.full((50, 2), -1, np.int32)
        token, state = jit_sample(logits, params, start_state(params), mask)
        assert set(token.tolist()) == {-1}
        assert state.mu is None or np.isfinite(state.mu).all()


# Seeds and batches


def test_a_seed_gives_the_same_token_alone_and_in_a_batch():
    logits = np.random.default_rng(5).normal(0, 1, 200)
    batch = draws(logits, 8, seed=100, temperature=1.5, **FREE)
    alone = [draws(logits, 1, seed=100 + row, temperature=1.5, **FREE)[0] for row in range(8)]
    assert batch.tolist() == alone
    assert len(set(alone)) > 1


def test_all_64_bits_of_a_seed_count():
    seeds = [7, 7 + 2**32, 7 + 2**63, -7]
    tokens = [int(draws(np.zeros(10_000), 1, seed=seed, temperature=1.0, **FREE)[0]) for seed in seeds]
    assert len(set(tokens)) == 4


def test_no_seed_is_a_random_one():
    first, second = sampling_params(), sampling_params(seed=-1)
    assert (first.seed != second.seed).any()


MIXED = [
    dict(),
    dict(temperature=0.0, repeat_penalty=1.5),
    dict(top_k=0, top_p=0.7, min_keep=3),
    dict(mirostat=2, mirostat_tau=2.0),
    dict(dry_multiplier=1.0, dry_allowed_length=1, dry_breakers=[[41], [20, 7]], xtc_probability=0.5, exempt_id=9),
    dict(samplers="top_k;temperature", top_k=500, temperature=2.0, logit_bias={1: 2.0, 4: float("-inf")}),
]


def test_rows_of_any_options_share_a_batch_without_a_change():
    rows = np.random.default_rng(6).normal(0, 2, (8, len(MIXED), 100)).astype(np.float32)  # eight steps

    def run(params, steps):
        state, tokens = start_state(params, history_of(params)), []
        for logits in steps:
            token, state = jit_sample(logits, params, state)
            tokens.append(np.asarray(token))
        return np.stack(tokens, axis=1), state

    each = [sampling_params(seed=row, **options) for row, options in enumerate(MIXED)]
    together, end = run(join_params(each), rows)
    for row, params in enumerate(each):
        alone, its_end = run(params, rows[:, row : row + 1])
        assert together[row].tolist() == alone[0].tolist(), MIXED[row]
        if its_end.mu is not None:
            np.testing.assert_allclose(end.mu[row], its_end.mu[0], rtol=1e-4)
    assert len({tuple(row) for row in together}) == len(MIXED)


def test_joining_needs_orders_and_vocabularies_that_agree():
    with pytest.raises(ArgumentError, match="contradicting orders"):
        join_params([sampling_params(samplers="kp"), sampling_params(samplers="pk")])
    with pytest.raises(ArgumentError, match="vocab_limit"):
        join_params([sampling_params(vocab_limit=3), sampling_params()])
    with pytest.raises(ArgumentError, match="0 sampling options"):
        join_params([])
    assert join_params([sampling_params(samplers="kp"), sampling_params(samplers="tk")]).samplers == (
        "temperature", "top_k", "top_p",
    )  # fmt: skip


# Mirostat


def test_mirostat_steers_the_surprise_to_its_target():
    logits = np.random.default_rng(7).normal(0, 2, (4, 400)).astype(np.float32)
    surprise = -np.log2([reference.softmax(row) for row in logits.astype(np.float64)])
    for version in (1, 2):
        params = sampling_params(4, mirostat=version, mirostat_tau=3.0, mirostat_eta=0.2, temperature=1.0, seed=3)
        state, seen = start_state(params), []
        np.testing.assert_array_equal(state.mu, 6.0)
        for _ in range(200):
            token, state = jit_sample(logits, params, state)
            seen.append(surprise[np.arange(4), np.asarray(token)])
        # The surprise among those kept is the controlled one; among all tokens it is a little more.
        assert 2.5 < np.mean(seen[50:]) < 4.5


def test_mirostat_keeps_the_best_token_when_none_is_unsurprising_enough():
    logits = np.zeros(1000)
    logits[500] = 0.1
    assert set(draws(logits, 20, mirostat=2, mirostat_tau=0.5, seed=1)) == {500}


# Log-probabilities


def test_log_probabilities():
    logits = np.random.default_rng(8).normal(0, 3, (3, V)).astype(np.float32)
    expected = np.log([reference.softmax(row) for row in logits[:, :40].astype(np.float64)])
    got = log_probabilities(jnp.asarray(logits), jnp.asarray([0, 5, 39]), 4, vocab_limit=40)
    np.testing.assert_allclose(got.token, expected[[0, 1, 2], [0, 5, 39]], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got.top_ids, np.argsort(-expected, axis=1)[:, :4])
    np.testing.assert_allclose(got.top, -np.sort(-expected, axis=1)[:, :4], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row", [[0.0, -1e38, -1e38], [0.0, -np.inf, 5.0], [np.nan] * 3, [np.inf, 0.0, 0.0]])
def test_log_probabilities_are_always_numbers(row):
    got = log_probabilities(jnp.asarray([row], jnp.float32), jnp.asarray([1]), 5)
    assert got.top.shape == (1, 3)
    for values in (got.token, got.top):
        assert np.isfinite(values).all()
        assert (np.asarray(values) <= 0).all()


# Options


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"typical_p": 0},
        {"tfs_z": 2},
        {"top_n_sigma": float("inf")},
        {"min_keep": -1},
        {"dynatemp_range": -1},
        {"dynatemp_exponent": 0},
        {"xtc_probability": 1.1},
        {"xtc_threshold": -0.1},
        {"repeat_penalty": 0.0},
        {"frequency_penalty": float("nan")},
        {"presence_penalty": "much"},
        {"repeat_last_n": -1},
        {"dry_multiplier": -1},
        {"dry_base": 0.5},
        {"dry_allowed_length": 1.5},
        {"dry_penalty_last_n": -2},
        {"dry_breakers": [[-1]]},
        {"mirostat": 3},
        {"mirostat_tau": -1},
        {"mirostat_eta": None},
        {"logit_bias": {-1: 0.0}},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": [1]},
        {"samplers": "top_k;best"},
        {"samplers": ["top_k", "top_k"]},
        {"samplers": "kz"},
        {"top_k": 1.5},
        {"seed": 2**65},
        {"seed": [1, 2, 3]},
        {"logprobs": -1},
        {"vocab_limit": 0},
    ],
    ids=str,
)
def test_a_wrong_option_is_named(options):
    if "dry_breakers" in options:
        options = {"dry_multiplier": 1.0} | options
    with pytest.raises(ArgumentError, match=list(options)[-1]):
        sampling_params(2, **options)


def test_the_default_order_is_todays():
    params = sampling_params(
        repeat_penalty=1.1, dry_multiplier=1.0, top_n_sigma=1.0, tfs_z=0.9, typical_p=0.9, xtc_probability=0.1
    )
    assert params.samplers == SAMPLERS
    assert [name for name in SAMPLERS if name != "tfs_z"] == list(sampler_order("edskypmxt"))
    assert sampling_params().samplers == ("top_k", "top_p", "min_p", "temperature")
    assert sampling_params(**FREE).samplers == ("temperature",)


def test_orders_are_read():
    assert sampler_order("top_k; temperature") == ("top_k", "temperature")
    assert sampler_order("kt") == ("top_k", "temperature")
    assert sampler_order("temperature") == ("temperature",)
    assert sampler_order(["temp", "typical_p"]) == ("temperature", "typ_p")
    assert sampler_order("") == ()
    assert sampling_params(samplers="", temperature=3.0).temperature.tolist() == [1.0]
