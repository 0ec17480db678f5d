"""Tokenised pairs, and the padded batches that training feeds on.

Axes: B rows, S source length, N target length.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

Encode = Callable[[Sequence[str]], list[list[int]]]  # texts -> ids, the end token included


@dataclasses.dataclass(frozen=True)
class Pair:
    """One tokenised example: source and target ids, each with its end token."""

    source: list[int]
    target: list[int]

    @property
    def length(self) -> int:
        return max(len(self.source), len(self.target))


@dataclasses.dataclass(frozen=True)
class Batch:
    """Padded arrays of one training step.

    Attributes:
      source_ids: `[B, S] int32`.
      source_mask: `[B, S] bool`, True at real tokens.
      target_ids: `[B, N] int32`, ends with the end token, then padding.
      target_mask: `[B, N] bool`.
    """

    source_ids: np.ndarray
    source_mask: np.ndarray
    target_ids: np.ndarray
    target_mask: np.ndarray


def tokenize(pairs: Sequence[tuple[str, str]], encode: Encode, max_length: int) -> list[Pair]:
    """Encodes text pairs and drops those of which a side is empty or over `max_length` ids."""
    sources = encode([source for source, _ in pairs])
    targets = encode([target for _, target in pairs])
    encoded = (Pair(s, t) for s, t in zip(sources, targets, strict=True))
    return [p for p in encoded if min(len(p.source), len(p.target)) > 1 and p.length <= max_length]


def pad(rows: Sequence[Sequence[int]], width: int, pad_id: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pads id lists to `[B, width] int32`; beside it the mask `[B, width] bool` of real ids."""
    ids = np.full((len(rows), width), pad_id, np.int32)
    mask = np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = True
    return ids, mask


def bucket(length: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `length`.

    Raises:
      ValueError: none does.
    """
    for size in sorted(buckets):
        if length <= size:
            return size
    raise ValueError(f"length {length} is over the largest bucket {max(buckets)}")


def make_batch(pairs: Sequence[Pair], width: int, target_width: int | None = None) -> Batch:
    """Pads sources to S = `width` and targets to N = `target_width`, where None means S."""
    source_ids, source_mask = pad([p.source for p in pairs], width)
    target_ids, target_mask = pad([p.target for p in pairs], target_width or width)
    return Batch(source_ids, source_mask, target_ids, target_mask)


def epoch(
    pairs: Sequence[Pair], batch_size: int, buckets: Sequence[int], seed: int, number: int
) -> list[tuple[np.ndarray, int]]:
    """The batches of one epoch as (indices, width), a pure function of its arguments.

    Examples are shuffled, sorted by length within windows of 32 batches so that little is
    padded, and the batches are shuffled again. The last, incomplete batch is dropped.
    """
    random = np.random.default_rng((seed, number))
    order = random.permutation(len(pairs))
    batches = []
    for start in range(0, len(order), 32 * batch_size):
        window = sorted(order[start : start + 32 * batch_size], key=lambda i: pairs[i].length)
        cuts = range(0, len(window) - batch_size + 1, batch_size)
        batches += [np.array(window[cut : cut + batch_size]) for cut in cuts]
    random.shuffle(batches)
    return [(rows, bucket(max(pairs[i].length for i in rows), buckets)) for rows in batches]


def training_rows(
    pairs: Sequence[Pair], batch_size: int, buckets: Sequence[int], seed: int, start_step: int = 0
) -> Iterator[tuple[np.ndarray, int]]:
    """Endless (indices, width) of batches; that of step n is the same wherever the iteration starts.

    Raises:
      ValueError: fewer pairs than one batch.
    """
    if len(pairs) < batch_size:
        raise ValueError(f"batch_size={batch_size}, but there are only {len(pairs)} pairs")
    steps_per_epoch = len(epoch(pairs, batch_size, buckets, seed, 0))
    number, skip = divmod(start_step, steps_per_epoch)
    while True:
        yield from epoch(pairs, batch_size, buckets, seed, number)[skip:]
        number, skip = number + 1, 0


def training_batches(
    pairs: Sequence[Pair], batch_size: int, buckets: Sequence[int], seed: int, start_step: int = 0
) -> Iterator[Batch]:
    """The batches of `training_rows`."""
    for rows, width in training_rows(pairs, batch_size, buckets, seed, start_step):
        yield make_batch([pairs[i] for i in rows], width)


def evaluation_batches(pairs: Sequence[Pair], batch_size: int, buckets: Sequence[int]) -> list[Batch]:
    """All pairs once, the short ones first, so that little is padded."""
    ordered = sorted(pairs, key=lambda pair: pair.length)
    chunks = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
    return [make_batch(chunk, bucket(chunk[-1].length, buckets)) for chunk in chunks]


def load_or_train_tokenizer(directory: str | pathlib.Path, lines: Iterable[str], vocab_size: int) -> Any:
    """The tokenizer in `directory`; when there is none, trains one on `lines` and writes it there.

    A unigram model with T5's conventions: pad 0, end 1, unknown 2, no sentinels.
    """
    import tempfile

    import sentencepiece
    import transformers

    directory = pathlib.Path(directory)
    if not (directory / "tokenizer_config.json").exists():
        with tempfile.TemporaryDirectory() as scratch:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines), model_prefix=f"{scratch}/spiece", vocab_size=vocab_size,
                model_type="unigram", character_coverage=1.0, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
                minloglevel=2,
            )  # fmt: skip
            tokenizer = transformers.T5Tokenizer.from_pretrained(scratch, extra_ids=0)
            tokenizer.save_pretrained(directory)
    return transformers.AutoTokenizer.from_pretrained(directory)
