"""Flags for decoding on many devices and hosts, and the memory that models take per device.

Every process runs the same command apart from --process_id; only process 0 prints and writes.
"""

from collections.abc import Sequence

import jax
from absl import flags
from jax.sharding import Mesh
from rich.console import Console

from experiments.lib import parse
from specjax import analysis, loading, sharding
from specjax.models import families


def define_flags() -> None:
    """Defines the flags of an experiment that decodes on many devices and hosts."""
    flags.DEFINE_string("mesh", None, "DATAxMODEL, as in 2x4: devices along the data and the model axis.")
    flags.DEFINE_string(
        "coordinator",
        None,
        'With several processes: HOST:PORT of process 0, or "auto" on a TPU VM or under Slurm.',
    )
    flags.DEFINE_integer("num_processes", None, "Number of processes, unless --coordinator=auto.")
    flags.DEFINE_integer("process_id", None, "Index of this process, from 0.")
    flags.DEFINE_bool("divide_draft", False, "Divide the draft like the target; otherwise it is replicated.")


def join() -> Mesh | None:
    """Joins the other processes, if any, and returns the mesh of the flags; None without one.

    Raises:
      ValueError: an invalid or missing mesh.
    """
    given = flags.FLAGS
    mesh = (
        None if given.mesh is None else parse.mesh(given.mesh)
    )  # checked before processes wait for each other
    if given.coordinator == "auto":
        sharding.join_processes()
    elif given.coordinator or given.num_processes or given.process_id is not None:
        sharding.join_processes(given.coordinator, given.num_processes, given.process_id)
    if mesh is None and jax.process_count() > 1:
        raise ValueError(f"`--mesh` must be given with {jax.process_count()} processes; give DATAxMODEL")
    return mesh and sharding.make_mesh(*mesh)


def draft_rules() -> sharding.Rules:
    """Returns the partition rules of the draft by --divide_draft."""
    return sharding.T5_RULES if flags.FLAGS.divide_draft else sharding.REPLICATED


def is_first() -> bool:
    """Returns whether this process prints and writes."""
    return jax.process_index() == 0


def show_memory(
    console: Console,
    mesh: Mesh,
    models: Sequence[tuple[str, families.Config, sharding.Rules, int]],
    *,
    batch_size: int,
    num_source: int,
    num_slots: int,
) -> list[dict[str, object]]:
    """Prints the memory per device of each model before any is loaded, and returns it as rows.

    Args:
      mesh: the mesh.
      models: name, shape, partition rules, and tokens per decoder call of each.
      batch_size, num_source, num_slots: sizes of the caches.

    Raises:
      ValueError: the mesh does not divide the rows or a parameter.
    """
    sharding.check_rows(mesh, batch_size)
    sizes = dict(batch_size=batch_size, num_source=num_source, num_slots=num_slots)
    rows: list[dict[str, object]] = []
    together = 0.0
    console.print(
        f"memory per device, {mesh.size} devices (data x model = {'x'.join(map(str, mesh.devices.shape))}):"
    )
    for name, config, rules, num_new in models:
        network = loading.outline(config, mesh, rules).network
        place = network.cache_sharding
        memory = analysis.memory_per_device(config, network.params, place, num_new=num_new, **sizes)
        gib = {part: size / 2**30 for part, size in (*memory._asdict().items(), ("total", memory.total))}
        console.print(f"  {name}: {', '.join(f'{part} {size:.3f}' for part, size in gib.items())} GiB")
        rows.append({"model": name, **{f"{part}_gib": size for part, size in gib.items()}})
        together += gib["total"]
    console.print(f"  together {together:.2f} GiB, without activations of a call and of the encoder")
    return rows


def show_source_memory(
    console: Console, config: families.Config, mesh: Mesh, num_rows: int, num_together: int, width: int
) -> None:
    """Prints the memory that sources of `width` tokens take on all devices, before a model is loaded.

    Args:
      config: the config of the target.
      mesh: the mesh.
      num_rows: rows in the cache.
      num_together: rows that are encoded together.
      width: source tokens.

    Raises:
      ValueError: they exceed the memory of the devices.
    """
    sizes = dict(num_params=0, batch_size=num_rows, num_source=width, num_slots=0, num_new=0)
    cross = analysis.memory(config, **sizes).cross / 2**30
    scores = 4 * num_together * config.num_heads * width**2 / 2**30
    console.print(
        f"sources of up to {width} tokens: {cross:.2f} GiB of keys and values for {num_rows} rows, and "
        f"{scores:.2f} GiB of attention scores in an encoder layer, {num_together} rows at a time"
    )
    available = sharding.memory_bytes(mesh.devices.ravel().tolist())
    if available is not None and cross + scores > available / 2**30:
        raise ValueError(
            f"sources of {width} tokens must fit in {available / 2**30:,.0f} GiB of memory, got "
            f"{cross + scores:,.0f} GiB; lower --batch_size, or --max_source_length with --truncate"
        )
