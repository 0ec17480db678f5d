"""Flags for many devices and hosts, for an experiment that decodes.

Every process runs the same command, --process_id aside; process 0 alone prints and writes.
"""

import jax
from absl import flags
from jax.sharding import Mesh
from rich.console import Console

from experiments import meshes
from experiments import start as start_lib
from specjax import sharding

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
    # Refused before anybody waits for others.
    mesh = None if _MESH.value is None else meshes.parse(_MESH.value)
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


def is_first() -> bool:
    """Whether this process prints and writes."""
    return jax.process_index() == 0
