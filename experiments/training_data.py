"""Flags for what is trained on, shared by the experiments that train."""

import itertools
from collections.abc import Sequence
from typing import Any

from absl import flags

from experiments import tasks
from specjax import data

_TASK = tasks.define_task()
_BUCKETS = flags.DEFINE_list(
    "buckets",
    ["12", "16", "20", "24", "28", "32", "40", "48"],
    "Padded lengths in tokens, growing: of both sides, or SOURCE:TARGET. A program is compiled for each.",
)
_TRUNCATE = flags.DEFINE_bool(
    "truncate_sources", False, "Cut sources that are over the last of --buckets, instead of leaving them out."
)


def source_prefix() -> str:
    """What stands before every source."""
    return tasks.task(_TASK.value).prefix


def pairs(split: str) -> Sequence[data.TextPair]:
    """The pairs of a split of --task; see `tasks.pairs`."""
    return tasks.pairs(split, _TASK.value)


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


def max_new_tokens() -> int:
    """The longest target that --buckets has room for."""
    return shapes()[-1][1]


def truncate_sources() -> bool:
    """--truncate_sources."""
    return _TRUNCATE.value


def tokenize(texts: Sequence[data.TextPair], tokenizer: Any) -> list[data.Pair]:
    """Those that --buckets has room for."""
    return data.tokenize(texts, encoder(tokenizer), shapes()[-1], _TRUNCATE.value)


def encoder(tokenizer: Any) -> data.Encode:
    """From texts to ids."""
    return lambda texts: tokenizer(list(texts)).input_ids


def fingerprint() -> dict[str, Any]:
    """What decides which pairs there are, for the note of a checkpoint."""
    return {"task": _TASK.value, "prefix": source_prefix()}
