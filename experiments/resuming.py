"""A run that goes on where it was stopped."""

from collections.abc import Mapping
from typing import Any

from specjax.training.checkpoints import Checkpoints, Restored


def restored(saved: Checkpoints, like: Any, run: Mapping[str, Any]) -> Restored | None:
    """The newest checkpoint, if there is one.

    Args:
      saved: the checkpoints of a run; each one's note holds, as "run", what that run was.
      like: structure and types of the state; see `Checkpoints.restore`.
      run: what a run that is resumed must share with the one that was stopped.

    Raises:
      ValueError: as of `Checkpoints.restore`; or the run had other settings, of which the first is named.
    """
    if saved.latest_step is None:
        return None
    found = saved.restore(like)
    before = found.note.get("run", {})
    for name, value in run.items():
        was = before.get(name, "another version of this script")
        if was != value:
            raise ValueError(
                f"{name}={value}, but {saved.directory} was made with {was}: resume with that, or give "
                "another --output"
            )
    return found
