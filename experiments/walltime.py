"""Measures the speed-up of any model shape on this hardware, with random weights and forced acceptance.

  python -m experiments.walltime --flagfile=configs/walltime_small.flags

This is a benchmark and not a sampler: the rule is computed in full, then its outcome is replaced by Bernoulli
draws of a given alpha, and no row ends early. Times do not depend on the values of the weights, so shapes are
enough. The first table has v(N - 1), the time of a target call on N tokens over that of a call on one token.
The second has, for each draft shape and alpha, c (a draft step) and o (the rest of a round), both over a
decoding step, and the predicted and measured speed-up.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from rich.console import Console

from experiments.lib import compilers, measure, parse, results, start, synthetic
from specjax import acceptance, analysis, drafters
from specjax.decode import Request
from specjax.models import families, t5
from specjax.types import Network

_TARGET = flags.DEFINE_string(
    "target", "t5-small", f"Shape of the target: {', '.join(families.PRESETS)}; or LAYERSxWIDTH, as in 1x256."
)
_DRAFTS = flags.DEFINE_list("draft", [], "Shapes of drafts, given like --target.")
_ALPHAS = flags.DEFINE_list("alpha", ["0.5", "0.65", "0.8"], "Forced probabilities of acceptance.")
_NUM_DRAFT = flags.DEFINE_list("num_draft", ["5"], "Values of K.")
_NUM_NEW = flags.DEFINE_list(
    "num_new",
    list(map(str, range(1, 17))),
    "Numbers of tokens N of the timed target calls; each compiles a program.",
)
_SOURCE = flags.DEFINE_integer("source_length", 64, "Number of source tokens.", lower_bound=1)
_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "New tokens per row.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1, "Batch size.", lower_bound=1)
_DTYPE = parse.define_dtype()
_NUM_RUNS = flags.DEFINE_integer("num_runs", 8, "Runs per timed turn, each with its own seed.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed turns of each arm.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json, table.md and walltime.png.")


def build(target: Network, drafter: Any = None, rule: Any = acceptance.speculative) -> list[Request]:
    """Returns requests of random source tokens whose rows run to their limit."""
    size, options = (
        (_BATCH_SIZE.value, _SOURCE.value),
        dict(max_new_tokens=_NEW_TOKENS.value, temperature=1.0),
    )
    return [
        synthetic.request(target, size, drafter=drafter, rule=rule, seed=seed, **options)
        for seed in range(_NUM_RUNS.value)
    ]


def verify_curve(request: Request) -> list[dict[str, Any]]:
    """Returns rows of v(N - 1) for each N of --num_new."""
    lengths, most = [1, *parse.counts("num_new", _NUM_NEW.value)], _NEW_TOKENS.value + 2
    if max(lengths) > most:
        raise ValueError(f"`--num_new` must be at most {most}, got {max(lengths)}; or raise --max_new_tokens")
    costs = measure.verify_costs(request, True, [n - 1 for n in lengths], repeats=_REPEATS.value)
    return [{"num_new": k + 1, "verify_cost": cost / costs[0]} for k, cost in costs.items()]


def forced_rows(
    console: Console, target: Network, name: str, draft: t5.T5Network, alphas: list[float], lengths: list[int]
) -> Iterator[dict[str, Any]]:
    """Yields the rows of one draft for every K of `lengths` and every alpha, as they are measured."""
    baseline, num_rows = build(target), _NUM_RUNS.value * _BATCH_SIZE.value
    for k in lengths:
        drafter = drafters.ModelDrafter(draft, k)
        forced = {alpha: synthetic.Forced(acceptance.speculative, alpha) for alpha in alphas}
        requests = {alpha: build(target, drafter, rule) for alpha, rule in forced.items()}
        costs = measure.round_costs(next(iter(requests.values()))[0], True, console)
        for alpha, runs in requests.items():
            timing = measure.time_arms(baseline, runs, num_rows, _REPEATS.value, console)
            paper = analysis.predicted_speedup(analysis.expected_tokens(alpha, k), k, costs.c)
            row = {"target": _TARGET.value, "draft": name, "forced_alpha": alpha, "num_draft": k}
            row |= {**timing.row(), **timing.parts_row(costs, k), "predicted_speedup_paper": float(paper)}
            row |= {"dtype": draft.config.dtype, "batch_size": _BATCH_SIZE.value, **peak_memory()}
            yield row | bandwidth(target, timing)


def bandwidth(target: Any, timing: measure.Timing) -> dict[str, float]:
    """Returns the speed at which a decoding step reads its weights."""
    sizes = dict(num_new=1, batch_size=_BATCH_SIZE.value, num_source=_SOURCE.value, num_cached=0)
    itemsize = target.params["embedding"].dtype.itemsize
    read = analysis.decoder_call(target.config, **sizes, bytes_per_number=itemsize).weights
    step_ms = float(np.median(timing.ms_per_token(measure.AUTOREGRESSIVE))) * _BATCH_SIZE.value
    return {"weights_gb_per_s": read / (1e6 * step_ms), **peak_share(read / (1e-3 * step_ms))}


def peak_share(bytes_per_s: float) -> dict[str, float]:
    """Returns the share of the bandwidth that the device's maker states, if known."""
    kind = jax.devices()[0].device_kind
    stated = [one.bandwidth for one in compilers.SLICES.values() if one.kind in kind]
    return {"share_of_stated_bandwidth": bytes_per_s / stated[0]} if stated else {}


def peak_memory() -> dict[str, int]:
    """Returns the peak memory of the device so far, earlier rows included, if it reports it."""
    stats = jax.devices()[0].memory_stats() or {}
    return {"peak_memory_bytes_so_far": stats["peak_bytes_in_use"]} if "peak_bytes_in_use" in stats else {}


def plot(curve: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> Any:
    """Returns a figure: v(N - 1) on the left, speed-up at each alpha on the right."""
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
    right.set(xlabel="alpha, forced (dashed: predicted)", title="speed-up over autoregressive decoding")
    if groups:
        right.legend(fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    return figure


def main(console: Console) -> None:
    config = parse.shape(_TARGET.value, _DTYPE.value or synthetic.default_dtype())
    shapes = {name: parse.shape(name, config.dtype, config) for name in _DRAFTS.value}
    alphas, lengths = parse.numbers("alpha", _ALPHAS.value), parse.counts("num_draft", _NUM_DRAFT.value)
    if not all(0 <= alpha <= 1 for alpha in alphas):
        raise ValueError(f"`--alpha` must be probabilities in [0, 1], got {','.join(_ALPHAS.value)}")
    with console.status("making random weights on the device"):
        target = jax.block_until_ready(synthetic.network(config, 0))
    millions = measure.num_params(target) / 1e6
    console.print(f"{_TARGET.value}: {millions:.1f} M parameters, {config.dtype}, {results.hardware()}")
    with console.status(f"timing calls on {', '.join(_NUM_NEW.value)} tokens, a program to compile for each"):
        curve = verify_curve(build(target)[0])
    results.show_lines(console, "v(N - 1): a target call on N tokens over a call on one", curve)
    rows: list[dict[str, Any]] = []
    for seed, (name, shape) in enumerate(shapes.items(), 1):
        for row in forced_rows(console, target, name, synthetic.network(shape, seed), alphas, lengths):
            rows.append(row)
            if _OUTPUT.value:  # after every row: a time limit may end the run
                results.write(_OUTPUT.value, "walltime", [*curve, *rows])
    if rows:
        results.show(console, "forced acceptance: a benchmark, not a sampler", rows)
    results.save(console, _OUTPUT.value, "walltime", [*curve, *rows], lambda: plot(curve, rows))


if __name__ == "__main__":
    start.run(main)
