"""Tests whether the output distribution is the target's, in three parts.

  python -m experiments.losslessness --flagfile=configs/losslessness.flags

1. Exact: exhaustive enumeration of the library's rounds on toy models, for every rule and option.
2. Drawn: G-tests of a trained pair's first token, and first two tokens, against the target's distribution.
3. Power: whether parts 1 and 2 detect planted faults and lossy rules.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console

import specjax
from experiments.exactness import cases, drawn, enumeration, faults
from experiments.exactness.cases import Case
from experiments.exactness.drawn import REJECT_BELOW, Pair
from experiments.exactness.faults import FAULTS, Fault
from experiments.lib import parse, progress, results, start
from specjax import drafters
from specjax.generation_config import GenerationConfig

_PARTS = flags.DEFINE_list("parts", ["exact", "drawn", "power"], "Parts to run.")
_TARGET = flags.DEFINE_string("target", None, "Trained target for part 2.")
_DRAFT = flags.DEFINE_string("draft", None, "Its draft, for part 2.")
_SOURCES = flags.DEFINE_multi_string("source", [], "Source for part 2; may be repeated.")
_NUM_DRAWS = flags.DEFINE_integer(
    "num_draws", 65536, "Draws per test, over all sources together.", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 512, "Draws per batch.", lower_bound=1)
_SEED = parse.define_seed()
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json, table.md and losslessness.png.")

# Cases and checks that faults are to fail; without a fault each must pass.
CONTROLS = dict.fromkeys((fault.case, fault.shows) for fault in FAULTS.values())
SMALL = 1000  # draws of the test in the Korean summary of the paper (see experiments/results/README.md)
LOSSY_SHARE = 8  # lossy rules are detected with this many times fewer draws

# rule as in --rule, K or a tree, options
TESTS = (
    ("speculative", "2", GenerationConfig(temperature=1.0)),
    ("speculative", "2", GenerationConfig(temperature=1.2, top_p=0.95, repetition_penalty=1.3)),
    ("block", "2", GenerationConfig(temperature=1.0)),
    ("multi_round", "2x1", GenerationConfig(temperature=1.0)),
)
LOSSY_TESTS = (
    ("lenient:0.5", "2", GenerationConfig(temperature=1.0)),
    ("typical", "2", GenerationConfig(temperature=1.0)),
)


def exact_row(key: tuple[str, str, str], case: Case) -> dict[str, Any]:
    """Returns the row of one enumerated case (part 1)."""
    outputs, expected = case.outputs().probability, case.expected()
    error = enumeration.largest_error(outputs, expected)
    rule, drafter, name = key
    return {
        "part": "exact",
        "rule": rule,
        "drafter": drafter,
        "options": name,
        "lossless": case.rule.is_lossless,
        "error": error,
        "kl": enumeration.divergence(expected, outputs),
        "passed": bool(error < case.bar),
    }


def drawn_rows(
    tests: tuple, lossless: bool, num_tests: int, console: Console, pair: Pair
) -> list[dict[str, Any]]:
    """Returns the rows of part 2: tests of the first token and of the first two, also with 1,000 draws."""
    rows = []
    for rule, drafted, config in tests:
        *above, last = map(int, drafted.split("x"))
        drafter = (
            drafters.tree_from_model(pair.draft, (*above, last))
            if above
            else drafters.from_model(pair.draft, last)
        )
        asked = {name: getattr(config, name) for name in ("temperature", "top_p", "repetition_penalty")}
        words = ", ".join(f"{k} {v:g}" for k, v in asked.items() if v is not None)
        label = f"drawing: {rule}, K = {drafted}, {words}"
        found = drawn.draw(
            pair,
            drafter,
            parse.rule(rule),
            dataclasses.replace(config, seed=_SEED.value),
            _NUM_DRAWS.value // (1 if lossless else LOSSY_SHARE),
            _BATCH_SIZE.value,
            lambda batches, label=label: progress.track(batches, len(batches), label, console),
        )
        for what, num_tokens in (("first token", 1), ("first two tokens", 2)):
            test, small = found.g_test(num_tokens), found.g_test(num_tokens, SMALL)
            rows.append(
                {
                    "part": "drawn",
                    "rule": rule,
                    "drafter": drafted,
                    "options": words,
                    "what": what,
                    "lossless": lossless,
                    "num_draws": sum(map(len, found.tokens)),
                    "num_cells": test.num_cells,
                    "statistic": test.statistic,
                    "p_value": test.p_value,
                    "p_value_of_1000": small.p_value,
                    "tau": found.tau,
                    "passed": test.p_value >= REJECT_BELOW / num_tests,
                }
            )
    return rows


def power_row(name: str, fault: Fault) -> dict[str, Any]:
    """Returns the row of one planted fault (part 3), checked where it shows."""
    caught, evidence, words = faults.check(fault.case, fault.shows, fault.one_round)
    caught_by = words if caught else "nothing"
    return {"part": "power", "bug": name, "caught_by": caught_by, "evidence": evidence, "passed": caught}


def control_rows() -> Iterator[dict[str, Any]]:
    """Yields the rows of the same checks on the same cases without a fault: none may fail."""
    for case, shows in CONTROLS:
        caught, evidence, words = faults.check(case, shows)
        yield {
            "part": "power",
            "bug": "none (control)",
            "caught_by": words if caught else "nothing",
            "evidence": evidence,
            "passed": not caught,
        }


def outcome(row: dict[str, Any]) -> str:
    """Returns the outcome of a check in words; in capitals if it is wrong."""
    if row["part"] == "power" and row["caught_by"] != "nothing":
        return "caught" if row["passed"] else "CAUGHT WITHOUT A FAULT"
    if row.get("lossless", True):
        return "passed" if row["passed"] else "FAILED"
    return "LOSSY, NOT DETECTED" if row["passed"] else "detected as lossy"


def show(console: Console, title: str, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    """Prints a table with the outcome of each row."""
    shown = [{name: "" if row[name] is None else row[name] for name in columns} for row in rows]
    shown = [line | {"outcome": outcome(row)} for line, row in zip(shown, rows, strict=True)]
    results.show_lines(console, title, shown)


def plot(rows: list[dict[str, Any]]) -> Any:
    """Returns a figure: errors of cases and planted faults above, p-values of drawn tests below."""
    figure, (above, below) = results.subplots(2, 1, figsize=(9, 7), height_ratios=[3, 2])
    exact = [row for row in rows if row["part"] == "exact"]
    groups: dict[str, list[float]] = {}
    for row in exact:
        name = "float32" if row["options"] == "float32" else row["rule"]
        groups.setdefault(name, []).append(max(row["error"], 1e-18))
    groups["planted faults"] = [
        row["evidence"]
        for row in rows
        if row["part"] == "power" and row["caught_by"] == faults.DISTRIBUTION_DIFFERS
    ]
    for place, (name, errors) in enumerate(groups.items()):
        spread = place + (np.linspace(-0.3, 0.3, len(errors)) if len(errors) > 1 else np.zeros(len(errors)))
        bad = name == "planted faults" or name in {r["rule"] for r in exact if not r["lossless"]}
        above.scatter(spread, errors, s=14, color="tab:red" if bad else "tab:blue")
    above.set_xticks(range(len(groups)), list(groups), rotation=20)
    above.axhline(Case().bar, color="gray", linestyle="--", label="tolerance, float64")
    above.legend(fontsize=8)
    above.set_yscale("log")
    above.set_ylabel("largest error of a probability")
    above.set_title("Enumerated distribution of the output against the target's")
    drawn = [row for row in rows if row["part"] == "drawn"]
    for place, row in enumerate(drawn):
        color = "tab:blue" if row["lossless"] else "tab:red"
        below.scatter(max(row["p_value"], 1e-30), place, color=color, s=24)
        below.scatter(max(row["p_value_of_1000"], 1e-30), place, color=color, s=24, facecolors="none")
    labels = [f"{row['rule']}, {row['what']}" + ("*" if "top_p" in row["options"] else "") for row in drawn]
    below.set_yticks(range(len(drawn)), labels, fontsize=8)
    below.invert_yaxis()
    below.axvline(REJECT_BELOW / max(len(drawn), 1), color="gray", linestyle="--")
    below.set_xscale("log")
    below.set_xlim(3e-31, 3)
    below.set_xlabel("p-value (filled: all draws; hollow: the first 1,000; *: top-p and a penalty)")
    return figure


def run_parts(console: Console) -> list[dict[str, Any]]:
    """Returns the rows of --parts; prints each table when it is ready."""
    exact: list[dict[str, Any]] = []
    sampled: list[dict[str, Any]] = []
    power: list[dict[str, Any]] = []
    if "exact" in _PARTS.value:
        listed = list((cases.all_cases() | cases.lossy_cases()).items())
        exact = [exact_row(*item) for item in progress.track(listed, len(listed), "exact", console)]
        show(
            console,
            "1. exact: the enumerated distribution",
            ("rule", "drafter", "options", "error", "kl"),
            exact,
        )
    if "drawn" in _PARTS.value:
        pair = Pair(specjax.load(_TARGET.value), specjax.load(_DRAFT.value), _SOURCES.value)
        num_tests = 2 * len(TESTS)
        sampled = drawn_rows(TESTS, True, num_tests, console, pair)
        sampled += drawn_rows(LOSSY_TESTS, False, num_tests, console, pair)
        columns = (
            "rule",
            "drafter",
            "options",
            "what",
            "num_draws",
            "num_cells",
            "p_value",
            "p_value_of_1000",
            "tau",
        )
        show(console, "2. drawn: the trained pair", columns, sampled)
    if "power" in _PARTS.value:
        planted = list(FAULTS.items())
        power = list(progress.track(control_rows(), len(CONTROLS), "power, control", console))
        power += [power_row(*item) for item in progress.track(planted, len(planted), "power", console)]
        show(console, "3. power: planted faults", ("bug", "caught_by", "evidence"), power)
    return exact + sampled + power


def main(console: Console) -> None:
    unknown = set(_PARTS.value) - {"exact", "drawn", "power"}
    if unknown or not _PARTS.value:
        raise ValueError(f"`--parts` must be some of exact, drawn, power, got {','.join(_PARTS.value)}")
    if "drawn" in _PARTS.value and not (_TARGET.value and _DRAFT.value and _SOURCES.value):
        raise ValueError(
            "`--target`, `--draft` and `--source` must be given for the drawn part; or leave it out"
        )
    rows = run_parts(console)
    wrong = [row for row in rows if row["passed"] != row.get("lossless", True)]
    console.print(f"{len(rows)} checks, {len(wrong)} with a wrong outcome")
    results.save(console, _OUTPUT.value, "losslessness", rows, lambda: plot(rows))
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    start.run(main)
