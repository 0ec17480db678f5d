"""The endless, resumable stream of training batches from text, on grain.

Order of things: shuffle all pairs by seed and epoch, take this process's share, cut it into windows
of 32 batches, tokenise a window, sort it by length so that little is padded, cut it into batches,
shuffle those.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from specjax.data.batches import WINDOW, Batch, Encode, Shape, alike, make_batch, shape_for, tokenize


class Stream:
    """Iterates over `Batch`es without end; `get_state` and `set_state` keep its position as bytes."""

    def __init__(self, iterator: Iterator[Batch], settings: dict[str, Any]):
        self._iterator: Any = iterator
        self._settings = settings

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> bytes:
        """The position after the last batch, for a checkpoint of this process; some 250 bytes."""
        return json.dumps({"settings": self._settings, "position": self._iterator.get_state()}).encode()

    def set_state(self, state: bytes) -> None:
        """Continues where a stream of the same arguments stood when it gave `state`.

        Raises:
          ValueError: that stream had other arguments; each is named with both values.
        """
        saved = json.loads(state)
        differences = [
            f"{name}={value!r} (saved with {saved['settings'].get(name)!r})"
            for name, value in self._settings.items()
            if saved["settings"].get(name) != value
        ]
        if differences:
            raise ValueError(
                f"the saved position is of another stream: {', '.join(differences)}. "
                "Resume with the saved values, or start from the beginning"
            )
        self._iterator.set_state(saved["position"])


@dataclasses.dataclass(frozen=True)
class _Batching:
    """From the text pairs of a window to its batches, a pure function of both arguments."""

    encode: Encode
    batch_size: int
    shapes: Sequence[Shape]
    seed: int
    truncate_sources: bool
    window: int  # pairs of a full window
    encode_targets: Encode | None = None

    def batches(self, number: int, texts: Sequence[tuple[str, str]]) -> list[Batch]:
        pairs = tokenize(texts, self.encode, self.shapes[-1], self.truncate_sources, self.encode_targets)
        rows = alike(pairs, self.batch_size, self.shapes)
        if not rows and len(texts) == self.window:
            raise ValueError(
                f"only {len(pairs)} of {len(texts)} pairs fit shapes={list(self.shapes)}, and a batch "
                f"needs {self.batch_size}: add a larger shape, or truncate_sources=True"
            )
        random = np.random.default_rng((self.seed, number))
        batches = [[pairs[i] for i in rows[j]] for j in random.permutation(len(rows))]
        return [make_batch(batch, shape_for(batch, self.shapes)) for batch in batches]


def stream(
    texts: Sequence[tuple[str, str]],
    encode: Encode,
    *,
    batch_size: int,
    shapes: Sequence[Shape],
    seed: int,
    truncate_sources: bool = False,
    process_index: int = 0,
    process_count: int = 1,
    encode_targets: Encode | None = None,
) -> Stream:
    """Endless training batches of text pairs, each process with a share of its own.

    Every epoch has another order, and uses each pair once at most: those that fit no shape, and
    what a window has left over below a batch, are passed over. Equal arguments give equal streams.

    Args:
      texts: such as `load(...).pairs`; indexed, never listed, so it may be larger than memory.
      encode: texts -> ids. Called on two lists a window.
      batch_size: pairs a batch, in this process.
      shapes: allowed (S, N), growing in both; a program is compiled for each.
      seed: of the order.
      truncate_sources: cuts sources to the largest S, their end token kept; otherwise a pair with a
        longer one is dropped. Longer targets always are.
      process_index, process_count: `jax.process_index()` and `jax.process_count()`.
      encode_targets: see `tokenize`.

    Raises:
      ValueError: no such process; too few pairs; shapes that do not grow; more than one shape
        with more than one process, whose shapes would differ in a step.
    """
    _check(len(texts), batch_size, shapes, process_index, process_count)
    window = min(WINDOW * batch_size, len(range(process_index, len(texts), process_count)))
    batching = _Batching(encode, batch_size, shapes, seed, truncate_sources, window, encode_targets)
    settings = {
        "num_pairs": len(texts),
        "batch_size": batch_size,
        "shapes": [list(shape) for shape in shapes],
        "seed": seed,
        "truncate_sources": truncate_sources,
        "window": window,
        "process_index": process_index,
        "process_count": process_count,
    }
    return Stream(_iterate(texts, batching, process_index, process_count), settings)


def _iterate(
    texts: Sequence[tuple[str, str]], batching: _Batching, process_index: int, process_count: int
) -> Iterator[Batch]:
    try:
        import grain
    except ImportError as error:
        raise ImportError('a stream of batches needs grain: pip install "specjax[data]"') from error

    class Unbatch(grain.experimental.FlatMapTransform):
        """A numbered window to its batches; defined here, since grain is imported here."""

        max_fan_out = WINDOW

        def flat_map(self, element):
            return batching.batches(*element)

    share = grain.MapDataset.source(texts).shuffle(batching.seed)[process_index::process_count]
    windows = share.batch(batching.window, batch_fn=list).repeat().map_with_index(lambda i, pairs: (i, pairs))
    # A thread reads one window ahead. It does not tokenise: tokenizers are not thread-safe.
    reading = windows.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
    return iter(grain.experimental.FlatMapIterDataset(reading, Unbatch()))


def _check(
    num_pairs: int, batch_size: int, shapes: Sequence[Shape], process_index: int, process_count: int
) -> None:
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index={process_index} is not below process_count={process_count}")
    if num_pairs // process_count < batch_size:
        raise ValueError(
            f"batch_size={batch_size}, but there are only {num_pairs} pairs for {process_count} processes"
        )
    if not shapes or any(s > t or n > m for (s, n), (t, m) in itertools.pairwise(shapes)):
        raise ValueError(f"shapes={list(shapes)}: give shapes (S, N) that grow in both numbers")
    if process_count > 1 and len(shapes) > 1:
        raise ValueError(
            f"shapes={list(shapes)} with process_count={process_count}: give one shape, since in a "
            "step all processes need the same shape"
        )
