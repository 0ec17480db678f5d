"""Flags for many devices and hosts, shared by the experiments that decode.

Every process runs the same command, --process_id aside; process 0 alone prints and writes.
"""

from collections.abc import Sequence

import jax
from absl import flags
from jax.sharding import Mesh
from rich.console import Console

from experiments import start as start_lib
from specjax import analysis, loading, sharding
from specjax.models import t5

_MESH = flags.DEFINE_string("mesh", None, "DATAxMODEL, as in 2x4: decode on that many devices.")
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, 'Several processes: HOST:PORT of process 0, or "auto" on a TPU VM and under Slurm.'
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many, unless --coordinator=auto.")
_DIVIDE = flags.DEFINE_bool("divide_draft", False, "Divide the draft as the target; else whole everywhere.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which one this is, from 0.")


def start() -> tuple[Mesh | None, Console]:
    """Joins the other processes, if there are any; the mesh asked for, and where to print.

    Raises:
      ValueError: flags that cannot be used.
    """
    console = start_lib.console()
    mesh = None if _MESH.value is None else parse(_MESH.value)  # refused before anybody waits for others
    if _COORDINATOR.value == "auto":
        sharding.join_processes()
    elif _COORDINATOR.value or _NUM_PROCESSES.value or _PROCESS_ID.value is not None:
        sharding.join_processes(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    if mesh is None and jax.process_count() > 1:
        raise ValueError(f"--mesh=None with {jax.process_count()} processes: give DATAxMODEL")
    console.quiet = not is_first()
    return mesh and sharding.make_mesh(*mesh), console


def draft_rules() -> sharding.Rules:
    """--divide_draft."""
    return sharding.T5_RULES if _DIVIDE.value else sharding.REPLICATED


def parse(text: str) -> tuple[int, int]:
    """Rows and columns of a mesh.

    Raises:
      ValueError: it is none.
    """
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"--mesh={text}: give DATAxMODEL, two whole numbers, as in 2x4")
    return int(parts[0]), int(parts[1])


def is_first() -> bool:
    """Whether this process prints and writes."""
    return jax.process_index() == 0


def show_memory(
    console: Console, mesh: Mesh, models: Sequence[tuple[str, t5.T5Config, sharding.Rules, int]], *,
    batch_size: int, num_source: int, num_slots: int,
) -> list[dict[str, object]]:  # fmt: skip
    """Prints what each model takes of every device, before any is loaded; and returns those rows.

    Args:
      models: name, shape, rules, and tokens of a decoder call.

    Raises:
      ValueError: the mesh does not divide the rows or a parameter.
    """
    sharding.check_rows(mesh, batch_size)
    rows: list[dict[str, object]] = []
    for name, config, rules, num_new in models:
        model = loading.outline(config, mesh, rules)
        parts = analysis.memory_per_device(
            config, model.params, sharding.of_cache(mesh, rules), batch_size=batch_size,
            num_source=num_source, num_slots=num_slots, num_new=num_new,
        )  # fmt: skip
        gib = {f"{part}_gib": size / 2**30 for part, size in parts._asdict().items()}
        rows.append({"model": name, **gib, "total_gib": parts.total / 2**30})
    total = sum(float(str(row["total_gib"])) for row in rows)
    console.print(
        f"memory of each of {mesh.size} devices (data x model = {'x'.join(map(str, mesh.devices.shape))}):"
    )
    for row in rows:
        sizes = ", ".join(f"{k.removesuffix('_gib')} {v:.3f}" for k, v in row.items() if k != "model")
        console.print(f"  {row['model']}: {sizes} GiB")
    console.print(f"  together {total:.2f} GiB, activations of a call and of the encoder not counted")
    return rows
