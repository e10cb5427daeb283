"""Training checkpoints: the head, its optimizer and the step, through orbax.

The frozen target is not in them. What the run depends on is stored beside the arrays, and a run
with other settings is refused instead of continuing something else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from train.step import TrainState


class Checkpoints:
    """The checkpoints of one run, in one folder. Close it, or use it as a context manager."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=True, cleanup_tmp_directories=True
            ),
        )
        self._folder = folder

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for a save in progress and releases the folder."""
        self._manager.close()

    def save(self, state: TrainState, run: dict[str, Any]) -> None:
        """Saves in the background; `run` holds JSON values that must be equal on resume."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run)),
        )

    def restore(self, like: TrainState, run: dict[str, Any]) -> TrainState | None:
        """The latest complete checkpoint, or None.

        Args:
          like: a state of the same shapes.
          run: as given to `save`.

        Raises:
          ValueError: the checkpoint belongs to a run with other settings, which are named.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        held = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))
        different = sorted(
            key for key in held["run"].keys() | run.keys() if held["run"].get(key) != run.get(key)
        )
        if different:
            changes = ", ".join(
                f"{key} {held['run'].get(key)!r} -> {run.get(key)!r}" for key in different
            )
            raise ValueError(
                f"{self._folder} holds a run with other settings ({changes}); "
                "choose another folder or the same settings"
            )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        )
        return restored["state"]
