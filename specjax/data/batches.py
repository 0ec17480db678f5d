"""Tokenised pairs, and padded batches for training.

Axes: B rows, S source length, N target length.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

Encode = Callable[[Sequence[str]], list[list[int]]]  # texts -> ids; targets end with the end token
Shape = tuple[int, int]  # (S, N) of a batch
SOURCE_BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # values of S for decoding
WINDOW = 32  # batches whose pairs are sorted by length together


@dataclasses.dataclass(frozen=True)
class Pair:
    """One tokenised example: source ids, and target ids with their end token."""

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


def tokenize(
    pairs: Sequence[tuple[str, str]],
    encode: Encode,
    largest: Shape,
    truncate_sources: bool = False,
    encode_targets: Encode | None = None,
) -> list[Pair]:
    """Encodes text pairs and drops those with an empty side or more ids than the `largest` shape holds.

    With `truncate_sources`, long sources are truncated instead, and keep an end token if they have one.
    `encode_targets` is for tokenizers without an end token or with a start token (Gemma's); None: `encode`.
    """
    max_source, max_target = largest
    sources = encode([source for source, _ in pairs])
    targets = (encode_targets or encode)([target for _, target in pairs])
    if truncate_sources:
        ends = {target[-1] for target in targets if target}
        sources = [truncate(x, max_source) if x[-1:] and x[-1] in ends else x[:max_source] for x in sources]
    return [
        Pair(s, t)
        for s, t in zip(sources, targets, strict=True)
        if 1 < len(s) <= max_source and 1 < len(t) <= max_target
    ]


def truncate(ids: Sequence[int], limit: int) -> list[int]:
    """Returns at most `limit` ids; keeps the last one, the end token."""
    return [*ids] if len(ids) <= limit else [*ids[: limit - 1], ids[-1]]


def pad(rows: Sequence[Sequence[int]], width: int, pad_id: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns id lists padded to `[B, width] int32`, and the mask `[B, width] bool` of real ids."""
    ids = np.full((len(rows), width), pad_id, np.int32)
    mask = np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = True
    return ids, mask


def bucket(length: int, buckets: Sequence[int]) -> int:
    """Returns the smallest bucket of at least `length`.

    Raises:
      ValueError: `length` exceeds the largest bucket.
    """
    for size in sorted(buckets):
        if length <= size:
            return size
    raise ValueError(f"`length` must be at most the largest bucket, {max(buckets)}, got {length}")


def source_buckets(longest: int) -> tuple[int, ...]:
    """Returns the values of S for up to `longest` ids: `SOURCE_BUCKETS`, then doublings of the last."""
    sizes = [*SOURCE_BUCKETS]
    while sizes[-1] < longest:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


def shape_for(pairs: Sequence[Pair], shapes: Sequence[Shape]) -> Shape:
    """Returns the first of the growing `shapes` that fits all pairs.

    Raises:
      ValueError: no shape does.
    """
    num_source, num_target = (max(len(p.source) for p in pairs), max(len(p.target) for p in pairs))
    for s, n in shapes:
        if num_source <= s and num_target <= n:
            return s, n
    raise ValueError(
        f"`pairs` must fit the largest shape, {shapes[-1]}, got {num_source} source and {num_target} "
        "target ids"
    )


def make_batch(pairs: Sequence[Pair], shape: Shape) -> Batch:
    """Pads sources to S and targets to N."""
    source_ids, source_mask = pad([p.source for p in pairs], shape[0])
    target_ids, target_mask = pad([p.target for p in pairs], shape[1])
    return Batch(source_ids, source_mask, target_ids, target_mask)


def alike(pairs: Sequence[Pair], batch_size: int, shapes: Sequence[Shape]) -> list[list[int]]:
    """Returns batches of indices of pairs of similar length; drops an incomplete batch."""
    order = sorted(range(len(pairs)), key=lambda i: (shape_for([pairs[i]], shapes), pairs[i].length))
    return [order[cut : cut + batch_size] for cut in range(0, len(pairs) - batch_size + 1, batch_size)]


def epoch(
    pairs: Sequence[Pair], batch_size: int, shapes: Sequence[Shape], seed: int, number: int
) -> list[list[int]]:
    """Returns the batches of one epoch as indices, a pure function of its arguments.

    Pairs are shuffled, sorted by length within windows of `WINDOW` batches, and cut into batches, which are
    shuffled. An incomplete last batch is dropped.
    """
    random = np.random.default_rng((seed, number))
    order = random.permutation(len(pairs))
    batches = []
    for start in range(0, len(order), WINDOW * batch_size):
        window = order[start : start + WINDOW * batch_size]
        batches += [window[rows] for rows in alike([pairs[i] for i in window], batch_size, shapes)]
    random.shuffle(batches)
    return [rows.tolist() for rows in batches]


def training_rows(
    pairs: Sequence[Pair], batch_size: int, shapes: Sequence[Shape], seed: int, start_step: int = 0
) -> Iterator[list[int]]:
    """Yields batches of indices without end; those of step n do not depend on `start_step`.

    Raises:
      ValueError: fewer pairs than `batch_size`.
    """
    if len(pairs) < batch_size:
        raise ValueError(f"`batch_size` must be at most the number of pairs, {len(pairs)}, got {batch_size}")
    steps_per_epoch = len(epoch(pairs, batch_size, shapes, seed, 0))
    number, skip = divmod(start_step, steps_per_epoch)
    while True:
        yield from epoch(pairs, batch_size, shapes, seed, number)[skip:]
        number, skip = number + 1, 0


def evaluation_batches(pairs: Sequence[Pair], batch_size: int, shapes: Sequence[Shape]) -> list[Batch]:
    """Returns batches with every pair once, sorted by length to limit padding."""
    ordered = sorted(pairs, key=lambda pair: (shape_for([pair], shapes), pair.length))
    chunks = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
    return [make_batch(chunk, shape_for(chunk, shapes)) for chunk in chunks]
