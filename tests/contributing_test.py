"""The recipe in CONTRIBUTING.md works as it is printed."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import exact_law, law_cases
from specjax import acceptance, decode, rounds

TEXT = (pathlib.Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def drafter():
    (source,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    names: dict = {"__name__": "recipe"}
    exec(source, names)
    return names["RepeatDrafter"](2)


def test_the_printed_drafter_keeps_the_law(drafter):
    network = exact_law.ToyNetwork(3)
    table = exact_law.random_table(0, 3, dtype=np.float64)
    program = rounds.Program(network, exact_law.ArgmaxDrafter(drafter), acceptance.speculative, 8, 1, (), 0)
    case = law_cases.Case()
    with jax.enable_x64(True):
        law = exact_law.exact_law(program, rounds.AllParams(table), law_cases.SOURCE, 4, case.options)
    expected = exact_law.target_law(table, law_cases.SOURCE, 4, case.options)
    assert exact_law.law_error(law.probability, expected) < 1e-12
    assert law.num_accepted > 0


def test_the_printed_drafter_generates_what_the_target_says(drafter):
    network, params = exact_law.ToyNetwork(3), jnp.asarray(exact_law.random_table(0, 3))
    sources = np.array([[2, 1, 0], [0, 1, 2]])
    arguments = (network, params, sources, np.ones((2, 3), bool))
    drafted = decode.generate(*arguments, drafter=drafter, seed=0, max_new_tokens=12, eos_ids=())
    plain = decode.generate(*arguments, seed=0, max_new_tokens=12, eos_ids=())
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    assert int(drafted.stats.accepted.sum()) > 0
