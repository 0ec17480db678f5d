"""Adaptive draft length: each row chooses its own, and drafts nothing where that does not pay off.

For the distribution see acceptance_test.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.exactness.cases import DRAFTERS, Toys
from experiments.exactness.toys import ToyHeads, ToyNetwork, random_table
from specjax import acceptance, decode, drafters
from specjax.drafters import AdaptiveDrafter, ModelDrafter

V = 5
TARGET, DRAFT = (ToyNetwork(jnp.asarray(random_table(seed, V))) for seed in (0, 1))
SOURCES = np.random.default_rng(0).integers(0, V, (6, 3))


def run(drafter, rows=slice(None), **options):
    return decode.generate(
        TARGET,
        SOURCES[rows],
        np.ones(SOURCES[rows].shape, bool),
        drafter=drafter,
        **dict(max_new_tokens=30, seed=np.arange(6)[rows], eos_ids=()) | options,
    )


def adapted(costs, network=DRAFT, num_draft=4, **settings):
    return drafters.adaptive(ModelDrafter(network, num_draft), costs, **settings)


COSTS = {1: 1.2, 2: 1.4, 4: 1.8}


def test_a_twin_is_drafted_to_the_last_and_a_stranger_hardly():
    twin = run(adapted(COSTS, TARGET)).stats
    assert float(twin.alpha.min()) == 1 and int(twin.num_rounds.max()) <= 8
    opposite = ToyNetwork(-TARGET.table)  # its argmax is the target's least likely token
    stranger = run(adapted(COSTS, opposite)).stats
    assert int(stranger.accepted.sum()) == 0 < int(stranger.num_drafted.min())
    per_round = [np.asarray(stats.num_drafted / stats.num_rounds) for stats in (stranger, twin)]
    assert per_round[0].max() < 1 and per_round[1].min() > 3


# One for each state that a drafter keeps: a cache, that of a tree, of two drafters, none, pairs, features.
# Every drafter catches up in oracle_test.
NAMES = ("model", "model tree", "staged lookup", "lookup", "eagle tree", "one pass")
ALL = {name: DRAFTERS[name].make(Toys(DRAFT, TARGET, ToyHeads(DRAFT.table)), 2) for name in NAMES}
ADAPTED = {
    name: drafters.adaptive(drafter, {drafter.num_draft: 1.5} if drafter.drafts_trees else {1: 1.3, 2: 1.6})
    for name, drafter in ALL.items()
}


@pytest.mark.parametrize("name", ADAPTED)
def test_greedy_output_is_the_targets_and_rows_do_not_depend_on_their_mates(name):
    """Draft caches lag in rounds without a draft and catch up later, in mixed and in uniform batches."""
    drafter, mixed = ADAPTED[name], np.array([0.0, 1.0, 0.0, 1.0, 0.0, 1.0], np.float32)
    together = run(drafter, temperature=mixed)
    lengths = np.asarray(together.stats.num_drafted / together.stats.num_rounds)
    assert len(set(lengths.tolist())) > 1
    np.testing.assert_array_equal(run(None).tokens[::2], together.tokens[::2])
    for row in (1, 3):
        alone = run(drafter, [row] * 6, temperature=1.0)  # of the same shape: compiled already
        np.testing.assert_array_equal(alone.tokens, np.tile(together.tokens[row], (6, 1)))
        assert set(alone.stats.num_drafted.tolist()) == {int(together.stats.num_drafted[row])}


@pytest.mark.parametrize("rule", [acceptance.block, acceptance.multi_round, acceptance.Typical()])
def test_every_rule_verifies_calls_of_every_width_in_one_program(rule):
    stats = run(adapted({1: 1.3, 2: 1.7}, num_draft=2), temperature=1.0, rule=rule).stats
    np.testing.assert_array_equal(stats.num_emitted, 30)
    assert len(set(np.asarray(stats.num_drafted / stats.num_rounds).tolist())) > 1


def test_a_greedy_row_is_as_confident_beside_a_sampled_one_as_alone():
    drafter = adapted({1: 1.1, 2: 1.2}, num_draft=2, min_confidence=0.4)
    mixed = np.array([0.0, 1.0, 0.0, 1.0, 0.0, 1.0], np.float32)
    together = run(drafter, temperature=mixed).stats
    alone = run(drafter, temperature=0.0).stats
    np.testing.assert_array_equal(together.num_drafted[::2], alone.num_drafted[::2])
    unsure = run(adapted({1: 1.1, 2: 1.2}, num_draft=2), temperature=0.0).stats
    assert int(alone.num_drafted.sum()) < int(unsure.num_drafted.sum())


def test_rows_that_have_ended_ask_for_nothing():
    """A batch of an ended row and one that does not draft runs decoding steps."""
    stats = run(adapted(COSTS, TARGET), max_new_tokens=[0, 1, 2, 3, 5, 30]).stats
    np.testing.assert_array_equal(stats.num_drafted[:5], [0, 0, 1, 2, 4])


def test_the_draft_after_a_pause_is_what_it_would_have_been_without():
    """The draft's cache caught up: all drafts of a twin are accepted after many decoding steps."""

    class Pausing(AdaptiveDrafter):
        """Drafts nothing for eleven rounds, then four tokens a round."""

        def choose_length(self, state, context):
            return jnp.where(state.tested < 11, 0, 4)

        def commit(self, state, round):
            return state.replace(inner=self.inner.commit(state.inner, round), tested=state.tested + 1)

    drafter = Pausing(ModelDrafter(TARGET, 4), (0, 4), (1.0, 2.0))
    stats = run(drafter, temperature=1.0).stats
    np.testing.assert_array_equal(stats.num_rounds, 11 + 4)
    assert float(stats.alpha.min()) == 1


TREE = drafters.ModelTreeDrafter(DRAFT, (2, 1))


def test_trees_are_drafted_whole_or_not_at_all():
    tree, plain = drafters.ModelTreeDrafter(DRAFT, (2,)), run(None)
    for cost, drafts in ((1.5, True), (99.0, False)):
        done = run(drafters.adaptive(tree, {2: cost}))
        np.testing.assert_array_equal(done.tokens, plain.tokens)
        assert bool(done.stats.num_drafted.sum() > 0) == drafts
    off = drafters.adaptive(tree, {2: 1.7}).replace(prior_alpha=0.99, decay=1.0)
    rows = run(off).stats
    assert (rows.num_drafted > 0).all() and (rows.num_drafted < 2 * rows.num_rounds).any()  # some gave up


def test_what_cannot_adapt_raises():
    with pytest.raises(ValueError, match="`drafter` must be able to skip rounds, got LookaheadDrafter"):
        drafters.adaptive(drafters.lookahead(), {21: 2.0})
    with pytest.raises(ValueError, match="`costs` must contain only K=4 for a tree"):
        drafters.adaptive(TREE, {2: 1.5, 4: 2.0})
    with pytest.raises(ValueError, match="the largest K of `costs` must be the drafter's num_draft=4"):
        adapted({3: 1.5})
    with pytest.raises(ValueError, match="must be above 0"):
        adapted({4: -1.0})
    with pytest.raises(ValueError, match="`min_confidence` must be left out for PromptLookupDrafter"):
        drafters.adaptive(drafters.prompt_lookup(4), {4: 1.5}, min_confidence=0.5)
    with pytest.raises(ValueError, match="`min_confidence` must be at least 0 and below 1, got 1"):
        adapted({4: 2.0}, min_confidence=1)
