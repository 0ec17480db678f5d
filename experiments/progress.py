"""Progress on long work: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Item = TypeVar("Item")
SECONDS_BETWEEN_LINES = 20.0


def track(items: Iterable[Item], total: int, label: str, console: Console) -> Iterator[Item]:
    """Yields the items and shows how many are done and how long the rest takes."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            yield from progress.track(items, total=total, description=label)
        return
    started = said = time.monotonic()
    for done, item in enumerate(items):
        if done and time.monotonic() - said > SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            left_s = (said - started) / done * (total - done)
            console.print(f"{label}: {done} of {total}, {left_s / 60:.1f} min left")
        yield item
