"""The loop of a training run: batches, checkpoints, reports, samples, and where it left off."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llama_jax import checks
from llama_jax.config import LlamaConfig
from llama_jax.errors import ArgumentError
from llama_jax.roofline import peak_operations
from training.checkpoint import Checkpoints, abstract
from training.data import Rows, all_batches, training_batches
from training.optimizer import OptimizerOptions, learning_rate_schedule, make_optimizer
from training.sharding import on_host, place_batch, state_shardings
from training.step import (
    Assemble,
    StepOptions,
    TrainState,
    all_trained,
    batch_sums,
    init_state,
    make_train_step,
    operations_per_token,
)

logger = logging.getLogger("llama_jax.train")

METRICS = "metrics.jsonl"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How long a run is and what it leaves behind.

    Attributes:
      batches: how many are seen in all, resumed runs included.
      batch: B, rows in a batch.
      seed: of the order of rows and of dropout.
      save_every, evaluate_every, sample_every, print_every: batches between two; 0 never (a run always saves its end).
      keep: checkpoints that stay.
      patience: looks at the validation data without a better loss before a run ends; 0 never ends it, and the last
        weights instead of the best ones are the result.
      workers: processes that make batches; 0 for threads.
      tensorboard: whether to write its events, too.
    """

    batches: int
    batch: int
    seed: int = 0
    save_every: int = 0
    evaluate_every: int = 0
    sample_every: int = 0
    print_every: int = 1
    keep: int = 3
    patience: int = 0
    workers: int = 0
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("batches", "save_every", "evaluate_every", "sample_every", "print_every", "patience", "workers"):
            checks.integer(name, getattr(self, name), 0)
        for name in ("batch", "keep"):
            checks.integer(name, getattr(self, name), 1)
        checks.integer("seed", self.seed, 0)


@functools.lru_cache(maxsize=16)
def _programs(
    config: LlamaConfig, optimizer: OptimizerOptions, step: StepOptions, assembly: Callable[[StepOptions], Assemble]
) -> tuple[Any, Any, Any]:
    """The optimiser, the jitted step and the jitted sums of an evaluation: runs with equal options compile once."""
    rule = make_optimizer(optimizer)
    full = optimizer.name == "lbfgs"
    train_step = make_train_step(
        config, rule, step, assembly(step), schedule=None if full else learning_rate_schedule(optimizer),
        line_search=full,
    )  # fmt: skip
    exact = dataclasses.replace(step, dropout=0.0, z_loss=0.0)

    def sums(params: Any, fixed: Any, batch: Any, key: jax.Array) -> Any:
        return batch_sums(assembly(exact)(params, fixed, key), batch, config, exact)[1]

    return rule, jax.jit(train_step, donate_argnums=0), jax.jit(sums)


def check_extras() -> None:
    """Raises ArgumentError where what training needs beside the package is not installed."""
    missing = [name for name in ("grain", "orbax.checkpoint") if not _importable(name)]
    if missing:
        raise ArgumentError(f"Training needs {' and '.join(missing)}: pip install 'llama-jax[train]'.")


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the parent
        return False


class Trainer(contextlib.AbstractContextManager):
    """One training run in a folder: its state, its position in the data, its reports. `with` closes it.

    `folder` gets `checkpoints/`, `best/` if the run has patience, and `metrics.jsonl`.
    """

    def __init__(
        self,
        folder: Path,
        config: LlamaConfig,
        rows: Rows,
        optimizer: OptimizerOptions,
        step: StepOptions,
        run: RunOptions,
        *,
        validation: Rows | None = None,
        fixed: Any = None,
        assembly: Callable[[StepOptions], Assemble] = all_trained,
        mesh: Mesh | None = None,
        sample: Callable[[Any], str] | None = None,
    ) -> None:
        self.folder, self.config, self.rows, self.options = folder, config, rows, run
        self.mesh, self.fixed, self._sample = mesh, fixed, sample
        self._optimizer_options = optimizer
        self._full = optimizer.name == "lbfgs"  # all the data in every step
        self._batches: Any = None
        if self._full:
            step = dataclasses.replace(step, accumulate=-(-len(rows) // run.batch), dropout=0.0)
        self.step_options = step
        self._optimizer, self._step, self._evaluate = _programs(config, optimizer, step, assembly)
        self._validation = all_batches(validation, run.batch) if validation is not None else []
        whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        self._key = jax.jit(lambda: jax.random.key(run.seed), out_shardings=whole)()
        self._checkpoints = Checkpoints(folder, run.keep)
        self._best = Checkpoints(folder / "best", 1) if run.patience else None
        self.state: TrainState | None = None
        self.done = 0  # batches
        self.seen = 0  # rows
        self.tokens = 0  # targets that counted
        self.best_loss, self._bad = math.inf, 0

    # Beginning

    def _open_data(self) -> None:
        if not self._full:
            options = self.options
            self._batches = training_batches(
                self.rows, options.batch, options.seed, seen=self.seen, workers=options.workers
            )

    def start(self, params: Any) -> None:
        """Begins with these weights, float32."""
        self.folder.mkdir(parents=True, exist_ok=True)

        def make(params: Any) -> TrainState:
            return init_state(params, self._optimizer, self.step_options)

        shardings = self._shardings(jax.eval_shape(make, params))
        if jax.process_count() > 1:
            params = jax.device_get(params)  # which every host has alike
        donated = () if shardings is not None else (0,)  # what moves to other places cannot be used again
        self.state = jax.jit(make, out_shardings=shardings, donate_argnums=donated)(params)
        _cut_metrics(self.folder / METRICS, 0)
        self._open_data()

    def _shardings(self, state: Any) -> Any:
        return None if self.mesh is None else state_shardings(state, self.config, self.mesh)

    def has_checkpoint(self) -> bool:
        """Whether the run has begun before."""
        return self._checkpoints.latest() is not None

    def resume(self, shapes: Any, checkpoints: Checkpoints | None = None) -> int:
        """Goes on where the newest checkpoint was written; returns the batches that it has seen.

        Args:
          shapes: the trained weights' shapes and types, in their pytree.
          checkpoints: another run's; its own by default.
        """
        source = checkpoints or self._checkpoints
        state = jax.eval_shape(lambda params: init_state(params, self._optimizer, self.step_options), shapes)
        self.state, position = source.restore_newest(
            abstract(state, self._shardings(state)), set_aside=source is self._checkpoints
        )
        self.done, self.seen, self.tokens = position["batches"], position["rows"], position["tokens"]
        self.best_loss = math.inf if position["best_loss"] is None else position["best_loss"]
        self._bad = position["bad"]
        self._open_data()
        self.folder.mkdir(parents=True, exist_ok=True)
        _cut_metrics(self.folder / METRICS, self.done)
        return self.done

    # Going on

    def _position(self) -> dict[str, Any]:
        return dict(
            batches=self.done,
            rows=self.seen,
            tokens=self.tokens,
            best_loss=None if math.isinf(self.best_loss) else self.best_loss,
            bad=self._bad,
        )

    def save(self) -> None:
        """Writes a checkpoint in the background."""
        self._checkpoints.save(self.done, self.state, self._position())

    def weights(self) -> Any:
        """What is worth saving: the weights' average if there is one, else the weights."""
        assert self.state is not None
        return self.state.params if self.state.average is None else self.state.average

    def host_weights(self) -> Any:
        """`weights` as numpy's arrays; all hosts have to call it."""
        return on_host(self.weights(), self.mesh)

    def validation_loss(self) -> float:
        """Nats a token on the validation data, by `weights`."""
        weights = self.weights()
        batches = (place_batch(batch, self.mesh) for batch in self._validation)
        sums = [self._evaluate(weights, self.fixed, batch, self._key) for batch in batches]
        loss, count = np.sum(np.array(jax.device_get(sums), np.float64), axis=0)
        return float(loss / max(count, 1.0))

    def _all_rows(self) -> dict[str, jax.Array]:
        """The whole data as one batch whose rows are a multiple of B."""
        batches = all_batches(self.rows, self.options.batch)
        return place_batch({name: np.concatenate([b[name] for b in batches]) for name in batches[0]}, self.mesh)

    def run(self) -> int:
        """Trains to the end: 0; or the number of the signal that ended it before, after which it is saved as it was."""
        everything = self._all_rows() if self._full else None
        with _Stop() as stop, _Reports(self) as reports:
            while self.done < self.options.batches and not stop.agreed():
                self._checkpoints.check()
                batch = everything if self._full else place_batch(next(self._batches), self.mesh)
                metrics = {}
                for _ in range(self._steps_on_batch()):
                    self.state, metrics = self._step(self.state, self.fixed, batch, self._key)
                self.done += 1
                self.seen += self.options.batch
                reports.add(self.done, metrics)
                if self._due(self.options.evaluate_every) and self._validation and self._judge(reports):
                    break
                if self._due(self.options.sample_every) and self._sample is not None:
                    reports.flush()
                    weights = self.host_weights()
                    if jax.process_index() == 0:
                        reports.write(dict(step=self.done, sample=self._sample(weights)))
                if self._due(self.options.save_every):
                    reports.flush()
                    self.save()
            reports.flush()
            ended_by = stop.asked
        self.save()
        self._checkpoints.wait()
        if not ended_by and self._best is not None and self._best.latest() is not None:
            self._best.wait()
            self._restore_best()
        return ended_by

    def _due(self, interval: int) -> bool:
        return bool(interval) and self.done % interval == 0

    def _steps_on_batch(self) -> int:
        first_of_2023 = self._optimizer_options.ggml_2023 and self.done == 0
        return 1 if first_of_2023 else self._optimizer_options.steps_per_batch

    def _judge(self, reports: _Reports) -> bool:
        """Looks at the validation data; True when it has got no better for too long."""
        reports.flush()
        loss = self.validation_loss()
        reports.write(dict(step=self.done, validation_loss=loss))
        logger.info("batch %d: validation loss %.4f", self.done, loss)
        if loss < self.best_loss:
            self.best_loss, self._bad = loss, 0
            if self._best is not None:
                self._best.wait()
                self._best.save(self.done, self.weights(), dict(loss=loss))
        else:
            self._bad += 1
        if self._best is not None and self._bad >= self.options.patience:
            logger.info("the validation loss no longer falls; the best was %.4f", self.best_loss)
            return True
        return False

    def _restore_best(self) -> None:
        assert self.state is not None
        assert self._best is not None
        weights = self.weights()
        like = abstract(weights, jax.tree.map(lambda w: w.sharding, weights))
        best = self._best.restore(self._best.latest() or 0, like)
        name = "params" if self.state.average is None else "average"
        self.state = dataclasses.replace(self.state, **{name: best})

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.close()
        elif kind is not KeyboardInterrupt:  # who asked twice does not want to wait
            with contextlib.suppress(ArgumentError):  # the first error is the one to tell
                self.close()

    def close(self) -> None:
        """Waits for what is being written."""
        self._checkpoints.close()
        if self._best is not None:
            self._best.close()


class _Stop(contextlib.AbstractContextManager):
    """`asked` is the number of the signal, SIGTERM or Ctrl-C's, or 0; a second one ends the process as usual."""

    def __init__(self) -> None:
        self.asked = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def agreed(self) -> int:
        """`asked` on any host; all hosts have to call it."""
        if jax.process_count() > 1:
            from jax.experimental.multihost_utils import process_allgather

            self.asked = int(np.max(process_allgather(np.array(self.asked, np.int32))))
        return self.asked

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = number
        logger.info("%s: saving and stopping", signal.Signals(number).name)

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class _Reports(contextlib.AbstractContextManager):
    """Metrics to a file, a progress bar or log lines, TensorBoard. Waits for a batch only when the next one runs."""

    def __init__(self, trainer: Trainer) -> None:
        from tqdm import tqdm

        options = trainer.options
        self._trainer = trainer
        self._waiting: tuple[int, Any] | None = None
        self._main = jax.process_index() == 0
        self._file = (trainer.folder / METRICS).open("a", encoding="utf-8") if self._main else None
        self._terminal = self._main and sys.stderr.isatty()
        self._bar = tqdm(
            total=options.batches, initial=trainer.done, disable=not self._terminal, unit="batch", leave=True
        )
        self._board = None
        if options.tensorboard and self._main:
            try:
                from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
            except ImportError:
                raise ArgumentError("--tensorboard needs tensorboardX: pip install -e '.[tensorboard]'.") from None
            self._board = SummaryWriter(str(trainer.folder / "tensorboard"))
        self._per_token = operations_per_token(trainer.config, trainer.rows.T, adapter=trainer.fixed is not None)
        peak = peak_operations()
        self._peak = peak * jax.device_count() if peak else None
        self._began = time.perf_counter()

    def add(self, step: int, metrics: Any) -> None:
        """Takes a batch's metrics, which may still be computed, and reports those of the one before."""
        before, self._waiting = self._waiting, (step, metrics)
        if before is not None:
            self._report(*before)

    def flush(self) -> None:
        """Reports what is waiting."""
        before, self._waiting = self._waiting, None
        if before is not None:
            self._report(*before)

    def _report(self, step: int, metrics: Any) -> None:
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        self._trainer.tokens += int(values["tokens"])
        rows = self._trainer.rows
        positions = (len(rows) if self._trainer._full else self._trainer.options.batch) * rows.T
        speed = values["tokens"] / seconds
        rate = self._per_token * positions / seconds
        line = dict(step=step, **values, tokens_per_second=speed, seconds=seconds)
        if self._peak:
            line["mfu"] = rate / self._peak
        self.write(line)
        shown = f"loss {values['loss']:.4f}, {speed:,.0f} tok/s"
        shown += f", MFU {100 * line['mfu']:.1f} %" if "mfu" in line else ""
        shown += ", skipped" if values["skipped"] else ""
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update(1)
        every = self._trainer.options.print_every
        if self._main and not self._terminal and every and step % every == 0:
            logger.info("batch %d of %d: %s", step, self._trainer.options.batches, shown)

    def write(self, line: dict[str, Any]) -> None:
        """One line of metrics.jsonl; numbers that are not finite become null."""
        if self._file is None:
            return
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()
        if "sample" in line:
            with self._bar.external_write_mode(sys.stderr):
                print(f"--- batch {line['step']}:\n{line['sample']}\n---", file=sys.stderr, flush=True)
        if self._board is not None:
            for name, value in clean.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._board.add_scalar(name, value, line["step"])

    def __exit__(self, *_: Any) -> None:
        self._bar.close()
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that a killed process has not finished is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict) and isinstance(value.get("step"), int):
                yield value


def _cut_metrics(path: Path, step: int) -> None:
    """Drops what is said of later steps, which will be made again."""
    if not path.exists() or jax.process_index():
        return
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    temporary = path.with_suffix(".part")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)
