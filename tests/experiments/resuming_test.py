"""Outputs of a target in a file, which belong to the weights of that target."""

import jax
import pytest
from rich.console import Console

from experiments.lib import resuming
from specjax import data
from specjax.loading import Model
from specjax.models import t5
from tests.tiny_t5 import random_params

CONFIG = t5.T5Config(24, 16, 4, 16, 2, 1, 1)
PAIRS = [data.Pair([5, 9, 1], []), data.Pair([3, 4, 7, 1], [])]
OPTIONS = dict(temperature=0.0, seed=0, max_new_tokens=8)


@pytest.fixture(scope="module")
def targets():
    """Returns two targets of one shape, as if the second was trained into the directory of the first."""
    params = (jax.tree.map(lambda x: 2 * x, random_params(CONFIG, seed)) for seed in (0, 1))
    return [Model(t5.T5Network(each, CONFIG), None) for each in params]


def test_outputs_of_a_changed_target_are_generated_again(targets, tmp_path):
    console, path = Console(quiet=True), tmp_path / "outputs.json"
    first, second = (
        resuming.outputs(console, target, "directory", PAIRS, path, **OPTIONS) for target in targets
    )
    assert first != second == resuming.generated(console, targets[1], PAIRS, "", **OPTIONS)


def test_outputs_of_the_same_target_come_from_the_file(targets, tmp_path, monkeypatch):
    console, path = Console(quiet=True), tmp_path / "outputs.json"
    made = resuming.outputs(console, targets[0], "directory", PAIRS, path, **OPTIONS)
    monkeypatch.setattr(resuming, "generated", None)
    assert resuming.outputs(console, targets[0], "directory", PAIRS, path, **OPTIONS) == made
