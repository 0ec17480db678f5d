"""Where arrays lie: a mesh of data x model, and partition rules by parameter path.

Axes of the mesh: "data" divides the rows of a batch, "model" divides heads, the feed-forward
width and the vocabulary (Shoeybi et al. 2019, section 3). Both are `Auto`: the compiler
propagates the placement of params and batches through the program.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Rules = Sequence[tuple[str, P]]

# Searched for in "encoder_layers_0/attention/q"; the first that is found decides.
T5_RULES: Rules = (
    (r"^embedding$", P("model", None)),  # [V, M]
    (r"^head$", P(None, "model")),  # [M, V]
    (r"_bias/table$", P(None, "model")),  # [buckets, H]
    (r"/(attention|cross)/[qkv]$", P(None, "model", None)),  # [M, H, D]
    (r"/(attention|cross)/o$", P("model", None, None)),  # [H, D, M]
    (r"/feed_forward/wi(_0|_1)?$", P(None, "model")),  # [M, F]
    (r"/feed_forward/wo$", P("model", None)),  # [F, M]
    (r"/scale$", P()),
)
REPLICATED: Rules = ((r"", P()),)  # small networks lie on every device


def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """A mesh of the first `data * model` devices.

    Raises:
      ValueError: a size below 1, or fewer devices than that.
    """
    if min(data, model) < 1:
        raise ValueError(f"data={data}, model={model}: each must be at least 1")
    devices = jax.devices()
    if data * model > len(devices):
        raise ValueError(
            f"data={data} times model={model} needs {data * model} devices, there are {len(devices)}: "
            "lower one of them"
        )
    return jax.make_mesh(
        (data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices[: data * model]
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Everything on every device."""
    return NamedSharding(mesh, P())


def by_row(mesh: Mesh) -> NamedSharding:
    """Axis 0 divided over "data": for every array of a batch."""
    return NamedSharding(mesh, P("data"))


def param_shardings(params: Any, mesh: Mesh, rules: Rules = T5_RULES) -> Any:
    """The placement of every parameter, in the structure of `params`.

    Args:
      params: nested dicts of arrays, or of their shapes.
      rules: (regular expression, partition) pairs; the first that matches a path decides.

    Raises:
      ValueError: a path that no rule matches, or an axis that the mesh does not divide.
    """

    def place(path: Any, leaf: Any) -> NamedSharding:
        name = "/".join(str(key.key) for key in path)
        spec = next((spec for pattern, spec in rules if re.search(pattern, name)), None)
        if spec is None:
            raise ValueError(f"no partition rule matches the parameter {name!r}: add one to `rules`")
        for axis, part in enumerate(spec):
            if part is not None and leaf.shape[axis] % mesh.shape[part]:
                raise ValueError(
                    f"parameter {name} {leaf.shape}: axis {axis} is not divisible by the {mesh.shape[part]} "
                    f"devices of the mesh axis {part!r}; choose a number that divides {leaf.shape[axis]}"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(place, params)
