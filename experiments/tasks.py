"""Flags for what is trained on, shared by the experiments that train."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
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
_BUCKETS = flags.DEFINE_list(
    "buckets", ["12", "16", "20", "24", "28", "32", "40", "48"],
    "Padded lengths in tokens, growing: of both sides, or SOURCE:TARGET. A program is compiled for each.",
)  # fmt: skip
_TRUNCATE = flags.DEFINE_bool(
    "truncate_sources", False, "Cut sources that are over the last of --buckets, instead of leaving them out."
)
flags.mark_flag_as_required("data_dir")


def task(name: str | None = None) -> data.Task:
    """The task of that name (None: --task), with --source_prefix."""
    named = data.TASKS[name or _TASK.value]
    if _PREFIX.value is None:
        return named
    return dataclasses.replace(named, prefix=_PREFIX.value and f"{_PREFIX.value} ")


def pairs(split: str, name: str | None = None) -> Sequence[data.TextPair]:
    """The pairs of a split of a task (None: --task); a prepared dataset is read as it is indexed.

    Raises:
      FileNotFoundError, ValueError: as of `data.load`.
    """
    return data.load(task(name), split, _DATA_DIR.value).pairs


def read(split: str, count: int) -> list[data.TextPair]:
    """The first `count` pairs of a split, or all if it has fewer."""
    found = pairs(split)
    return [found[i] for i in range(min(count, len(found)))]


def shapes() -> list[data.Shape]:
    """--buckets as (S, N).

    Raises:
      ValueError: one is no number, or they do not grow.
    """
    parts = [bucket.partition(":") for bucket in _BUCKETS.value]
    numbers = [(source, target or source) for source, _, target in parts]
    if not all(text.isdecimal() and int(text) for pair in numbers for text in pair):
        raise ValueError(
            f"--buckets={','.join(_BUCKETS.value)}: give lengths, or SOURCE:TARGET as in 512:128"
        )
    found = [(int(source), int(target)) for source, target in numbers]
    if any(a[0] > b[0] or a[1] > b[1] for a, b in itertools.pairwise(found)):
        raise ValueError(f"--buckets={','.join(_BUCKETS.value)}: must grow in both numbers")
    return found


def truncate_sources() -> bool:
    return _TRUNCATE.value


def tokenize(texts: Sequence[data.TextPair], tokenizer: Any) -> list[data.Pair]:
    """Those that --buckets has room for."""
    return data.tokenize(texts, encoder(tokenizer), shapes()[-1], _TRUNCATE.value)


def encoder(tokenizer: Any) -> data.Encode:
    return lambda texts: tokenizer(list(texts)).input_ids


def fingerprint() -> dict[str, Any]:
    """What decides which pairs there are, for the note of a checkpoint."""
    return {"task": _TASK.value, "prefix": task().prefix}


def refuse_another(run: Mapping[str, Any], before: Mapping[str, Any], directory: Any) -> None:
    """Raises a ValueError where a run to resume in `directory` had other settings; the first is named."""
    for name, value in run.items():
        found = before.get(name, "another version of this script")
        if found != value:
            raise ValueError(
                f"{name}={value}, but {directory} was made with {found}: resume with that, or give another "
                "--output"
            )
