"""What flags hold, read and checked."""

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
    return flags.DEFINE_integer("seed", 0, "Of everything drawn.", lower_bound=0, upper_bound=most)


def numbers(flag: str, values: Sequence[str]) -> list[float]:
    """Returns the numbers of a list flag.

    Raises:
      ValueError: there are none, or one is no number.
    """
    try:
        found = [float(value) for value in values]
    except ValueError as error:
        raise ValueError(f"--{flag}={','.join(values)}: give numbers, as in --{flag}=0,1") from error
    if not found:
        raise ValueError(f"--{flag} is empty: give at least one number")
    return found


def counts(flag: str, values: Sequence[str]) -> list[int]:
    """Returns the whole numbers of a list flag, each at least 1.

    Raises:
      ValueError: there are none, or one is not a whole number of at least 1.
    """
    if not values or not all(value.isdecimal() and int(value) for value in values):
        raise ValueError(f"--{flag}={','.join(values)}: give whole numbers, at least 1, as in --{flag}=1,4")
    return [int(value) for value in values]


def _two(text: str) -> tuple[int, int] | None:
    """Returns both numbers of a text such as 2x4; None: it is no such text."""
    parts = text.split("x")
    is_pair = len(parts) == 2 and all(part.isdecimal() and int(part) for part in parts)
    return (int(parts[0]), int(parts[1])) if is_pair else None


def mesh(text: str) -> tuple[int, int]:
    """Returns the rows and columns of a mesh, DATAxMODEL.

    Raises:
      ValueError: it is no mesh.
    """
    if (found := _two(text)) is None:
        raise ValueError(f"--mesh={text}: give DATAxMODEL, two whole numbers, as in 2x4")
    return found


def shape(name: str, dtype: str, family: families.Config = families.PRESETS["t5-small"]) -> families.Config:
    """Returns a preset, its first layers ("t5gemma-2b-2b/2"), or a smaller relative of `family`.

    "1x256" has one layer on each side, 256 wide.

    Raises:
      ValueError: it is neither.
    """
    preset, _, depth = name.partition("/")
    if preset in families.PRESETS and (not depth or (depth.isdecimal() and int(depth))):
        config = dataclasses.replace(families.PRESETS[preset], dtype=dtype)
        return config.shallow(int(depth)) if depth else config
    if (found := _two(name)) is None:
        known = f"one of {', '.join(families.PRESETS)}, one/LAYERS for its first layers, or LAYERSxWIDTH"
        raise ValueError(f"{name!r} is no shape: give {known}")
    return family.resized(*found, dtype)


def rule(text: str) -> AcceptanceRule:
    """Returns an acceptance rule by its name, its numbers after colons.

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
            f"--rule={text}: give one of {', '.join(make)}; lenient needs its number, as in lenient:0.5 "
            f"({error})"
        ) from error
