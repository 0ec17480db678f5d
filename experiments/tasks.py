"""Flags for what is trained on, shared by the experiments that train."""

import dataclasses
from typing import Any

from absl import flags

from specjax import data

_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder of the task's data: prepared datasets or its files."
)
_TASK = flags.DEFINE_enum("task", "multi30k_en_de", sorted(data.TASKS), "Which sources and targets.")
_PREFIX = flags.DEFINE_string(
    "source_prefix", None, "Before every source, in place of the task's own; a space follows unless empty."
)
flags.mark_flag_as_required("data_dir")


def task() -> data.Task:
    """--task, with --source_prefix."""
    named = data.TASKS[_TASK.value]
    if _PREFIX.value is None:
        return named
    return dataclasses.replace(named, prefix=_PREFIX.value and f"{_PREFIX.value} ")


def read(split: str, count: int | None = None) -> list[tuple[str, str]]:
    """The first `count` pairs of a split (None: all).

    Raises:
      FileNotFoundError, ValueError: as of `data.load`.
    """
    pairs = data.load(task(), split, _DATA_DIR.value).pairs
    return [pairs[i] for i in range(len(pairs) if count is None else min(count, len(pairs)))]


def fingerprint() -> dict[str, Any]:
    """What decides which pairs there are, for the note of a checkpoint."""
    return {"task": _TASK.value, "prefix": task().prefix}
