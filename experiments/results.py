"""What an experiment leaves behind: results.json (schema 1), table.md, plots, and a table on screen."""

import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from specjax.writing import write_whole


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file whole."""
    write_whole({path: lambda part: part.write_text(text, encoding="utf-8")})


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware() -> str:
    """The machine in words."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{jax.device_count()} x {device.device_kind}"
    return f"{_cpu_model()}, {num_cores()} cores"


def _cpu_model() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write(
    output: str | pathlib.Path, experiment: str, rows: Sequence[Mapping[str, Any]], more: Sequence[str] = ()
) -> None:
    """Writes `results.json` and `table.md` into the directory `output`.

    Args:
      more: packages whose versions count as well; one that is missing is said to be "not installed".
    """
    folder = pathlib.Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    packages = ("jax", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")
    document = {
        "schema": 1,
        "experiment": experiment,
        "command": shlex.join(["python", "-m", f"experiments.{experiment}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": {name: _version(name) for name in (*packages, *more)},
        "rows": [{name: _finite(value) for name, value in row.items()} for row in rows],
    }
    said = json.dumps(document, indent=2, allow_nan=False) + "\n"
    write_whole(
        {
            folder / "table.md": lambda part: part.write_text(markdown(rows), encoding="utf-8"),
            folder / "results.json": lambda part: part.write_text(said, encoding="utf-8"),
        }
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table; what a row lacks says "not run"."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names)]
    lines += [[_cell(row.get(name, "not run")) for name in names] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def subplots(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    """A figure without a screen, and its axes; `options` as of pyplot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, layout="constrained", **options)


def save_figure(figure: Any, path: pathlib.Path) -> None:
    """Writes a PNG whole, and closes the figure."""
    from matplotlib import pyplot

    write_whole({path: lambda part: figure.savefig(part, dpi=120, format="png")})
    pyplot.close(figure)


def show(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the rows side by side, one column a row: names on the left, as a person reads them."""
    table = Table(title=title)
    names = list(dict.fromkeys(name for row in rows for name in row))
    table.add_column(names[0])
    for row in rows:
        table.add_column(_cell(row.get(names[0], "")), justify="right", overflow="fold")
    for name in names[1:]:
        table.add_row(name, *(_cell(row.get(name, "not run")) for row in rows))
    console.print(table)


def show_lines(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the rows below each other, one line a row, as a person compares them."""
    table = Table(title=title)
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(name, "not run")) for name in names))
    console.print(table)


def _finite(value: Any) -> Any:
    """JSON has no infinity: "inf", "-inf", "nan" are written as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
