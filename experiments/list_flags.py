"""What list flags hold, checked."""

from collections.abc import Sequence


def numbers(flag: str, values: Sequence[str]) -> list[float]:
    """The numbers of a list flag.

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
    """The whole numbers of a list flag, each at least 1.

    Raises:
      ValueError: there are none, or one is none.
    """
    if not values or not all(value.isdecimal() and int(value) for value in values):
        raise ValueError(f"--{flag}={','.join(values)}: give whole numbers, at least 1, as in --{flag}=1,4")
    return [int(value) for value in values]
