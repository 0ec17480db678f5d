"""Flags for where a task's pairs are, shared by the experiments that read tasks."""

import dataclasses
from collections.abc import Sequence

from absl import flags

from specjax import data

_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder of the task's data: prepared datasets or its files."
)
_PREFIX = flags.DEFINE_string(
    "source_prefix", None, "Before every source, in place of the task's own; a space follows unless empty."
)
_DOWNLOAD = flags.DEFINE_bool(
    "download", False, "Prepare the task's dataset in --data_dir first (extra `prepare`; hours for WMT14)."
)
flags.mark_flag_as_required("data_dir")


def define_task() -> flags.FlagHolder[str]:
    """Defines --task, for an experiment that reads one."""
    return flags.DEFINE_enum("task", "multi30k_en_de", sorted(data.TASKS), "Which sources and targets.")


def define_mixture() -> flags.FlagHolder[list[str]]:
    """Defines --task, for an experiment that trains on one task or on several together."""
    return flags.DEFINE_list(
        "task",
        ["multi30k_en_de"],
        "Which sources and targets; several are trained on together, each in proportion to its size, "
        f"or NAME:N for N times that. One of {', '.join(sorted(data.TASKS))}.",
    )


def parse_mixture(parts: Sequence[str], flag: str = "task") -> dict[str, int]:
    """Returns task -> how often an epoch has it, of the values of a flag.

    Raises:
      ValueError: an unknown or repeated task, or a number that is none.
    """
    mixture: dict[str, int] = {}
    for part in parts:
        name, _, times = part.partition(":")
        if name not in data.TASKS or name in mixture:
            raise ValueError(f"--{flag}={name}: give tasks of {', '.join(sorted(data.TASKS))}, each once")
        if times and not (times.isdecimal() and int(times)):
            raise ValueError(f"--{flag}={part}: give a whole number from 1 behind the colon, as in {name}:2")
        mixture[name] = int(times or 1)
    return mixture


def task(name: str) -> data.Task:
    """Returns the task of that name, with --source_prefix."""
    named = data.TASKS[name]
    if _PREFIX.value is None:
        return named
    return dataclasses.replace(named, prefix=_PREFIX.value and f"{_PREFIX.value} ")


def pairs(split: str, name: str) -> Sequence[data.TextPair]:
    """Returns the pairs of a split of a task; a prepared dataset is read as it is indexed.

    Raises:
      FileNotFoundError, ValueError: as of `data.load`.
    """
    return data.load(task(name), split, _DATA_DIR.value, download=_DOWNLOAD.value).pairs


def first(found: Sequence[data.TextPair], count: int | None) -> list[data.TextPair]:
    """Returns the first `count` pairs (None: all), or all if there are fewer."""
    return [found[i] for i in range(min(len(found) if count is None else count, len(found)))]
