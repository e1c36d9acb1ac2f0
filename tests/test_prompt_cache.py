"""Prompt caches: another process goes on exactly where one has ended, and no file is taken for what it is not."""

import copy
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llama_jax import ArgumentError, FormatError, Llama, PromptCache, Session, init_params, loading, sampling_params
from llama_jax.cli import options
from llama_jax.cli.main import main
from llama_jax.prompt_cache import fingerprint, read_snapshot, write_snapshot
from tests.conftest import REPOSITORY
from tests.tiny import tiny_config, tiny_llama, tiny_params

CONFIG = tiny_config(n_layers=1)
PARAMS = tiny_params(CONFIG)
MODEL = fingerprint(PARAMS, CONFIG)
PROMPTS = [[5, 9, 77, 3, 14, 50, 2], [8, 31]]
SAMPLED = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.3, repeat_last_n=6, seed=11)


def sampling(batch: int = 2, **changes):
    return sampling_params(batch, **(SAMPLED | changes))


def session(batch: int = 2, capacity: int = 16, params=PARAMS, **options) -> Session:
    return Session(params, CONFIG, batch=batch, capacity=capacity, **options)


def rows(chunks) -> list[list[int]]:
    got = [[], []]
    for new in chunks:
        for row, tokens in zip(got, new, strict=True):
            row.extend(tokens)
    return got


@pytest.mark.parametrize(
    ("dtype", "keep"), [("float32", [2, 0]), pytest.param("bfloat16", None, marks=pytest.mark.slow)]
)
def test_a_restored_generation_goes_on_bit_for_bit(tmp_path, dtype, keep):
    """With `keep` the contexts are full and have been shifted before the file is written."""
    shape = dict(capacity=16 if keep else 40, dtype=np.dtype(dtype))
    limits = dict(max_tokens=24, keep=keep)
    whole = rows(session(**shape).generate(PROMPTS, sampling(), **limits))
    first = session(**shape)
    head = rows(first.generate(PROMPTS, sampling(), **(limits | dict(max_tokens=13))))
    write_snapshot(tmp_path / "x", first.snapshot(), MODEL)
    second = session(**shape)
    second.restore(read_snapshot(tmp_path / "x", MODEL))
    assert second.tokens == first.tokens
    for got, expected in zip([*second.cache.k, *second.cache.v], [*first.cache.k, *first.cache.v], strict=True):
        for row, tokens in enumerate(first.tokens):
            n = len(tokens)
            assert np.asarray(got[row, :, :n]).tobytes() == np.asarray(expected[row, :, :n]).tobytes()
    tail = rows(second.resume(sampling(), **(limits | dict(max_tokens=11))))
    assert [a + b for a, b in zip(head, tail, strict=True)] == whole
    assert first.resumable
    assert rows(first.resume(sampling(), **(limits | dict(max_tokens=11)))) == tail
    assert second.tokens == first.tokens


def test_a_prompt_takes_only_what_it_shares(tmp_path):
    first = session()
    rows(first.generate(PROMPTS, sampling(), max_tokens=6))
    write_snapshot(tmp_path / "x", first.snapshot(), MODEL)
    prompts = [[*PROMPTS[0], 1, 2], [8, 32, 7]]
    second = session()
    second.restore(read_snapshot(tmp_path / "x", MODEL))
    got = rows(second.generate(prompts, sampling(), max_tokens=6))
    assert second.timings.cached_tokens == 7 + 1
    assert got == rows(session().generate(prompts, sampling(), max_tokens=6))


def test_after_a_shift_only_what_is_exact_is_reused(tmp_path):
    first = session(1, 16)
    list(first.generate(PROMPTS[:1], sampling(1), max_tokens=20, keep=[3]))
    write_snapshot(tmp_path / "x", first.snapshot(), MODEL)
    second = session(1, 16)
    second.restore(read_snapshot(tmp_path / "x", MODEL))
    second.prefill([[*first.tokens[0], 4]])
    assert second.timings.cached_tokens == 3


def test_a_smaller_context_takes_the_beginning(tmp_path):
    first = session(1)
    list(first.generate(PROMPTS[:1], sampling(1), max_tokens=8))
    write_snapshot(tmp_path / "x", first.snapshot(), MODEL)
    second = session(1, 9)
    second.restore(read_snapshot(tmp_path / "x", MODEL))
    assert second.tokens == [first.tokens[0][:9]]
    assert not second.resumable
    with pytest.raises(ArgumentError, match="no generation to resume"):
        list(second.resume(sampling(1), max_tokens=1))


def test_other_rows_types_and_options_are_refused(tmp_path):
    first = session()
    rows(first.generate(PROMPTS, sampling(), max_tokens=5))
    write_snapshot(tmp_path / "x", first.snapshot(), MODEL)
    snapshot = read_snapshot(tmp_path / "x", MODEL)
    for other in (session(1), session(dtype=np.dtype("float16"))):
        with pytest.raises(ArgumentError, match="other rows or another type of keys and values"):
            other.restore(snapshot)
    same = session()
    same.restore(snapshot)
    with pytest.raises(ArgumentError, match="sampled with other options"):
        list(same.resume(sampling(repeat_last_n=9), max_tokens=2))


def test_a_fingerprint_tells_models_apart():
    changed = PARAMS.replace(output_norm=PARAMS.output_norm.at[3].add(1e-6))
    half = init_params(jax.random.key(0), CONFIG, jnp.bfloat16, scale=0.3)
    other = tiny_config(n_layers=1, rope_theta=10001.0)
    prints = [MODEL, fingerprint(changed, CONFIG), fingerprint(half, CONFIG), fingerprint(PARAMS, other)]
    assert len(set(prints)) == 4
    assert fingerprint(tiny_params(CONFIG), tiny_config(n_layers=1)) == MODEL


# Files that are something else


@pytest.fixture
def file(tmp_path):
    """A prompt cache of the tiny model."""
    first = session(1)
    list(first.generate(PROMPTS[:1], sampling(1), max_tokens=5))
    path = tmp_path / "x.cache"
    write_snapshot(path, first.snapshot(), MODEL)
    return path


def test_every_damaged_byte_is_noticed(file):
    data = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    for at in [*range(0, 8), *range(8, header, 11), *range(header, len(data), 997), len(data) - 1]:
        damaged = data.copy()
        damaged[at] ^= 0x10
        file.write_bytes(damaged)
        with pytest.raises((FormatError, ArgumentError)) as error:
            read_snapshot(file, MODEL)
        assert str(error.value).count("\n") == 0
    for length in (0, 1, 8, header - 1, header, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(FormatError):
            read_snapshot(file, MODEL)
    file.write_bytes(data + b"\0")
    with pytest.raises(FormatError):
        read_snapshot(file, MODEL)
    file.write_bytes(data)
    assert read_snapshot(file, MODEL).tokens[0][:7] == PROMPTS[0]


def test_a_model_of_the_same_shape_is_refused(file):
    with pytest.raises(ArgumentError, match="is the prompt cache of another model, adapter or --dtype"):
        read_snapshot(file, fingerprint(tiny_params(CONFIG, 1), CONFIG))


def test_safetensors_files_of_other_kinds_are_refused(file):
    tensors = load_file(file)
    save_file(tensors, file)
    with pytest.raises(FormatError, match="is a safetensors file but not a prompt cache"):
        read_snapshot(file, MODEL)
    save_file(tensors, file, {"format": "llama_jax prompt cache 99", "model": MODEL})
    with pytest.raises(FormatError, match="of another version of llama_jax"):
        read_snapshot(file, MODEL)


# From text to text


@pytest.fixture(scope="module")
def loaded() -> Llama:
    return tiny_llama(96)


@pytest.fixture
def fresh(loaded):
    """A model as a fresh process has it."""
    return lambda: Llama(loaded.config, loaded.params, loaded.tokenizer, n_ctx=96)


TEXT = dict(max_tokens=30, temperature=0.9, seed=5)


def test_a_prompt_in_a_file_is_not_run_again(fresh, tmp_path):
    path = tmp_path / "prompt"
    expected = fresh().generate("ROMEO.\n", **TEXT)
    first, second, third = fresh(), fresh(), fresh()
    assert first.generate("ROMEO.\n", prompt_cache=PromptCache(path), **TEXT) == expected
    n = len(first.tokenize_prompt("ROMEO.\n"))
    assert read_snapshot(path, first.new_session().fingerprint).tokens == [first.tokenize_prompt("ROMEO.\n")]
    written = path.stat().st_mtime_ns
    assert second.generate("ROMEO.\n", prompt_cache=PromptCache(path), **TEXT) == expected
    assert (second.timings.cached_tokens, second.timings.prompt_tokens) == (n - 1, 1)
    assert path.stat().st_mtime_ns == written  # nothing new
    longer = "ROMEO.\nWhat light"
    cache = PromptCache(path, read_only=True)
    assert third.generate(longer, prompt_cache=cache, **TEXT) == fresh().generate(longer, **TEXT)
    assert third.timings.cached_tokens == n
    assert path.stat().st_mtime_ns == written
    assert os.listdir(tmp_path) == ["prompt"]


@pytest.mark.parametrize("seed", [5, None])
def test_a_text_in_a_file_goes_on(fresh, tmp_path, seed, monkeypatch):
    """Without a seed the file's, which was drawn at random, goes on too."""
    random_seeds = iter(range(1000, 2000))
    monkeypatch.setattr("llama_jax.sampling.params.random_seed", lambda: next(random_seeds))
    path = tmp_path / "text"
    options = TEXT | dict(seed=seed, repeat_penalty=1.2)
    head = fresh().generate("ROMEO.\n", prompt_cache=PromptCache(path, all=True), **options)
    if seed is None:
        high, low = read_snapshot(path, fresh().new_session().fingerprint).sampler["seed"][0]
        options["seed"] = int(high) << 32 | int(low)
    whole = fresh().generate("ROMEO.\n", **(options | dict(max_tokens=50)))
    options |= dict(seed=seed, max_tokens=20)
    assert head + fresh().generate("", prompt_cache=PromptCache(path, all=True), **options) == whole
    again = fresh()
    more = again.generate("", prompt_cache=PromptCache(path, all=True, read_only=True), **options)
    assert again.timings.prompt_tokens == 0
    assert more
    assert more not in whole


def test_a_text_that_a_stop_string_ended_goes_on_from_there(fresh, tmp_path):
    path = tmp_path / "text"
    greedy = dict(max_tokens=40, temperature=0.0)
    whole = fresh().generate("ROMEO.\n", **greedy)
    stop = whole[20:24]
    model = fresh()
    head = model.generate("ROMEO.\n", stop=stop, prompt_cache=PromptCache(path, all=True), **greedy)
    assert head == whole[: whole.index(stop)]
    (held,) = read_snapshot(path, model.new_session().fingerprint).tokens
    begun = model.tokenizer.decode(held).removeprefix("ROMEO.\n")
    assert begun.startswith(head)
    assert len(begun) < len(head) + len(stop) + 20  # not what one dispatch has made beyond the stop string
    rest = fresh().generate("", prompt_cache=PromptCache(path), **greedy)
    assert whole.startswith(begun + rest[:8])


def test_a_foreign_file_is_refused_at_the_call_and_left_alone(fresh, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("Dear diary, this is not a prompt cache at all.")
    with pytest.raises(FormatError, match=r"notes\.txt: the header would take"):
        fresh().stream("x", prompt_cache=PromptCache(path, all=True))
    assert path.read_text().startswith("Dear diary")
    with pytest.raises(ArgumentError, match="lies in a folder that does not exist"):
        PromptCache(tmp_path / "none" / "x")


def test_an_empty_prompt_without_a_file_begins_a_text(fresh, tmp_path):
    path = tmp_path / "new"
    greedy = dict(max_tokens=4, temperature=0.0)
    assert fresh().generate("", prompt_cache=PromptCache(path), **greedy) == fresh().generate("", **greedy)
    assert path.exists()


def test_no_tokens_still_fill_the_cache(fresh, tmp_path):
    path = tmp_path / "new"
    assert fresh().generate("ROMEO.\n", prompt_cache=PromptCache(path), max_tokens=0) == ""
    assert read_snapshot(path, fresh().new_session().fingerprint).tokens == [fresh().tokenize_prompt("ROMEO.\n")]


def test_the_command_line(fresh, tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setattr(options, "cache_compiled_programs", lambda: None)
    monkeypatch.setattr(loading, "load", lambda *_, dtype, **__: bfloat16 if dtype == "bfloat16" else fresh())
    bfloat16 = copy.copy(fresh())
    bfloat16.params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), bfloat16.params)

    def run(*arguments: str) -> tuple[int, str, str]:
        return main(["generate", "-c", "96", "-s", "3", *arguments]), *capsys.readouterr()

    path = str(tmp_path / "x")
    _, whole, _ = run("-p", "ROMEO.\n", "-n", "24")
    _, head, _ = run("-p", "ROMEO.\n", "-n", "14", "--prompt-cache", path, "--prompt-cache-all")
    code, tail, errors = run("-p", "", "-n", "10", "--prompt-cache", path, "--prompt-cache-ro")
    assert (code, head[:-1] + tail) == (0, whole)
    assert "x holds 20 tokens" in caplog.text
    code, out, errors = run("-p", "", "--prompt-cache", path, "--dtype", "bf16")
    assert (code, out) == (1, "")
    assert "is the prompt cache of another model, adapter or --dtype" in errors.splitlines()[-1]


@pytest.mark.slow
def test_the_command_line_goes_on_in_another_process(tmp_path):
    def run(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "llama_jax", "generate", "-s", "3", *arguments]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | dict(
            XDG_CACHE_HOME=str(tmp_path / "programs")
        )
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    path = str(tmp_path / "x")
    _, whole, _ = run("-p", "ROMEO.\n", "-n", "24")
    _, head, _ = run("-p", "ROMEO.\n", "-n", "14", "--prompt-cache", path, "--prompt-cache-all")
    code, tail, errors = run("-p", "", "-n", "10", "--prompt-cache", path, "--prompt-cache-ro")
    assert (code, head[:-1] + tail) == (0, whole)
    assert "holds " in errors
