"""Speculative decoding gives the text of plain decoding, whatever is drafted, and the same distribution."""

import copy
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_jax import (
    ArgumentError,
    Llama,
    Session,
    Speculation,
    forward,
    init_cache,
    loading,
    sampling_params,
    start_decoding,
)
from llama_jax import session as session_module
from llama_jax.cli import options
from llama_jax.cli.main import main
from llama_jax.llama import shipped_model
from llama_jax.sampling import start_state
from llama_jax.speculative import ModelDraft, NgramDraft, look_up
from tests.tiny import tiny_config, tiny_llama, tiny_params

CONFIG = tiny_config(n_layers=1)
PARAMS = tiny_params(CONFIG)
DRAFT_CONFIG = tiny_config(n_layers=1, d_model=24, n_heads=2)
# A model that drafts for another has to agree with it now and then: these two share a common part of the logits.
NEAR = jax.tree.map(lambda w: w + 0.02 * jnp.sin(jnp.arange(w.size, dtype=w.dtype)).reshape(w.shape), PARAMS)
FAR = tiny_params(DRAFT_CONFIG, seed=5)
DRAFTS = {"near": (NEAR, CONFIG), "far": (FAR, DRAFT_CONFIG), "itself": (PARAMS, CONFIG)}
jit_look_up = jax.jit(look_up, static_argnums=(2, 3))
PROMPTS = [[5, 9, 77, 3, 14, 50, 2, 9, 77, 3, 14], [8], [31, 31, 4, 90, 31, 31]]
WILD = dict(temperature=0.7, top_k=0, top_p=0.95, min_p=0.01, seed=5, repeat_penalty=1.2, repeat_last_n=9)


def make(batch=3, capacity=48, params=PARAMS, config=CONFIG, draft=None, **options) -> Session:
    same = dict(batch=batch, capacity=capacity)
    return Session(params, config, draft=draft and Session(*draft, **same), **same, **options)


def run(sampling, max_tokens=24, prompts=PROMPTS, eos_ids=(), capacity=48, keep=None, **options):
    session = make(len(prompts), capacity, **options)
    rows = [[] for _ in prompts]
    for new in session.generate(prompts, sampling, max_tokens=max_tokens, eos_ids=eos_ids, keep=keep):
        for row, tokens in zip(rows, new, strict=True):
            row.extend(tokens)
    return rows, session


def speculation(draft: str, **options) -> dict:
    if draft == "ngram":
        return dict(speculation=Speculation(**(dict(ngram=2, n_max=4) | options)))
    return dict(speculation=Speculation(**(dict(n_max=4) | options)), draft=DRAFTS[draft])


GREEDY = dict(temperature=0.0, logprobs=2)


@pytest.mark.parametrize(
    ("draft", "options"),
    [
        ("near", GREEDY),
        ("near", WILD),
        ("ngram", GREEDY),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("far", GREEDY), ("far", WILD), ("ngram", WILD))),
    ],
)
def test_the_text_is_that_of_plain_decoding(draft, options):
    expected, plain = run(sampling_params(3, **options))
    got, session = run(sampling_params(3, **options), **speculation(draft))
    assert got == expected
    assert session.tokens == plain.tokens
    assert session.cache.lengths.tolist() == [len(row) for row in session.tokens]
    timings = session.timings
    assert timings.generated_tokens == 3 * 23
    assert timings.drafted_tokens >= timings.accepted_tokens >= 0
    for got, held in zip(session.cache.k, plain.cache.k, strict=True):
        for row, tokens in enumerate(plain.tokens):
            np.testing.assert_allclose(got[row, :, : len(tokens)], held[row, :, : len(tokens)], atol=1e-5)
    for got, expected in zip(session.logprobs, plain.logprobs, strict=True):
        assert [p.token for p in got] == [p.token for p in expected]
        np.testing.assert_allclose([p.logprob for p in got], [p.logprob for p in expected], atol=1e-4)
    assert ("logprobs" in options) == bool(session.logprobs[0])


def test_a_model_that_drafts_for_itself_is_always_right():
    for chain in (GREEDY, WILD):
        _, session = run(sampling_params(3, **chain), max_tokens=26, **speculation("itself"))
        assert session.timings.accepted_tokens == session.timings.drafted_tokens == 3 * 20  # 25 = 5 rounds of 4 + 1


@pytest.mark.parametrize("draft", ["near", pytest.param("ngram", marks=pytest.mark.slow)])
def test_rows_end_where_they_would(draft):
    """At an end token, after few tokens, with a full cache, and with a cache that shifts."""
    greedy = sampling_params(3, **GREEDY)
    free, _ = run(greedy)
    cases = [
        dict(eos_ids=[free[0][6], free[2][3]]),
        dict(max_tokens=2),
        dict(max_tokens=100),
        dict(max_tokens=90, keep=[0, 1, 2]),
    ]
    for case in cases:
        expected, plain = run(greedy, **case)
        got, session = run(greedy, **case, **speculation(draft))
        assert got == expected, case
        assert session.timings.context_full == plain.timings.context_full
        if "keep" not in case:
            assert session.tokens == plain.tokens


def test_what_goes_on_is_the_same_text():
    """A prompt that goes on, and a generation that is resumed."""
    greedy = sampling_params(3, **GREEDY)
    expected, _ = run(greedy, max_tokens=20)
    session = make(**speculation("near"))
    heads = [[], [], []]
    for chunks in (session.generate(PROMPTS, greedy, max_tokens=9), session.resume(greedy, max_tokens=11)):
        for new in chunks:
            for head, tokens in zip(heads, new, strict=True):
                head.extend(tokens)
    assert heads == expected
    longer = [[*prompt, *row[:12], 7] for prompt, row in zip(PROMPTS, heads, strict=True)]
    got = [[], [], []]
    for new in session.generate(longer, greedy, max_tokens=8):
        for row, tokens in zip(got, new, strict=True):
            row.extend(tokens)
    assert got == run(greedy, max_tokens=8, prompts=longer)[0]
    assert session.timings.prompt_tokens == 3


@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=20), ngram=st.integers(1, 4), n_max=st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_looking_up(text, ngram, n_max):
    tokens = jnp.asarray(text + [1] * (24 - len(text)), jnp.int32)
    drafts, count = jit_look_up(tokens, jnp.int32(len(text)), ngram, n_max)
    found = [end for end in range(ngram, len(text)) if text[end - ngram : end] == text[len(text) - ngram :]]
    expected = text[found[-1] : found[-1] + n_max] if found else []
    assert drafts[: int(count)].tolist() == expected


def test_a_draft_that_is_not_sure_is_short():
    options = sampling_params(3, **GREEDY)
    _, all_of_them = run(options, **speculation("near"))
    _, sure = run(options, **speculation("near", p_min=0.2, n_min=2))
    assert 0 < sure.timings.drafted_tokens < all_of_them.timings.drafted_tokens
    share = [s.timings.accepted_tokens / s.timings.drafted_tokens for s in (sure, all_of_them)]
    assert share[0] > share[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(n_max=0), "n_max of drafts is 0"),
        (dict(n_max=2, n_min=3), "n_min of drafts is 3; it must be an integer from 0 to 2"),
        (dict(p_min=1.5), "p_min of drafts is 1.5; it must be from 0 to 1"),
        (dict(ngram=0), "ngram is 0"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(ArgumentError, match=words):
        Speculation(**options)


def test_drafts_come_from_one_place():
    for wrong in (dict(speculation=Speculation()), dict(speculation=Speculation(ngram=2), draft=DRAFTS["far"])):
        with pytest.raises(ArgumentError, match="either a draft model or n-grams"):
            make(**wrong)
    draft = Session(FAR, DRAFT_CONFIG, capacity=9, batch=1)
    with pytest.raises(ArgumentError, match="session has 1 rows of 9 tokens; it must have 3 of 48"):
        Session(PARAMS, CONFIG, capacity=48, batch=3, speculation=Speculation(), draft=draft)


# The distribution

SMALL = tiny_config(vocab_size=7, n_layers=1, d_model=16, d_ff=24)
N = 4000


@pytest.mark.parametrize("draft", ["model", pytest.param("ngram", marks=pytest.mark.slow)])
def test_sampled_tokens_have_the_distribution_of_the_model(draft):
    """The second and third of three tokens, whose joint probabilities are summed up exactly, over N seeds."""
    params, other = tiny_params(SMALL, seed=2), tiny_params(SMALL, seed=3)
    prompt = [1, 4, 1, 5, 1]

    def joint(params) -> np.ndarray:
        first, second = np.meshgrid(np.arange(7), np.arange(7), indexing="ij")
        rows = jnp.asarray([[*prompt, a, b] for a, b in zip(first.ravel(), second.ravel(), strict=True)], jnp.int32)
        logits, _ = forward(params, rows, SMALL)
        p = np.asarray(jax.nn.softmax(logits[:, -3:], axis=-1), np.float64).reshape(7, 7, 3, 7)
        p1, p2, p3 = p[0, 0, 0], p[:, 0, 1], p[:, :, 2]
        return np.einsum("a,ab,abc->bc", p1, p2, p3)

    options = dict(speculation=Speculation(n_max=2), draft=(other, SMALL))
    if draft == "ngram":
        options = dict(speculation=Speculation(n_max=2, ngram=1))
    session = make(N, 8, params, SMALL, **options)
    sampling = sampling_params(N, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=99)
    rows = [[] for _ in range(N)]
    for new in session.generate([prompt] * N, sampling, max_tokens=3):
        for row, tokens in zip(rows, new, strict=True):
            row.extend(tokens)
    assert 0.05 < session.timings.accepted_tokens / session.timings.drafted_tokens < 0.95  # neither is idle
    counts = np.zeros((7, 7))
    for _, b, c in rows:
        counts[b, c] += 1

    def chi_squared(expected: np.ndarray) -> float:
        return float(np.sum((counts - N * expected) ** 2 / (N * expected)))

    # 48 degrees of freedom: above 93 comes up once in ten thousand times; the draft's own distribution is far off.
    assert chi_squared(joint(params)) < 93
    assert chi_squared(joint(other)) > 500


@pytest.mark.parametrize("kind", ["model", pytest.param("ngram", marks=pytest.mark.slow)])
def test_the_compiled_rounds_update_the_caches_in_place(kind):
    sampling, eos = sampling_params(temperature=0.0), jnp.zeros(1, jnp.int32)
    cache = init_cache(CONFIG, 1, 33, jnp.float32)
    state = start_decoding(jnp.zeros((1, 101)), cache, start_state(sampling), sampling, eos)
    if kind == "ngram":
        options, params, draft = Speculation(ngram=2), None, NgramDraft(tokens=jnp.zeros((1, 34), jnp.int32))
    else:
        options, params = Speculation(), PARAMS
        draft = ModelDraft(cache=init_cache(CONFIG, 1, 33, jnp.float32), config=CONFIG)
    limits = jnp.int32(8), jnp.zeros(1, jnp.int32), jnp.int32(33)
    lowered = session_module._speculate_jit.lower(
        PARAMS, params, CONFIG, state, draft, sampling, eos, options, 8, *limits
    )
    text = lowered.compile().as_text()
    shape = "f32[1,2,33,12]"
    assert shape in text
    assert not [line for line in text.splitlines() if f"= {shape}" in line and " copy(" in line]


# From text to text


@pytest.fixture(scope="module")
def model() -> Llama:
    return tiny_llama(96)


@pytest.mark.slow
def test_a_draft_model_and_n_grams_change_no_text(model):
    options = dict(max_tokens=40, temperature=0.6, seed=4)
    expected = model.generate("ROMEO.\n", **options)
    model.speculate(Speculation(n_max=5), model)
    assert model.generate("ROMEO.\n", **options) == expected
    assert model.timings.drafted_tokens == model.timings.accepted_tokens > 30
    model.warm_up("ROMEO.\n", temperature=0.6)
    model.speculate(Speculation(ngram=2, n_max=5))
    assert "".join(model.stream("ROMEO.\n", **options)) == expected
    model.speculate(None)
    assert model.generate("ROMEO.\n", **options) == expected
    assert model.timings.drafted_tokens == 0


def test_a_draft_model_needs_the_same_vocabulary(model):
    other = copy.copy(model)
    other.tokenizer = SimpleNamespace(vocab_size=model.tokenizer.vocab_size, piece=str)
    with pytest.raises(ArgumentError, match="another vocabulary"):
        model.speculate(Speculation(), other)
    for arguments in [(Speculation(),), (Speculation(ngram=2), model)]:
        with pytest.raises(ArgumentError, match="either a draft model or n-grams"):
            model.speculate(*arguments)


def test_the_command_line_reports_what_was_accepted(model, monkeypatch, capsys):
    monkeypatch.setattr(options, "cache_compiled_programs", lambda: None)
    monkeypatch.setattr(loading, "load", lambda *_, **__: copy.copy(model))
    command = ["generate", "-c", "96", "-p", "ROMEO.\\n", "-n", "21", "--temp", "0"]
    assert main(command) == 0
    expected = capsys.readouterr().out
    assert main([*command, "-md", str(shipped_model())]) == 0
    out, errors = capsys.readouterr()
    assert out == expected
    assert errors.splitlines()[-1].endswith("; draft 15 tokens, 15 accepted (100 %)")
    for wrong in (["--spec-type", "draft-simple"], ["--spec-type", "ngram-simple", "-md", "x"]):
        assert main([*command, *wrong]) == 1
        assert "-md PATH goes with draft-simple" in capsys.readouterr().err
    assert main([*command, "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "0"]) == 1
    assert "ngram is 0" in capsys.readouterr().err
