"""Checkpoints by Orbax: written in the background, complete or absent, the newest few kept."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from llama_jax.errors import ArgumentError, plain

logger = logging.getLogger("llama_jax.train")

FOLDER = "checkpoints"


@functools.cache
def _drop_echoes() -> None:
    """Of a failed read or write one exception is raised; the others that tensorstore's threads print are dropped."""
    report = sys.unraisablehook

    def hook(event: Any) -> None:
        code = getattr(event.object, "cr_code", None)
        of_orbax = code is not None and "orbax" in Path(code.co_filename).parts
        if not of_orbax and str(event.exc_value) != "Event loop is closed":
            report(event)

    sys.unraisablehook = hook


def _reason(error: Exception) -> str:
    full = os.strerror(errno.ENOSPC)
    return full if full in str(error) else plain(str(error).partition(". See full TensorStore details")[0], 200)


class Checkpoints:
    """The checkpoints of a run, in the folder `checkpoints` of the run's folder, one a step.

    A checkpoint is written under another name and renamed when it is complete, so a killed process leaves the one
    before. Orbax's own messages, which repeat what it raises, are left out.
    """

    def __init__(self, run: Path, keep: int = 3) -> None:
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.CRITICAL)  # what goes wrong is raised, too
        _drop_echoes()
        self._ocp = ocp
        self.folder = (run / FOLDER).absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        try:
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        except OSError as error:
            raise ArgumentError(f"The folder {str(self.folder)!r} cannot be used: {error.strerror}.") from None
        self._writing: int | None = None  # the step that was last begun and has not been seen to be complete

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Begins to write; returns as soon as the state may be changed again.

        Args:
          position: what JSON can hold, such as the data's position.

        Raises:
          ArgumentError: this checkpoint or the one before could not be written.
        """
        self.wait()
        if step in self._manager.all_steps():
            return
        arguments = self._ocp.args.Composite(
            state=self._ocp.args.StandardSave(state), position=self._ocp.args.JsonSave(position)
        )
        self._writing = step
        with self._explained():
            self._manager.save(step, args=arguments, force=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """What goes wrong while a checkpoint is written becomes one sentence."""
        try:
            yield
        except Exception as error:  # of the file system, tensorstore or Orbax, by many names
            step, self._writing = self._writing, None
            raise ArgumentError(f"{_reason(error)}: the checkpoint of batch {step} was not written.") from None

    def check(self) -> None:
        """Raises ArgumentError where the checkpoint that was written in the background has failed; never waits."""
        if self._writing is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def position(self, step: int) -> dict[str, Any]:
        """What was saved beside the state; raises as `restore`."""
        return self._restore(step, position=self._ocp.args.JsonRestore())["position"]

    def restore(self, step: int, like: Any) -> Any:
        """The state of a step.

        Args:
          like: the shapes, types and shardings to restore to; the mesh may be another than that of the writer.

        Raises:
          ArgumentError: the checkpoint is damaged or holds another kind of state.
        """
        return self._restore(step, state=self._ocp.args.StandardRestore(like))["state"]

    def _restore(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=self._ocp.args.Composite(**items))
        except Exception as error:  # by many names
            raise ArgumentError(
                f"The checkpoint {str(self.folder / str(step))!r} is damaged or does not fit this run: {_reason(error)}"
            ) from None

    def restore_newest(self, like: Any, *, set_aside: bool = False) -> tuple[Any, dict[str, Any]]:
        """The state and position of the newest checkpoint that can be read; a warning names newer ones.

        Args:
          like: as for `restore`.
          set_aside: rename newer ones, whose steps will be made again.

        Raises:
          ArgumentError: none can be read; it tells why the newest cannot.
        """
        first: ArgumentError | None = None
        steps = self.steps()
        for i, step in reversed(list(enumerate(steps))):
            try:
                result = self.restore(step, like), self.position(step)
            except ArgumentError as error:
                first = first or error
                continue
            if first is not None:
                logger.warning("%s; going on with the one of batch %d", first, step)
                if set_aside:
                    self._set_aside(steps[i + 1 :])
            return result
        raise first or ArgumentError(f"{str(self.folder)!r} holds no complete checkpoint.")

    def _set_aside(self, steps: list[int]) -> None:
        if jax.process_index() == 0:
            for step in steps:
                os.replace(self.folder / str(step), self.folder.parent / f"damaged-{step}-{time.time_ns()}")
        if jax.process_count() > 1:
            from jax.experimental.multihost_utils import sync_global_devices

            sync_global_devices("damaged checkpoints are set aside")
        self._manager.reload()

    def wait(self) -> None:
        """Returns when everything is written; raises ArgumentError where it could not be."""
        with self._explained():
            self._manager.wait_until_finished()
        self._writing = None

    def close(self) -> None:
        """Waits, then ends the background threads; raises as `wait`."""
        with self._explained():
            self._manager.close()


def abstract(state: Any, shardings: Any = None) -> Any:
    """Shapes, types and places of a state, for `Checkpoints.restore`."""
    if shardings is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: device, state)
    return jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), state, shardings)
