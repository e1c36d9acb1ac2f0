"""Texts with their reasons, tokens and log-probabilities; options that speak of text; long runs with random options."""

import math

import numpy as np
import pytest

import llama_jax
from llama_jax import ArgumentError, Llama
from llama_jax.sampling.from_text import DEFAULT_BREAKERS, breaking_tokens, newline_id, resolve_options
from tests.tiny import tiny_llama

PROMPT = "ROMEO.\n"


@pytest.fixture(scope="module")
def model() -> Llama:
    return tiny_llama(n_ctx=128)


def test_choices_differ_and_the_first_is_the_single_one(model):
    options = dict(max_tokens=12, seed=4)
    done = model.complete(PROMPT, n=3, **options)
    assert done[0].text == model.generate(PROMPT, **options)
    assert [c.text for c in done[1:]] == [model.generate(PROMPT, **(options | {"seed": 5 + i})) for i in range(2)]
    assert len({c.text for c in done}) == 3
    assert {c.finish_reason for c in done} == {"length"}
    assert all(c.logprobs is None and len(c.tokens) == 12 for c in done)


def test_log_probabilities_are_the_models(model):
    (done,) = model.complete(PROMPT, max_tokens=6, temperature=1.5, seed=2, logprobs=3, repeat_penalty=1.3)
    ids = model.tokenize_prompt(PROMPT)
    logits, _ = llama_jax.forward(model.params, np.asarray([[*ids, *done.tokens]], np.int32), model.config)
    logits = np.asarray(logits[0, len(ids) - 1 : -1], np.float64)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert done.logprobs is not None
    assert [place.token for place in done.logprobs] == list(done.tokens)
    for place, row in zip(done.logprobs, log_p, strict=True):
        assert place.logprob == pytest.approx(row[place.token], abs=1e-3)
        assert [i for i, _ in place.top] == np.argsort(-row)[:3].tolist()
        assert [p for _, p in place.top] == pytest.approx(np.sort(row)[::-1][:3].tolist(), abs=1e-3)


def test_log_probabilities_join_over_dispatches(model):
    (told,) = model.complete(PROMPT, max_tokens=70, temperature=0.0, logprobs=0)
    assert told.logprobs is not None
    assert len(told.logprobs) == len(told.tokens) == 70
    assert all(place.top == () and -50 < place.logprob <= 0 for place in told.logprobs)


def test_why_a_text_ends(model):
    text = model.generate(PROMPT, max_tokens=40, temperature=0.0)
    stop = text[9:17]
    (done,) = model.complete(PROMPT, max_tokens=40, temperature=0.0, stop=[stop, "\x01"])
    assert (done.text, done.finish_reason, done.stop) == (text[: text.index(stop)], "stop", stop)
    (done,) = model.complete(PROMPT, max_tokens=5, temperature=0.0)
    assert (done.finish_reason, done.stop, len(done.tokens)) == ("length", None, 5)
    (done,) = model.complete(PROMPT, max_tokens=None, temperature=0.0, ignore_eos=True)
    assert done.finish_reason == "length"
    assert len(done.tokens) == 128 - len(model.tokenize_prompt(PROMPT)) + 1
    eos = model.tokenizer.eos_id
    (done,) = model.complete(PROMPT, max_tokens=9, temperature=0.0, logit_bias={eos: 100.0})
    assert (done.text, done.tokens, done.finish_reason) == ("", (eos,), "stop")
    (done,) = model.complete(PROMPT, max_tokens=0, n=1)
    assert (done.text, done.tokens, done.finish_reason) == ("", (), "length")


def test_rows_end_on_their_own(model):
    texts = [model.generate(PROMPT, seed=seed, max_tokens=30, temperature=1.0) for seed in range(3)]
    stop = texts[1][3:9]
    done = model.complete(PROMPT, n=3, seed=0, max_tokens=30, temperature=1.0, stop=[stop])
    expected = [text.split(stop)[0] for text in texts]
    assert [c.text for c in done] == expected
    assert done[1].finish_reason == "stop"


# Options that speak of text


def test_ignore_eos_bans_every_end(model):
    eos = model.tokenizer.eos_id
    text = model.generate(PROMPT, max_tokens=20, temperature=0.0, ignore_eos=True)
    assert text == model.generate(PROMPT, max_tokens=20, temperature=0.0)
    only_end = {i: -math.inf for i in range(model.tokenizer.vocab_size) if i != eos}
    with pytest.raises(ArgumentError, match="cannot go on"):
        model.generate(PROMPT, logit_bias=only_end, ignore_eos=True)


def test_logit_bias_takes_texts_and_false(model):
    options = resolve_options({"logit_bias": {" the": -5, 7: False}, "ignore_eos": True}, model.tokenizer, 128)
    ids = model.tokenizer.encode(" the", add_bos=False)
    assert options["logit_bias"] == dict.fromkeys(ids, -5) | {7: -math.inf, 2: -math.inf}
    with pytest.raises(ArgumentError, match="99999"):
        model.stream(PROMPT, logit_bias={99999: 1.0})


def test_windows_end_at_the_context(model):
    options = resolve_options({"repeat_last_n": -1, "dry_penalty_last_n": 10**6}, model.tokenizer, 128)
    assert options == {"repeat_last_n": 128, "dry_penalty_last_n": 128}


def test_the_newline_may_be_spared(model):
    newline = newline_id(model.tokenizer)
    assert model.tokenizer.token_bytes(newline) == b"\n"
    assert resolve_options({"penalize_nl": False}, model.tokenizer, 8) == {"exempt_id": newline}
    options = dict(max_tokens=4, temperature=0.0, repeat_penalty=1e6, logit_bias={newline: 100.0})
    assert model.generate(PROMPT, penalize_nl=False, **options) == "\n" * 4


def test_breakers_are_all_ways_to_write_them(model):
    tokenizer = model.tokenizer
    singles = breaking_tokens(tokenizer, DEFAULT_BREAKERS)
    expected = [i for i in range(2048) if any(b in tokenizer.token_bytes(i) for b in (b"\n", b":", b'"', b"*"))]
    assert sorted(singles) == [(i,) for i in expected]
    sequences = breaking_tokens(tokenizer, ("ROMEO",))
    assert len(sequences) > 3
    for sequence in sequences:
        assert "ROMEO" in b"".join(map(tokenizer.token_bytes, sequence)).decode()
    for wrong in ("ab", [5]):
        with pytest.raises(ArgumentError, match="dry_sequence_breakers"):
            model.sampling(dry_sequence_breakers=wrong)
    with pytest.raises(ArgumentError, match="DRY sequence breaker is ''"):
        model.sampling(dry_sequence_breakers=[""], dry_multiplier=1.0)


def test_dry_ends_a_loop(model):
    ids = model.tokenize_prompt("good my lord and good my lord and good my")
    lord = ids[-4]
    assert model.tokenizer.piece(lord) == "▁lord"
    favour = dict(max_tokens=1, temperature=0.0, logit_bias={lord: 50.0})
    dry = dict(dry_multiplier=80.0, dry_allowed_length=2)
    assert model.generate(ids, **favour) == " lord"
    assert model.generate(ids, **favour, **dry) != " lord"
    assert model.generate(ids, **favour, **dry, dry_sequence_breakers=["my"]) == " lord"


@pytest.mark.parametrize("name", ["ignore_eos", "penalize_nl"])
def test_a_flag_is_true_or_false(model, name):
    with pytest.raises(ArgumentError, match=name):
        model.stream(PROMPT, **{name: "no"})


# Random options


def random_options(seed: int) -> dict:
    """Some options out of their whole ranges."""
    random = np.random.default_rng(seed)
    every = dict(
        temperature=random.choice([0.0, 0.3, 1.0, 2.0]),
        dynatemp_range=random.choice([0.0, 0.5]),
        top_k=int(random.choice([-1, 0, 1, 5, 300, 5000])),
        top_p=random.uniform(0.05, 1),
        min_p=random.uniform(0, 0.5),
        typical_p=random.uniform(0.1, 1),
        tfs_z=random.uniform(0.1, 1),
        top_n_sigma=random.uniform(-1, 3),
        min_keep=int(random.integers(0, 5)),
        xtc_probability=random.uniform(0, 1),
        xtc_threshold=random.uniform(0, 0.6),
        repeat_penalty=random.uniform(0.8, 2),
        frequency_penalty=random.uniform(-0.5, 1),
        presence_penalty=random.uniform(-0.5, 1),
        repeat_last_n=int(random.choice([-1, 0, 7, 64])),
        penalize_nl=bool(random.integers(2)),
        dry_multiplier=random.uniform(0, 2),
        dry_penalty_last_n=int(random.choice([-1, 0, 40])),
        dry_sequence_breakers=[["\n"], [], ["the", "."]][random.integers(3)],
        mirostat=int(random.integers(3)),
        logit_bias={int(random.integers(2048)): float(random.normal())},
        samplers=random.permutation(list("edskfypmxt")).tolist()[: random.integers(1, 11)],
        logprobs=int(random.integers(5)),
    )
    chosen = random.permutation(list(every))[: random.integers(2, 12)]
    return {name: every[name] for name in chosen} | {"seed": int(random.integers(2**62))}


def run_on(model: Llama, options: dict, n_tokens: int) -> int:
    """Tokens of texts that go on until there are `n_tokens` of them."""
    count, prompt = 0, PROMPT
    while count < n_tokens:
        (done,) = model.complete(prompt, max_tokens=min(100, n_tokens - count), stop=["\x00"], **options)
        assert "\x00" not in done.text
        assert all(0 <= token < 2048 for token in done.tokens)
        if done.logprobs is not None:
            assert all(math.isfinite(p) for place in done.logprobs for p in (place.logprob, *dict(place.top).values()))
        count += max(len(done.tokens), 1)
        prompt = PROMPT + done.text[-40:]
        options = options | {"seed": options["seed"] + 1}
    return count


@pytest.mark.parametrize("seed", [1])
def test_random_options_run(model, seed):
    assert run_on(model, random_options(seed), 60) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_options_run_long(seed):
    model = llama_jax.load(dtype="float32", n_ctx=256)
    assert run_on(model, random_options(100 + seed), 2000) >= 2000
