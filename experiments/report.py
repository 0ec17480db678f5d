"""Gathers the published results into one page, experiments/results/README.md.

  python -m experiments.report

The text of the page is `experiments/results/template.md`. A line of the form

  {draft_sizes where num_new is absent: draft, temperature as T, alpha}

becomes a table of these fields of `draft_sizes/results.json`, followed by hardware, date and command. "as"
gives a header; otherwise it is that of `lib/legend.py`. If the file is missing, the line becomes "Not run". A
line with a missing picture is left out.
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
    shown = [{header or legend.header(name): cell(row, name) for name, _, header in names} for row in rows]
    source = f"{document['hardware']}, {document['date']}: `{document['command']}`"
    return f"{results.markdown(shown, str)}\n{source}\n"


def cell(row: dict[str, Any], name: str) -> Any:
    """Returns the cell of a field: the last part of a path, a speed-up with its quartiles."""
    value = row.get(name, "-")
    if name in ("draft", "target"):
        return pathlib.PurePath(value).name
    if name == "speedup" and "speedup_low" in row:
        return f"**{value:.2f}** [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
    return value


def main(console: Console) -> None:
    folder = pathlib.Path(_RESULTS.value)
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
