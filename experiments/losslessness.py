"""Is the output distribution the target's? Three answers, one report.

  python -m experiments.losslessness --flagfile=configs/losslessness.flags

1. Exact: every outcome of the real rounds enumerated on toy models, for every rule and option.
2. Drawn: a trained pair, G-tests of the first token and of the first two against the target's law.
3. Power: what happens to 1 and 2 when the code has a fault, and under rules that are lossy.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console

import specjax
from experiments import (
    exact_law,
    law_cases,
    pair_law,
    planted_bugs,
    progress,
    results,
    rules,
    sampled_law,
    start,
)
from experiments.law_cases import Case
from experiments.planted_bugs import Bug
from specjax import acceptance, drafters
from specjax.sampling import Sampling

_PARTS = flags.DEFINE_list("parts", ["exact", "drawn", "power"], "Which parts to run.")
_TARGET = flags.DEFINE_string("target", None, "Trained target of part 2.")
_DRAFT = flags.DEFINE_string("draft", None, "Its draft.")
_SOURCES = flags.DEFINE_multi_string("source", [], "A source of part 2; several.")
_NUM_DRAWS = flags.DEFINE_integer(
    "num_draws", 65536, "Draws of a test, over all sources together.", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 512, "Draws made together.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of all that is drawn.", lower_bound=0)
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json, table.md and losslessness.png.")

NUM_CONTROLS = len({(bug.shows == "greedy", bug.case) for bug in planted_bugs.BUGS.values()})
REJECT_BELOW = 1e-3  # p-value, divided by the number of tests
SMALL = 1000  # draws of the test in the Korean summary of the paper (see experiments/results/README.md)

LOSSY_SHARE = 8  # a lossy rule is seen with so many times fewer draws

# rule as --rule has it, drafted (K or a tree), options
TESTS = (
    ("speculative", "2", Sampling()),
    ("speculative", "2", Sampling(temperature=1.2, top_p=0.95, repetition_penalty=1.3)),
    ("block", "2", Sampling()),
    ("multi_round", "2x1", Sampling()),
)
LOSSY_TESTS = (("lenient:0.5", "2", Sampling()), ("typical", "2", Sampling()))


def exact_row(key: tuple[str, str, str], case: Case) -> dict[str, Any]:
    """Part 1: one enumeration."""
    law, target = case.run().probability, case.target_law()
    error = exact_law.law_error(law, target)
    rule, drafter, name = key
    return {
        "part": "exact",
        "rule": rule,
        "drafter": drafter,
        "options": name,
        "lossless": acceptance.is_lossless(case.rule()),
        "error": error,
        "kl": exact_law.divergence(target, law),
        "passed": bool(error < case.bar),
    }


def drawn_rows(
    tests: tuple, lossless: bool, num_tests: int, console: Console, pair: pair_law.Pair
) -> list[dict[str, Any]]:
    """Part 2: each test on first tokens and on pairs of tokens, and its version of 1,000 draws."""
    rows = []
    for rule, drafted, sampling in tests:
        *above, last = map(int, drafted.split("x"))
        drafter = (
            drafters.tree_from_model(pair.draft, (*above, last))
            if above
            else drafters.from_model(pair.draft, last)
        )
        words = ", ".join(f"{k} {v:g}" for k, v in dataclasses.asdict(sampling).items() if v is not None)
        label = f"drawing: {rule}, K = {drafted}, {words}"
        num = _NUM_DRAWS.value // (1 if lossless else LOSSY_SHARE)
        drawn = pair_law.draw(
            pair,
            drafter,
            rules.parse(rule),
            sampling,
            num,
            _BATCH_SIZE.value,
            _SEED.value,
            lambda batches, label=label: progress.track(batches, len(batches), label, console),
        )
        for what, num_tokens in (("first token", 1), ("first two tokens", 2)):
            test = pair_law.g_test(drawn, num_tokens)
            small = pair_law.g_test(drawn, num_tokens, num=SMALL)
            rows.append(
                {
                    "part": "drawn",
                    "rule": rule,
                    "drafter": drafted,
                    "options": words,
                    "what": what,
                    "lossless": lossless,
                    "num_draws": sum(map(len, drawn.tokens)),
                    "num_cells": test.num_cells,
                    "statistic": test.statistic,
                    "p_value": test.p_value,
                    "p_value_of_1000": small.p_value,
                    "tau": drawn.tau,
                    "passed": test.p_value >= REJECT_BELOW / num_tests,
                }
            )
    return rows


def caught(case: Case, greedy: bool) -> tuple[str, float | None]:
    """Part 3: the first check that the code as it is fails on a case, and by how much.

    ("nothing", 0.0) where every check passes: with a fault in the code a hole in the proof, without one
    what must be. The greedy program draws nothing: its faults are looked for in its output alone.
    """
    if greedy:
        differing = sum(tokens != path for tokens, path in case.greedy_paths())
        return ("greedy output", float(differing)) if differing else ("nothing", 0.0)
    try:
        law = case.run()
    except (ValueError, TypeError) as error:
        return f"exact: refused ({str(error).splitlines()[0][:60]})", None
    error = exact_law.law_error(law.probability, case.target_law())
    if error > case.bar:
        return "exact: law", error
    twin = case.run(twin=True) if case.has_twin else law
    if case.has_twin and twin.num_accepted < 0.999 * twin.num_tested:
        return "exact: twin draft rejected", 1 - float(twin.num_accepted / twin.num_tested)
    p_value = sampled_law.sampled_test(case).p_value
    return ("drawn: p-value", p_value) if p_value < REJECT_BELOW else ("nothing", 0.0)


def power_row(name: str, bug: Bug) -> dict[str, Any]:
    """One planted fault."""
    with planted_bugs.planted(bug):
        check, evidence = caught(bug.case, bug.shows == "greedy")
    passed = check != "nothing"
    return {"part": "power", "bug": name, "caught_by": check, "evidence": evidence, "passed": passed}


def control_rows() -> Iterator[dict[str, Any]]:
    """The same checks on the same cases without a fault: none may fail."""
    for greedy, case in dict.fromkeys(
        (bug.shows == "greedy", bug.case) for bug in planted_bugs.BUGS.values()
    ):
        check, evidence = caught(case, greedy)
        yield {
            "part": "power",
            "bug": "none (control)",
            "caught_by": check,
            "evidence": evidence,
            "passed": check == "nothing",
        }


def verdict(row: dict[str, Any]) -> str:
    """What is to be said about a check; in colour what should not be."""
    if row["part"] == "power" and row["caught_by"] != "nothing":
        said = "caught" if row["passed"] else "CAUGHT WITHOUT A FAULT"
    elif row.get("lossless", True):
        said = "passed" if row["passed"] else "FAILED"
    else:
        said = "LOSSY, NOT SEEN" if row["passed"] else "seen to be lossy"
    return said if said.islower() else f"[bold red]{said}[/bold red]"


def show(console: Console, title: str, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    """A long table, one line a row."""
    shown = [{name: "" if row[name] is None else row[name] for name in columns} for row in rows]
    shown = [line | {"verdict": verdict(row)} for line, row in zip(shown, rows, strict=True)]
    results.show_lines(console, title, shown)


def plot(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Errors of all enumerations and planted faults on one axis; p-values of the drawn tests below."""
    figure, (above, below) = results.subplots(2, 1, figsize=(9, 7), height_ratios=[3, 2])
    exact = [row for row in rows if row["part"] == "exact"]
    groups: dict[str, list[float]] = {}
    for row in exact:
        name = "float32" if row["options"] == "float32" else row["rule"]
        groups.setdefault(name, []).append(max(row["error"], 1e-18))
    groups["planted faults"] = [
        row["evidence"] for row in rows if row["part"] == "power" and row["caught_by"] == "exact: law"
    ]
    for place, (name, errors) in enumerate(groups.items()):
        spread = place + (np.linspace(-0.3, 0.3, len(errors)) if len(errors) > 1 else np.zeros(len(errors)))
        bad = name == "planted faults" or name in {r["rule"] for r in exact if not r["lossless"]}
        above.scatter(spread, errors, s=14, color="tab:red" if bad else "tab:blue")
    above.set_xticks(range(len(groups)), list(groups), rotation=20)
    above.axhline(Case().bar, color="gray", linestyle="--")
    above.text(len(groups) - 0.6, Case().bar * 2, "bar, float64", ha="right", color="gray")
    above.set_yscale("log")
    above.set_ylabel("largest error of a probability")
    above.set_title("Enumerated law of the output against the target's")
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
    below.set_xlabel("p-value (full: all draws; hollow: the first 1,000; *: with top-p and a penalty)")
    results.save_figure(figure, path)


def run_parts(console: Console) -> list[dict[str, Any]]:
    """All three parts, each table printed when it is ready."""
    exact: list[dict[str, Any]] = []
    drawn: list[dict[str, Any]] = []
    power: list[dict[str, Any]] = []
    if "exact" in _PARTS.value:
        cases = list((law_cases.all_cases() | law_cases.lossy_cases()).items())
        exact = [exact_row(*item) for item in progress.track(cases, len(cases), "exact", console)]
        show(console, "1. exact: the enumerated law", ("rule", "drafter", "options", "error", "kl"), exact)
    if "drawn" in _PARTS.value:
        pair = pair_law.Pair(specjax.load(_TARGET.value), specjax.load(_DRAFT.value), _SOURCES.value)
        num_tests = 2 * len(TESTS)
        drawn = drawn_rows(TESTS, True, num_tests, console, pair)
        drawn += drawn_rows(LOSSY_TESTS, False, num_tests, console, pair)
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
        show(console, "2. drawn: the trained pair", columns, drawn)
    if "power" in _PARTS.value:
        bugs = list(planted_bugs.BUGS.items())
        power = list(progress.track(control_rows(), NUM_CONTROLS, "power, control", console))
        power += [power_row(*item) for item in progress.track(bugs, len(bugs), "power", console)]
        show(console, "3. power: planted faults", ("bug", "caught_by", "evidence"), power)
    return exact + drawn + power


def main(argv: list[str]) -> None:
    del argv
    unknown = set(_PARTS.value) - {"exact", "drawn", "power"}
    if unknown or not _PARTS.value:
        raise ValueError(f"--parts={','.join(_PARTS.value)}: give some of exact, drawn, power")
    if "drawn" in _PARTS.value and not (_TARGET.value and _DRAFT.value and _SOURCES.value):
        raise ValueError("the drawn part needs --target, --draft and --source; leave it out of --parts")
    console = start.console()
    rows = run_parts(console)
    wrong = [row for row in rows if row["passed"] != row.get("lossless", True)]
    console.print(f"{len(rows)} checks, {len(wrong)} of them not as they should be")
    if _OUTPUT.value:
        results.write(_OUTPUT.value, "losslessness", rows)
        plot(pathlib.Path(_OUTPUT.value) / "losslessness.png", rows)
        console.print(f"wrote results.json, table.md and losslessness.png into {_OUTPUT.value}")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    start.run(main)
