"""Recomputes the paper's tables 1 and 4 from its formulas, and the best K over alpha, c and v.

  python -m experiments.theory --output=experiments/results/theory

No model runs; it takes seconds. Recomputed values stand beside the printed ones, and the best K beside its
speed-up. A heat map shows both for a target call whose cost does not depend on the number of tokens (v = 1),
and for two whose cost grows with it.
"""

from typing import Any

import numpy as np
from absl import flags
from rich.console import Console

from experiments.lib import results, start
from specjax import analysis

_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json, table.md and theory.png.")

# Leviathan et al. 2023. Table 1: alpha, K, operations, speed-up.
TABLE_1 = (
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
)
# Tables 2 and 4: task, draft, temperature, K, alpha, c, expected and measured speed-up.
TABLE_4 = (
    ("EnDe", "small", 0, 7, 0.75, 0.02, 3.2, 3.4),
    ("EnDe", "base", 0, 7, 0.80, 0.04, 3.3, 2.8),
    ("EnDe", "large", 0, 7, 0.82, 0.11, 2.5, 1.7),
    ("EnDe", "small", 1, 7, 0.62, 0.02, 2.3, 2.6),
    ("EnDe", "base", 1, 5, 0.68, 0.04, 2.4, 2.4),
    ("EnDe", "large", 1, 3, 0.71, 0.11, 2.0, 1.4),
    ("CNN/DM", "small", 0, 5, 0.65, 0.02, 2.4, 3.1),
    ("CNN/DM", "base", 0, 5, 0.73, 0.04, 2.6, 3.0),
    ("CNN/DM", "large", 0, 3, 0.74, 0.11, 2.0, 2.2),
    ("CNN/DM", "small", 1, 5, 0.53, 0.02, 1.9, 2.3),
    ("CNN/DM", "base", 1, 3, 0.55, 0.04, 1.8, 2.2),
    ("CNN/DM", "large", 1, 3, 0.56, 0.11, 1.6, 1.7),
)


def table_1() -> list[dict[str, Any]]:
    """Returns rows of expected tokens and operations, printed and recomputed."""
    rows = []
    for alpha, k, operations, tokens in TABLE_1:
        ours = [analysis.operations_factor(alpha, k), analysis.expected_tokens(alpha, k)]
        row = {"alpha": alpha, "num_draft": k, "printed_operations": operations}
        row |= {"operations": round(float(ours[0]), 2), "printed_tokens": tokens}
        rows.append(row | {"tokens": round(float(ours[1]), 2)})
    return rows


def table_4() -> list[dict[str, Any]]:
    """Returns rows of expected speed-up, printed and recomputed, its range under rounding, and the best K."""
    rows = []
    for task, draft, temperature, k, alpha, c, expected, measured in TABLE_4:

        def speedup(alpha: float, c: float, k: int = k) -> float:
            return float(analysis.predicted_speedup(analysis.expected_tokens(alpha, k), k, c))

        best = analysis.best_num_draft(alpha, c)
        low, high = speedup(alpha - 0.005, c + 0.005), speedup(alpha + 0.005, c - 0.005)
        row = {
            "task": task,
            "draft": draft,
            "temperature": temperature,
            "num_draft": k,
            "alpha": alpha,
            "c": c,
        }
        row |= {"printed": expected, "recomputed": round(speedup(alpha, c), 2)}
        row |= {"range": f"{low:.2f} to {high:.2f}", "paper_measured": measured}
        row |= {"best_num_draft": int(best.num_draft), "best_speedup": round(float(best.speedup), 2)}
        rows.append(row)
    return rows


def best_lengths() -> list[dict[str, Any]]:
    """Returns rows of the best K and its speed-up over alpha and c, at v = 1."""
    rows = []
    for alpha in (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95):
        best = {c: analysis.best_num_draft(alpha, c) for c in (0.01, 0.02, 0.05, 0.1, 0.2)}
        cells = {f"c={c}": f"{int(b.num_draft)} ({float(b.speedup):.2f})" for c, b in best.items()}
        rows.append({"best K (speed-up) at alpha": alpha, **cells})
    return rows


def plot() -> Any:
    """Returns a figure: best K in colour, its speed-up in lines, over alpha and c, for three slopes of v."""
    from matplotlib import colors, patheffects

    alphas, costs = np.linspace(0.3, 0.95, 66), np.geomspace(0.005, 0.4, 60)
    edges = np.array([0, 1, 2, 3, 4, 5, 6, 8, 10, 14, 20, 40])
    figure, axes = results.subplots(1, 3, figsize=(14, 4.6), sharey=True)
    for axis, slope in zip(axes, (0.0, 0.03, 0.1), strict=True):
        best = analysis.best_num_draft(alphas[None, :], costs[:, None], slope)
        norm = colors.BoundaryNorm(edges - 0.5, 256)
        mesh = axis.pcolormesh(alphas, costs, best.num_draft, norm=norm, cmap="viridis")
        title = f"v(K) = 1 + {slope:g} K" if slope else "v = 1 (the paper)"
        axis.set(yscale="log", xlabel="alpha (accepted over tested drafts)", title=title)
        lines = axis.contour(alphas, costs, best.speedup, [1.1, 1.5, 2, 3, 5], colors="white", linewidths=1)
        # Labels with an edge, on whole lines: by default matplotlib cuts lines at their labels.
        labels = axis.clabel(lines, fmt="%gx", fontsize=9, inline=False)
        for label in labels:
            label.set_path_effects([patheffects.withStroke(linewidth=3, foreground="black")])
    axes[0].set_ylabel("c, a draft step over a decoding step")
    bar = figure.colorbar(mesh, ax=axes, label="best K (lines: its speed-up)")
    bar.set_ticks(edges[:-1])
    return figure


def main(console: Console) -> None:
    tables = {
        "Table 1: tokens and operations": table_1(),
        "Table 4: expected speed-up": table_4(),
        "best K": best_lengths(),
    }
    for title, rows in tables.items():
        results.show_lines(console, title, rows)
    rows = [{"table": title, **row} for title, rows in tables.items() for row in rows]
    results.save(console, _OUTPUT.value, "theory", rows, plot)


if __name__ == "__main__":
    start.run(main)
