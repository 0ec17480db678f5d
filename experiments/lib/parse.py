"""Parses and checks the values of flags."""

import dataclasses
from collections.abc import Callable, Sequence

from absl import flags

from specjax import acceptance
from specjax.models import convert, families
from specjax.types import AcceptanceRule


def define_dtype() -> flags.FlagHolder[str | None]:
    """Defines --dtype."""
    return flags.DEFINE_enum(
        "dtype", None, convert.DTYPES, "Compute dtype; default float32 on CPU, bfloat16 elsewhere."
    )


def define_seed() -> flags.FlagHolder[int]:
    """Defines --seed."""
    most = 2**32 - 1
    return flags.DEFINE_integer("seed", 0, "Seed of all random draws.", lower_bound=0, upper_bound=most)


def numbers(flag: str, values: Sequence[str]) -> list[float]:
    """Returns the numbers of a list flag.

    Raises:
      ValueError: an empty list, or a value that is not a number.
    """
    try:
        found = [float(value) for value in values]
    except ValueError as error:
        raise ValueError(f"`--{flag}` must be numbers, as in 0,1, got {','.join(values)}") from error
    if not found:
        raise ValueError(f"`--{flag}` must not be empty; give at least one number")
    return found


def counts(flag: str, values: Sequence[str]) -> list[int]:
    """Returns the whole numbers of a list flag, each at least 1.

    Raises:
      ValueError: an empty list, or a value that is not a whole number of at least 1.
    """
    if not values or not all(value.isdecimal() and int(value) for value in values):
        raise ValueError(f"`--{flag}` must be whole numbers of at least 1, as in 1,4, got {','.join(values)}")
    return [int(value) for value in values]


def _two(text: str) -> tuple[int, int] | None:
    """Returns both numbers of a text such as 2x4; None for any other text."""
    parts = text.split("x")
    is_pair = len(parts) == 2 and all(part.isdecimal() and int(part) for part in parts)
    return (int(parts[0]), int(parts[1])) if is_pair else None


def mesh(text: str) -> tuple[int, int]:
    """Returns the sizes of a mesh, DATAxMODEL.

    Raises:
      ValueError: an invalid mesh.
    """
    if (found := _two(text)) is None:
        raise ValueError(f"`--mesh` must be DATAxMODEL, two whole numbers as in 2x4, got {text}")
    return found


def shape(name: str, dtype: str, family: families.Config = families.PRESETS["t5-small"]) -> families.Config:
    """Returns the config of a shape.

    Args:
      name: a preset; "PRESET/LAYERS" for its first layers, as in "t5gemma-2b-2b/2"; or LAYERSxWIDTH for a
        smaller version of `family`, as in "1x256": one layer on each side, 256 wide.
      dtype: dtype of the computation.
      family: the config that LAYERSxWIDTH changes.

    Raises:
      ValueError: an unknown name.
    """
    preset, _, depth = name.partition("/")
    if preset in families.PRESETS and (not depth or (depth.isdecimal() and int(depth))):
        config = dataclasses.replace(families.PRESETS[preset], dtype=dtype)
        return config.shallow(int(depth)) if depth else config
    if (found := _two(name)) is None:
        known = f"one of {', '.join(families.PRESETS)}, PRESET/LAYERS, or LAYERSxWIDTH"
        raise ValueError(f"a shape must be {known}, got {name!r}")
    return family.resized(*found, dtype)


def rule(text: str) -> AcceptanceRule:
    """Returns an acceptance rule by its name, which numbers may follow after colons.

    Raises:
      ValueError: an unknown rule, or invalid numbers.
    """
    name, *numbers = text.split(":")
    make: dict[str, Callable[..., AcceptanceRule]] = {
        "speculative": lambda: acceptance.speculative,
        "block": lambda: acceptance.block,
        "multi_round": lambda: acceptance.multi_round,
        "lenient": acceptance.Lenient,
        "typical": acceptance.Typical,
    }
    try:
        return make[name](*map(float, numbers))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"`--rule` must be one of {', '.join(make)}, with numbers as in lenient:0.5, got {text} ({error})"
        ) from error
