"""A full context: the end of the text, or a shift that turns the cached keys to their new positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import llama_jax
from llama_jax import ArgumentError, Llama, RopeScaling, Session, forward, init_cache, prefill, sampling_params
from llama_jax.cache import forget
from llama_jax.rope import apply_rope, rope_rotations, rotate_back
from tests.tiny import tiny_config, tiny_llama, tiny_params

ROPES = {
    "plain": {},
    "llama3": dict(rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_context_length=32)),
    "yarn": dict(rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_context_length=32)),
}
ONE_LAYER = tiny_config(n_layers=1)
GREEDY = sampling_params(temperature=0.0)
jit_prefill = jax.jit(prefill, static_argnames="config")
jit_forward = jax.jit(forward, static_argnames="config")
jit_forget = jax.jit(forget, static_argnames="config")


@pytest.mark.parametrize("rope", ROPES)
def test_heads_turn_back(rope):
    config = tiny_config(**ROPES[rope])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3, 12)), jnp.float32)  # [B, T, N, E]
    positions = jnp.asarray([[40, 41, 42, 43, 44], [9, 10, 11, 12, 13]], jnp.int32)
    distance = jnp.asarray([33, 0], jnp.int32)
    turned = rotate_back(apply_rope(x, rope_rotations(positions, config)).swapaxes(1, 2), distance, config)
    fresh = apply_rope(x, rope_rotations(positions - distance[:, None], config)).swapaxes(1, 2)
    np.testing.assert_allclose(turned, fresh, atol=2e-5)


def filled(config, params, rows: list[list[int]], capacity: int = 24):
    longest = max(map(len, rows))
    tokens = jnp.asarray([row + [0] * (longest - len(row)) for row in rows], jnp.int32)
    counts = jnp.asarray([len(row) for row in rows], jnp.int32)
    return jit_prefill(params, tokens, config, init_cache(config, len(rows), capacity, jnp.float32), counts)


ROWS = [[(7 * i + 3) % 101 for i in range(20)], [(5 * i + 1) % 101 for i in range(13)]]
START, COUNT = jnp.asarray([4, 0], jnp.int32), jnp.asarray([8, 0], jnp.int32)
KEPT = [ROWS[0][:4] + ROWS[0][12:], ROWS[1]]


@pytest.mark.parametrize("rope", ROPES)
def test_one_layer_forgets_as_if_it_had_never_seen(rope):
    config = tiny_config(n_layers=1, **ROPES[rope])
    params = tiny_params(config)
    _, cache = filled(config, params, ROWS)
    cache = jit_forget(cache, config, START, COUNT)
    _, fresh = filled(config, params, KEPT)
    assert cache.lengths.tolist() == fresh.lengths.tolist() == [12, 13]
    for got, expected in zip([*cache.k, *cache.v], [*fresh.k, *fresh.v], strict=True):
        for row in range(2):
            n = len(KEPT[row])
            np.testing.assert_allclose(got[row, :, :n], expected[row, :, :n], atol=2e-5)
    last = jnp.asarray([[8], [9]], jnp.int32)
    got, _ = jit_forward(params, last, config, cache)
    expected, _ = jit_forward(params, last, config, fresh)
    np.testing.assert_allclose(got, expected, atol=2e-4)


def test_deeper_layers_keep_their_values_and_turn_their_keys():
    config = tiny_config(n_layers=3)
    params = tiny_params(config)
    _, before = filled(config, params, ROWS)
    after = jit_forget(before, config, START, COUNT)
    for got, old in zip(after.v, before.v, strict=True):
        np.testing.assert_array_equal(got[0, :, :12], jnp.concatenate([old[0, :, :4], old[0, :, 12:20]], axis=1))
        np.testing.assert_array_equal(got[1], old[1])
    for got, old in zip(after.k, before.k, strict=True):
        np.testing.assert_array_equal(got[0, :, :4], old[0, :, :4])
        np.testing.assert_allclose(got[1], old[1], atol=1e-6)
        # The same vectors at positions 12 ... 19 and 4 ... 11: their float64 rotation by eight steps.
        left, right = np.split(np.asarray(old[0, :, 12:20], np.float64), 2, axis=-1)
        angle = -8 * 10000.0 ** (-2 * np.arange(6) / 12)
        turned = [left * np.cos(angle) - right * np.sin(angle), right * np.cos(angle) + left * np.sin(angle)]
        np.testing.assert_allclose(got[0, :, 4:12], np.concatenate(turned, axis=-1), atol=1e-5)


def from_scratch(params, config, prompt: list[int], n: int, capacity: int, keep: int) -> tuple[list[int], int]:
    """Greedy tokens, each from a fresh run over the kept tokens; when `capacity - 1` are there, half of them go."""
    held, new, shifts = list(prompt), [], 0
    for _ in range(n):
        logits, _ = jit_forward(params, jnp.asarray([held + [0] * (capacity - len(held))], jnp.int32), config)
        new.append(int(jnp.argmax(logits[0, len(held) - 1])))
        if len(held) >= capacity - 1 and len(new) < n:
            start = min(keep, len(held) - 2)
            del held[start : start + (len(held) - start) // 2]
            shifts += 1
        held.append(new[-1])
    return new, shifts


@pytest.mark.parametrize(("keep", "length"), [(0, 3), (5, 7), (100, 7), (2, 15), (2, 16)])
def test_a_shifted_generation_equals_fresh_runs_over_the_kept_tokens(keep, length):
    params = tiny_params(ONE_LAYER)
    session = Session(params, ONE_LAYER, capacity=16)
    prompt = ROWS[0][:length]
    got = [t for (new,) in session.generate([prompt], GREEDY, max_tokens=60, keep=[keep]) for t in new]
    if length == 16:  # the prompt alone is full: its first token comes from all of it
        expected, shifts = from_scratch(params, ONE_LAYER, prompt, 1, 16, keep)[0], 1
        rest, more = from_scratch(params, ONE_LAYER, [*prompt[:2], *prompt[9:], *expected], 59, 16, keep)
        expected, shifts = expected + rest, shifts + more
    else:
        expected, shifts = from_scratch(params, ONE_LAYER, prompt, 60, 16, keep)
    assert got == expected
    assert session.timings.shifts == shifts > 3
    assert session.cache.lengths.tolist() == [len(session.tokens[0])]


def test_rows_shift_alone():
    params = tiny_params(ONE_LAYER)
    session = Session(params, ONE_LAYER, capacity=16, batch=2)
    prompts = [ROWS[0][:12], ROWS[1][:3]]
    rows = [[], []]
    for new in session.generate(prompts, sampling_params(2, temperature=0.0), max_tokens=40, keep=[3, 1]):
        for row, tokens in zip(rows, new, strict=True):
            row.extend(tokens)
    assert rows == [from_scratch(params, ONE_LAYER, p, 40, 16, k)[0] for p, k in zip(prompts, [3, 1], strict=True)]


def test_only_what_saw_nothing_else_is_reused_after_a_shift():
    config = tiny_config(n_layers=3)
    params = tiny_params(config)
    session = Session(params, config, capacity=16)
    list(session.generate([ROWS[0][:8]], GREEDY, max_tokens=30, keep=[5]))
    again = [*session.tokens[0], 7]
    got = [t for (new,) in session.generate([again], GREEDY, max_tokens=3) for t in new]
    assert session.timings.cached_tokens == 5
    fresh = Session(params, config, capacity=16)
    assert got == [t for (new,) in fresh.generate([again], GREEDY, max_tokens=3) for t in new]


def test_a_context_too_small_to_shift_is_refused():
    session = Session(tiny_params(ONE_LAYER), ONE_LAYER, capacity=3)
    with pytest.raises(ArgumentError, match="context of 3 tokens cannot shift; at least 4 can"):
        list(session.generate([[1]], GREEDY, max_tokens=3, keep=[0]))


# The shipped model


@pytest.fixture(scope="module")
def loaded() -> Llama:
    return llama_jax.load(dtype="float32", n_ctx=64)


def test_a_full_context_ends_the_text_unless_it_may_shift():
    loaded = tiny_llama(64)
    text = loaded.generate("ROMEO.\n", max_tokens=None, temperature=0.0)
    assert loaded.timings.context_full
    assert loaded.timings.shifts == 0
    options = dict(max_tokens=150, temperature=0.0, context_shift=True)
    longer = loaded.generate("ROMEO.\n", **options)
    assert longer.startswith(text[:-1])
    assert loaded.timings.shifts >= 3
    assert not loaded.timings.context_full
    assert "".join(loaded.stream("ROMEO.\n", **options)) == longer


def test_the_beginning_of_the_text_is_always_kept(loaded):
    ids = loaded.tokenize_prompt("ROMEO.\n")
    assert [loaded._kept(ids, keep) for keep in (0, 2, -1, 1000)] == [1, 3, len(ids), len(ids)]
    with pytest.raises(ArgumentError, match="keep is -2; it must be from 0 to 2147483647, or -1 for the whole prompt"):
        loaded.stream("x", context_shift=True, keep=-2)


@pytest.mark.slow
def test_a_shifted_context_stays_near_a_fresh_one(loaded):
    """Six layers remember a little of what was forgotten; the next token's distribution hardly does."""
    ids = loaded.tokenizer.encode(loaded.generate("ROMEO.\n", max_tokens=62, temperature=0.8, seed=3))[:62]
    session = loaded.new_session()
    session.prefill([ids])
    shifted = jit_forget(session.cache, loaded.config, jnp.asarray([1], jnp.int32), jnp.asarray([30], jnp.int32))
    kept = ids[:1] + ids[31:]
    _, fresh = filled(loaded.config, loaded.params, [kept], 64)
    probe = jnp.asarray([[5]], jnp.int32)
    p, q = (
        np.asarray(jax.nn.log_softmax(jit_forward(loaded.params, probe, loaded.config, cache)[0][0, 0]))
        for cache in (shifted, fresh)
    )
    divergence = float(np.sum(np.exp(q) * (q - p)))
    assert 0 < divergence < 0.05
