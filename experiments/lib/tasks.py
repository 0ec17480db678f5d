"""Flags for tasks and their data."""

import dataclasses
from collections.abc import Sequence

from absl import flags

from specjax import data

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of the data of tasks: prepared datasets or files.")
_PREFIX = flags.DEFINE_string(
    "source_prefix",
    None,
    "Prefix of every source instead of the task's own; a space follows unless it is empty.",
)
_DOWNLOAD = flags.DEFINE_bool(
    "download", False, "First prepare the task's dataset in --data_dir (extra `prepare`; hours for WMT14)."
)
flags.mark_flag_as_required("data_dir")


def define_task() -> flags.FlagHolder[str]:
    """Defines --task for an experiment with one task."""
    return flags.DEFINE_enum(
        "task", "multi30k_en_de", sorted(data.TASKS), "Task with the sources and targets."
    )


def define_mixture() -> flags.FlagHolder[list[str]]:
    """Defines --task for an experiment that trains on one or several tasks."""
    return flags.DEFINE_list(
        "task",
        ["multi30k_en_de"],
        "Tasks to train on together, each in proportion to its size, or N times that with NAME:N. "
        f"Tasks are {', '.join(sorted(data.TASKS))}.",
    )


def parse_mixture(parts: Sequence[str], flag: str = "task") -> dict[str, int]:
    """Returns how often an epoch has each task, from the values of a flag.

    Raises:
      ValueError: an unknown or repeated task, or an invalid number.
    """
    mixture: dict[str, int] = {}
    for part in parts:
        name, _, times = part.partition(":")
        if name not in data.TASKS or name in mixture:
            raise ValueError(
                f"`--{flag}` must be some of {', '.join(sorted(data.TASKS))}, each once, got {name}"
            )
        if times and not (times.isdecimal() and int(times)):
            raise ValueError(f"`--{flag}` must have a whole number of at least 1 after the colon, got {part}")
        mixture[name] = int(times or 1)
    return mixture


def task(name: str) -> data.Task:
    """Returns a task by name, with --source_prefix if given."""
    named = data.TASKS[name]
    if _PREFIX.value is None:
        return named
    return dataclasses.replace(named, prefix=_PREFIX.value and f"{_PREFIX.value} ")


def pairs(split: str, name: str) -> Sequence[data.TextPair]:
    """Returns the pairs of a split of a task; a prepared dataset is read lazily.

    Raises:
      FileNotFoundError, ValueError: as `data.load`.
    """
    return data.load(task(name), split, _DATA_DIR.value, download=_DOWNLOAD.value).pairs


def first(found: Sequence[data.TextPair], count: int | None) -> list[data.TextPair]:
    """Returns the first `count` pairs (None: all)."""
    return [found[i] for i in range(min(len(found) if count is None else count, len(found)))]
