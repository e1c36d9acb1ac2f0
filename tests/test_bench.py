"""`llama-jax bench`: which tests, what is counted, every output; the numbers are only checked for consistency."""

import csv
import dataclasses
import io
import json
import time

import jax.numpy as jnp
import numpy as np
import pytest

import llama_jax
from llama_jax.bench import BenchResult, BenchTest, bench, grid
from llama_jax.cli import options
from llama_jax.cli.main import main
from llama_jax.config import PRESETS
from llama_jax.errors import ArgumentError
from llama_jax.roofline import prompt_operations, unembedding_operations
from tests.tiny import tiny_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "m.gguf"
    tiny_gguf(path)
    return path


@pytest.fixture(scope="module")
def model(path):
    return llama_jax.load(path, n_ctx=64, n_batch=16)


def test_names_and_combinations_are_llama_bench_s():
    names = [test.name for test in grid([512], [128], [(4096, 256)], [0, 1024])]
    assert names == [
        "pp512", "tg128", "pp4096+tg256", "pp512 @ d1024", "tg128 @ d1024", "pp4096+tg256 @ d1024",
    ]  # fmt: skip
    assert [test.name for test in grid([0], [0, 16], [], [0])] == ["tg16"]
    tests = grid([8], [0], [], [0], [32, 64], [16], ["f16", None], [None])
    assert [(t.n_batch, t.n_ubatch, t.type_k, t.type_v) for t in tests] == [
        (32, 16, "f16", None), (32, 16, None, None), (64, 16, "f16", None), (64, 16, None, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (dict(n_prompt=-1), "n_prompt is -1; it must be an integer from 0"),
        (dict(n_gen=1, n_ubatch=0), "n_ubatch is 0; it must be an integer from 1"),
        (dict(), "neither prompt nor new tokens"),
        (dict(n_gen=1, type_k="q3"), "The cache type is 'q3'; it must be one of f32, f16, bf16"),
    ],
)
def test_wrong_tests_are_refused(fields, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        BenchTest(**fields)


def test_operations_are_those_of_every_product():
    """Counted product by product, from the shapes."""
    config = PRESETS["llama-3-8b"]
    T, start = 100, 30
    attention = config.n_heads * config.head_dim
    kv = config.n_kv_heads * config.head_dim
    products = config.d_model * (attention + 2 * kv) + attention * config.d_model + 3 * config.d_model * config.d_ff
    pairs = sum(start + t for t in range(T))
    expected = config.n_layers * (2 * T * products + 2 * 2 * pairs * attention)
    assert prompt_operations(config, T, start) == pytest.approx(expected, rel=1e-3)
    assert unembedding_operations(config) == 2 * config.vocab_size * config.d_model


def test_a_result_is_consistent(monkeypatch):
    result = BenchResult(BenchTest(n_prompt=30, n_gen=10), (1.0, 2.0), 6e9, 3e12)
    assert result.speeds == [40.0, 20.0]
    assert (result.speed, result.bandwidth, result.arithmetic) == (30.0, 4e9, 2e12)
    assert result.speed_deviation == pytest.approx(np.std([40, 20], ddof=1))
    monkeypatch.setattr("llama_jax.bench.peak_bandwidth", lambda: 10e9)
    monkeypatch.setattr("llama_jax.bench.peak_operations", lambda: 4e12)
    assert result.share_of_limit == (0.5, "arithmetic")
    assert dataclasses.replace(result, bytes_read=12e9, devices=4).share_of_limit == (0.2, "memory")
    monkeypatch.setattr("llama_jax.bench.peak_operations", lambda: None)
    assert result.share_of_limit is None


def test_each_kind_of_test_runs(model, monkeypatch):
    started = time.perf_counter()
    tests = [
        BenchTest(n_prompt=24, n_ubatch=16, n_depth=5),
        BenchTest(n_gen=6, n_depth=9, type_k="f32", type_v="bf16"),
    ]
    results = list(bench(model, tests, repeats=2))
    elapsed = time.perf_counter() - started
    weights = 4 * (model.config.n_parameters - model.config.vocab_size * model.config.d_model)
    for test, result in zip(tests, results, strict=True):
        assert result.test is test
        assert len(result.seconds) == 2
        assert all(0 < s < elapsed for s in result.seconds)
        runs = -(-test.n_prompt // 16) + test.n_gen
        assert result.bytes_read > runs * weights
        assert result.operations > (test.n_prompt + test.n_gen) * model.config.n_layers
    kv = model.config.kv_bytes_per_token(4)
    assert results[0].bytes_read == 2 * weights + (5 + 16 + 5 + 24) * kv
    assert results[1].bytes_read == 6 * (weights + (9 + 3) * 0.75 * kv)  # values take half of what keys take
    assert results[1].share_of_limit[1] == "memory"
    assert results[0].share_of_limit is None  # what a CPU can compute at most is not known


@pytest.fixture
def command(monkeypatch, capsys, path):
    monkeypatch.setattr(options, "cache_compiled_programs", lambda: None)

    def call(*arguments):
        code = main(["bench", "-m", str(path), "-p", "16", "-n", "4", "-r", "2", *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


def test_the_table(command):
    code, out, _ = command("-b", "16,32", "-pg", "8,2")
    assert code == 0
    head, rule, *lines, empty, build = out.splitlines()
    assert head == ("| model | size | params | backend | n_batch | test | t/s | GB/s | TFLOP/s | of the limit |")
    assert rule.count("---") == 10
    assert all(line.startswith("| llama 0.0M float32 | 0.0") for line in lines)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [(row[4], row[5]) for row in cells] == [
        ("16", "pp16"), ("16", "tg4"), ("16", "pp8+tg2"), ("32", "pp16"), ("32", "tg4"), ("32", "pp8+tg2"),
    ]  # fmt: skip
    assert all(" ± " in row[6] and float(row[6].split(" ")[0]) > 0 for row in cells)
    assert (empty, build) == ("", f"build: llama_jax {llama_jax.__version__}")


def test_the_other_outputs_hold_the_same_numbers(command):
    rows = json.loads(command("-o", "json", "-d", "4")[1])
    assert [(row["n_prompt"], row["n_gen"], row["n_depth"], row["test"]) for row in rows] == [
        (16, 0, 4, "pp16 @ d4"), (0, 4, 4, "tg4 @ d4"),
    ]  # fmt: skip
    for row in rows:
        assert len(row["samples_ns"]) == len(row["samples_ts"]) == 2
        assert row["avg_ns"] == pytest.approx(np.mean(row["samples_ns"]), abs=1)
        assert row["avg_ts"] == pytest.approx(np.mean(row["samples_ts"]))
        assert row["stddev_ts"] == pytest.approx(np.std(row["samples_ts"], ddof=1))
        tokens = row["n_prompt"] + row["n_gen"]
        np.testing.assert_allclose(row["samples_ts"], tokens / (np.array(row["samples_ns"]) / 1e9), rtol=1e-4)
    lines = [json.loads(line) for line in command("-o", "jsonl")[1].splitlines()]
    assert [line.keys() for line in lines] == [row.keys() for row in rows]
    table = list(csv.DictReader(io.StringIO(command("-o", "csv")[1])))
    assert [row["test"] for row in table] == ["pp16", "tg4"]
    assert set(table[0]) == {key for key, value in rows[0].items() if not isinstance(value, list)}


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["-r", "0"], 1, "-r is 0; it must be at least 1."),
        (["-ctk", "q9"], 1, "The cache type is 'q9'; it must be one of"),
        (["-d", "x"], 2, "argument -d/--n-depth: invalid list of integers value: 'x'"),
        (["-pg", "5"], 2, "argument -pg: invalid pair PP,TG value: '5'"),
    ],
)
def test_wrong_options_are_one_sentence(command, capsys, arguments, code, sentence):
    if code == 2:
        with pytest.raises(SystemExit):
            command(*arguments)
        assert sentence in capsys.readouterr().err
    else:
        assert command(*arguments)[0] == 1
        assert sentence in command(*arguments)[2]


def test_no_test_at_all_is_refused(path, capsys):
    assert main(["bench", "-m", str(path), "-p", "0", "-n", "0"]) == 1
    assert "-p 0 -n 0 leaves no test" in capsys.readouterr().err


def test_the_cache_has_the_type_that_was_asked_for(model):
    session = model.new_session(capacity=8, dtype=(jnp.float32, jnp.bfloat16))
    assert (session.cache.k[0].dtype, session.cache.v[0].dtype) == (jnp.float32, jnp.bfloat16)
    assert session.capacity == 8
