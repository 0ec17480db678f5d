"""Checks a device quickly before anything is measured on it: its tokens, and the kernels that it launches.

  python -m experiments.device_check --part=tokens --output=DIR
  python -m experiments.device_check --part=profile --target=t5-v1_1-xxl --draft=t5-small --output=DIR

--part=tokens compares the greedy output of the shipped pair on this device with that on the CPU, and lists
near ties of the target's two largest logits. --part=profile runs a few rounds of a shape with random weights
under the profiler, and compares the kernels launched per round with those of the compiled program.
"""

import pathlib
import tempfile
from typing import Any

import jax
import numpy as np
from absl import flags
from rich.console import Console

import specjax
from experiments.lib import compare, hlo, parse, results, start, synthetic
from specjax import api, data, decode, drafters

_PART = flags.DEFINE_enum("part", "tokens", ["tokens", "profile"], "Check to run.")
_PAIR = flags.DEFINE_string(
    "checkpoints", "experiments/checkpoints/captions", "Path of the pair without -target or -draft."
)
_INPUT = flags.DEFINE_string("input", "configs/demo.txt", "Sources for the pair, one per line.")
_TARGET = flags.DEFINE_string("target", "t5-small", "Shape of the profiled target; see experiments.walltime.")
_DRAFT = flags.DEFINE_string("draft", "1x64", "Shape of its draft.")
_SOURCE = flags.DEFINE_integer("source_length", 64, "Number of source tokens for the profile.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json and table.md.")

NUM_DRAFT = 5  # K, in both checks


def token_rows(console: Console) -> list[dict[str, Any]]:
    """Returns a row without and one with a drafter: outputs identical to the CPU's, and differences."""
    sources = data.read_lines(_INPUT.value)

    def decoded(device: jax.Device, num_draft: int) -> tuple[list[list[int]], decode.Request]:
        with jax.default_device(device):
            target = specjax.load(f"{_PAIR.value}-target", "float32")
            draft = specjax.load(f"{_PAIR.value}-draft", "float32")
            drafter = drafters.from_model(draft, num_draft) if num_draft else None
            request = decode.prepare(
                target.network, *api.encode_sources(target, sources), drafter=drafter, max_new_tokens=64
            )
            return compare.ids(jax.device_get(decode.jitted_generate(*request))), request

    with console.status("decoding on the CPU"):
        expected, request = decoded(jax.devices("cpu")[0], 0)
    rows = []
    for num_draft in (0, NUM_DRAFT):
        with console.status(f"decoding on {results.hardware()}, K = {num_draft}"):
            found, _ = decoded(jax.devices()[0], num_draft)
        with jax.default_device(jax.devices("cpu")[0]):
            differences = compare.differences(expected, found, lambda row: (request, row))
        same, near_ties = compare.counted(differences, len(sources))
        listed = "; ".join(f"row {d.row} at {d.position}, margin {d.margin:.1e}" for d in differences)
        row = {"device": results.hardware(), "num_draft": num_draft, "same_as_on_cpu": same}
        rows.append(row | {"differ_at_a_near_tie": near_ties, "differences": listed or "none"})
    return rows


def profile_row(console: Console) -> dict[str, Any]:
    """Returns the kernels that the device launched per round, and those of the compiled loop."""
    config = parse.shape(_TARGET.value, synthetic.default_dtype())
    target = synthetic.network(config, 0)
    draft = synthetic.network(parse.shape(_DRAFT.value, config.dtype, config), 1)
    request = synthetic.request(
        target,
        (1, _SOURCE.value),
        drafter=drafters.ModelDrafter(draft, NUM_DRAFT),
        temperature=1.0,
        max_new_tokens=64,
    )
    with console.status("compiling"):
        state = decode.jitted_prefill(request.program, **request.inputs)
        compiled = decode.jitted_run.lower(request.program, state).compile()
        after = jax.block_until_ready(compiled(request.program, state))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            after = jax.block_until_ready(compiled(request.program, state))
        launches = _launches(folder)
    num_rounds = int(np.asarray(after.stats.num_rounds)[0])
    loop = hlo.Module.parse(compiled.as_text()).rounds("sampled")
    _, per_round = hlo.per_round(loop, NUM_DRAFT - 1)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "device": results.hardware(),
        "target": _TARGET.value,
        "draft": _DRAFT.value,
        "num_draft": NUM_DRAFT,
        "rounds_profiled": num_rounds,
        "kernels_launched_per_round": round(launches / num_rounds) if launches else "not reported",
        "kernels_compiled_per_round": per_round,
        "peak_gib_measured": stats.get("peak_bytes_in_use", 0) / 2**30 or "not reported",
        "peak_gib_compiled": compiled.memory_analysis().peak_memory_in_bytes / 2**30,
    }


def _launches(folder: str) -> int:
    """Returns the number of events on the device lines of a trace: kernels and copies of one run."""
    (path,) = pathlib.Path(folder).glob("**/*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    lines = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
    return sum(1 for line in lines if line.name.startswith("Stream") for _ in line.events)


def main(console: Console) -> None:
    rows = token_rows(console) if _PART.value == "tokens" else [profile_row(console)]
    results.show(console, _PART.value, rows)
    results.save(console, _OUTPUT.value, "device_check", rows)


if __name__ == "__main__":
    start.run(main)
