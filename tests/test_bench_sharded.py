"""scripts/bench_sharded.py: weights made in their shards are where `load` puts them; a run on fake devices."""

import importlib
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from llama_jax import place_params, tensor_mesh
from llama_jax.quantization import row_bytes
from llama_jax.quantization.packed import QuantizedTensor, pack
from tests.conftest import REPOSITORY
from tests.tiny import tiny_config

SCRIPT = REPOSITORY / "scripts" / "bench_sharded.py"
CONFIG = tiny_config(n_layers=1, vocab_size=1001, d_model=256, d_ff=512, n_heads=4, n_kv_heads=4, head_dim=64)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    for variable in ("NCCL_NVLS_ENABLE", "XLA_PYTHON_CLIENT_MEM_FRACTION"):  # given back afterwards
        monkeypatch.setenv(variable, "")
    return importlib.import_module("bench_sharded")


@pytest.mark.parametrize("weights", ["dense", "Q4_0"])
def test_shards_are_those_of_a_loaded_model(weights, script):
    mesh = tensor_mesh(4)
    made = script.sharded_params(CONFIG, weights, mesh)
    place = place_params(CONFIG, mesh, pad_vocabulary=True)

    def loaded(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        rows = CONFIG.vocab_size if name in ("embedding", "output_head") else leaf.shape[0]
        if not isinstance(leaf, QuantizedTensor):
            return place(name, np.zeros((rows, *leaf.shape[1:]), leaf.dtype))
        size = rows * row_bytes(leaf.type_name, leaf.shape[1])
        return place(name, pack(np.zeros(size, np.uint8), leaf.type_name, (rows, leaf.shape[1]), leaf.dtype))

    wanted = jax.tree.map_with_path(loaded, made, is_leaf=lambda leaf: isinstance(leaf, QuantizedTensor))
    assert made.vocab_size == 1001
    assert made.embedding.shape[0] == 1004
    assert jax.tree.structure(made) == jax.tree.structure(wanted)
    for new, old in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
        assert len({shard.data.shape for shard in new.addressable_shards}) == 1
        assert np.isfinite(np.asarray(new, np.float32)).all()


def test_speed_up_and_efficiency(script):
    line = dict(shape="a", weights="dense", case="decode:1", devices=1, tokens_per_second=100.0)
    one = script.with_speed_up(line, [])
    assert (one["speed_up"], one["efficiency"]) == (1.0, 1.0)
    four = script.with_speed_up(line | dict(devices=4, tokens_per_second=300.0), [one])
    assert (four["speed_up"], four["efficiency"], four["efficiency_over_devices"]) == (3.0, 0.75, 1)
    failed = line | dict(error="no memory")
    eight = script.with_speed_up(line | dict(devices=8, tokens_per_second=800.0), [failed])
    assert (eight["speed_up"], eight["efficiency"], eight["efficiency_over_devices"]) == (None, 1.0, 8)
    assert script.with_speed_up(failed, [one]) == failed


def run(*arguments):
    environment = os.environ | dict(JAX_NUM_CPU_DEVICES="2", JAX_PLATFORMS="cpu", PYTHONPATH=str(REPOSITORY))
    command = [sys.executable, str(SCRIPT), "--shapes", "smollm2-135m", "--weights", "dense", "--layers", "1"]
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    return lines, json.loads(last)


def test_what_the_limit_leaves_out_is_named():
    lines, report = run("--devices", "1", "2", "--limit", "0", "--cases", "decode:1", "--training")
    assert lines == [
        f"smollm2-135m dense decode:1 on {n}: failed, not enough time is left" for n in (1, 2)
    ]  # fmt: skip
    assert [line["error"] for line in report["results"]] == ["not enough time is left"] * 2


@pytest.mark.slow
def test_a_run_on_fake_devices():
    cases = ["decode:2", "prefill:48", "prefill:32"]
    options = ["--context", "32", "--steps", "2", "--repeats", "2", "--tokens", "16", "--chunk", "32"]
    lines, report = run("--cases", *cases, "--training", "smollm2-135m:fsdp:1", *options, "--profile", "3")
    results = {(line["devices"], line["case"]): line for line in report["results"]}
    assert list(results) == [
        *((n, case) for n in (1, 2) for case in cases), *((n, "train:fsdp:1") for n in (1, 2)),
    ]  # fmt: skip
    for (n, case), line in results.items():
        if case == "prefill:48":
            assert line["error"] == "ValueError: a prompt of 48 tokens does not consist of chunks of 32"
            continue
        assert "error" not in line, line
        assert line["nccl_nvls_enable"] == "0"
        assert line["tokens_per_second"] > 0
        assert line["program_bytes"] > 0
        assert len(line["kernels"]) == 3
        assert bool(line["collectives"]) == (n == 2)
        assert (line["collective_milliseconds"] > 0) == (n == 2)
        one = results[1, case]
        assert line["speed_up"] == pytest.approx(line["tokens_per_second"] / one["tokens_per_second"])
    assert results[2, "decode:2"]["program_bytes"] < 0.6 * results[1, "decode:2"]["program_bytes"]
    assert sum("failed" in line for line in lines) == 2
