"""Meshes of devices: their shape, and what models take of each device."""

from collections.abc import Sequence

from jax.sharding import Mesh
from rich.console import Console

from specjax import analysis, loading, sharding
from specjax.models import t5


def parse(text: str) -> tuple[int, int]:
    """Rows and columns of a mesh.

    Raises:
      ValueError: it is none.
    """
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"--mesh={text}: give DATAxMODEL, two whole numbers, as in 2x4")
    return int(parts[0]), int(parts[1])


def show_memory(
    console: Console,
    mesh: Mesh,
    models: Sequence[tuple[str, t5.T5Config, sharding.Rules, int]],
    *,
    batch_size: int,
    num_source: int,
    num_slots: int,
) -> list[dict[str, object]]:
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
            config,
            model.params,
            sharding.of_cache(mesh, rules),
            batch_size=batch_size,
            num_source=num_source,
            num_slots=num_slots,
            num_new=num_new,
        )
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
