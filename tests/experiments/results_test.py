"""Tables as a person sees them."""

import json

from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib import legend, results
from tests.experiments.program import ROOT, run


def test_brackets_in_a_table_are_text():
    """Not markup, which would vanish."""
    for show in (results.show, results.show_lines):
        console = Console(width=80, record=True)
        show(console, "peers", [{"arm": "pip install -e '.[peers]'"}])
        assert "'.[peers]'" in console.export_text()


def test_every_column_of_what_is_published_is_explained():
    """The columns named c=... are explained by the one before them."""
    for path in sorted((ROOT / "experiments" / "results").glob("*/results.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        names = {name for row in document["rows"] for name in row if not name.startswith("c=")}
        below = legend.below(document["experiment"], names)
        assert names == {line.split("`")[1] for line in below.splitlines() if line.startswith("-")}, path


def test_marks_of_figures_stand_where_they_belong(tmp_path, monkeypatch):
    """The paper's measurements on its own chip's bars, and lines that no label cuts."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *at, **how: (figures.append(self), save(self, *at, **how))
    )
    for name in ("roofline", "theory"):
        done = run(name, f"--output={tmp_path}/{name}")
        assert done.returncode == 0, done.stderr
        assert "\n\nColumns:\n\n- `" in (tmp_path / name / "table.md").read_text(encoding="utf-8")
    bars, maps = figures
    (axis,) = bars.axes
    spans = [segment[:, 0] for lines in axis.collections for segment in lines.get_segments()]
    assert len(spans) == 2 and all(-0.5 < x < 0.5 for span in spans for x in span)
    assert axis.get_ylabel() and axis.get_xlabel()
    for axis in maps.axes[:3]:
        (contours,) = (found for found in axis.collections if isinstance(found, ContourSet))
        lines = [path for path in contours.get_paths() if len(path.vertices)]
        assert contours.labelTexts and all((path.codes == path.MOVETO).sum() == 1 for path in lines)
