"""Does a program for many devices exist? Lowered from shapes alone, for a platform that need not be here.

  python -m experiments.lower --flagfile=configs/lower_xxl.flags

The whole of decoding (encoder, draft, verification, acceptance, the loop) is traced on a mesh of
simulated devices and lowered for each platform; no weights exist, nothing runs. Before it, the memory
of a device.
"""

import time

import jax
import numpy as np
from absl import flags
from rich.console import Console

from experiments.lib import meshes, parse, results, start
from specjax import decode, loading, sharding
from specjax.drafters import ModelDrafter
from specjax.models import convert, t5

_SHAPES = sorted(t5.PRESETS)
_TARGET = flags.DEFINE_enum("target", "t5-v1_1-xxl", _SHAPES, "Shape of the target.")
_DRAFT = flags.DEFINE_enum("draft", "t5-small", _SHAPES, "Shape of the draft, which is replicated.")
_MESH = flags.DEFINE_string("mesh", "1x8", "DATAxMODEL, as in 2x4: that many simulated devices.")
_NUM_DRAFT = flags.DEFINE_integer("num_draft", 5, "K.", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", convert.DTYPES, "Of weights and computation.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Rows, over all devices.", lower_bound=1)
_SOURCE = flags.DEFINE_integer("source_length", 512, "Source tokens.", lower_bound=1)
_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Tokens of a row.", lower_bound=1)
_PLATFORMS = flags.DEFINE_list("platforms", ["tpu", "cuda"], "What to lower for.")
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json and table.md.")


def main(console: Console) -> None:
    num_data, num_model = parse.mesh(_MESH.value)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_data * num_model)
    mesh = sharding.make_mesh(num_data, num_model)
    # Networks whose params are shapes.
    target = loading.outline(parse.shape(_TARGET.value, _DTYPE.value), mesh).network
    draft = loading.outline(parse.shape(_DRAFT.value, _DTYPE.value), mesh, sharding.REPLICATED).network
    size = (_BATCH_SIZE.value, _SOURCE.value)
    program, inputs = decode.prepare(
        target,
        np.full(size, 2, np.int32),
        np.ones(size, bool),
        drafter=ModelDrafter(draft, _NUM_DRAFT.value),
        temperature=1.0,
        max_new_tokens=_NEW_TOKENS.value,
    )
    models = [
        ("target", target.config, sharding.T5_RULES, _NUM_DRAFT.value + 1),
        ("draft", draft.config, sharding.REPLICATED, 1),
    ]
    rows = meshes.show_memory(
        console, mesh, models, batch_size=size[0], num_source=size[1], num_slots=program.num_slots
    )
    started = time.perf_counter()
    traced = decode.jitted_generate.trace(program, inputs)
    console.print(f"traced in {time.perf_counter() - started:.1f} s")
    for platform in _PLATFORMS.value:
        started = time.perf_counter()
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        took_s, num_lines = time.perf_counter() - started, len(text.splitlines())
        console.print(f"lowered for {platform} in {took_s:.1f} s: {num_lines} lines of StableHLO")
        rows.append({"platform": platform, "num_lines": num_lines, "seconds": round(took_s, 1)})
    results.save(console, _OUTPUT.value, "lower", rows)


if __name__ == "__main__":
    start.run(main)
