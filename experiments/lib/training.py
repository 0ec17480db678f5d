"""Flags for training, shared by the experiments that train: on which pairs, and how long."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from experiments.lib import tasks
from specjax import data
from specjax.training.state import Optimization

_TASK = tasks.define_mixture()
flags.DEFINE_list(
    "buckets",
    "12,16,20,24,28,32,40,48",
    "Padded lengths in tokens, growing: of both sides, or SOURCE:TARGET. A program is compiled for each.",
)
flags.DEFINE_bool(
    "truncate_sources", False, "Cut sources over the last of --buckets; else they are left out."
)
FLAGS = flags.FLAGS


def define_run(
    splits: str, *, num_steps: int, learning_rate: float, warmup_steps: int, report_every: int
) -> None:
    """Defines the flags that every run has, with its defaults; `FLAGS` holds their values."""
    flags.DEFINE_list("splits", splits, "Splits of the task: for training, for choice, for the result.")
    flags.DEFINE_integer("batch_size", 64, "Pairs a step.", lower_bound=1)
    flags.DEFINE_integer("num_steps", num_steps, "Steps in all.", lower_bound=1)
    flags.DEFINE_float("learning_rate", learning_rate, "Peak; of Adafactor relative to a parameter's size.")
    flags.DEFINE_integer("warmup_steps", warmup_steps, "Steps of linear warm-up.", lower_bound=0)
    flags.DEFINE_integer(
        "report_every", report_every, "Steps between reports and checkpoints.", lower_bound=1
    )
    flags.DEFINE_integer("seed", 0, "Of everything drawn.", lower_bound=0)
    flags.DEFINE_string("output", None, "Directory for checkpoints and results.")
    flags.DEFINE_string("export", None, "Directory for what was trained.")


def define_sequences() -> None:
    """Defines how many sources a target decodes for its draft."""
    flags.DEFINE_integer("num_sequences", 16384, "Training sources.")
    flags.DEFINE_integer("num_held_out", 256, "Validation sources.")


def optimization(**others: Any) -> Optimization:
    """Returns what the flags ask for; `others` are the fields that an experiment chooses."""
    names = ("learning_rate", "warmup_steps", "num_steps")
    return Optimization(**{name: FLAGS[name].value for name in names}, **others)


def run_identity(**own: Any) -> dict[str, Any]:
    """Returns what a resumed run must share with the one that was stopped, `own` settings included."""
    names = ("splits", "batch_size", "learning_rate", "warmup_steps", "num_steps", "seed")
    settings = {name: FLAGS[name].value for name in names}
    return {**fingerprint(), **settings, "buckets": [list(shape) for shape in shapes()], **own}


def fingerprint() -> dict[str, Any]:
    """Returns what decides which pairs there are, for the note of a checkpoint."""
    return {"task": mixture(), "prefix": {name: tasks.task(name).prefix for name in mixture()}}


def mixture() -> dict[str, int]:
    """Returns task -> how often an epoch has it; see `tasks.parse_mixture`."""
    return tasks.parse_mixture(_TASK.value)


def pairs(split: str, count: int | None = None) -> Sequence[data.TextPair]:
    """Returns the pairs of a split of all tasks of --task that have it, as often as --task says.

    Args:
      count: about so many in all, of each task the first in proportion to its size; None: all.

    Raises:
      FileNotFoundError, ValueError: as of `data.load`.
    """
    parts = [pairs_of(name, split) for name, times in mixture().items() for _ in range(times)]
    parts = [part for part in parts if len(part)]
    if len(parts) == 1 and count is None:
        return parts[0]  # a prepared dataset is read as it is indexed
    share = 1.0 if count is None else min(1.0, count / sum(map(len, parts)))
    return [pair for part in parts for pair in tasks.first(part, max(1, round(share * len(part))))]


def pairs_of(name: str, split: str) -> Sequence[data.TextPair]:
    """Returns the pairs of a split of one task; of `a+b` the parts that this task has.

    Raises:
      FileNotFoundError, ValueError: as of `data.load`, where no task of the mixture has a part.
    """
    parts = split.split("+")
    has = lambda other, part: part.partition("[")[0] in data.TASKS[other].files  # noqa: E731
    own = [part for part in parts if has(name, part) or not any(has(other, part) for other in mixture())]
    return tasks.pairs("+".join(own), name) if own else []


def shapes() -> list[data.Shape]:
    """Returns --buckets as (S, N).

    Raises:
      ValueError: one is no number, or they do not grow.
    """
    parts = [bucket.partition(":") for bucket in FLAGS.buckets]
    numbers = [(source, target or source) for source, _, target in parts]
    if not all(text.isdecimal() and int(text) for pair in numbers for text in pair):
        raise ValueError(f"--buckets={','.join(FLAGS.buckets)}: give lengths, or SOURCE:TARGET as in 512:128")
    found = [(int(source), int(target)) for source, target in numbers]
    if any(a[0] > b[0] or a[1] > b[1] for a, b in itertools.pairwise(found)):
        raise ValueError(f"--buckets={','.join(FLAGS.buckets)}: must grow in both numbers")
    return found


def max_new_tokens() -> int:
    """Returns the longest target that --buckets has room for."""
    return shapes()[-1][1]


def tokenized(split: str, count: int, tokenizer: Any) -> list[data.Pair]:
    """Returns those of `count` pairs of a split that --buckets has room for."""
    return tokenize(pairs(split, count), tokenizer)


def tokenize(texts: Sequence[data.TextPair], tokenizer: Any) -> list[data.Pair]:
    """Returns those pairs that --buckets has room for."""
    encoders = encoder(tokenizer), target_encoder(tokenizer)
    return data.tokenize(texts, encoders[0], shapes()[-1], FLAGS.truncate_sources, encoders[1])


def batches(start_step: int, *kinds: Sequence[data.Pair]) -> Iterator[list[data.Batch]]:
    """Yields batches of the same rows of each kind of pairs without end, a function of the step.

    They share a shape: that of the longest target among the kinds.
    """
    longest = [max(same, key=lambda pair: len(pair.target)) for same in zip(*kinds, strict=True)]
    for rows in data.training_rows(longest, FLAGS.batch_size, shapes(), FLAGS.seed, start_step):
        shape = data.shape_for([longest[i] for i in rows], shapes())
        yield [data.make_batch([kind[i] for i in rows], shape) for kind in kinds]


def encoder(tokenizer: Any) -> data.Encode:
    """Returns a function from texts to the ids of sources."""
    return lambda texts: tokenizer(list(texts)).input_ids


def target_encoder(tokenizer: Any) -> data.Encode:
    """Returns the same for targets: no token before the text, the end token behind it."""

    def encode(texts: Sequence[str]) -> list[list[int]]:
        rows = tokenizer(list(texts), add_special_tokens=False).input_ids
        return [[*row, tokenizer.eos_token_id] for row in rows]

    return encode
