"""Placement of arrays: a mesh of data x model, and partition rules by parameter path.

Axes of the mesh: "data" divides the rows of a batch, "model" divides heads, the feed-forward
width and the vocabulary (Shoeybi et al. 2019, section 3). Both are `Auto`: the compiler
propagates the placement of params and batches through the program.

With several processes (hosts) each runs the same program on the same inputs, stores the parts of its own
devices, and returns the whole result (`fetch`).
"""

import os
import re
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Rules = Sequence[tuple[str, P]]

# Patterns are searched for in paths such as "encoder_layers_0/attention/q". Of the rules that match, the
# first whose axes the mesh divides decides: so keys and values with fewer heads than devices (the grouped
# heads of T5Gemma) are replicated.
T5_RULES: Rules = (
    (r"(^|/)embedding$", P("model", None)),  # [V, M]
    (r"^head$", P(None, "model")),  # [M, V]
    (r"_bias(_\d+)?/table$", P(None, "model")),  # [buckets, H]
    (r"/(attention|cross)/[qkv]$", P(None, "model", None)),  # [M, H, D]
    (r"/(attention|cross)/[kv]$", P()),
    (r"/(attention|cross)/o$", P("model", None, None)),  # [H, D, M]
    (r"/feed_forward/wi(_0|_1)?$", P(None, "model")),  # [M, F]
    (r"/feed_forward/wo$", P("model", None)),  # [F, M]
    (r"/(scale|vector)$", P()),
)
REPLICATED: Rules = ((r"", P()),)  # for small networks


def join_processes(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Connects several processes, so that JAX sees all their devices; call it before any other use of JAX.

    Args:
      coordinator: "host:port" of process 0. None: all three arguments are detected, as on a TPU VM or under
        Slurm or Open MPI (`jax.distributed.initialize`).
      num_processes: number of processes.
      process_id: index of this process, from 0.

    Raises:
      ValueError: only some of the three are given, or `process_id` is out of range.
    """
    given = (coordinator, num_processes, process_id)
    if None in given and given != (None,) * 3:
        raise ValueError(
            f"`coordinator`, `num_processes` and `process_id` must be given together, got {given}; omit all "
            "three where they can be detected"
        )
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ValueError(f"`process_id` must be in 0..{num_processes - 1}, got {process_id}")
    jax.distributed.initialize(coordinator, num_processes, process_id)


def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """Returns a mesh of the first `data * model` devices.

    Raises:
      ValueError: a size below 1, too few devices, or unused devices with several processes.
    """
    if not all(isinstance(size, int) and size >= 1 for size in (data, model)):
        raise ValueError(
            f"`data` and `model` must be whole numbers of at least 1, got data={data}, model={model}"
        )
    devices = jax.devices()
    if data * model > len(devices):
        raise ValueError(
            f"`data` times `model` must be at most {len(devices)}, the number of devices, got "
            f"{data} * {model}"
        )
    if data * model < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"`data` times `model` must be {len(devices)}, the devices of {jax.process_count()} processes, "
            f"got {data} * {model}"
        )
    return jax.make_mesh(
        (data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices[: data * model]
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the placement of replicated arrays."""
    return NamedSharding(mesh, P())


def by_row(mesh: Mesh) -> NamedSharding:
    """Returns the placement of a batch's arrays: axis 0 divided over "data"."""
    return NamedSharding(mesh, P("data"))


def of_cache(mesh: Mesh, rules: Rules = T5_RULES, num_heads: int | None = None) -> NamedSharding:
    """Returns the placement of cached keys and values `[B, H, ...]`: rows over "data", heads by `rules`.

    Args:
      num_heads: heads of keys and values; None: a number that the mesh divides. If the mesh does not divide
        them, the second axis of the result is None rather than left out, which states that the network itself
        is divided (see `keep_whole`).
    """
    over = next(iter(_matching(rules, "decoder_layers_0/attention/k")[0][1:2]), None)
    if over is None:
        return NamedSharding(mesh, P("data"))
    is_divided = num_heads is None or num_heads % mesh.shape[over] == 0
    return NamedSharding(mesh, P("data", over if is_divided else None))


def mesh_of(params: Any) -> Any:
    """Returns the mesh of params (or of their shapes); None: they are on no mesh of `make_mesh`."""
    for leaf in jax.tree.leaves(params):
        place = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
        if isinstance(place, NamedSharding) and "data" in place.mesh.shape:
            return place.mesh
    return None


def check_rows(mesh: Mesh, num_rows: int) -> None:
    """Raises a ValueError if a mesh does not divide the rows of a batch."""
    size = mesh.shape["data"]
    if num_rows % size:
        raise ValueError(
            f"`source_ids` must have a multiple of {size} rows (prompts times num_samples), the size of the "
            f"mesh axis 'data', got {num_rows}; add rows, or use a smaller mesh"
        )


def place_rows(batch: Any, mesh: Mesh, num_rows: int) -> Any:
    """Places every array `[B, ...]` of a batch, its rows divided over "data".

    Args:
      batch: a pytree of arrays, equal in every process; traced ones are constrained.
      num_rows: B.

    Raises:
      ValueError: the mesh does not divide the rows.
    """
    check_rows(mesh, num_rows)
    place = by_row(mesh)

    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.core.Tracer):
            return jax.lax.with_sharding_constraint(leaf, place)
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, place, lambda index: whole[index])

    return jax.tree.map(one, batch)


def keep_whole(tree: Any, place: NamedSharding | None) -> Any:
    """Constrains the outputs `[B, ...]` of a replicated network to stay undivided, except over rows.

    Without it the compiler propagates the target's divided vocabulary and heads to the draft, and every
    drafted token waits for other devices.

    Args:
      place: the placement of the network's cache (see `of_cache`). If it is None or that of a divided
        network, nothing is constrained.
    """
    if place is None or len(place.spec) > 1:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(place.mesh, P("data")))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Replicates arrays, which are equal in every process, on every device."""
    put = lambda x: jax.make_array_from_callback(x.shape, replicated(mesh), lambda index: x[index])  # noqa: E731
    return jax.tree.map(lambda leaf: put(np.asarray(leaf)), tree)


def memory_bytes(devices: Collection[jax.Device]) -> int | None:
    """Returns the total memory of these devices, which are of one kind; None: unknown."""
    device = next(device for device in devices if device.process_index == jax.process_index())
    if device.platform == "cpu":  # the CPU devices of a host share its memory
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError):  # not POSIX
            return None
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else limit * len(devices)


def fetch(tree: Any) -> Any:
    """Returns whole NumPy arrays in every process; all processes must call it."""

    def one(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            return multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(jax.device_get(leaf))

    return jax.tree.map(one, tree)


def _matching(rules: Rules, name: str) -> list[P]:
    """Returns the partition specs of the rules that match a path, at least one."""
    found = [spec for pattern, spec in rules if re.search(pattern, name)]
    if not found:
        raise ValueError(f"no partition rule matches the parameter {name!r}: add one to `rules`")
    return found


def _undivided(spec: P, shape: Sequence[int], mesh: Mesh) -> list[tuple[int, Any]]:
    """Returns the axes that the mesh cannot divide as `spec` requires, each with its mesh axis."""
    return [(i, part) for i, part in enumerate(spec) if part is not None and shape[i] % mesh.shape[part]]


def param_shardings(params: Any, mesh: Mesh, rules: Rules = T5_RULES) -> Any:
    """Returns the placement of every parameter, in the structure of `params`.

    Args:
      params: nested dicts of arrays, or of their shapes.
      rules: (regular expression, partition) pairs; of the rules that match a path, the first whose axes the
        mesh divides is used.

    Raises:
      ValueError: no rule matches a path, or the mesh does not divide an axis.
    """

    def place(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        specs = _matching(rules, name)
        spec = next((one for one in specs if not _undivided(one, leaf.shape, mesh)), specs[0])
        for axis, part in _undivided(spec, leaf.shape, mesh):
            raise ValueError(
                f"parameter {name} {leaf.shape}: axis {axis} is not divisible by the {mesh.shape[part]} "
                f"devices of the mesh axis {part!r}; choose a number that divides {leaf.shape[axis]}"
            )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(place, params)
