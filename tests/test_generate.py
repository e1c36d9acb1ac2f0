"""The loop on the device against the model run from scratch for every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax import (
    ArgumentError,
    Session,
    forward,
    generate_tokens,
    init_cache,
    sampling_params,
    start_decoding,
)
from llama_jax import session as session_module
from llama_jax.generate import decode
from llama_jax.sampling import recent_tokens, start_state
from llama_jax.session import _recent_tokens, chunk_lengths
from tests.tiny import tiny_config, tiny_params

CONFIG = tiny_config()
PARAMS = tiny_params(CONFIG)
PROMPTS = [[5, 9, 77, 3, 14, 50, 2], [8], [31, 31, 4, 90]]
WILD = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
full_forward = jax.jit(forward, static_argnames="config")


def greedy_from_scratch(prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        padded = jnp.asarray([tokens + [0] * (40 - len(tokens))], jnp.int32)
        logits, _ = full_forward(PARAMS, padded, CONFIG)
        tokens.append(int(jnp.argmax(logits[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


def padded(prompts: list[list[int]]) -> tuple[jax.Array, jax.Array]:
    longest = max(map(len, prompts))
    tokens = jnp.asarray([p + [0] * (longest - len(p)) for p in prompts], jnp.int32)
    return tokens, jnp.asarray([len(p) for p in prompts], jnp.int32)


jit_generate = jax.jit(generate_tokens, static_argnames=("config", "max_tokens"))


def run_session(prompts, sampling, max_tokens, eos_ids=(), **options) -> tuple[list[list[int]], Session]:
    session = Session(PARAMS, CONFIG, batch=len(prompts), **({"capacity": 40} | options))
    rows = [[] for _ in prompts]
    for new in session.generate(prompts, sampling, max_tokens=max_tokens, eos_ids=eos_ids):
        for row, tokens in zip(rows, new, strict=True):
            row.extend(tokens)
    return rows, session


def test_greedy_equals_the_model_from_scratch():
    tokens, lengths = padded(PROMPTS)
    got, counts = jit_generate(PARAMS, tokens, CONFIG, max_tokens=12, lengths=lengths)
    assert counts.tolist() == [12, 12, 12]
    assert got.tolist() == [greedy_from_scratch(p, 12) for p in PROMPTS]


@pytest.mark.parametrize("n_batch", [1, 3, 40])
def test_a_session_gives_the_same_tokens(n_batch):
    rows, session = run_session(PROMPTS, sampling_params(3, temperature=0.0), 12, n_batch=n_batch)
    assert rows == [greedy_from_scratch(p, 12) for p in PROMPTS]
    assert session.tokens == [p + row[:-1] for p, row in zip(PROMPTS, rows, strict=True)]
    assert session.cache.lengths.tolist() == [len(t) for t in session.tokens]


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_sampled_rows_do_not_depend_on_their_neighbours_or_on_the_dispatch(penalty):
    options = WILD | dict(repeat_penalty=penalty, repeat_last_n=5)
    together, _ = run_session(PROMPTS, sampling_params(3, **options), 15)
    for row, prompt in enumerate(PROMPTS):
        alone, _ = run_session([prompt], sampling_params(1, **(options | {"seed": 5 + row})), 15)
        assert alone[0] == together[row]
    tokens, lengths = padded(PROMPTS)
    pure, _ = jit_generate(
        PARAMS, tokens, CONFIG, max_tokens=15, lengths=lengths, sampling=sampling_params(3, **options)
    )
    assert pure.tolist() == together


def test_repeats_are_penalised_in_prompt_and_answer():
    # A penalty this strong forbids every token of the window; 101 tokens give 30 different ones.
    options = dict(temperature=0.0, repeat_penalty=1e9, repeat_last_n=38)
    (row,), _ = run_session([PROMPTS[0]], sampling_params(1, **options), 30)
    free, _ = run_session([PROMPTS[0]], sampling_params(1, temperature=0.0), 30)
    assert len(set(row)) == 30
    assert not set(row) & set(PROMPTS[0])
    assert len(set(free[0])) < 30


def test_a_row_ends_at_its_end_token():
    free = greedy_from_scratch(PROMPTS[0], 12)
    end = free[4]
    first = free.index(end)
    rows, _ = run_session(PROMPTS, sampling_params(3, temperature=0.0), 12, eos_ids=[end, 100])
    assert rows[0] == free[: first + 1]
    tokens, lengths = padded(PROMPTS)
    got, counts = jit_generate(PARAMS, tokens, CONFIG, max_tokens=12, lengths=lengths, eos_ids=jnp.asarray([end]))
    assert counts[0] == first + 1
    assert got[0].tolist() == rows[0] + [0] * (11 - first)


def test_a_full_cache_ends_the_row_and_only_that_row():
    rows, session = run_session(PROMPTS, sampling_params(3, temperature=0.0), 100, capacity=10)
    # The cache takes 10 tokens, and one more is sampled from the tenth.
    assert [len(p) + len(r) for p, r in zip(PROMPTS, rows, strict=True)] == [11, 11, 11]
    assert rows == [greedy_from_scratch(p, 11 - len(p)) for p in PROMPTS]
    assert session.cache.lengths.tolist() == [10, 10, 10]


def test_zero_and_one_token():
    rows, session = run_session(PROMPTS, sampling_params(3, temperature=0.0), 0)
    assert rows == [[], [], []]
    assert session.tokens == PROMPTS
    rows, _ = run_session(PROMPTS, sampling_params(3, temperature=0.0), 1)
    assert rows == [greedy_from_scratch(p, 1) for p in PROMPTS]


def test_a_session_runs_only_what_is_new():
    rows, session = run_session([PROMPTS[0]], sampling_params(1, temperature=0.0), 6)
    longer = [*PROMPTS[0], *rows[0], 7, 8]
    new = list(session.generate([longer], sampling_params(1, temperature=0.0), max_tokens=5))
    assert session.timings.cached_tokens == len(PROMPTS[0]) + 5  # the latest token was never run
    assert session.timings.prompt_tokens == 3
    assert [t for chunk in new for t in chunk[0]] == greedy_from_scratch(longer, 5)
    again = list(session.generate([PROMPTS[0]], sampling_params(1, temperature=0.0), max_tokens=6))
    assert session.timings.prompt_tokens == 1  # logits need one token
    assert [t for chunk in again for t in chunk[0]] == rows[0]


def test_a_stream_that_is_dropped_leaves_a_usable_session():
    session = Session(PARAMS, CONFIG, capacity=40)
    for _ in session.generate([PROMPTS[0]], sampling_params(temperature=0.0), max_tokens=20):
        break
    rest = session.generate([PROMPTS[2]], sampling_params(temperature=0.0), max_tokens=5)
    assert [t for (new,) in rest for t in new] == greedy_from_scratch(PROMPTS[2], 5)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [([[]], "no tokens"), ([[1] * 41], "41 tokens; the context holds 40"), ([[1], [2]], "2 prompts .* 1 sequences")],
)
def test_prompts_that_do_not_fit_are_named(prompts, words):
    with pytest.raises(ArgumentError, match=words):
        Session(PARAMS, CONFIG, capacity=40).prefill(prompts)


def test_recent_tokens_come_latest_first():
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]
    tokens, lengths = padded(prompts)
    for window in (1, 2, 3, 8):
        expected = [(prompt[::-1] + [-1] * window)[:window] for prompt in prompts]
        np.testing.assert_array_equal(recent_tokens(tokens, lengths, window), expected)
        np.testing.assert_array_equal(_recent_tokens(prompts, window), expected)
    assert recent_tokens(tokens, lengths, 0).shape == (3, 0)


def test_a_handful_of_programs_serves_all_prompt_lengths(monkeypatch):
    traces = {"prefill": 0, "decode": 0}

    def counted(name, function):
        def wrapper(*args):
            traces[name] += 1
            return function(*args)

        return wrapper

    prefill = jax.jit(counted("prefill", session_module._prefill_chunk), static_argnums=2, donate_argnums=(3, 5))
    steps = jax.jit(counted("decode", decode), static_argnums=(1, 5), donate_argnums=2)
    monkeypatch.setattr(session_module, "_prefill_jit", prefill)
    monkeypatch.setattr(session_module, "_decode_jit", steps)
    config = tiny_config(n_layers=1)
    session = Session(tiny_params(config), config, capacity=120, n_batch=32)
    for length in range(1, 100, 7):
        prompt = [(length * 13 + i) % 100 for i in range(length)]
        for n in (2, 5):
            list(session.generate([prompt], sampling_params(temperature=0.0), max_tokens=n))
    assert traces == {"prefill": 2, "decode": 1}
    assert chunk_lengths(32) == (16, 32)
    assert chunk_lengths(2048) == (16, 64, 256, 2048)
    assert chunk_lengths(3) == (3,)


def test_warm_up_compiles_all_and_changes_nothing():
    session = Session(PARAMS, CONFIG, capacity=40, n_batch=16)
    before = jax.tree.map(np.asarray, session.cache)
    session.warm_up(sampling_params(temperature=0.0), longest_prompt=20, eos_ids=[1])
    jax.tree.map(np.testing.assert_array_equal, before, session.cache)
    compiled = session_module._prefill_jit._cache_size(), session_module._decode_jit._cache_size()
    list(session.generate([list(range(20))], sampling_params(temperature=0.0), max_tokens=8, eos_ids=[1]))
    assert (session_module._prefill_jit._cache_size(), session_module._decode_jit._cache_size()) == compiled


def test_the_compiled_decode_step_updates_the_cache_in_place():
    sampling = sampling_params(temperature=0.0)
    eos = jnp.zeros(1, jnp.int32)
    cache = init_cache(CONFIG, 1, 32, jnp.float32)
    state = start_decoding(jnp.zeros((1, 101)), cache, start_state(sampling), sampling, eos)
    lowered = session_module._decode_jit.lower(PARAMS, CONFIG, state, sampling, eos, 4, jnp.int32(4))
    compiled = lowered.compile()
    buffers = 2 * CONFIG.n_layers
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= buffers * state.cache.k[0].nbytes
    text = compiled.as_text()
    assert text.count("may-alias") + text.count("must-alias") >= buffers
    shape = "f32[1,2,32,12]"
    copies = [line for line in text.splitlines() if f"= {shape}" in line and " copy(" in line]
    assert not copies


def test_sampling_for_other_rows_is_refused():
    session = Session(PARAMS, CONFIG, batch=2, capacity=40)
    with pytest.raises(ArgumentError, match="sampling is for 1 rows; the session has 2"):
        list(session.generate(PROMPTS[:2], sampling_params(1), max_tokens=2))
    tokens, lengths = padded(PROMPTS)
    with pytest.raises(ArgumentError, match="sampling is for 2 rows; there are 3 prompts"):
        generate_tokens(PARAMS, tokens, CONFIG, max_tokens=2, lengths=lengths, sampling=sampling_params(2))


@pytest.mark.parametrize("dtype", [jnp.int8, (jnp.bfloat16, jnp.int8)])
def test_a_narrow_cache_changes_the_logits_a_little(dtype):
    config = tiny_config()
    params = tiny_params(config)
    prompts = [list(range(1, 20)), [7, 3, 5]]
    wide, narrow = (Session(params, config, batch=2, capacity=32, n_batch=8, dtype=each) for each in (None, dtype))
    expected, logits = wide.prefill(prompts), narrow.prefill(prompts)
    difference = jnp.linalg.norm(logits - expected) / jnp.linalg.norm(expected)
    assert 0 < difference < 0.02
    shorter = [sum(leaf.nbytes for leaf in jax.tree.leaves(session.cache.k)) for session in (narrow, wide)]
    assert shorter[0] <= shorter[1] * (0.5 if isinstance(dtype, tuple) else 0.25 + 1 / config.head_dim)


@pytest.mark.slow
def test_ten_thousand_steps_take_no_more_memory_and_no_new_program():
    config = tiny_config(context_length=16384)
    session = Session(tiny_params(config), config, batch=1, capacity=10_200)
    sampling = sampling_params(temperature=1.0, seed=3)
    held, programs, n = [], [], 0
    for (tokens,) in session.generate([[1, 2, 3]], sampling, max_tokens=10_001):
        n += len(tokens)
        held.append(sum(array.nbytes for array in jax.live_arrays()))
        programs.append(session_module._decode_jit._cache_size())
    assert n == 10_001
    later = len(held) // 4
    assert max(held[later:]) <= held[later] * 1.001
    assert set(programs[later:]) == {programs[later]}
