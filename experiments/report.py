"""Gathers the published results into one page, experiments/results/README.md.

  python -m experiments.report

The text of the page is `experiments/results/template.md`. A line of the form

  {draft_sizes where num_new is absent: draft, temperature as T, alpha}

becomes a table of these fields of `draft_sizes/results.json`, followed by hardware, date and command. "as"
gives a header; otherwise it is that of `lib/legend.py`. If the file is missing, the line becomes "Not run". A
line with a missing picture is left out.

Two figures are drawn from several results: `speedup.png` (by K and by drafter) and `positions.png` (accepted
drafts by position).
"""

import json
import pathlib
import re
from typing import Any

from absl import flags
from rich.console import Console

from experiments.lib import legend, results, start

_RESULTS = flags.DEFINE_string("results", "experiments/results", "Folder of the template and the results.")
_LINE = re.compile(r"\{(\w+)(?: where (\w+) is (present|absent))?: (.*)\}")
_PICTURE = re.compile(r"!\[.*\]\((.*)\)")


def table(folder: pathlib.Path, match: re.Match) -> str:
    """Returns the Markdown of one line of the template."""
    name, field, presence, columns = match.groups()
    path = folder / name / "results.json"
    if not path.exists():
        return f"Not run ({name}).\n"
    document = json.loads(path.read_text())
    rows = [row for row in document["rows"] if field is None or (field in row) == (presence == "present")]
    names = [column.strip().partition(" as ") for column in columns.split(",")]
    for field, _, _ in names:
        if not any(field in row for row in rows):
            raise ValueError(f"fields in the template must be in {path}, got {field} ({match[0]})")
    shown = [{header or legend.header(name): cell(row, name) for name, _, header in names} for row in rows]
    source = f"{document['hardware']}, {document['date']}: `{document['command']}`"
    return f"{results.markdown(shown, str)}\n{source}\n"


def cell(row: dict[str, Any], name: str) -> Any:
    """Returns the cell of a field: the last part of a path, a speed-up with its quartiles."""
    value = row.get(name, "-")
    if name in ("draft", "target") and not re.search(r"/\d+$", value):  # PRESET/LAYERS is not a path
        return pathlib.PurePath(value).name
    if name == "speedup" and "speedup_low" in row:
        return f"**{value:.2f}** [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
    return value


# ---- figures


def read_rows(folder: pathlib.Path, name: str) -> list[dict[str, Any]]:
    """Returns the rows of `name/results.json`; none if the file is missing."""
    path = folder / name / "results.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def label(row: dict[str, Any]) -> str:
    """Returns the name of the drafter of a row."""
    drafter = row["num_draft"]
    if drafter.isdecimal():
        return f"draft model, K = {drafter}"
    return f"draft model, tree {drafter}" if drafter[0].isdecimal() else drafter


def plot_speedup(by_k: list[dict[str, Any]], by_drafter: list[dict[str, Any]]) -> Any:
    """Returns a figure: speed-up by K, measured and predicted, and by drafter, greedy and sampled."""
    figure, (left, right) = results.subplots(1, 2, figsize=(11, 5.5), width_ratios=[4, 5])
    drafters = sorted(
        {label(row): row for row in by_drafter if row["temperature"] == 0}.values(),
        key=lambda row: row["speedup"],
    )
    place = {label(row): i for i, row in enumerate(drafters)}
    for i, temperature in enumerate(sorted({row["temperature"] for row in by_k})):
        name = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        rows = [row for row in by_k if row["temperature"] == temperature]
        ks = [int(row["num_draft"]) for row in rows]
        left.errorbar(
            ks, [row["speedup"] for row in rows], yerr=_quartiles(rows), marker="o", capsize=3, label=name
        )
        predicted = [row["predicted_speedup"] for row in rows]
        left.plot(ks, predicted, f"C{i}--", label=f"{name}, predicted from the parts of a round")
        rows = [row for row in by_drafter if row["temperature"] == temperature and label(row) in place]
        right.barh(
            [place[label(row)] + 0.19 - 0.38 * i for row in rows],
            [row["speedup"] for row in rows],
            0.38,
            xerr=_quartiles(rows),
            capsize=2,
            label=name,
        )
    left.axhline(1, color="black", linewidth=0.8)
    right.axvline(1, color="black", linewidth=0.8)
    left.set_xlabel("K, drafted tokens per round")
    left.set_ylabel("speed-up over autoregressive decoding")
    left.set_title("draft model, by K")
    left.legend(fontsize=8)
    right.set_yticks(range(len(drafters)), place)
    right.set_xlabel("speed-up over autoregressive decoding")
    right.set_title("by drafter")
    right.legend(loc="lower right")
    return figure


def _quartiles(rows: list[dict[str, Any]]) -> list[list[float]]:
    """Returns distances from the median to both quartiles, `[2, len(rows)]`."""
    return [[abs(row[f"speedup_{end}"] - row["speedup"]) for row in rows] for end in ("low", "high")]


def plot_positions(rows: list[dict[str, Any]]) -> Any:
    """Returns a figure: the share of target calls that accept a draft at each position, by drafter."""
    temperatures = sorted({row["temperature"] for row in rows})
    figure, axes = results.subplots(1, len(temperatures), figsize=(11, 4.5), sharey=True, squeeze=False)
    for axis, temperature in zip(axes[0], temperatures, strict=True):
        for row in rows:
            shares = row["accepted_by_position"]
            if row["temperature"] == temperature and shares:
                name = f"{label(row)} (tau {row['tokens_per_target_call']:.2f})"
                axis.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
        axis.set_title("greedy" if temperature == 0 else f"temperature {temperature:g}")
        axis.set_xlabel("position in the draft")
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0, 0].set_ylabel("share of target calls that accept it")
    return figure


def main(console: Console) -> None:
    folder = pathlib.Path(_RESULTS.value)
    by_k, by_drafter = read_rows(folder, "best_k"), read_rows(folder, "drafters")
    if by_k and by_drafter:
        results.save_figure(plot_speedup(by_k, by_drafter), folder / "speedup.png")
    if by_position := read_rows(folder, "positions"):
        results.save_figure(plot_positions(by_position), folder / "positions.png")
    template = (folder / "template.md").read_text(encoding="utf-8")
    lines = []
    for line in template.splitlines():
        picture = _PICTURE.fullmatch(line)
        if match := _LINE.fullmatch(line):
            lines.append(table(folder, match))
        elif not picture or (folder / picture[1]).exists():
            lines.append(f"{line}\n")
    note = "<!-- Made by `python -m experiments.report` from template.md and */results.json. -->\n"
    results.write_text(folder / "README.md", note + "".join(lines))
    console.print(f"wrote {folder / 'README.md'}", soft_wrap=True)


if __name__ == "__main__":
    start.run(main)
