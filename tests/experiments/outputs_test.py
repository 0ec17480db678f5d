"""A target's outputs are kept in a file, for the target that made them."""

import jax
import pytest
from rich.console import Console

from experiments import outputs, shapes
from specjax import data
from specjax.loading import Model
from specjax.models import t5

CONFIG = t5.T5Config(24, 16, 4, 16, 2, 1, 1)
PAIRS = [data.Pair([5, 9, 1], []), data.Pair([3, 4, 7, 1], [])]
OPTIONS = dict(temperature=0.0, seed=0, max_new_tokens=8)


@pytest.fixture(scope="module")
def targets():
    """Two of one shape, as if the second had been trained into the first one's directory."""
    params = (jax.tree.map(lambda x: 2 * x, shapes.random_params(CONFIG, seed)) for seed in (0, 1))
    return [Model(t5.T5Network(CONFIG), each, tokenizer=range(24)) for each in params]


def test_a_changed_target_is_not_answered_from_the_old_file(targets, tmp_path):
    console, path = Console(quiet=True), tmp_path / "outputs.json"
    first, second = (outputs.said(console, target, "directory", PAIRS, path, **OPTIONS) for target in targets)
    assert first != second == outputs.generated(console, targets[1], PAIRS, "", **OPTIONS)


def test_the_same_target_is_answered_from_the_file(targets, tmp_path, monkeypatch):
    console, path = Console(quiet=True), tmp_path / "outputs.json"
    made = outputs.said(console, targets[0], "directory", PAIRS, path, **OPTIONS)
    monkeypatch.setattr(outputs, "generated", None)
    assert outputs.said(console, targets[0], "directory", PAIRS, path, **OPTIONS) == made
