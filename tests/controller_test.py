"""Adaptive length: rows decide for themselves, and what does not pay is not drafted. For the law see
acceptance_test."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import exact_law
from experiments.toy_heads import ToyHeads
from specjax import acceptance, controller, decode, drafters
from specjax.controller import AdaptiveDrafter
from specjax.drafters.model import ModelDrafter
from specjax.drafters.prompt_lookup import PromptLookupDrafter
from specjax.request import prepare
from specjax.sampling import Sampling
from specjax.staged import StagedDrafter, StagedParams

V = 5
NETWORK = exact_law.ToyNetwork(V)
TARGET, DRAFT = (jnp.asarray(exact_law.random_table(seed, V)) for seed in (0, 1))
SOURCES = np.random.default_rng(0).integers(0, V, (6, 3))


def run(drafter, params, rows=slice(None), **options):
    return decode.generate(
        NETWORK,
        TARGET,
        SOURCES[rows],
        np.ones(SOURCES[rows].shape, bool),
        drafter=drafter,
        drafter_params=params,
        max_new_tokens=30,
        seed=np.arange(6)[rows],
        eos_ids=(),
        **options,
    )


def bound(draft_params, costs, num_draft=4, **settings):
    plain = drafters.BoundDrafter(ModelDrafter(NETWORK, num_draft), draft_params)
    return controller.adaptive(plain, costs, **settings).drafter


def test_a_twin_is_drafted_to_the_last_and_a_stranger_hardly():
    costs = {1: 1.2, 2: 1.4, 4: 1.8}
    twin = run(bound(TARGET, costs), TARGET).stats
    assert float(twin.alpha.min()) == 1 and int(twin.num_rounds.max()) <= 8
    stranger = run(bound(DRAFT, costs), -TARGET).stats  # its argmax is the target's least likely token
    assert int(stranger.accepted.sum()) == 0 < int(stranger.num_drafted.min())
    per_round = [np.asarray(stats.num_drafted / stats.num_rounds) for stats in (stranger, twin)]
    assert per_round[0].max() < 1 and per_round[1].min() > 3


def adapted(drafter, params, costs):
    return controller.adaptive(drafters.BoundDrafter(drafter, params), costs)


HEADS, CHAIN_COSTS = ToyHeads(V, num_steps=4), {1: 1.3, 4: 2.2}
ADAPTED = {
    "model": adapted(ModelDrafter(NETWORK, 4), DRAFT, CHAIN_COSTS),
    "eagle": adapted(drafters.EagleDrafter(HEADS, 4), DRAFT, CHAIN_COSTS),
    "one_pass": adapted(drafters.OnePassDrafter(HEADS, 4), DRAFT, CHAIN_COSTS),
    "staged": adapted(
        StagedDrafter(NETWORK, 4, ModelDrafter(NETWORK, 1)), StagedParams(DRAFT, TARGET), CHAIN_COSTS
    ),
    "model tree": adapted(drafters.ModelTreeDrafter(NETWORK, (2, 1)), DRAFT, {4: 1.5}),
    "medusa": adapted(drafters.MedusaDrafter(HEADS, (2, 1)), DRAFT, {4: 1.5}),
    "eagle tree": adapted(drafters.EagleTreeDrafter(HEADS, 4, 2, 2), DRAFT, {4: 1.5}),
}


@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_greedy_output_is_the_targets_and_rows_do_not_depend_on_their_mates(temperature, name):
    """Rows fall behind in rounds without a draft and catch up later, alone or beside others."""
    drafter, params, _ = ADAPTED[name]
    sampling = Sampling(temperature=temperature)
    together = run(drafter, params, sampling=sampling)
    lengths = np.asarray(together.stats.num_drafted / together.stats.num_rounds)
    assert len(set(lengths.tolist())) > 1
    for row in (0, 3):
        alone = run(drafter, params, slice(row, row + 1), sampling=sampling)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        assert int(alone.stats.num_drafted[0]) == int(together.stats.num_drafted[row])
    if temperature == 0:
        np.testing.assert_array_equal(run(None, None).tokens, together.tokens)


@pytest.mark.parametrize("rule", [acceptance.block, acceptance.multi_round, acceptance.Typical()])
def test_every_rule_judges_calls_of_every_width_in_one_program(rule):
    stats = run(bound(DRAFT, {1: 1.3, 4: 2.2}), DRAFT, sampling=Sampling(), rule=rule).stats
    np.testing.assert_array_equal(stats.num_emitted, 30)
    assert len(set(np.asarray(stats.num_drafted / stats.num_rounds).tolist())) > 1


def test_a_greedy_row_is_as_confident_beside_a_sampled_one_as_alone():
    drafter = bound(DRAFT, {2: 1.1, 4: 1.2}, min_confidence=0.4)
    mixed = Sampling(temperature=np.array([0.0, 1.0, 0.0, 1.0, 0.0, 1.0], np.float32))
    together = run(drafter, DRAFT, sampling=mixed).stats
    alone = run(drafter, DRAFT, sampling=Sampling(temperature=0.0)).stats
    np.testing.assert_array_equal(together.num_drafted[::2], alone.num_drafted[::2])
    unsure = run(bound(DRAFT, {2: 1.1, 4: 1.2}), DRAFT, sampling=Sampling(temperature=0.0)).stats
    assert int(alone.num_drafted.sum()) < int(unsure.num_drafted.sum())


def test_rows_that_have_ended_ask_for_nothing():
    """A batch of an ended row and one that does not draft runs plain steps."""
    drafter = bound(DRAFT, {4: 1.5})
    program, params, inputs = prepare(
        NETWORK,
        TARGET,
        SOURCES,
        np.ones(SOURCES.shape, bool),
        drafter=drafter,
        drafter_params=DRAFT,
        max_new_tokens=[0, 1, 2, 3, 30, 30],
        seed=0,
        eos_ids=(),
    )
    state = decode.jitted_prefill(program, params, **inputs)
    draft, _ = drafter.propose(DRAFT, state.drafter_state, state.context, None)
    np.testing.assert_array_equal(draft.num_drafted, [0, 0, 1, 2, 4, 4])


def test_the_draft_after_a_pause_is_what_it_would_have_been_without():
    """The draft's cache caught up: a twin is still accepted to the last after many plain steps."""

    @dataclasses.dataclass(frozen=True)
    class Pausing(AdaptiveDrafter):
        """Drafts nothing for eleven rounds, then four tokens a round."""

        def wanted(self, state):
            return jnp.where(state.tested < 11, 0, 4)

        def commit(self, params, state, round):
            return state.replace(inner=self.inner.commit(params, state.inner, round), tested=state.tested + 1)

    drafter = Pausing(ModelDrafter(NETWORK, 4), (0, 4), (1.0, 2.0))
    stats = run(drafter, TARGET, sampling=Sampling(temperature=1.0)).stats
    np.testing.assert_array_equal(stats.num_rounds, 11 + 4)
    assert float(stats.alpha.min()) == 1


TREE = drafters.BoundDrafter(drafters.ModelTreeDrafter(NETWORK, (2, 1)), DRAFT)


def test_trees_are_drafted_whole_or_not_at_all():
    plain = run(None, None)
    for cost, drafts in ((1.5, True), (99.0, False)):
        done = run(controller.adaptive(TREE, {4: cost}).drafter, DRAFT)
        np.testing.assert_array_equal(done.tokens, plain.tokens)
        assert bool(done.stats.num_drafted.sum() > 0) == drafts
    off = dataclasses.replace(controller.adaptive(TREE, {4: 2.5}).drafter, prior_alpha=0.99, decay=1.0)
    rows = run(off, DRAFT).stats
    assert (rows.num_drafted > 0).all() and (rows.num_drafted < 4 * rows.num_rounds).any()  # some gave up


def test_copies_adapt_too():
    lookup = controller.adaptive(drafters.prompt_lookup(4), {4: 1.5}).drafter
    assert isinstance(lookup.inner, PromptLookupDrafter)
    done = run(lookup, None)
    np.testing.assert_array_equal(done.tokens, run(None, None).tokens)
    assert int(done.stats.num_drafted.sum()) > 0


def test_what_cannot_adapt_is_refused():
    with pytest.raises(ValueError, match="LookaheadDrafter cannot adapt its length"):
        controller.adaptive(drafters.lookahead(), {21: 2.0})
    with pytest.raises(ValueError, match="a tree is drafted whole, so give 4 alone"):
        controller.adaptive(TREE, {2: 1.5, 4: 2.0})
    with pytest.raises(ValueError, match="the largest K must be the drafter's num_draft=4"):
        bound(DRAFT, {3: 1.5})
    with pytest.raises(ValueError, match="must be above 0"):
        bound(DRAFT, {4: -1.0})
    with pytest.raises(
        ValueError, match="min_confidence=0.5: PromptLookupDrafter does not draft step by step"
    ):
        controller.adaptive(drafters.prompt_lookup(4), {4: 1.5}, min_confidence=0.5)
    with pytest.raises(ValueError, match="min_confidence=1"):
        bound(DRAFT, {4: 2.0}, min_confidence=1)
