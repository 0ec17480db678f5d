"""Training checkpoints (orbax): the whole training state, written beside a running step.

A checkpoint is complete or absent: orbax writes to a temporary name and renames.
"""

import pathlib
from typing import Any

from orbax.checkpoint import v1 as ocp


class Checkpoints:
    """The checkpoints of one run, the newest two kept.

    Args:
      directory: where they lie; made absolute, created when missing.
    """

    def __init__(self, directory: str | pathlib.Path):
        path = pathlib.Path(directory).expanduser().absolute()
        path.mkdir(parents=True, exist_ok=True)
        self._checkpointer = ocp.training.Checkpointer(
            path,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=ocp.training.preservation_policies.LatestN(2),
            cleanup_tmp_directories=True,
        )

    @property
    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint, or None."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    def save(self, step: int, state: Any) -> None:
        """Starts writing `state` in the background; a step that is there already is kept."""
        if step != self.latest_step:
            self._checkpointer.save_async(step, state)

    def restore(self, like: Any) -> Any:
        """The newest state, in the structure, shapes, dtypes and shardings of `like`."""
        return self._checkpointer.load(None, like)

    def close(self) -> None:
        """Waits for the last write."""
        self._checkpointer.close()
