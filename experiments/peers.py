"""The same checkpoint and sentences in other libraries, side by side (extra `peers`).

  python -m experiments.peers --flagfile=configs/peers.flags

Greedy, batch 1, end to end (encoder included, text handling excluded), the same number of threads; all
arms take turns, and their tokens are compared with those of our plain loop. With --shape: random weights
of that shape, whose rows all run to --max_new_tokens; our drafts are then forced, a benchmark and not a
sampler. Below the table, the time that reading the weights takes at least.
"""

import functools
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from rich.console import Console

from experiments import arms as arms_lib
from experiments import identity, measure, memory_floor, peer_arms, peer_cases, progress, results, start
from specjax import data, decode
from specjax.request import Request

_TARGET = flags.DEFINE_string("target", None, "Target: a Hugging Face directory.")
_DRAFT = flags.DEFINE_string("draft", None, "Draft model, the same way.")
_SHAPE = flags.DEFINE_string("shape", None, "In place of both: a preset such as t5-small, random weights.")
_DRAFT_SHAPE = flags.DEFINE_string("draft_shape", "1x64", "Of the draft of a --shape, LAYERSxWIDTH.")
_ALPHA = flags.DEFINE_float("alpha", 0.75, "With --shape: the chance of acceptance that is forced.")
_SOURCE = flags.DEFINE_integer("source_length", 64, "With --shape: source tokens.", lower_bound=1)
_INPUT = flags.DEFINE_string("input", "configs/demo.txt", "File with one source a line.")
_NUM_EXAMPLES = flags.DEFINE_integer(
    "num_examples", None, "Only so many sources; with --shape 4 if not given.", lower_bound=1
)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Limit of a row.", lower_bound=0)
_PEERS = flags.DEFINE_list("peers", list(peer_arms.BUILDERS), "Which libraries beside our own.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed turns of each arm.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json, table.md and peers.png.")

PLAIN = "specjax, target alone"
# Threads of some libraries go on waiting for work, at full speed, for up to .2 s after it.
SETTLE_S = 0.5


class Times(NamedTuple):
    """Milliseconds a token of an arm, and that over the plain loop's in the same turn."""

    ms: measure.Spread
    over_plain: measure.Spread


def our_arm(requests: Sequence[Request]) -> peer_arms.Arm:
    """Our program as an arm."""

    def run(source: int) -> list[int]:
        return identity.ids(jax.device_get(decode.jitted_generate(*requests[source])))[0]

    return run


def all_arms(case: peer_cases.Case, folder: pathlib.Path, console: Console) -> peer_arms.Arms:
    """Ours, then those of --peers; what cannot run says why."""
    made: peer_arms.Arms = {PLAIN: our_arm(case.plain)}
    made |= {name: our_arm(requests) for name, requests in case.speculative.items()}
    for library in _PEERS.value:
        with console.status(f"loading and converting for {library}"):
            made |= peer_arms.build(library, case, folder)
    return made


def turn_seconds(arm: peer_arms.Arm, num_sources: int) -> float:
    """Seconds of all sources, after a pause and one source that is not timed: the caches are another's."""
    time.sleep(SETTLE_S)
    arm(0)

    def turn() -> None:
        for source in range(num_sources):
            arm(source)

    return measure.seconds(turn)


def time_all(
    arms: dict[str, peer_arms.Arm], counts: dict[str, int], num_sources: int, console: Console
) -> dict[str, Times]:
    """Every arm in turns; a token is one of the arm's own."""
    timed = {name: functools.partial(turn_seconds, arm, num_sources) for name, arm in arms.items()}
    alternating = measure.alternate(timed, _REPEATS.value)
    turns = list(progress.track(alternating, _REPEATS.value, "timing all arms in turns", console))
    ms = {name: np.array([1e3 * turn[name] / counts[name] for turn in turns]) for name in arms}
    return {name: Times(measure.Spread.of(x), measure.Spread.of(x / ms[PLAIN])) for name, x in ms.items()}


def same(case: peer_cases.Case, ours: list[list[int]], theirs: list[list[int]]) -> dict[str, Any]:
    """How much of an output is that of our plain loop; of the rows that differ, how many do at a near tie."""
    found = identity.differences(ours, theirs, lambda row: (case.plain[row], 0))
    same_rows, near_ties = identity.counted(found, len(ours))
    num_tokens = sum(map(len, ours))
    equal = num_tokens - sum(len(ours[d.row]) - d.position for d in found)
    return {"same_rows": same_rows, "same_tokens": f"{equal} of {num_tokens}", "num_near_ties": near_ties}


def tau(requests: Sequence[Request] | None) -> float | str:
    """Tokens a target call of our speculative arms."""
    if requests is None:
        return "-"
    stats = [jax.device_get(decode.jitted_generate(*request).stats) for request in requests]
    return float(arms_lib.joined(stats).total().tau[0])


def compare(
    case: peer_cases.Case, made: peer_arms.Arms, console: Console
) -> tuple[list[dict[str, Any]], dict[str, Times]]:
    """A row for each arm, and the times of those that ran."""
    arms = {name: arm for name, arm in made.items() if callable(arm)}
    num_sources, outputs = len(case.sources), {}
    for name, arm in progress.track(arms.items(), len(arms), "warming up, comparing tokens", console):
        outputs[name] = [arm(source) for source in range(num_sources)]
    counts = {name: sum(map(len, rows)) for name, rows in outputs.items()}
    times = time_all(arms, counts, num_sources, console)
    rows: list[dict[str, Any]] = []
    for name, arm in made.items():
        row = {"model": case.name, "arm": name}
        if not callable(arm):
            rows.append({**row, "ms_per_token": arm})
            continue
        spreads = {"ms_per_token": str(times[name].ms), "time_over_plain": str(times[name].over_plain)}
        row |= spreads | {"tokens_per_target_call": tau(case.speculative.get(name))}
        rows.append({**row, **same(case, outputs[PLAIN], outputs[name])})
    counted = counts[PLAIN]
    with console.status("measuring how fast memory is read"):
        floor = memory_floor.row(case.plain, counted, _REPEATS.value)
    return [*rows, {"model": case.name, **floor}], times


def plot(path: pathlib.Path, title: str, times: dict[str, Times], floor_ms: float) -> None:
    """A bar for each arm, quartiles as whiskers, and the floor as a line."""
    figure, axis = results.subplots(1, 1, figsize=(9, 0.45 * len(times) + 1.5))
    names = list(times)[::-1]
    ms = [times[name].ms for name in names]
    whiskers = [[x.median - x.low for x in ms], [x.high - x.median for x in ms]]
    colors = ["C0" if name.startswith("specjax") else "C7" for name in names]
    axis.barh(names, [x.median for x in ms], xerr=whiskers, color=colors, ecolor="black", capsize=3)
    for i, name in enumerate(names):
        text = f"  {times[name].over_plain.median:.2f}x"
        axis.text(times[name].ms.high, i, text, va="center", fontsize=8)
    axis.axvline(floor_ms, color="C3", linestyle="--", linewidth=1, label="float32 weights read once a token")
    longest = max(x.high for x in ms)
    axis.set(xlabel="ms a token, end to end (and over our plain loop)", title=title, xlim=(0, 1.15 * longest))
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3, axis="x")
    results.save_figure(figure, path)


def make_case(folder: pathlib.Path) -> peer_cases.Case:
    """What the flags ask for."""
    unknown = set(_PEERS.value) - peer_arms.BUILDERS.keys()
    if unknown:
        raise ValueError(f"--peers={','.join(unknown)}: give some of {', '.join(peer_arms.BUILDERS)}")
    if _SHAPE.value:
        return peer_cases.of_shape(
            _SHAPE.value,
            _DRAFT_SHAPE.value,
            _ALPHA.value,
            folder / "model",
            num_sources=_NUM_EXAMPLES.value or 4,
            source_length=_SOURCE.value,
            max_new_tokens=_MAX_NEW_TOKENS.value,
        )
    if not (_TARGET.value and _DRAFT.value):
        raise ValueError("--target and --draft: give both, or --shape in place of them")
    texts = [line for line in data.read_lines(_INPUT.value) if line.strip()][: _NUM_EXAMPLES.value]
    return peer_cases.of_pair(_TARGET.value, _DRAFT.value, texts, _MAX_NEW_TOKENS.value)


def main(argv: list[str]) -> None:
    del argv
    console = start.console()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with console.status("making models and requests"):
            case = make_case(folder)
        rows, times = compare(case, all_arms(case, folder, console), console)
    title = f"{case.name}: greedy, batch 1, {len(case.sources)} sources, {results.hardware()}"
    shown = [{name: value for name, value in row.items() if name != "model"} for row in rows]
    results.show_lines(console, title, shown[:-1])
    results.show_lines(console, "the floor that memory sets", shown[-1:])
    if _OUTPUT.value:
        results.write(_OUTPUT.value, "peers", rows, peer_arms.PACKAGES)
        plot(pathlib.Path(_OUTPUT.value) / "peers.png", title, times, rows[-1]["floor_ms"])
        console.print(f"wrote results.json, table.md and peers.png into {_OUTPUT.value}", soft_wrap=True)


if __name__ == "__main__":
    start.run(main)
