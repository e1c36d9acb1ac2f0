"""A run as a whole: going on bit for bit, signals, what is kept, meshes."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from llama_jax import device_mesh
from llama_jax.errors import ArgumentError
from llama_jax.model import init_params
from tests.conftest import REPOSITORY
from tests.placement.test_distributed import free_port, on_two_hosts
from tests.tiny import tiny_config, tiny_params
from training.checkpoint import Checkpoints
from training.data import Rows, join_documents
from training.loop import METRICS, RunOptions, Trainer, read_metrics
from training.optimizer import OptimizerOptions
from training.sharding import parse_mesh
from training.step import StepOptions

CONFIG = tiny_config(n_layers=1, vocab_size=32, d_model=16, d_ff=32, head_dim=4)
SHAPES = jax.eval_shape(lambda: init_params(jax.random.key(0), CONFIG))


def rows(n=400, seed=0):
    ids = np.random.default_rng(seed).integers(0, 32, n).astype(np.int32)
    return Rows(join_documents([(ids[: n // 3], None), (ids[n // 3 :], None)]), 8, seed=1)


def trainer(folder, batches=6, name="adamw", step=None, **options):
    run = dict(batch=8, batches=batches, save_every=2, seed=3) | options.pop("run", {})
    step = step or StepOptions(dropout=0.0 if name == "lbfgs" else 0.2)
    optimizer = OptimizerOptions(name=name, warmup=2, decay_steps=10, learning_rate=0.01)
    data = rows(120) if name == "lbfgs" else rows()
    return Trainer(folder, CONFIG, data, optimizer, step, RunOptions(**run), **options)


def finish(run):
    ended_by = run.run()
    run.close()
    return ended_by


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def losses(folder):
    return {line["step"]: line["loss"] for line in read_metrics(folder / METRICS) if "loss" in line}


@pytest.mark.parametrize("name", ["adamw", pytest.param("lbfgs", marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path, name):
    whole = trainer(tmp_path / "whole", name=name)
    whole.start(tiny_params(CONFIG))
    assert finish(whole) == 0
    first = trainer(tmp_path / "parts", batches=4, name=name, run=dict(save_every=3))
    first.start(tiny_params(CONFIG))
    assert finish(first) == 0
    second = trainer(tmp_path / "parts", name=name)
    assert second.resume(SHAPES) == 4
    assert second.tokens == first.tokens
    assert finish(second) == 0
    same(second.state, whole.state)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 6
    assert second.tokens == whole.tokens


def test_the_newest_checkpoints_are_kept_and_reports_complete(tmp_path):
    run = trainer(tmp_path, batches=7, validation=rows(90, seed=5), run=dict(keep=2, evaluate_every=3))
    run.start(tiny_params(CONFIG))
    assert finish(run) == 0
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [6, 7]
    assert checkpoints.position(7)["batches"] == 7
    checkpoints.close()
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 8))
    assert steps[0].keys() >= {"loss", "learning_rate", "gradient_norm", "tokens", "tokens_per_second", "seconds"}
    assert steps[0]["learning_rate"] == pytest.approx(0.005)
    assert [line["step"] for line in lines if "validation_loss" in line] == [3, 6]


def test_sigterm_saves_and_stops(tmp_path):
    def sample(params):
        os.kill(os.getpid(), signal.SIGTERM)
        return "a sample"

    before = signal.getsignal(signal.SIGTERM)
    run = trainer(tmp_path, run=dict(save_every=0, sample_every=3), sample=sample)
    run.start(tiny_params(CONFIG))
    assert finish(run) == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [3]
    checkpoints.close()
    assert any(line.get("sample") == "a sample" for line in read_metrics(tmp_path / METRICS))


def test_a_damaged_checkpoint_is_left_for_the_one_before(tmp_path, caplog):
    run = trainer(tmp_path)
    run.start(tiny_params(CONFIG))
    assert finish(run) == 0
    for path in (tmp_path / "checkpoints/6/state/d").iterdir():
        path.write_bytes(path.read_bytes()[:10])
    (tmp_path / "checkpoints/4/position/metadata").write_text('{"batches":')
    again = trainer(tmp_path)
    assert again.resume(SHAPES) == 2
    (warning,) = (r.message for r in caplog.records if r.levelname == "WARNING" and r.name == "llama_jax.train")
    assert "checkpoints/6' is damaged or does not fit this run" in warning
    assert warning.endswith("; going on with the one of batch 2")
    assert finish(again) == 0
    assert losses(tmp_path).keys() == set(range(1, 7))
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [2, 4, 6]
    assert checkpoints.position(6)["batches"] == 6
    checkpoints.close()
    assert len(list(tmp_path.glob("damaged-*"))) == 2


def test_a_checkpoint_that_cannot_be_written_is_a_sentence(tmp_path, monkeypatch):
    run = trainer(tmp_path, batches=5000, run=dict(save_every=2))
    run.start(tiny_params(CONFIG))

    def full():
        raise ValueError("RESOURCE_EXHAUSTED: Error writing [OS error 28: ENOSPC No space left on device]")

    # As Orbax tells of a failed write in the background: not when it begins, but when it is waited for.
    monkeypatch.setattr(run._checkpoints._manager, "wait_until_finished", full)
    sentence = r"^No space left on device: the checkpoint of batch 2 was not written\.$"
    run._checkpoints._writing = 2
    with pytest.raises(ArgumentError, match=sentence), run:
        run.run()
    assert run.done == 0


def test_patience_ends_a_run_with_the_best_weights(tmp_path):
    # A learning rate that only harms: the first look is the best.
    run = Trainer(
        tmp_path, CONFIG, rows(), OptimizerOptions(learning_rate=0.3, warmup=0, decay_steps=0), StepOptions(),
        RunOptions(batch=8, batches=50, evaluate_every=1, patience=3), validation=rows(90, seed=5),
    )  # fmt: skip
    run.start(tiny_params(CONFIG))
    assert finish(run) == 0
    seen = [line["validation_loss"] for line in read_metrics(tmp_path / METRICS) if "validation_loss" in line]
    best = int(np.argmin(seen))
    assert len(seen) == best + 4 < 50
    assert run.validation_loss() == pytest.approx(seen[best], rel=1e-6)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run on one device."""
    run = trainer(tmp_path_factory.mktemp("alone"), batches=3, step=StepOptions(accumulate=2))
    run.start(tiny_params(CONFIG))
    assert finish(run) == 0
    return run


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "axes", ["data=2,fsdp=2,tensor=2", pytest.param("fsdp=4", marks=SLOW), pytest.param("data=8", marks=SLOW)]
)
def test_any_mesh_gives_the_same_result(tmp_path, alone, axes):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    accumulate = 1 if axes == "data=8" else 2
    run = trainer(tmp_path, batches=3, step=StepOptions(accumulate=accumulate), mesh=device_mesh(**parse_mesh(axes)))
    run.start(tiny_params(CONFIG))
    assert finish(run) == 0
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), run.state.params, alone.state.params
    )
    if axes.startswith("data=2"):
        wq = run.state.params.layers[0].wq
        assert wq.sharding.shard_shape(wq.shape) == (wq.shape[0] // 2, wq.shape[1] // 2)
        moment = next(leaf for leaf in jax.tree.leaves(run.state.optimizer) if leaf.shape == wq.shape)
        assert moment.sharding == wq.sharding
        # The same checkpoint on another mesh, and on none.
        for other in (device_mesh(fsdp=8), None):
            again = trainer(tmp_path, batches=3, step=StepOptions(accumulate=2), mesh=other)
            assert again.resume(SHAPES) == 3
            again.close()
            same(again.state, run.state)


@pytest.mark.parametrize("text", ["data", "data=x", "rows=2", "data=2;fsdp=2"])
def test_a_wrong_mesh_is_a_sentence(text):
    with pytest.raises(ArgumentError, match="it must be like data=2,fsdp=4,tensor=1"):
        parse_mesh(text)


def test_another_state_is_a_sentence(tmp_path, alone):
    source = Checkpoints(alone.folder)
    other = trainer(tmp_path, name="sgd")
    with pytest.raises(ArgumentError, match="is damaged or does not fit this run"):
        other.resume(SHAPES, source)
    other.close()
    source.close()


@pytest.mark.slow
def test_two_hosts_train_as_one_does(tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n" * 40)

    def command(name):
        return [
            "-m", "training.train_text_from_scratch", "--train-data", str(tmp_path / "text.txt"), "--ctx", "16",
            "--embd", "32", "--head", "2", "--layer", "1", "-b", "4", "-n", "4", "--predict", "4", "--val-split", "0.2",
            "--eval-interval", "2", "--print-details-interval", "2", "--checkpoint-out", str(tmp_path / name),
        ]  # fmt: skip

    hosts = ["--mesh", "data=2,fsdp=2", "--coordinator", f"localhost:{free_port()}", "--num-hosts", "2", "--host-id"]
    for done in on_two_hosts([*command("two"), *hosts], numbers=("0", "1")):
        assert done.returncode == 0, done.stderr[-2000:]
    subprocess.run([sys.executable, *command("one")], cwd=REPOSITORY, check=True, capture_output=True)
    one, two = (list(read_metrics(tmp_path / name / METRICS)) for name in ("one", "two"))
    for key in ("loss", "validation_loss"):
        values = [[line[key] for line in lines if key in line] for lines in (one, two)]
        assert values[0]
        np.testing.assert_allclose(values[1], values[0], rtol=1e-5)
    assert (tmp_path / "two" / "model.gguf").exists()


@pytest.mark.slow
def test_kill_9_leaves_a_complete_checkpoint(tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n" * 40)
    command = [
        sys.executable, "-m", "training.train_text_from_scratch", "--train-data", str(tmp_path / "text.txt"),
        "--ctx", "16", "--embd", "32", "--head", "2", "--layer", "1", "-b", "2", "--save-interval", "1",
        "--checkpoint-out", str(tmp_path / "run"), "--predict", "0",
    ]  # fmt: skip
    folder = tmp_path / "run" / "checkpoints"
    for least in (2, 5):
        process = subprocess.Popen([*command, "-n", "100000"], cwd=REPOSITORY, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            if folder.exists() and any(p.name.isdigit() and int(p.name) >= least for p in folder.iterdir()):
                break
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        checkpoints = Checkpoints(tmp_path / "run")
        latest = checkpoints.latest()
        checkpoints.close()
        assert latest is not None
        assert latest >= least
    done = subprocess.run([*command, "-n", str(latest + 1)], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert f"going on behind batch {latest}" in done.stderr
    assert (tmp_path / "run" / "model.gguf").exists()
