"""The drafters of --num_draft."""

import types

import jax.numpy as jnp
import pytest
from absl import flags

from experiments.lib import columns, measure
from specjax import acceptance
from specjax.drafters import AdaptiveDrafter, LookaheadDrafter, ModelDrafter, ModelTreeDrafter, StagedDrafter
from specjax.loading import Model
from specjax.models import t5

MODEL = Model(t5.T5Network({"embedding": jnp.zeros((5, 1))}, t5.T5Config(5, 4, 4, 4, 1, 1, 1)), None)


@pytest.fixture(autouse=True)
def parsed():
    flags.FLAGS.mark_as_parsed()


def priced(num_rows, **prices):
    """Returns a trial with `(cost, gain)` of each K and alpha .6; all pay off unless `pays` is given."""
    pays = prices.pop("pays", True)
    return types.SimpleNamespace(
        price=lambda drafter: measure.Price(*prices[f"k{drafter.num_draft}"], 0.6, num_rows),
        pays=lambda drafter: pays,
    )


@pytest.mark.parametrize(
    ("column", "kind", "num_draft"),
    [
        ("5", ModelDrafter, 5),
        ("3x2x1", ModelTreeDrafter, 15),
        ("lookahead:4-3-2", LookaheadDrafter, 12),
        ("staged:5-3", StagedDrafter, 5),
    ],
)
def test_columns_make_drafters_by_name(column, kind, num_draft):
    drafter = columns.drafter(MODEL, MODEL, column)
    assert isinstance(drafter, kind) and drafter.num_draft == num_draft


def test_columns_adapt_one_row_and_give_a_batch_the_best_length():
    prices = dict(k1=(1.4, 1.7), k3=(2.3, 2.4))
    alone = columns.drafter(MODEL, MODEL, "adaptive:1-3", priced(1, **prices))
    assert isinstance(alone, AdaptiveDrafter) and alone.costs == (1.0, 1.4, 2.3)
    assert alone.prior_alpha == 0.6
    batch = columns.drafter(MODEL, MODEL, "adaptive:1-3", priced(4, **prices))
    assert isinstance(batch, ModelDrafter) and batch.num_draft == 1
    tree = columns.drafter(MODEL, MODEL, "adaptive:2x1", priced(1, k4=(2.0, 2.1)))
    assert tree.drafts_trees and tree.costs == (1.0, 2.0)


@pytest.mark.parametrize("num_rows", [1, 64])
def test_columns_drop_adaptive_drafters_that_do_not_pay_off(num_rows):
    assert columns.drafter(MODEL, MODEL, "adaptive:3", priced(num_rows, k3=(2.3, 2.3))) is None
    tried = priced(num_rows, k3=(2.3, 2.4), pays=False)
    assert columns.drafter(MODEL, MODEL, "adaptive:3", tried) is None
    assert (
        columns.drafter(MODEL, MODEL, "adaptive:1-3", priced(num_rows, k1=(1.5, 1.4), k3=(2.3, 2.2))) is None
    )


@pytest.mark.parametrize(
    ("column", "draft", "words"),
    [
        ("guess:3", MODEL, "`--num_draft` must be .* KIND:NUMBERS, got guess:3; kinds are adaptive|chain"),
        ("lookup", MODEL, "`--num_draft` must have a number .*, got lookup; .* lookup:4"),
        ("five", MODEL, "`--num_draft` must be a whole number.*, got five"),
        ("lookup:3-4", MODEL, "those that its kind takes, got lookup:3-4"),
        ("5", None, "--num_draft=5 needs a draft model; give --draft"),
        ("eagle:4", MODEL, "--num_draft=eagle:4 needs eagle heads of this target"),
        ("adaptive:1-3", MODEL, "must not be adaptive here, got adaptive:1-3"),
    ],
)
def test_columns_raise_for_an_invalid_column(column, draft, words):
    with pytest.raises(ValueError, match=words):
        columns.drafter(MODEL, draft, column)


def test_columns_know_which_are_alike_and_have_an_alpha():
    assert columns.all_alike("eagle:4") and not columns.all_alike("adaptive+eagle:4")
    alpha = {
        column: columns.has_alpha(column, False, acceptance.speculative)
        for column in ("medusa:2x1", "one_pass:5", "adaptive:3")
    }
    assert alpha == {"medusa:2x1": False, "one_pass:5": True, "adaptive:3": False}
    assert columns.has_alpha("5", True, acceptance.speculative)
    assert not columns.has_alpha("5", True, acceptance.block)
