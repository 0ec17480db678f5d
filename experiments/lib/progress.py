"""Progress of long work: a bar on a terminal, otherwise a line from time to time."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.lib import start

Item = TypeVar("Item")
SECONDS_BETWEEN_LINES = 20.0


def track(items: Iterable[Item], total: int, label: str, console: Console) -> Iterator[Item]:
    """Yields the items, and shows how many are done and the time left."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            yield from progress.track(items, total=total, description=label)
        return
    started = printed = time.monotonic()
    for done, item in enumerate(items):
        if done and time.monotonic() - printed > SECONDS_BETWEEN_LINES:
            printed = time.monotonic()
            left_s = (printed - started) / done * (total - done)
            console.print(f"{label}: {done} of {total}, {left_s / 60:.1f} min left")
        yield item


@contextlib.contextmanager
def tokens(total: int, label: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """Yields a function of (items done, tokens so far) that shows both, tokens per second, and the time left.

    Its first call reports the items that an earlier run has done.
    """
    first: tuple[int, float, float] | None = None
    printed = time.monotonic()
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def report(done: int, num_tokens: int) -> None:
            nonlocal first, printed
            now = time.monotonic()
            if first is None:
                first = done, now, start.compile_seconds()
                if done:
                    console.print(f"resuming: {done} of {total} are done")
            # The time left excludes compilation.
            elapsed_s = max(now - first[1] - (start.compile_seconds() - first[2]), 1e-9)
            left_s = elapsed_s / max(done - first[0], 1) * (total - done)
            speed = f"{num_tokens / elapsed_s:,.0f} tokens/s, {left_s / 60:.1f} min left"
            if elapsed_s < 1:  # too short to tell; programs compile in parallel
                speed = f"{num_tokens:,} tokens"
            bar.update(task, completed=done, description=speed)
            if not console.is_terminal and now - printed > SECONDS_BETWEEN_LINES:
                printed = now
                console.print(f"{label}: {done} of {total}, {speed}")

        yield report
