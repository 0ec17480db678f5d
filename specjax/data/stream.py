"""An endless, resumable stream of training batches from text, built on grain.

Steps: shuffle all pairs by seed and epoch, take this process's share, cut it into windows of 32
batches, tokenise a window, sort it by length to limit padding, cut it into batches, shuffle the
batches.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from specjax.data.batches import WINDOW, Batch, Encode, Shape, alike, make_batch, shape_for, tokenize


class Stream:
    """An endless iterator over `Batch`es; `get_state` and `set_state` save and restore its position."""

    def __init__(self, iterator: Iterator[Batch], settings: dict[str, Any]):
        self._iterator: Any = iterator
        self._settings = settings

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> bytes:
        """Returns the position after the last batch, for a checkpoint of this process; about 250 bytes."""
        return json.dumps({"settings": self._settings, "position": self._iterator.get_state()}).encode()

    def set_state(self, state: bytes) -> None:
        """Restores a position that `get_state` returned for a stream with equal arguments.

        Raises:
          ValueError: the arguments differ; the message has both values of each.
        """
        saved = json.loads(state)
        differences = [
            f"{name}={value!r} (saved with {saved['settings'].get(name)!r})"
            for name, value in self._settings.items()
            if saved["settings"].get(name) != value
        ]
        if differences:
            raise ValueError(
                f"`state` must be from a stream with equal arguments, got {', '.join(differences)}; "
                "resume with the saved values, or start from the beginning"
            )
        self._iterator.set_state(saved["position"])


@dataclasses.dataclass(frozen=True)
class _Batching:
    """The conversion of a window of text pairs to batches, a pure function of its number and texts."""

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
    """Returns an endless stream of training batches; each process has its own share of the pairs.

    Every epoch has a different order and uses each pair at most once: pairs that fit no shape, and the
    incomplete last batch of a window, are skipped. Equal arguments give equal streams.

    Args:
      texts: such as `load(...).pairs`; read by index, so it may be larger than memory.
      encode: texts -> ids. Called on two lists per window.
      batch_size: pairs per batch in this process.
      shapes: allowed (S, N), growing in both; a program is compiled for each.
      seed: of the shuffling.
      truncate_sources: truncates sources to the largest S, keeping their end token; otherwise pairs
        with longer sources are dropped. Pairs with longer targets are always dropped.
      process_index, process_count: `jax.process_index()` and `jax.process_count()`.
      encode_targets: see `tokenize`.

    Raises:
      ValueError: invalid `process_index`; too few pairs; shapes that do not grow; several shapes
        with several processes, which could then differ in a step.
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
        """The split of a numbered window into batches; defined here, since grain is imported here."""

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
        raise ValueError(f"`process_index` must be in 0..{process_count - 1}, got {process_index}")
    if num_pairs // process_count < batch_size:
        raise ValueError(
            f"`batch_size` must be at most {num_pairs // process_count}, one process's share of {num_pairs} "
            f"pairs, got {batch_size}"
        )
    if not shapes or any(s > t or n > m for (s, n), (t, m) in itertools.pairwise(shapes)):
        raise ValueError(f"`shapes` must be (S, N) that grow in both numbers, got {list(shapes)}")
    if process_count > 1 and len(shapes) > 1:
        raise ValueError(
            f"`shapes` must be one shape for {process_count} processes, which share the shape of a step, "
            f"got {list(shapes)}"
        )
