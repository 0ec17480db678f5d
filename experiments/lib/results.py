"""What an experiment leaves behind: results.json (schema 1), table.md, a figure; and tables on screen."""

import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.lib import legend
from specjax.writing import write_whole

Rows = Sequence[Mapping[str, Any]]


def num_cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware() -> str:
    """Returns the machine in words."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{jax.device_count()} x {device.device_kind}"
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {num_cores()} cores"


def save(
    console: Console,
    output: str | None,
    experiment: str,
    rows: Rows,
    plot: Callable[[], Any] | None = None,
    more: Sequence[str] = (),
) -> None:
    """Writes results.json, table.md and the figure that `plot` returns into `output`; None: nothing.

    Args:
      more: see `write`.
    """
    if not output:
        return
    write(output, experiment, rows, more)
    if plot is not None:
        save_figure(plot(), pathlib.Path(output) / f"{experiment}.png")
    names = f"results.json, table.md and {experiment}.png" if plot else "results.json and table.md"
    console.print(f"wrote {names} into {output}", soft_wrap=True)


def write(output: str | pathlib.Path, experiment: str, rows: Rows, more: Sequence[str] = ()) -> None:
    """Writes results.json and table.md, its columns explained below it, into the directory `output`.

    Args:
      more: packages whose versions count as well; a missing one is recorded as "not installed".
    """
    folder = pathlib.Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    packages = ("jax", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")
    document = {
        "schema": 1,
        "experiment": experiment,
        "command": command(experiment),
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": {name: _version(name) for name in (*packages, *more)},
        "rows": [{name: _finite(value) for name, value in row.items()} for row in rows],
    }
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    table = markdown(rows) + legend.below(experiment, _names(rows))
    write_whole(
        {
            folder / "table.md": lambda part: part.write_text(table, encoding="utf-8"),
            folder / "results.json": lambda part: part.write_text(text, encoding="utf-8"),
        }
    )


def command(experiment: str) -> str:
    """Returns the command of this run, as a shell takes it."""
    return shlex.join(["python", "-m", f"experiments.{experiment}", *sys.argv[1:]])


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file whole."""
    write_whole({path: lambda part: part.write_text(text, encoding="utf-8")})


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _finite(value: Any) -> Any:
    """JSON has no infinity: "inf", "-inf", "nan" are written as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# ---- tables


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name, "not run")
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def markdown(rows: Rows) -> str:
    """Returns the rows as a Markdown table; a missing field is "not run"."""
    names = _names(rows)
    lines = [names, ["---"] * len(names), *([_cell(row, name) for name in names] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def show(console: Console, title: str, rows: Rows) -> None:
    """Prints the rows side by side, one column a row: names on the left, as a person reads them."""
    lines = [[name, *(_cell(row, name) for row in rows)] for name in _names(rows)]
    _print_table(console, title, lines, "right")


def show_lines(console: Console, title: str, rows: Rows) -> None:
    """Prints the rows below each other, one line a row, as a person compares them."""
    names = _names(rows)
    lines = [[name.replace("_", " ") for name in names]]
    _print_table(console, title, lines + [[_cell(row, name) for name in names] for row in rows], "left")


def _print_table(console: Console, title: str, lines: list[list[str]], justify: Any) -> None:
    table = Table(title=title)  # cells are `Text`: brackets in them are no markup
    for i, name in enumerate(lines[0]):
        table.add_column(Text(name), overflow="fold", justify=justify if i else "left")
    for line in lines[1:]:
        table.add_row(*map(Text, line))
    console.print(table)


# ---- figures


def subplots(rows: int, columns: int, figsize: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """Returns a figure without a screen, and its axes; `options` as of `Figure.subplots`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def save_figure(figure: Any, path: pathlib.Path) -> None:
    """Writes a PNG whole."""
    write_whole({path: lambda part: figure.savefig(part, dpi=120, format="png")})
