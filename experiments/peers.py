"""Compares specjax with other libraries on the same checkpoint and sources (extra `peers`).

  python -m experiments.peers --flagfile=configs/peers.flags

Decoding is greedy, at batch 1, end to end (encoder included, tokenizing excluded), with the same number of
threads. All arms take turns, and their tokens are compared with those of our autoregressive decoding. --shape
uses random weights, and every row runs to --max_new_tokens; our drafts are then forced, which is a benchmark
and not a sampler. A second table has the floor: the least time in which a token's weights can be read.
"""

import functools
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from rich.console import Console

from experiments.lib import (
    arms,
    compare,
    inputs,
    measure,
    memory_floor,
    peer_arms,
    peer_cases,
    progress,
    results,
    start,
)
from experiments.lib.peer_arms import Arm, Arms
from experiments.lib.peer_cases import Case
from specjax import decode
from specjax.decode import Request

_TARGET = flags.DEFINE_string("target", None, "Target: a Hugging Face directory.")
_DRAFT = flags.DEFINE_string("draft", None, "Draft model, given like --target.")
_SHAPE = flags.DEFINE_string("shape", None, "A preset such as t5-small with random weights, instead of both.")
_DRAFT_SHAPE = flags.DEFINE_string("draft_shape", "1x64", "Shape of the draft for --shape, LAYERSxWIDTH.")
_ALPHA = flags.DEFINE_float("alpha", 0.75, "With --shape: forced probability of acceptance.")
_SOURCE = flags.DEFINE_integer("source_length", 64, "With --shape: number of source tokens.", lower_bound=1)
_INPUT = flags.DEFINE_string(
    "input", "configs/demo.txt", "Sources: a file of text lines, JSON lines, CSV or TSV."
)
_NUM_EXAMPLES = flags.DEFINE_integer(
    "num_examples", None, "Number of sources; by default all, or 4 with --shape.", lower_bound=1
)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Maximum new tokens per row.", lower_bound=0)
_PEERS = flags.DEFINE_list("peers", list(peer_arms.BUILDERS), "Libraries to compare with.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed turns of each arm.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json, table.md and peers.png.")

AUTOREGRESSIVE = "specjax, autoregressive"
# Milliseconds per token of each arm, and their ratio to autoregressive decoding in the same turn.
Times = dict[str, tuple[measure.Spread, measure.Spread]]
# Threads of some libraries busy-wait for up to .2 s after their work.
SETTLE_S = 0.5


def our_arm(requests: Sequence[Request]) -> Arm:
    """Returns an arm of specjax."""
    return lambda source: compare.ids(jax.device_get(decode.jitted_generate(*requests[source])))[0]


def all_arms(case: Case, folder: pathlib.Path, console: Console) -> Arms:
    """Returns the arms of specjax, then those of --peers; the reason for an arm that cannot run."""
    made: Arms = {AUTOREGRESSIVE: our_arm(case.autoregressive)}
    made |= {name: our_arm(requests) for name, requests in case.speculative.items()}
    for library in _PEERS.value:
        with console.status(f"loading and converting for {library}"):
            made |= peer_arms.build(library, case, folder)
    return made


def turn_seconds(arm: Arm, num_sources: int) -> float:
    """Returns the seconds for all sources, after a pause and an untimed source that warms the caches."""
    time.sleep(SETTLE_S)
    arm(0)
    return measure.seconds(lambda: [arm(source) for source in range(num_sources)])


def time_all(callables: dict[str, Arm], counts: dict[str, int], num_sources: int, console: Console) -> Times:
    """Times all arms in turns, per token that the arm emits."""
    timed = {name: functools.partial(turn_seconds, arm, num_sources) for name, arm in callables.items()}
    alternating = measure.alternate(timed, _REPEATS.value)
    turns = list(progress.track(alternating, _REPEATS.value, "timing all arms in turns", console))
    ms = {name: np.array([1e3 * turn[name] / counts[name] for turn in turns]) for name in timed}
    return {name: (measure.Spread.of(x), measure.Spread.of(x / ms[AUTOREGRESSIVE])) for name, x in ms.items()}


def same(case: Case, ours: list[list[int]], theirs: list[list[int]]) -> dict[str, Any]:
    """Returns how many outputs and tokens are identical to ours, and how many differences are near ties."""
    found = compare.differences(ours, theirs, lambda row: (case.autoregressive[row], 0))
    same_rows, near_ties = compare.counted(found, len(ours))
    num_tokens = sum(map(len, ours))
    equal = num_tokens - sum(len(ours[d.row]) - d.position for d in found)
    return {"same_rows": same_rows, "same_tokens": f"{equal} of {num_tokens}", "num_near_ties": near_ties}


def tau(requests: Sequence[Request] | None) -> float | str:
    """Returns the mean tokens per target call of a speculative arm of ours; "-" for any other arm."""
    return "-" if requests is None else float(arms.counted(requests)[0].tau[0])


def compared(case: Case, made: Arms, console: Console) -> tuple[list[dict[str, Any]], Times]:
    """Returns a row per arm, then that of the floor; and the times of the arms that ran."""
    callables = {name: arm for name, arm in made.items() if callable(arm)}
    num_sources, outputs = len(case.sources), {}
    label = "warming up and comparing tokens"
    for name, arm in progress.track(callables.items(), len(callables), label, console):
        outputs[name] = [arm(source) for source in range(num_sources)]
    counts = {name: sum(map(len, rows)) for name, rows in outputs.items()}
    times = time_all(callables, counts, num_sources, console)
    rows: list[dict[str, Any]] = []
    for name, arm in made.items():
        row = {"model": case.name, "arm": name}
        if not callable(arm):
            rows.append({**row, "ms_per_token": arm})
            continue
        row |= zip(("ms_per_token", "time_over_autoregressive"), map(str, times[name]), strict=True)
        row["tokens_per_target_call"] = tau(case.speculative.get(name))
        rows.append({**row, **same(case, outputs[AUTOREGRESSIVE], outputs[name])})
    with console.status("measuring memory bandwidth"):
        floor = memory_floor.row(case.autoregressive, counts[AUTOREGRESSIVE], _REPEATS.value)
    return [*rows, {"model": case.name, **floor}], times


def plot(title: str, times: Times, floor_ms: float) -> Any:
    """Returns a figure: a bar per arm with quartiles as whiskers, and the floor as a line."""
    figure, axis = results.subplots(1, 1, figsize=(9, 0.45 * len(times) + 1.5))
    names = list(times)[::-1]
    ms, ratios = zip(*(times[name] for name in names), strict=True)
    whiskers = [[x.median - x.low for x in ms], [x.high - x.median for x in ms]]
    colors = ["C0" if name.startswith("specjax") else "C7" for name in names]
    axis.barh(names, [x.median for x in ms], xerr=whiskers, color=colors, ecolor="black", capsize=3)
    for i, (x, ratio) in enumerate(zip(ms, ratios, strict=True)):
        axis.text(x.high, i, f"  {ratio.median:.2f}x", va="center", fontsize=8)
    axis.axvline(
        floor_ms, color="C3", linestyle="--", linewidth=1, label="float32 weights read once per token"
    )
    limits, label = (0, 1.15 * max(x.high for x in ms)), "ms per token, end to end (and over autoregressive)"
    axis.set(xlabel=label, title=title, xlim=limits)
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3, axis="x")
    return figure


def make_case(folder: pathlib.Path) -> Case:
    """Returns the case that the flags select."""
    unknown = set(_PEERS.value) - peer_arms.BUILDERS.keys()
    if unknown:
        raise ValueError(
            f"`--peers` must be some of {', '.join(peer_arms.BUILDERS)}, got {','.join(unknown)}"
        )
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
        raise ValueError("`--target` and `--draft` must both be given; or give --shape instead")
    _, texts = inputs.asked(_INPUT.value, _NUM_EXAMPLES.value)
    return peer_cases.of_pair(_TARGET.value, _DRAFT.value, texts, _MAX_NEW_TOKENS.value)


def main(console: Console) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with console.status("making models and requests"):
            case = make_case(folder)
        rows, times = compared(case, all_arms(case, folder, console), console)
    title = f"{case.name}: greedy, batch 1, {len(case.sources)} sources, {results.hardware()}"
    shown = [{name: value for name, value in row.items() if name != "model"} for row in rows]
    results.show_lines(console, title, shown[:-1])
    results.show_lines(console, "the floor set by memory bandwidth", shown[-1:])
    figure = functools.partial(plot, title, times, rows[-1]["floor_ms"])
    results.save(console, _OUTPUT.value, "peers", rows, figure, peer_arms.PACKAGES)


if __name__ == "__main__":
    start.run(main)
