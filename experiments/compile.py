"""Compiles decoding for TPUs or GPUs that this machine does not have: does it fit, and what will it run?

  python -m experiments.compile --flagfile=configs/compile_small.flags

The compiler of those devices compiles the whole of decoding (encoder, draft, verification, acceptance and the
loop over rounds) from shapes only. No weights are made and nothing is executed. Each row of the table has a
topology, a target, a drafter and a batch size; it reports memory per device and the contents of the loop.
"""

import itertools
import json
import os
import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh
from rich.console import Console

from experiments.lib import columns, compilers, hlo, parse, results, start
from experiments.lib.compilers import Slice
from specjax import decode, drafters, loading, sharding
from specjax.loading import Model
from specjax.models import convert, families, heads, heads_io

_TOPOLOGY = flags.DEFINE_list(
    "topology", ["v5e-8"], f"Devices to compile for: {', '.join(compilers.SLICES)}."
)
_TARGET = flags.DEFINE_list(
    "target", ["t5-v1_1-xxl"], "Targets: names of shapes, LAYERSxWIDTH, or directories of models."
)
_DRAFT = flags.DEFINE_string("draft", "t5-small", "Draft, given like --target; it is replicated.")
_MESH = flags.DEFINE_string(
    "mesh", None, "DATAxMODEL; by default the model is divided over all devices (1x8)."
)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", convert.DTYPES, "Dtype of weights and computation.")
_BATCH_SIZE = flags.DEFINE_list("batch_size", ["1"], "Batch sizes, over all devices together.")
_SOURCE = flags.DEFINE_integer("source_length", 512, "Number of source tokens.", lower_bound=1)
_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Maximum new tokens per row.", lower_bound=1)
_PROGRAM = flags.DEFINE_enum("program", "sampled", ["sampled", "greedy"], "Loop to inspect.")
_HLO = flags.DEFINE_string("hlo", None, "Directory for the text of the compiled programs.")
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json and table.md.")

LARGE = 1 << 20  # bytes; copies above this size are counted


class _Outlines:
    """The parts that drafters are made of, as shapes on a mesh; see `drafters.Parts`."""

    def __init__(self, target: Model, mesh: Mesh):
        self.target, self.mesh = target, mesh

    def draft_model(self) -> Model:
        return loading.outline(_config(_DRAFT.value), self.mesh, sharding.REPLICATED)

    def int8_target(self) -> Model:
        raise ValueError(
            "`--num_draft` must not be int8 here: it cannot be compiled from shapes; give another kind"
        )

    def heads(self, kind: str) -> heads.HeadsNetwork:
        """Returns the largest possible heads: as wide as the target, with all of its ids."""
        shape, network = self.target.config, self.target.network
        widths = dict(d_model=shape.d_model, d_kv=shape.d_kv, d_ff=shape.d_ff, num_heads=shape.num_heads)
        config = heads.HeadsConfig(kind, 8, num_layers=0 if kind == "medusa" else 1, **widths)
        made = jax.eval_shape(lambda network: heads_io.init(config, network, 0), network)
        whole = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, shape.dtype, sharding=sharding.replicated(self.mesh)),
            (made.params, made.frozen),
        )
        place = sharding.of_cache(self.mesh, sharding.REPLICATED)
        return heads.HeadsNetwork(*whole, config, shape, place)

    def ngram_table(self) -> drafters.NgramTable:
        """A bigram table of 64 successors."""
        num_ids, place = self.target.config.vocab_size, sharding.replicated(self.mesh)
        of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)  # noqa: E731
        pairs = (num_ids, 64)
        return drafters.NgramTable(
            of((num_ids,), np.float32), of(pairs, np.int32), of(pairs, np.float32), of((num_ids,), np.float32)
        )


def _config(name: str) -> families.Config:
    if os.path.isdir(name):
        return convert.read_config(name, _DTYPE.value)
    return parse.shape(name, _DTYPE.value)


def request(mesh: Mesh, target_name: str, column: str, batch_size: int) -> decode.Request:
    """Returns a request whose arrays are shapes on a mesh.

    Args:
      mesh: from `compilers.make_mesh`.
      target_name: one of --target.
      column: one of --num_draft.
      batch_size: B.
    """
    sharding.check_rows(mesh, batch_size)
    target = loading.outline(_config(target_name), mesh)
    drafter = columns.of_parts(_Outlines(target, mesh), column)
    size = (batch_size, _SOURCE.value)
    # Arguments are checked and laid out on this machine, then given shardings over the absent devices.
    here = target.network.replace(cache_sharding=None)
    program, inputs = decode.prepare(
        here,
        np.full(size, 2, np.int32),
        np.ones(size, bool),
        max_new_tokens=_NEW_TOKENS.value,
        temperature=float(_PROGRAM.value == "sampled"),
    )
    network = target.network.with_features(drafter.feature_layers)
    by_row = sharding.by_row(mesh)
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_row), inputs)
    return decode.Request(program.replace(target=network, drafter=drafter), inputs)


def compiled_row(devices: Slice, request: decode.Request, hlo_path: pathlib.Path | None) -> dict[str, Any]:
    """Compiles a request; returns the memory and the loop that the compiler reports."""
    started = time.perf_counter()
    lowered = decode.jitted_generate.trace(*request).lower(lowering_platforms=(devices.platform,))
    gib = lambda size: round(size / 2**30, 3)  # noqa: E731
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        used = re.search(r"Used ([\d.]+)([MG]) of ([\d.]+)([MG])", str(error))
        if used is None:
            raise
        peak = float(used[1]) / (1024 if used[2] == "M" else 1)
        took = round(time.perf_counter() - started, 1)
        return {"peak_gib": peak, "usable_gib": gib(devices.usable), "fits": "no", "compile_s": took}
    memory, text = compiled.memory_analysis(), compiled.as_text()
    if hlo_path is not None:
        results.write_text(hlo_path, text)
    peak = memory.peak_memory_in_bytes
    return {
        "arguments_gib": gib(memory.argument_size_in_bytes),
        "temporaries_gib": gib(memory.temp_size_in_bytes),
        "peak_gib": gib(peak),
        "usable_gib": gib(devices.usable),
        "fits": "yes" if peak <= devices.usable else "no",
        **loop_row(hlo.Module.parse(text).rounds(_PROGRAM.value), request, devices.platform),
        "compile_s": round(time.perf_counter() - started, 1),
    }


def loop_row(rounds: hlo.Loop, request: decode.Request, platform: str) -> dict[str, Any]:
    """Returns the contents of the loop over rounds; counts are per round."""
    in_draft, others = hlo.draft_and_rest(rounds)
    count = "kernels" if platform == "cuda" else "instructions"
    # The first draft comes from the call before the inner loop.
    per_step, per_round = hlo.per_round(rounds, request.program.max_depth - 1)
    return {
        "collectives_in_draft": hlo.names([one for one in in_draft if one.is_collective]) or "none",
        "collectives_in_verify": hlo.names([one for one in others if one.is_collective]) or "none",
        "large_copies": sum(one.opcode == "copy" and one.num_bytes > LARGE for one in in_draft + others),
        "custom_calls": hlo.names([one for one in in_draft + others if one.target]) or "none",
        f"{count}_per_draft_step": per_step or "no loop",
        f"{count}_per_round": per_round,
    }


def rows(console: Console, kept: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields a row for each topology, target, drafter and batch size, compiled or taken from `kept`."""
    for name in _TOPOLOGY.value:
        devices = compilers.SLICES[name]
        shape = (1, devices.num_devices) if _MESH.value is None else parse.mesh(_MESH.value)
        mesh = compilers.make_mesh(devices, *shape)
        for target, column in itertools.product(_TARGET.value, columns.columns()):
            peaks: dict[int, float] = {}
            for batch_size in parse.counts("batch_size", _BATCH_SIZE.value):
                settings = {
                    "topology": name,
                    "mesh": "x".join(map(str, shape)),
                    "target": target,
                    "drafter": f"{_DRAFT.value} {column}" if columns.needs_draft(column) else column,
                    "program": _PROGRAM.value,
                    "batch_size": batch_size,
                }
                same = [row for row in kept if settings.items() <= row.items()]
                if same:
                    peaks[batch_size] = same[0]["peak_gib"]
                    yield same[0]
                    continue
                label = "-".join(map(str, settings.values())).replace("/", "_").replace(" ", "-")
                path = None if _HLO.value is None else pathlib.Path(_HLO.value) / f"{label}.txt"
                with console.status(
                    f"compiling for {name}: {target}, {settings['drafter']}, batch size {batch_size}"
                ):
                    row = compiled_row(devices, request(mesh, target, column, batch_size), path)
                jax.clear_caches()  # each program holds gigabytes, and none is used again
                peaks[batch_size] = row["peak_gib"]
                yield settings | row | largest_batch(peaks, row["usable_gib"])


def rows_kept(console: Console) -> list[dict[str, Any]]:
    """Returns the rows in --output that an interrupted run of the same command has left."""
    path = pathlib.Path(_OUTPUT.value or "") / "results.json"
    document = json.loads(path.read_text()) if _OUTPUT.value and path.is_file() else {}
    if document.get("command") != results.command("compile"):
        return []
    console.print(f"keeping {len(document['rows'])} rows of {_OUTPUT.value}; delete it to compile them again")
    return document["rows"]


def largest_batch(peaks: dict[int, float], memory: float) -> dict[str, int]:
    """Returns the largest batch that fits by linear extrapolation of peak memory over batch size."""
    (first, low), (last, high) = min(peaks.items()), max(peaks.items())
    if high <= low:  # only one batch size, or memory that does not grow with it
        return {}
    return {"largest_batch": max(0, int(first + (memory - low) * (last - first) / (high - low)))}


def main(console: Console) -> None:
    for name in _TOPOLOGY.value:
        if name not in compilers.SLICES:
            raise ValueError(f"`--topology` must be one of {', '.join(compilers.SLICES)}, got {name}")
    columns.check()
    compilers.prepare({compilers.SLICES[name].platform for name in _TOPOLOGY.value})
    if _HLO.value is not None:
        pathlib.Path(_HLO.value).mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for row in rows(console, rows_kept(console)):
        found.append(row)
        results.show(console, f"row {len(found)}", [row])
        if _OUTPUT.value:  # after every row: the next may take long
            results.write(_OUTPUT.value, "compile", found, more=("libtpu", "jax-cuda13-plugin"))
    results.save(console, _OUTPUT.value, "compile", found)


if __name__ == "__main__":
    start.run(main)
