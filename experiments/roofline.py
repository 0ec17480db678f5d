"""Predicts speed-ups from bytes and bandwidth, for machines that need not be here.

  python -m experiments.roofline --flagfile=configs/roofline.flags

A decoder call at batch 1 reads all its weights once, whether for one token or for eight. So its time is bytes
over bandwidth, unless arithmetic takes longer; collectives between devices are left out. The target is
divided over the devices, the draft is replicated. On a GPU a call takes at least the time to launch its
kernels. A second prediction has that floor: kernels counted in compiled programs
(results/compile_small_sampled), --launch_us each. A second table compares the measured values of
`experiments.walltime` with paper.
"""

import json
import pathlib
from typing import Any

from absl import flags
from rich.console import Console

from experiments.lib import compilers, results, start
from specjax import analysis
from specjax.models.config import PRESETS

_SOURCE = flags.DEFINE_integer("source_length", 64, "Number of source tokens.")
_CACHED = flags.DEFINE_integer("num_cached", 32, "Tokens in the cache, as in the middle of an output.")
_LAUNCH_US = flags.DEFINE_float(
    "launch_us", 3.0, "Least time of a GPU kernel in microseconds (an assumption)."
)
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json, table.md and roofline.png.")

# Entry of `compilers.SLICES` with the bandwidth, number of devices, and teraflops (bfloat16, dense) of each
# device as its maker states them.
MACHINES = {
    "TPU v4, one chip (the paper)": ("v4-8", 1, 275),
    "TPU v4-8": ("v4-8", 4, 275),
    "TPU v5e-8": ("v5e-8", 8, 197),
    "H100 SXM": ("h100", 1, 989),
    "H200 SXM": ("h200", 1, 989),
}
# Target, draft, alpha, and the measured speed-up of the paper (tables 2 and 4; WMT, temperature 0, K = 7).
PAIRS = (
    ("t5-v1_1-xxl", "t5-v1_1-small", 0.75, 3.4),
    ("t5-v1_1-xxl", "t5-v1_1-base", 0.80, 2.8),
    ("t5-11b", "t5-small", 0.75, None),
)
NUM_DRAFT = 7
# Kernels of a call compiled for an H200: per layer on one token, on several tokens, and outside the layers.
LAYER_KERNELS, LAYER_KERNELS_OF_SEVERAL, OTHER_KERNELS = 18, 22, 22


def call(name: str, num_new: int, bytes_per_number: int = 2) -> analysis.Call:
    """Returns a decoder call of a shape at batch 1."""
    return analysis.decoder_call(
        PRESETS[name],
        num_new=num_new,
        batch_size=1,
        num_source=_SOURCE.value,
        num_cached=_CACHED.value,
        bytes_per_number=bytes_per_number,
    )


def speedup(machine: str, target: str, draft: str, alpha: float, launch_s: float) -> dict[str, float]:
    """Returns the time of a decoding step, c, v and the predicted speed-up.

    Args:
      machine: one of `MACHINES`.
      target, draft: names of shapes.
      alpha: acceptance rate.
      launch_s: least seconds of a kernel.
    """
    of, devices, teraflops = MACHINES[machine]
    bandwidth = compilers.SLICES[of].bandwidth

    def seconds(name: str, num_new: int, devices: int) -> float:
        took = call(name, num_new).seconds(bandwidth * devices, 1e12 * teraflops * devices)
        in_layer = LAYER_KERNELS if num_new == 1 else LAYER_KERNELS_OF_SEVERAL
        return max(took, launch_s * (OTHER_KERNELS + in_layer * PRESETS[name].num_decoder_layers))

    step_s = seconds(target, 1, devices)
    c, v = seconds(draft, 1, 1) / step_s, seconds(target, NUM_DRAFT + 1, devices) / step_s
    tau = analysis.expected_tokens(alpha, NUM_DRAFT)
    faster = float(analysis.predicted_speedup(tau, NUM_DRAFT, c, v))
    return {"decoding_step_ms": 1e3 * step_s, "c": c, "verify_cost": v, "predicted_speedup": faster}


def predict(machine: str, target: str, draft: str, alpha: float, paper: float | None) -> dict[str, Any]:
    """Returns a row: bytes read, times of the parts, and predicted speed-up."""
    reads = call(target, 1)
    row = {"machine": machine, "target": target, "draft": draft, "alpha": alpha, "num_draft": NUM_DRAFT}
    row |= {"gigabytes_target": reads.weights / 1e9, "gigabytes_draft": call(draft, 1).weights / 1e9}
    row |= {"megabytes_cache": reads.cache / 1e6, "megabytes_cross": reads.cross / 1e6}
    row |= speedup(machine, target, draft, alpha, 0.0)
    if "TPU" not in machine:
        with_launches = speedup(machine, target, draft, alpha, 1e-6 * _LAUNCH_US.value)
        row |= {f"{name}_with_launches": with_launches[name] for name in ("c", "predicted_speedup")}
    # The paper measured on one chip.
    row["paper_measured"] = paper if paper and "one chip" in machine else "not measured"
    return row


def measured_here() -> list[dict[str, Any]]:
    """Returns the published rows of `walltime`, with the bytes that a decoding step reads."""
    rows = []
    for name in ("small", "base"):
        path = pathlib.Path(__file__).parent / "results" / f"walltime_{name}" / "results.json"
        document = json.loads(path.read_text())
        found = [row for row in document["rows"] if "forced_alpha" in row]
        curve = {row["num_new"]: row["verify_cost"] for row in document["rows"] if "num_new" in row}
        reads = call(f"t5-{name}", 1, bytes_per_number=4)
        decoding_step_ms = float(str(found[0]["ms_per_token_autoregressive"]).split()[0])
        row = {"measured_on": document["hardware"], "target": f"t5-{name}, float32"}
        row |= {"gigabytes_target": reads.weights / 1e9, "decoding_step_ms_measured": decoding_step_ms}
        row |= {"gigabytes_per_second_reached": sum(reads[:3]) / decoding_step_ms / 1e6}
        rows.append(row | {"verify_cost_measured": curve[8], "verify_cost_on_paper": 1.0})
    return rows


def plot(rows: list[dict[str, Any]]) -> Any:
    """Returns a figure: predicted speed-up by machine, one bar per pair, and the paper's measurements."""
    figure, axis = results.subplots(1, 1, figsize=(9, 4))
    machines = list(MACHINES)
    for i, (target, draft, *_) in enumerate(PAIRS):
        these = [row for row in rows if (row["target"], row["draft"]) == (target, draft)]
        at = [m + 0.27 * (i - 1) for m in range(len(machines))]
        axis.bar(at, [row["predicted_speedup"] for row in these], 0.25, label=f"{target} with {draft}")
        floors = [row.get("predicted_speedup_with_launches") for row in these]
        axis.plot(at, floors, "k_", markersize=16, label="" if i else "with kernel launches")
        for m, row in enumerate(these):
            if isinstance(row["paper_measured"], float):
                sides = at[m] - 0.125, at[m] + 0.125
                axis.hlines(row["paper_measured"], *sides, "red", label="" if i else "measured by the paper")
    axis.set_xticks(range(len(machines)), [name.replace(", ", ",\n") for name in machines], fontsize=8)
    axis.set(title="speed-up on paper, K = 7, batch 1", ylim=(0, 4.8))
    axis.set(xlabel="machine", ylabel="speed-up over autoregressive decoding")
    axis.legend(fontsize=8, ncol=3, loc="upper center")
    return figure


def main(console: Console) -> None:
    rows = [predict(machine, *pair) for machine in MACHINES for pair in PAIRS]
    results.show_lines(console, "predicted from bytes and bandwidth, batch 1, bfloat16", rows)
    here = measured_here()
    results.show_lines(console, "measured", here)
    results.save(console, _OUTPUT.value, "roofline", [*rows, *here], lambda: plot(rows))


if __name__ == "__main__":
    start.run(main)
