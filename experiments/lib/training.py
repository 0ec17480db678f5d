"""Flags for training, and the batches that they define."""

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
    "Padded lengths in tokens, increasing: of both sides, or SOURCE:TARGET. Each compiles a program.",
)
flags.DEFINE_bool(
    "truncate_sources", False, "Truncate sources over the last of --buckets; otherwise drop them."
)
FLAGS = flags.FLAGS


def define_run(
    splits: str, *, num_steps: int, learning_rate: float, warmup_steps: int, report_every: int
) -> None:
    """Defines the flags of every training run, with these defaults; `FLAGS` holds their values."""
    flags.DEFINE_list("splits", splits, "Splits of the task: for training, validation, and test.")
    flags.DEFINE_integer("batch_size", 64, "Pairs per step.", lower_bound=1)
    flags.DEFINE_integer("num_steps", num_steps, "Total number of steps.", lower_bound=1)
    flags.DEFINE_float(
        "learning_rate",
        learning_rate,
        "Peak learning rate; for Adafactor relative to the scale of each parameter.",
    )
    flags.DEFINE_integer("warmup_steps", warmup_steps, "Steps of linear warm-up.", lower_bound=0)
    flags.DEFINE_integer(
        "report_every", report_every, "Steps between reports and checkpoints.", lower_bound=1
    )
    flags.DEFINE_integer("seed", 0, "Seed of all random draws.", lower_bound=0)
    flags.DEFINE_string("output", None, "Directory for checkpoints and results.")
    flags.DEFINE_string("export", None, "Directory for the trained model.")


def define_sequences() -> None:
    """Defines the flags for the number of sources that the target decodes."""
    flags.DEFINE_integer("num_sequences", 16384, "Number of training sources.")
    flags.DEFINE_integer("num_held_out", 256, "Number of validation sources.")


def optimization(**others: Any) -> Optimization:
    """Returns the optimization settings of the flags; `others` are further fields."""
    names = ("learning_rate", "warmup_steps", "num_steps")
    return Optimization(**{name: FLAGS[name].value for name in names}, **others)


def run_identity(**own: Any) -> dict[str, Any]:
    """Returns the settings that a resumed run must share with the interrupted one, `own` included."""
    names = ("splits", "batch_size", "learning_rate", "warmup_steps", "num_steps", "seed")
    settings = {name: FLAGS[name].value for name in names}
    return {**fingerprint(), **settings, "buckets": [list(shape) for shape in shapes()], **own}


def fingerprint() -> dict[str, Any]:
    """Returns the settings that determine the pairs, for the note of a checkpoint."""
    return {"task": mixture(), "prefix": {name: tasks.task(name).prefix for name in mixture()}}


def mixture() -> dict[str, int]:
    """Returns how often an epoch has each task; see `tasks.parse_mixture`."""
    return tasks.parse_mixture(_TASK.value)


def pairs(split: str, count: int | None = None) -> Sequence[data.TextPair]:
    """Returns the pairs of a split of all tasks of --task that have it, as often as --task has them.

    Args:
      split: the split.
      count: approximate total number, the first of each task in proportion to its size; None: all.

    Raises:
      FileNotFoundError, ValueError: as `data.load`.
    """
    parts = [pairs_of(name, split) for name, times in mixture().items() for _ in range(times)]
    parts = [part for part in parts if len(part)]
    if len(parts) == 1 and count is None:
        return parts[0]  # a prepared dataset is read lazily
    share = 1.0 if count is None else min(1.0, count / sum(map(len, parts)))
    return [pair for part in parts for pair in tasks.first(part, max(1, round(share * len(part))))]


def pairs_of(name: str, split: str) -> Sequence[data.TextPair]:
    """Returns the pairs of a split of one task; for a split `a+b` the parts that the task has.

    Raises:
      FileNotFoundError, ValueError: as `data.load`, if no task of the mixture has a part.
    """
    parts = split.split("+")
    has = lambda other, part: part.partition("[")[0] in data.TASKS[other].files  # noqa: E731
    own = [part for part in parts if has(name, part) or not any(has(other, part) for other in mixture())]
    return tasks.pairs("+".join(own), name) if own else []


def shapes() -> list[data.Shape]:
    """Returns --buckets as (S, N).

    Raises:
      ValueError: invalid numbers, or numbers that do not increase.
    """
    parts = [bucket.partition(":") for bucket in FLAGS.buckets]
    numbers = [(source, target or source) for source, _, target in parts]
    if not all(text.isdecimal() and int(text) for pair in numbers for text in pair):
        raise ValueError(
            f"`--buckets` must be lengths, or SOURCE:TARGET as in 512:128, got {','.join(FLAGS.buckets)}"
        )
    found = [(int(source), int(target)) for source, target in numbers]
    if any(a[0] > b[0] or a[1] > b[1] for a, b in itertools.pairwise(found)):
        raise ValueError(f"`--buckets` must increase in both numbers, got {','.join(FLAGS.buckets)}")
    return found


def max_new_tokens() -> int:
    """Returns the longest target that fits in --buckets."""
    return shapes()[-1][1]


def tokenized(split: str, count: int, tokenizer: Any) -> list[data.Pair]:
    """Returns `count` pairs of a split as ids, without those that do not fit in --buckets."""
    return tokenize(pairs(split, count), tokenizer)


def tokenize(texts: Sequence[data.TextPair], tokenizer: Any) -> list[data.Pair]:
    """Returns pairs as ids, without those that do not fit in --buckets."""
    encoders = encoder(tokenizer), target_encoder(tokenizer)
    return data.tokenize(texts, encoders[0], shapes()[-1], FLAGS.truncate_sources, encoders[1])


def batches(start_step: int, *kinds: Sequence[data.Pair]) -> Iterator[list[data.Batch]]:
    """Yields batches of the same rows of each kind of pairs without end; they depend on the step only.

    The batches of a step have one shape, which fits the longest target of any kind.
    """
    longest = [max(same, key=lambda pair: len(pair.target)) for same in zip(*kinds, strict=True)]
    for rows in data.training_rows(longest, FLAGS.batch_size, shapes(), FLAGS.seed, start_step):
        shape = data.shape_for([longest[i] for i in rows], shapes())
        yield [data.make_batch([kind[i] for i in rows], shape) for kind in kinds]


def encoder(tokenizer: Any) -> data.Encode:
    """Returns a function from texts to the ids of sources."""
    return lambda texts: tokenizer(list(texts)).input_ids


def target_encoder(tokenizer: Any) -> data.Encode:
    """Returns a function from texts to the ids of targets, which end with the end token."""

    def encode(texts: Sequence[str]) -> list[list[int]]:
        rows = tokenizer(list(texts), add_special_tokens=False).input_ids
        return [[*row, tokenizer.eos_token_id] for row in rows]

    return encode
