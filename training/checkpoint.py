"""Checkpoints by Orbax: written in the background, complete or absent, the newest few kept."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax

from llama_jax.errors import ArgumentError, plain

FOLDER = "checkpoints"


class Checkpoints:
    """The checkpoints of a run, in the folder `checkpoints` of the run's folder, one a step.

    A checkpoint is written under another name and renamed when it is complete, so a killed process leaves the one
    before. Orbax's own messages are kept to warnings.
    """

    def __init__(self, run: Path, keep: int = 3) -> None:
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.WARNING)
        self._ocp = ocp
        self.folder = (run / FOLDER).absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        try:
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        except OSError as error:
            raise ArgumentError(f"The folder {str(self.folder)!r} cannot be used: {error.strerror}.") from None

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
        """
        if step in self._manager.all_steps():
            return
        arguments = self._ocp.args.Composite(
            state=self._ocp.args.StandardSave(state), position=self._ocp.args.JsonSave(position)
        )
        self._manager.save(step, args=arguments, force=True)

    def position(self, step: int) -> dict[str, Any]:
        """What was saved beside the state."""
        arguments = self._ocp.args.Composite(position=self._ocp.args.JsonRestore())
        return self._manager.restore(step, args=arguments)["position"]

    def restore(self, step: int, like: Any) -> Any:
        """The state of a step.

        Args:
          like: the shapes, types and shardings to restore to; the mesh may be another than that of the writer.

        Raises:
          ArgumentError: the checkpoint holds another kind of state.
        """
        arguments = self._ocp.args.Composite(state=self._ocp.args.StandardRestore(like))
        try:
            return self._manager.restore(step, args=arguments)["state"]
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                f"The checkpoint {str(self.folder / str(step))!r} does not fit this run: {plain(error, 200)}"
            ) from None

    def wait(self) -> None:
        """Returns when everything is written."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then ends the background threads."""
        self._manager.close()


def abstract(state: Any, shardings: Any = None) -> Any:
    """Shapes, types and places of a state, for `Checkpoints.restore`."""
    if shardings is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: device, state)
    return jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), state, shardings)
