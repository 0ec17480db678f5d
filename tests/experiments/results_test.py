"""Tables on the screen and in table.md, the report, and figures."""

import io
import json
import re

import numpy as np
import pytest
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from rich.console import Console

from experiments import report
from experiments.lib import legend, results
from tests.experiments.program import ROOT, run


def test_show_prints_brackets_as_text():
    """Markup would vanish."""
    for show in (results.show, results.show_lines):
        console = Console(width=80, record=True)
        show(console, "peers", [{"arm": "pip install -e '.[peers]'"}])
        assert "'.[peers]'" in console.export_text()


def published():
    """Yields path and document of each published results.json."""
    for path in sorted((ROOT / "experiments" / "results").glob("*/results.json")):
        yield path, json.loads(path.read_text(encoding="utf-8"))


def test_legend_has_a_distinct_header_for_every_published_column():
    """The columns named c=... are explained by the one before them."""
    for path, document in published():
        names = {name for row in document["rows"] for name in row if not name.startswith("c=")}
        below = legend.below(document["experiment"], names)
        assert names == {line.split("`")[1] for line in below.splitlines() if line.startswith("-")}, path
        assert len({legend.header(name) for name in names}) == len(names), path


def test_write_heads_table_md_in_words_and_explains_fields(tmp_path):
    rows = [{"num_draft": 5, "peak_gib": 1.5, "some_field": "a|b"}, {"num_draft": 7}]
    results.write(tmp_path, "compile", rows)
    lines = (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "| K or drafter | peak memory (GiB) | some field |"
    assert lines[2:4] == ["| 5 | 1.5 | a\\|b |", "| 7 | - | - |"]
    assert "- peak memory (GiB) (`peak_gib`): the largest memory per device at any time" in lines
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["rows"] == rows


def test_show_breaks_no_word_and_no_number_at_80_columns():
    """Tests the widest published table: no longer line, no broken word of a header, no broken number."""
    documents = [document for _, document in published()]
    rows = max(
        (document["rows"] for document in documents), key=lambda rows: len({k for r in rows for k in r})
    )
    for show in (results.show, results.show_lines):
        console = Console(width=80, record=True, file=io.StringIO())
        show(console, "speed-up", rows)
        lines = console.export_text().splitlines()
        assert max(map(len, lines)) <= 80
        words = set(re.split(r"[\s│┃]+", "\n".join(lines)))
        for row in rows:
            assert words >= {word for name in row for word in legend.header(name).split()}
            assert words >= {f"{x:.3g}" for x in row.values() if isinstance(x, float)}
            assert words >= {str(x) for x in row.values() if isinstance(x, int)}


def test_show_lines_transposes_a_table_that_does_not_fit():
    rows = [{"alpha": 0.5 + i / 100, "num_draft": i, "fits": "yes"} for i in range(3)]
    rows[1].pop("fits")
    for width, expected in ((80, [["0.5", "0", "yes"], ["0.51", "1", "-"]]), (22, [["fits", "yes"]])):
        console = Console(width=width, record=True, file=io.StringIO())
        results.show_lines(console, "rows", rows)
        text = console.export_text()
        cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
        assert all(line in cells for line in expected), text
        assert ("(1 of 3)" in text) == (width == 22)


def test_report_takes_headers_of_the_template_or_of_the_legend(tmp_path):
    (tmp_path / "pair").mkdir()
    results.write(
        tmp_path / "pair",
        "speedup",
        [{"draft": "a/b", "alpha": 0.5, "num_draft": 3}, {"draft": "s/1"}, {"draft": "c", "num_new": 1}],
    )
    match = report._LINE.fullmatch("{pair where num_new is absent: draft as small model, num_draft, alpha}")
    lines = report.table(tmp_path, match).splitlines()
    assert lines[0] == "| small model | K or drafter | alpha |" and lines[2:4] == [
        "| b | 3 | 0.5 |",
        "| s/1 | - | - |",
    ]
    with pytest.raises(ValueError, match="fields in the template must be in .*, got rouge"):
        report.table(tmp_path, report._LINE.fullmatch("{pair: draft, rouge}"))
    match = report._LINE.fullmatch("{nothing: draft}")
    assert report.table(tmp_path, match) == "Not run (nothing).\n"


def test_report_draws_speedups_and_positions(tmp_path):
    def row(drafter, temperature, speedup):
        ends = {"speedup": speedup, "speedup_low": speedup - 0.1, "speedup_high": speedup + 0.2}
        return {"num_draft": drafter, "temperature": temperature, "predicted_speedup": 2 * speedup} | ends

    by_k = [row("1", 0.0, 1.2), row("4", 0.0, 1.7), row("1", 1.0, 1.1)]
    by_drafter = [row("4", 0.0, 1.7), row("3x2x1", 0.0, 1.3), row("eagle:4", 0.0, 1.9), row("4", 1.0, 0.9)]
    left, right = report.plot_speedup(by_k, by_drafter).axes
    assert [line.get_label() for line in left.lines if line.get_linestyle() == "--"] == [
        "greedy, predicted from the parts of a round",
        "temperature 1, predicted from the parts of a round",
    ]
    names = [text.get_text() for text in right.get_yticklabels()]
    assert names == ["draft model, tree 3x2x1", "draft model, K = 4", "eagle:4"]  # the fastest on top
    lengths = {(round(bar.get_y() + bar.get_height() / 2, 2), bar.get_width()) for bar in right.patches}
    assert lengths == {(0.19, 1.3), (1.19, 1.7), (2.19, 1.9), (0.81, 0.9)}
    rows = [
        {
            "num_draft": "2",
            "temperature": t,
            "tokens_per_target_call": 2,
            "accepted_by_position": [0.7, t / 2],
        }
        for t in (0.0, 1.0)
    ]
    for axis, t in zip(report.plot_positions(rows).axes, (0.0, 1.0), strict=True):
        (line,) = axis.lines
        np.testing.assert_array_equal(line.get_xydata(), [[1, 0.7], [2, t / 2]])
    results.write(tmp_path / "positions", "speedup", rows)
    assert "| 0.70 0.50 |" in (tmp_path / "positions" / "table.md").read_text(encoding="utf-8")


def test_figures_place_their_marks(tmp_path, monkeypatch):
    """Tests that the paper's measurements are on the bars of its chip, and that no label cuts a line."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *at, **how: (figures.append(self), save(self, *at, **how))
    )
    for name in ("roofline", "theory"):
        done = run(name, f"--output={tmp_path}/{name}")
        assert done.returncode == 0, done.stderr
        assert "\n\nColumns:\n\n- " in (tmp_path / name / "table.md").read_text(encoding="utf-8")
    bars, maps = figures
    (axis,) = bars.axes
    spans = [segment[:, 0] for lines in axis.collections for segment in lines.get_segments()]
    assert len(spans) == 2 and all(-0.5 < x < 0.5 for span in spans for x in span)
    assert axis.get_ylabel() and axis.get_xlabel()
    for axis in maps.axes[:3]:
        (contours,) = (found for found in axis.collections if isinstance(found, ContourSet))
        lines = [path for path in contours.get_paths() if len(path.vertices)]
        assert contours.labelTexts and all((path.codes == path.MOVETO).sum() == 1 for path in lines)
