"""Rules by their names."""

from collections.abc import Callable

from specjax import acceptance
from specjax.types import AcceptanceRule


def parse(text: str) -> AcceptanceRule:
    """A rule by its name, its numbers after colons.

    Raises:
      ValueError: there is no such rule, or a number that is none.
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
