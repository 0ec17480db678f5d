"""The recipe in CONTRIBUTING.md works as it is printed."""

import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.exactness import toys
from experiments.exactness.cases import Case, ToyDrafter, adapted
from specjax import decode
from specjax.drafters import Kind

TEXT = (pathlib.Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
(SOURCE,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
NAMES: dict = {"__name__": "recipe", "Kind": Kind, "ToyDrafter": ToyDrafter}
exec(SOURCE, NAMES)
# The lines that register it.
KIND, TOY = (eval(f"{{{line}}}", NAMES)["repeat"] for line in re.findall(r'`("repeat": .*?\))`', TEXT))


def test_the_printed_lines_register_the_drafter():
    assert KIND.make(None, 3) == NAMES["RepeatDrafter"](3)
    assert TOY.make(None, 3) == KIND.make(None, 3) and TOY.warm_up is None


@pytest.mark.parametrize("way", [lambda drafter: drafter, adapted], ids=["fixed", "adaptive"])
def test_the_printed_drafter_keeps_the_distribution(way):
    case = Case(lambda toys: way(TOY.make(toys, 2)))
    assert case.error() < 1e-12
    assert case.outputs().num_accepted > 0


def test_the_printed_drafter_generates_what_the_target_does():
    network = toys.ToyNetwork(jnp.asarray(toys.random_table(0, 3)))
    arguments = (network, np.array([[2, 1, 0], [0, 1, 2]]), np.ones((2, 3), bool))
    drafted = decode.generate(*arguments, drafter=KIND.make(None, 2), max_new_tokens=12, eos_ids=())
    plain = decode.generate(*arguments, max_new_tokens=12, eos_ids=())
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    assert int(drafted.stats.accepted.sum()) > 0
