"""Where arrays lie: a mesh of data x model, and partition rules by parameter path.

Axes of the mesh: "data" divides the rows of a batch, "model" divides heads, the feed-forward
width and the vocabulary (Shoeybi et al. 2019, section 3). Both are `Auto`: the compiler
propagates the placement of params and batches through the program.

With several processes (hosts) every one runs the same program on the same inputs, holds the parts
of its own devices, and gets the whole result (`fetch`).
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

# Searched for in "encoder_layers_0/attention/q"; of those that are found the first decides that the mesh
# divides: keys and values of fewer heads than devices (grouped heads, as T5Gemma has them) are whole on each.
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
    """Makes the devices of several processes one set; call it before anything else touches a device.

    Args:
      coordinator: "host:port" of process 0. None: all three are detected, as on a TPU VM, under Slurm
        or Open MPI (`jax.distributed.initialize`).
      num_processes: how many there are.
      process_id: which this one is, from 0.

    Raises:
      ValueError: only some of the three, or a `process_id` out of range.
    """
    given = (coordinator, num_processes, process_id)
    if None in given and given != (None,) * 3:
        raise ValueError(
            f"`coordinator`, `num_processes` and `process_id` must be given together, got {given}; leave all "
            "out where they can be detected"
        )
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ValueError(f"`process_id` must be in 0..{num_processes - 1}, got {process_id}")
    jax.distributed.initialize(coordinator, num_processes, process_id)


def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """Returns a mesh of the first `data * model` devices.

    Raises:
      ValueError: a size below 1, fewer devices than that, or devices left out with several processes.
    """
    if not all(isinstance(size, int) and size >= 1 for size in (data, model)):
        raise ValueError(
            f"`data` and `model` must be whole numbers of at least 1, got data={data}, model={model}"
        )
    devices = jax.devices()
    if data * model > len(devices):
        raise ValueError(
            f"`data` times `model` must be at most {len(devices)}, all devices, got {data} * {model}"
        )
    if data * model < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"`data` times `model` must be {len(devices)}, all devices of {jax.process_count()} processes, "
            f"got {data} * {model}"
        )
    return jax.make_mesh(
        (data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices[: data * model]
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the placement of whole arrays on every device."""
    return NamedSharding(mesh, P())


def by_row(mesh: Mesh) -> NamedSharding:
    """Returns the placement of a batch's arrays: axis 0 divided over "data"."""
    return NamedSharding(mesh, P("data"))


def of_cache(mesh: Mesh, rules: Rules = T5_RULES, num_heads: int | None = None) -> NamedSharding:
    """Returns the placement of cached keys and values `[B, H, ...]`: rows over "data", heads by `rules`.

    Args:
      num_heads: of keys and values; None: as many as the mesh divides. Where it does not divide them they are
        whole, and the second axis is named all the same: None, for the network itself is divided.
    """
    over = next(iter(_matching(rules, "decoder_layers_0/attention/k")[0][1:2]), None)
    if over is None:
        return NamedSharding(mesh, P("data"))
    is_divided = num_heads is None or num_heads % mesh.shape[over] == 0
    return NamedSharding(mesh, P("data", over if is_divided else None))


def mesh_of(params: Any) -> Any:
    """Returns the mesh that params (or their shapes) lie on; None: not on one of `make_mesh`."""
    for leaf in jax.tree.leaves(params):
        place = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
        if isinstance(place, NamedSharding) and "data" in place.mesh.shape:
            return place.mesh
    return None


def check_rows(mesh: Mesh, num_rows: int) -> None:
    """Raises a ValueError where a mesh does not divide the rows of a batch."""
    size = mesh.shape["data"]
    if num_rows % size:
        raise ValueError(
            f"`source_ids` must have a multiple of {size} rows (prompts times num_samples), the devices of "
            f"the mesh axis 'data', got {num_rows}; or use a mesh of fewer"
        )


def place_rows(batch: Any, mesh: Mesh, num_rows: int) -> Any:
    """Puts every array `[B, ...]` of a batch onto the devices that its rows belong to.

    Args:
      batch: arrays of any structure, whole and equal in every process; traced ones are constrained.
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
    """Constrains what a replicated network computes, arrays `[B, ...]`, to be whole on every device.

    Without it the compiler carries the target's divided vocabulary and heads over to the draft, and every
    drafted token waits for other devices.

    Args:
      place: of the network's cache (see `of_cache`); None, or that of a divided network: nothing is
        constrained.
    """
    if place is None or len(place.spec) > 1:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(place.mesh, P("data")))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Puts whole arrays, equal in every process, onto every device."""
    put = lambda x: jax.make_array_from_callback(x.shape, replicated(mesh), lambda index: x[index])  # noqa: E731
    return jax.tree.map(lambda leaf: put(np.asarray(leaf)), tree)


def memory_bytes(devices: Collection[jax.Device]) -> int | None:
    """Returns the memory that these devices have together, all being like a local one; None: unknown."""
    device = next(device for device in devices if device.process_index == jax.process_index())
    if device.platform == "cpu":  # all of a host's share its memory
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError):  # no POSIX
            return None
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else limit * len(devices)


def fetch(tree: Any) -> Any:
    """Returns numpy arrays, whole in every process; all processes must call it."""

    def one(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            return multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(jax.device_get(leaf))

    return jax.tree.map(one, tree)


def _matching(rules: Rules, name: str) -> list[P]:
    """Returns the partitions of the rules that match a path, at least one."""
    found = [spec for pattern, spec in rules if re.search(pattern, name)]
    if not found:
        raise ValueError(f"no partition rule matches the parameter {name!r}: add one to `rules`")
    return found


def _undivided(spec: P, shape: Sequence[int], mesh: Mesh) -> list[tuple[int, Any]]:
    """Returns the axes that a mesh does not divide as `spec` asks, with the mesh axis of each."""
    return [(i, part) for i, part in enumerate(spec) if part is not None and shape[i] % mesh.shape[part]]


def param_shardings(params: Any, mesh: Mesh, rules: Rules = T5_RULES) -> Any:
    """Returns the placement of every parameter, in the structure of `params`.

    Args:
      params: nested dicts of arrays, or of their shapes.
      rules: (regular expression, partition) pairs; of those that match a path the first decides that the
        mesh divides.

    Raises:
      ValueError: a path that no rule matches, or an axis that the mesh does not divide.
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
