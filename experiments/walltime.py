"""What would this hardware give? Any model shape, random weights, acceptance set by hand.

  python -m experiments.walltime --flagfile=configs/walltime_small.flags

A benchmark, not a sampler: the rule is computed in full, then its outcome is overridden by coins of a
given alpha, and no row ends early. Times do not depend on what the weights are, so shapes are
enough: first v(N - 1), a target call on N tokens over a call on one; then, for each draft shape, c, o and
the speed-up at each alpha, predicted and measured.
"""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from absl import flags
from rich.console import Console

from experiments import arms, dtypes, list_flags, measure, results, shapes, start
from experiments import rows as rows_lib
from experiments.forced import Forced
from specjax import acceptance, analysis, decode, drafters
from specjax.models import t5
from specjax.request import Request
from specjax.sampling import Sampling

_TARGET = flags.DEFINE_string(
    "target", "t5-small", f"Shape of the target: {', '.join(t5.PRESETS)}; or LAYERSxWIDTH, as in 1x256."
)
_DRAFTS = flags.DEFINE_list("draft", [], "Shapes of drafts, the same way.")
_ALPHAS = flags.DEFINE_list("alpha", ["0.5", "0.65", "0.8"], "Chances of acceptance that are forced.")
_NUM_DRAFT = flags.DEFINE_list("num_draft", ["5"], "Each K at which they are.")
_NUM_NEW = flags.DEFINE_integer(
    "max_num_new", 16, "A target call on N tokens, for N = 1 to this.", lower_bound=1
)
_SOURCE = flags.DEFINE_integer("source_length", 64, "Source tokens.", lower_bound=1)
_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Tokens of a run.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1, "Rows.", lower_bound=1)
_NUM_RUNS = flags.DEFINE_integer(
    "num_runs", 8, "Runs in a timed turn, each with coins of its own.", lower_bound=1
)
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed turns of each arm.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json, table.md and walltime.png.")


def build(target: t5.T5Config, params: Any, drafter: Any, drafter_params: Any, rule: Any) -> list[Request]:
    """Requests of random tokens that run to their limit."""
    return [
        shapes.request(
            target,
            params,
            (_BATCH_SIZE.value, _SOURCE.value),
            _NEW_TOKENS.value,
            drafter=drafter,
            drafter_params=drafter_params,
            rule=rule,
            sampling=Sampling(),
            seed=seed,
        )
        for seed in range(_NUM_RUNS.value)
    ]


def verify_curve(request: Request) -> list[dict[str, Any]]:
    """v(N - 1) for each N, the tokens of a target call."""
    program, params, inputs = request
    state = decode.jitted_prefill(program, params, **inputs)
    lengths = range(1, _NUM_NEW.value + 1)
    costs = measure.verify_costs(
        program, params, state, True, [n - 1 for n in lengths], repeats=_REPEATS.value
    )
    return [{"num_new": n, "verify_cost": costs[n - 1] / costs[0]} for n in lengths]


class Grid(NamedTuple):
    """What is forced: shapes of drafts, chances of acceptance, and K."""

    drafts: dict[str, t5.T5Config]
    alphas: list[float]
    num_draft: list[int]


def read_grid(target: t5.T5Config) -> Grid:
    """--draft, --alpha and --num_draft."""
    drafts = {name: shapes.shape(name, target.dtype, target) for name in _DRAFTS.value}
    alphas = list_flags.numbers("alpha", _ALPHAS.value)
    if not all(0 <= alpha <= 1 for alpha in alphas):
        raise ValueError(f"--alpha={','.join(_ALPHAS.value)}: give chances, from 0 to 1")
    return Grid(drafts, alphas, list_flags.counts("num_draft", _NUM_DRAFT.value))


def forced_rows(
    console: Console, target: t5.T5Config, params: Any, name: str, grid: Grid, seed: int
) -> list[dict[str, Any]]:
    """One draft shape at every K and alpha."""
    config = grid.drafts[name]
    draft_params = shapes.random_params(config, seed)
    plain = build(target, params, None, None, acceptance.speculative)
    rows = []
    for num_draft in grid.num_draft:
        drafter = drafters.ModelDrafter(t5.T5Network(config), num_draft)
        requests = {
            alpha: build(target, params, drafter, draft_params, Forced(acceptance.speculative, alpha))
            for alpha in grid.alphas
        }
        costs = arms.round_costs(next(iter(requests.values()))[0], True, console)
        for alpha, runs in requests.items():
            num_rows = _NUM_RUNS.value * _BATCH_SIZE.value
            timing = arms.time_arms(plain, runs, num_rows, _REPEATS.value, console)
            tau = analysis.expected_tokens(alpha, num_draft)
            rows.append(
                {"target": _TARGET.value, "draft": name, "forced_alpha": alpha, "num_draft": num_draft}
                | rows_lib.times(timing)
                | rows_lib.parts(timing, costs, num_draft)
                | {"predicted_speedup_paper": float(analysis.predicted_speedup(tau, num_draft, costs.c))}
                | {"dtype": config.dtype}
                | {"batch_size": _BATCH_SIZE.value, **peak_memory()}
            )
    return rows


def peak_memory() -> dict[str, int]:
    """Bytes that the device has held at most so far, earlier rows included; nothing where it does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    return {"peak_memory_bytes_so_far": stats["peak_bytes_in_use"]} if "peak_bytes_in_use" in stats else {}


def plot(path: pathlib.Path, curve: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> None:
    """v(N - 1) on the left, speed-up at each alpha on the right."""
    figure, (left, right) = results.subplots(1, 2, figsize=(11, 4.5))
    left.plot([row["num_new"] for row in curve], [row["verify_cost"] for row in curve], marker="o")
    left.set(xlabel="N, tokens of a target call", title=f"v(N - 1) of {_TARGET.value}", ylim=(0, None))
    groups = list(dict.fromkeys((row["draft"], row["num_draft"]) for row in rows))
    for i, group in enumerate(groups):
        these = [row for row in rows if (row["draft"], row["num_draft"]) == group]
        at = [row["forced_alpha"] for row in these]
        right.plot(at, [r["speedup"] for r in these], f"C{i}o-", label=f"{group[0]}, K = {group[1]}")
        right.plot(at, [r["predicted_speedup"] for r in these], f"C{i}--")
    right.axhline(1, color="black", linewidth=0.8)
    right.set(xlabel="alpha, forced (dashed: predicted)", title="speed-up over the target alone")
    if groups:
        right.legend(fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    results.save_figure(figure, path)


def main(argv: list[str]) -> None:
    del argv
    console = start.console()
    target = shapes.shape(_TARGET.value, dtypes.dtype() or shapes.default_dtype())
    grid = read_grid(target)
    with console.status("making random weights on the device"):
        params = jax.block_until_ready(shapes.random_params(target, 0))
    millions = measure.num_params(params) / 1e6
    console.print(f"{_TARGET.value}: {millions:.1f} M parameters, {target.dtype}, {results.hardware()}")
    with console.status(f"calls on 1 to {_NUM_NEW.value} tokens, a program to compile for each"):
        curve = verify_curve(build(target, params, None, None, acceptance.speculative)[0])
    results.show_lines(console, "a target call on N tokens over a call on one", curve)
    rows = []
    for seed, name in enumerate(grid.drafts, 1):
        rows += forced_rows(console, target, params, name, grid, seed)
    if rows:
        results.show_lines(console, "forced acceptance: a benchmark, not a sampler", rows)
    if _OUTPUT.value:
        results.write(_OUTPUT.value, "walltime", [*curve, *rows])
        plot(pathlib.Path(_OUTPUT.value) / "walltime.png", curve, rows)
        console.print(f"wrote results.json, table.md and walltime.png into {_OUTPUT.value}", soft_wrap=True)


if __name__ == "__main__":
    start.run(main)
