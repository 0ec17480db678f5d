"""Results of an experiment: results.json (schema 1), table.md, a figure, and tables on the screen."""

import datetime
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import platform
import re
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
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware() -> str:
    """Returns a description of the machine."""
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
    """Writes results.json, table.md and the figure of `plot` to the directory `output`, and prints that.

    Args:
      console: where to print.
      output: the directory; None or empty: nothing is written.
      experiment: name of the experiment.
      rows: rows of the table.
      plot: makes the figure; None: no figure.
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
    """Writes results.json, and table.md with its legend, to the directory `output`.

    Args:
      output: the directory.
      experiment: name of the experiment.
      rows: rows of the table.
      more: further packages whose versions to record; a missing one is "not installed".
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
    table = _tables(rows) + legend.below(experiment, [name for name in _names(rows) if name != "table"])
    write_whole(
        {
            folder / "table.md": lambda part: part.write_text(table, encoding="utf-8"),
            folder / "results.json": lambda part: part.write_text(text, encoding="utf-8"),
        }
    )


def _tables(rows: Rows) -> str:
    """Returns a Markdown table; if rows have a field "table", one for each of its values, with a heading."""
    parts = []
    for title, group in itertools.groupby(rows, key=lambda row: row.get("table")):
        heading = "" if title is None else f"## {title[0].upper()}{title[1:]}\n\n"
        own = [{name: value for name, value in row.items() if name != "table"} for row in group]
        parts.append(heading + markdown(own))
    return "\n".join(parts)


def command(experiment: str) -> str:
    """Returns the command of this run, quoted for a shell."""
    return shlex.join(["python", "-m", f"experiments.{experiment}", *sys.argv[1:]])


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file, complete or not at all."""
    write_whole({path: lambda part: part.write_text(text, encoding="utf-8")})


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _finite(value: Any) -> Any:
    """Returns a value for JSON: infinity and NaN as the text "inf", "-inf" or "nan"."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# ---- tables

_MISSING = "-"  # the cell of a field that a row does not have
_PIECE = re.compile(r"\S+?[/|_:]+(?=\S{4})|\S+|\s+")  # a cell is broken between these: words, parts of paths
_WRAP = 20  # characters to which cells are wrapped before rows go into another block


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name, _MISSING)
    if isinstance(value, list):
        return " ".join(f"{x:.2f}" for x in value) or _MISSING
    if isinstance(value, dict):
        return ", ".join(f"{key}: {x:.2f}" for key, x in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _lines(rows: Rows, header: Callable[[str], str] = legend.header) -> list[list[str]]:
    """Returns the headers, then the cells of each row."""
    names = _names(rows)
    return [[header(name) for name in names], *([_cell(row, name) for name in names] for row in rows)]


def markdown(rows: Rows, header: Callable[[str], str] = legend.header) -> str:
    """Returns the rows as a Markdown table; the cell of a missing field is "-".

    Args:
      header: maps the name of a field to its header.
    """
    first, *others = _lines(rows, header)
    lines = [first, ["---"] * len(first), *others]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def show(console: Console, title: str, rows: Rows) -> None:
    """Prints the rows side by side, headers on the left, in blocks of as many rows as fit in the width."""
    first = 0
    while first < len(rows):
        last = first + 1
        while last < len(rows) and _fits(console, _lines(rows[first : last + 1]), _WRAP):
            last += 1
        numbers = f"{first + 1}" if last == first + 1 else f"{first + 1}-{last}"
        part = f" ({numbers} of {len(rows)})" if last - first < len(rows) else ""
        _print_table(console, title + part, _lines(rows[first:last]), "right")
        first = last


def show_lines(console: Console, title: str, rows: Rows) -> None:
    """Prints the rows below each other, a line each; side by side if the lines do not fit in the width."""
    columns = list(zip(*_lines(rows), strict=True))
    if _fits(console, columns):
        _print_table(console, title, columns, "left")
    else:
        show(console, title, rows)


def _fits(console: Console, columns: Sequence[Sequence[str]], wrap: int = 0) -> bool:
    """Returns whether columns fit in the width, with no piece broken and no cell wrapped before `wrap`."""
    return sum(_narrowest(column, wrap) for column in columns) <= _available(console, len(columns))


def _available(console: Console, num_columns: int) -> int:
    """Returns the characters that borders and padding leave to the cells."""
    return console.width - 3 * num_columns - 1


def _narrowest(column: Sequence[str], wrap: int = 0) -> int:
    """Returns the least width of a column: its longest piece, or its longest cell if `wrap` is more."""
    longest_piece = max(len(piece) for cell in column for piece in _PIECE.findall(cell) or [""])
    return max(longest_piece, min(max(map(len, column)), wrap))


def _wrapped(cell: str, width: int) -> str:
    """Returns a cell in lines of at most `width`, broken between its pieces."""
    lines = [""]
    for piece in _PIECE.findall(cell):
        if len(lines[-1]) + len(piece.rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += piece if lines[-1] else piece.lstrip()
    return "\n".join(line.rstrip() for line in lines)


def _print_table(console: Console, title: str, columns: Sequence[Sequence[str]], justify: Any) -> None:
    """Prints columns, each with its header first; the widest are wrapped until all fit."""
    widths = [max(map(len, column)) for column in columns]
    narrowest = [_narrowest(column) for column in columns]
    while sum(widths) > _available(console, len(columns)):
        excess = [width if width > least else 0 for width, least in zip(widths, narrowest, strict=True)]
        if not any(excess):
            break  # a piece is longer than the line, and is folded
        widths[excess.index(max(excess))] -= 1
    table = Table(title=title)  # cells are `Text`, in which brackets are not markup
    texts = [[Text(_wrapped(cell, width)) for cell in c] for c, width in zip(columns, widths, strict=True)]
    for i, column in enumerate(texts):
        table.add_column(column[0], overflow="fold", justify=justify if i else "left", min_width=widths[i])
    for line in zip(*(column[1:] for column in texts), strict=True):
        table.add_row(*line)
    console.print(table)


# ---- figures


def subplots(rows: int, columns: int, figsize: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """Returns a figure that needs no screen, and its axes; `options` are those of `Figure.subplots`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def save_figure(figure: Any, path: pathlib.Path) -> None:
    """Writes a PNG, complete or not at all."""
    write_whole({path: lambda part: figure.savefig(part, dpi=120, format="png")})
