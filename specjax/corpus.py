"""Continuous batching: rows that have finished get the next sources.

A batch that waits for its slowest row leaves the other rows idle. Here rows are refilled at fixed shapes, so
nothing is recompiled. No row depends on the others, so a source's output does not depend on the batch or on
the order, except at near ties where S differs.

Axes: B rows, F rows refilled together, S source length.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, sharding, writing
from specjax.decode import Generation, Request
from specjax.round import FinishReason, LoopState

# (S, indices of sources) -> the request that decodes them
MakeRequest = Callable[[int, Sequence[int]], Request]

# The old state is not used again, so it is donated: its buffers are updated in place.
_run = jax.jit(decode.run, donate_argnums=1)


class Finished(NamedTuple):
    """Decoded sources.

    Attributes:
      indices: `[n]`, indices of the sources.
      generation: their rows, on the host.
    """

    indices: np.ndarray
    generation: Generation


def plan(lengths: Sequence[int], buckets: Sequence[int], num_rows: int) -> list[tuple[int, list[int]]]:
    """Groups sources by padded length; a bucket too small to fill a batch is merged into the next.

    Args:
      lengths: lengths of the sources, in tokens.
      buckets: values of S, ascending; the last is at least the longest source.
      num_rows: B.

    Returns:
      (S, indices of sources) of each bucket, the largest S first.

    Raises:
      ValueError: a source is longer than the largest S.
    """
    groups, group = [], []
    ascending = collections.deque(sorted(range(len(lengths)), key=lambda i: lengths[i]))
    for size in buckets:
        while ascending and lengths[ascending[0]] <= size:
            group.append(ascending.popleft())
        if len(group) >= num_rows or (group and not ascending):
            groups.append((size, group[::-1]))
            group = []
    if ascending:
        raise ValueError(
            f"`lengths` must be at most the largest S, {buckets[-1]}, got {lengths[ascending[0]]}; "
            "truncate the source"
        )
    return groups[::-1]


def default_refill_size(num_rows: int, mesh: jax.sharding.Mesh | None = None) -> int:
    """Returns the default F, about B / 8: a divisor of B and a multiple of the mesh axis "data"."""
    least = 1 if mesh is None else mesh.shape["data"]
    sizes = [f for f in range(least, max(least, num_rows // 8) + 1, least) if num_rows % f == 0]
    return max(sizes, default=num_rows)


def decode_all(
    request: MakeRequest,
    lengths: Sequence[int],
    buckets: Sequence[int],
    num_rows: int,
    num_refilled: int,
    stop_at: decode.StopAt | None = None,
) -> Iterator[Finished]:
    """Decodes all sources; yields them as they finish.

    Args:
      request: returns the request of any F sources; requests of one S share a program.
      lengths, buckets: see `plan`.
      num_rows: B, rows decoded together.
      num_refilled: F, finished rows to wait for before they are refilled together. F = B is static batching,
        in which each batch waits for its slowest row.
      stop_at: see `decode.generate`; rounds then run one at a time from the host.

    Raises:
      ValueError: F does not divide B.
    """
    if num_rows < 1 or num_refilled < 1 or num_rows % num_refilled:
        raise ValueError(
            f"`num_refilled` must be at least 1 and divide num_rows={num_rows}, got {num_refilled}"
        )
    for size, sources in plan(lengths, buckets, num_rows):
        yield from _decode_bucket(functools.partial(request, size), sources, num_rows, num_refilled, stop_at)


def _decode_bucket(
    request: Callable[[Sequence[int]], Request],
    sources: list[int],
    num_rows: int,
    num_refilled: int,
    stop_at: decode.StopAt | None,
) -> Iterator[Finished]:
    """Decodes the sources of one S in one batch of rows."""
    waiting = collections.deque(sources)
    source_of = np.full(num_rows, -1)  # -1: idle
    state = None
    while waiting or (source_of >= 0).any():
        while waiting and (source_of < 0).sum() >= min(num_refilled, len(waiting)):
            rows = np.flatnonzero(source_of < 0)[:num_refilled]
            taken = [waiting.popleft() for _ in rows[: len(waiting)]]
            program, inputs = request(taken + taken[-1:] * (num_refilled - len(taken)))
            program = program.replace(sampled=None)  # rows of other requests may be sampled
            fresh = decode.jitted_prefill(program, **inputs)
            rows = np.pad(rows[: len(taken)], (0, num_refilled - len(taken)), constant_values=num_rows)
            state = _refill(_idle(fresh, num_rows) if state is None else state, fresh, rows)
            source_of[rows[: len(taken)]] = taken
        max_running = num_rows - num_refilled if waiting else 0
        if stop_at is None:
            state = _run(program, state, max_running)
        else:
            assert state is not None
            state = decode.run_on_host(program, state, max_running, stop_at=stop_at)
        done = np.flatnonzero(~sharding.fetch(state.running) & (source_of >= 0))
        generation = sharding.fetch(decode.jitted_finish(program, state))
        yield Finished(source_of[done], jax.tree.map(lambda x: x[done], generation))  # noqa: B023
        source_of[done] = -1


@functools.partial(jax.jit, static_argnums=1)
def _idle(state: LoopState, num_rows: int) -> LoopState:
    """Returns B ended rows, with the shapes of the rows of `state`."""
    rows = jnp.arange(num_rows) % state.seeds.shape[0]
    state = jax.tree.map(lambda x: x[rows], state)
    return state.replace(
        finish_reason=jnp.full_like(state.finish_reason, int(FinishReason.LENGTH)),
        context=state.context.replace(remaining=jnp.zeros_like(state.context.remaining)),
    )


@functools.partial(jax.jit, donate_argnums=0)
def _refill(state: LoopState, fresh: LoopState, rows: jax.Array) -> LoopState:
    """Replaces `rows` `[F]` of `state` by the rows of `fresh`; entries equal to B are skipped."""
    return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), state, fresh)


@dataclasses.dataclass(frozen=True)
class Journal:
    """A file of outputs, a line of JSON each, from which a killed run resumes.

    Attributes:
      path: the file, locked while it is open; None: records are kept in memory only.
      records: its records by source.
    """

    path: pathlib.Path | None
    records: dict[int, dict[str, Any]]

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: str | os.PathLike | None, header: Mapping[str, Any]) -> Iterator["Journal"]:
        """Opens a journal, dropping an incomplete last line, or creates it.

        Args:
          header: all that outputs depend on, as JSON types. It must equal that of an existing journal.

        Raises:
          ValueError: the file is not a journal, belongs to another run (the message states what differs), or
            is in use by another run.
        """
        if path is None:
            yield cls(None, {})
            return
        path = pathlib.Path(path)
        with contextlib.ExitStack() as stack:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
                stack.enter_context(writing.locked(path))
                known = cls._read(path, dict(header))
                if not path.stat().st_size:
                    path.write_text(json.dumps(dict(header)) + "\n")
            except BlockingIOError as error:
                raise ValueError(
                    f"another run is writing the journal {path}; wait until it ends, or give another path"
                ) from error
            except OSError as error:
                raise ValueError(
                    f"the journal {path} cannot be written ({error}); give another path"
                ) from error
            yield cls(path, known)

    @staticmethod
    def _read(path: pathlib.Path, header: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Reads the records by source; cuts off an incomplete last line."""
        written = path.read_bytes()
        whole = written[: written.rfind(b"\n") + 1]
        if not whole and not (json.dumps(header) + "\n").encode().startswith(written):
            raise ValueError(f"{path} is not a journal of outputs; move it away, or give another path")
        lines = whole.decode(errors="replace").splitlines()
        try:
            found, *records = [json.loads(line) for line in lines] or [header]
            known = {int(record["index"]): record for record in records}
            differing = [key for key in {**header, **found} if header.get(key) != found.get(key)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is not a journal of outputs ({error}); move it away, or give another path"
            ) from error
        if "sources" in differing:
            differing = ["sources"]  # other rows have other options, too
        if differing:
            raise ValueError(
                f"{path} belongs to another run, which differs in {', '.join(differing)}; run that again to "
                "finish it, or delete the file or write elsewhere to start over"
            )
        if len(whole) < len(written):
            os.truncate(path, len(whole))
        return known

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Appends records, each of which has the `index` of its source."""
        if self.path is not None:
            with self.path.open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
        self.records.update({record["index"]: record for record in records})
