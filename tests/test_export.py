"""Exported programs, run by a process that cannot import this package, say what the model says; the memory test."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import llama_jax
from llama_jax.cli import options
from llama_jax.cli.main import main
from llama_jax.memory_test import describe, memory_test
from llama_jax.quantization import QuantizedTensor
from tests.tiny import tiny_gguf

PROMPT = [1, 5, 9, 33, 21, 8, 40, 13, 13, 60]
BLOCKED = """
import runpy, sys
sys.modules["llama_jax"] = None
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    tiny_gguf(path, "Q8_0")
    return path


@pytest.fixture(scope="module")
def model(path):
    return llama_jax.load(path, n_ctx=48, n_batch=8)


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "made"
    llama_jax.export_model(folder, model)
    return folder


def greedy(model, ids, n):
    steps = model.new_session().generate([ids], model.sampling(batch=1, temperature=0.0), max_tokens=n)
    return [token for (new,) in steps for token in new]


def run_alone(folder, ids, n):
    """run.py of the folder in a process in which `import llama_jax` fails."""
    names = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_", "PYTHONPATH"))}
    command = [sys.executable, "-c", BLOCKED, str(folder / "run.py"), *map(str, ids), "--tokens", str(n)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=names)
    assert done.returncode == 0, done.stderr
    return list(map(int, done.stdout.split()))


def test_a_program_without_the_package_continues_as_the_model_does(model, exported):
    assert len(PROMPT) > model.n_batch  # more than one chunk
    assert run_alone(exported, PROMPT, 12) == greedy(model, PROMPT, 12)


def test_the_folder_holds_what_it_promises(model, exported):
    assert sorted(path.name for path in exported.iterdir()) == [
        "decode.jax", "model.json", "prefill.jax", "run.py", "weights.safetensors",
    ]  # fmt: skip
    facts = json.loads((exported / "model.json").read_text())
    assert (facts["context"], facts["prefill_tokens"], facts["platforms"]) == (48, 8, ["cpu", "cuda"])
    assert facts["end_ids"] == list(model.tokenizer.eog_ids)
    weights = load_file(exported / "weights.safetensors")
    np.testing.assert_array_equal(weights["layers.0.wk"], model.params.layers[0].wk)
    assert len(weights) == len(set(weights)) == 2 + 9 * model.config.n_layers + (model.params.output_head is not None)


@pytest.mark.slow
def test_packed_and_narrow_weights_with_an_adapter_are_exported(model, path, tmp_path):
    adapter = llama_jax.init_lora(jax.random.key(0), model.config, rank=2, targets=["wq"], dtype=jnp.bfloat16)
    llama_jax.save_peft(tmp_path / "adapter", adapter)
    narrow = llama_jax.load(path, n_ctx=32, n_batch=16, packed=True, dtype="bfloat16", lora=[tmp_path / "adapter"])
    assert isinstance(narrow.params.layers[0].wo, QuantizedTensor)
    llama_jax.export_model(tmp_path / "made", narrow)
    assert run_alone(tmp_path / "made", PROMPT, 6) == greedy(narrow, PROMPT, 6)


def test_a_divided_model_is_refused(path, tmp_path):
    divided = llama_jax.load(path, n_ctx=32, mesh=llama_jax.tensor_mesh(2))
    with pytest.raises(llama_jax.ArgumentError, match="divided over a mesh; only one on a single device"):
        llama_jax.export_model(tmp_path / "x", divided)


def test_the_memory_test_runs_both_ends_of_the_context(model):
    test = memory_test(model)
    assert [(step.position, step.tokens) for step in test.steps] == [(0, 8), (47, 1)]
    assert test.memory.weights == 4 * model.config.n_parameters
    assert test.memory.cache == 48 * model.config.kv_bytes_per_token(4) + 4
    assert test.memory.temporaries > 0
    assert test.peak_bytes > 10 * test.memory.weights
    assert all(0 < step.seconds < step.first_seconds + 1 for step in test.steps)
    lines = describe(test)
    assert lines[0].startswith("8 tokens at position 0: ")
    assert lines[1].startswith("1 token at position 47: ")
    assert lines[2].startswith("weights 0.1 MB, KV cache 0.0 MB, temporaries ")
    assert lines[3].endswith(" of the process")


def test_the_commands(path, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(options, "cache_compiled_programs", lambda: None)
    assert main(["generate", "-m", str(path), "--mtest", "-c", "32", "-b", "16"]) == 0
    assert "16 tokens at position 0" in capsys.readouterr().out
    assert main(["generate", "-m", str(path), "--export", str(tmp_path / "made"), "-c", "32", "-b", "16"]) == 0
    assert (tmp_path / "made" / "decode.jax").exists()
