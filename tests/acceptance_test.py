"""Acceptance rules in full rounds: exact output distributions, and planted faults that must be caught."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.exactness import cases, drawn, faults
from experiments.exactness.cases import Case, options
from experiments.exactness.faults import CHAIN, FAULTS
from experiments.exactness.toys import ToyNetwork
from specjax import acceptance, sampling
from specjax.drafters import ModelDrafter
from specjax.draws import KeyDraws, Stream
from specjax.types import Draft, Options, Tree

TELLING_P = np.array([0.2, 0.4, 0.3, 0.1])
TELLING_Q = np.array([0.6, 0.25, 0.1, 0.05])


# `experiments.losslessness` enumerates every combination. Here stand each option with a chain, all options at
# once with what draws from a q of its own, every drafter with an end token (at adaptive length where it can
# skip rounds), every size, and of the other rules what they treat differently.
DRAWING = ("model", "staged", "one pass", "model tree", "tree 2, with replacement")
ALONE = ("lookup", "eagle", "one pass", "staged")  # at fixed length too: faults are planted on them
TREES = ("tree 2x1, with replacement", "tree 2x1, without replacement")
OF_OTHER_RULES = {
    ("block", "chain of 2", "prefix, end tokens, all options"),
    ("block", "chain of 2", "temperature 0.6"),
    ("block", "3 drafts of 3", "its own"),
    ("block", "2 argmax drafts", "its own"),
    ("multi_round", "chain of 2", "temperature 0.6"),
    ("multi_round", "2 argmax drafts", "its own"),
}


def _is_run(rule, drafter, options):
    if rule in ("block", "multi_round") and ("speculative", drafter, options) in cases.all_cases():
        return (rule, drafter, options) in OF_OTHER_RULES
    if "all options" in options:
        return drafter in DRAWING
    if options == "end token":
        return drafter in ALONE or (rule, drafter, "adaptive") not in cases.all_cases()
    return not drafter.startswith("tree ") or drafter in TREES


CASES = {key: case for key, case in cases.all_cases().items() if _is_run(*key)}


@pytest.mark.parametrize("key", CASES, ids="-".join)
def test_output_distribution_is_the_targets(key):
    """Every lossless rule with every option."""
    case = CASES[key]
    outputs, drafter = case.outputs(), case.drafter()
    assert case.rule.is_lossless
    assert case.error() < case.bar
    if drafter is not None and case.config.temperature:
        share = outputs.num_accepted / outputs.num_tested
        assert 0.1 < share  # both branches were taken
        assert share < 1 - 1e-3 or drafter.drafts_trees


@pytest.mark.parametrize("key", cases.lossy_cases(), ids="-".join)
def test_lossy_rule_changes_the_distribution(key):
    case = cases.lossy_cases()[key]
    assert not case.rule.is_lossless
    assert case.error() > 1e-2


def test_lenience_raises_no_probability_by_more_than_its_inverse():
    """Leviathan et al. 2023, appendix A.5: of the first token."""
    case = dataclasses.replace(CHAIN, rule=acceptance.Lenient(0.5), num_tokens=1)
    outputs, expected = case.outputs().probability, case.expected()
    assert all(outputs[key] <= expected[key] / 0.5 + 1e-12 for key in outputs)


@pytest.mark.parametrize("name", ["model", "model tree", "staged"])
def test_draft_equal_to_the_target_is_always_accepted(name):
    """A missing or wrong token in the draft's cache would cause rejections."""
    case = Case(cases.of(name), num_tokens=3)
    outputs = case.outputs(twin=True)
    assert case.error(twin=True) < 1e-12
    assert abs(outputs.num_accepted - outputs.num_tested) < 1e-12


def test_block_verification_accepts_at_least_as_much_as_the_token_wise_rule():
    """Sun et al. 2024, theorem 2: on random pairs of four spreads, first round; equal at temperature 0."""
    rules, gains = (acceptance.speculative, acceptance.block), []
    for index in range(12):
        config = options(temperature=[0.4, 0.7, 1.0, 1.5][index % 4])
        case = Case(cases.of("model", 3), config=config, num_tokens=1, seed=10 + 2 * index)
        accepted = [dataclasses.replace(case, rule=rule).outputs().num_accepted for rule in rules]
        gains.append(accepted[1] / accepted[0])
    assert min(gains) > 1 - 1e-12 and np.mean(gains) > 1.02
    zero = Case(config=options(temperature=0.0))
    accepted = [dataclasses.replace(zero, rule=rule).outputs().num_accepted for rule in rules]
    assert accepted[0] == accepted[1]


def test_draft_of_nan_keeps_the_distribution():
    """A draft that overflows costs speed, not exactness."""
    nans = lambda toys: ToyNetwork(np.full_like(toys.draft.table, np.nan))  # noqa: E731
    assert Case(lambda toys: ModelDrafter(nans(toys), 2)).error() < 1e-12


# ---- faults


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(name):
    fault = FAULTS[name]
    fails, value, words = faults.check(fault.case, fault.shows, fault.one_round)
    assert fails
    match fault.shows:
        case "distribution":
            assert value > 1e-6  # a million times what passes
        case "raises":
            assert value is None and ("is drawn from twice" in words or "incompatible" in words)
        case "twin":
            assert words == "draft equal to the target is rejected" and value > 0.01  # only the speed suffers


CONTROLS = list(dict.fromkeys((fault.case, fault.shows) for fault in FAULTS.values()))


@pytest.mark.parametrize("case, shows", CONTROLS, ids=[f"{i}-{s}" for i, (_, s) in enumerate(CONTROLS)])
def test_without_a_fault_the_check_that_catches_it_passes(case, shows):
    """Otherwise the check would fail with and without the fault."""
    fails, value, _ = faults.check(case, shows)
    assert not fails
    assert shows != "twin" or value < 1e-9


UNCHANGED = {
    "function": faults.with_function(sampling, "residual", lambda residual: residual),
    "rule": faults.with_next_weights(lambda weights, draft, target_probs, num_accepted: weights),
    "chances": faults.with_chances(lambda chance, p, q: chance),
    "residual": faults.residual_at(),
    "drafter": faults.with_draft(lambda draft, inner, state, context: draft),
    "draws": faults.with_draws(lambda state, draws: faults.on_streams(lambda stream: stream)(draws)),
    "state": faults.then(lambda before, after: after),
}


@pytest.mark.parametrize("seam", UNCHANGED)
def test_seam_that_changes_nothing_keeps_the_distribution(seam):
    """So the check catches the fault, not the patching."""
    assert not faults.check(CHAIN, "distribution", UNCHANGED[seam])[0]


# ---- drawn samples


@pytest.mark.parametrize("more", [{}, dict(top_k=2)], ids=["plain", "top-k"])
def test_drawn_samples_of_cut_and_ended_rows_have_the_targets_distribution(more):
    case = dataclasses.replace(CHAIN, config=dataclasses.replace(CHAIN.config, **more))
    assert drawn.toy_test(case).p_value > 1e-3


def test_g_tests_of_several_distributions_add_up():
    """Degrees of freedom are counted one by one: under the null, p is uniform."""
    random, probs = np.random.default_rng(0), np.full(6, 1 / 6)
    p_values = [
        drawn.combined([drawn.g_test(random.multinomial(600, probs), probs) for _ in range(3)]).p_value
        for _ in range(2000)
    ]
    assert abs(np.mean(np.array(p_values) < 0.05) - 0.05) < 5 * np.sqrt(0.05 * 0.95 / 2000)


def test_g_test_pools_rare_cells_and_rejects_impossible_ones():
    probs = np.array([0.5, 0.3, 0.2 - 2e-4, 1e-4, 1e-4])
    result = drawn.g_test(np.array([5000, 3000, 1998, 1, 1.0]), probs)
    assert result.num_cells == 3 and result.p_value > 0.9
    assert drawn.g_test(np.array([5200, 2800, 2000, 0, 0.0]), probs).p_value < 1e-3
    assert drawn.g_test(np.array([50.0, 50, 1]), np.array([0.5, 0.5, 0.0])).p_value == 0


# ---- pieces


def test_residual_keeps_where_the_target_is_above():
    """The telling pair: acceptance .6, residual [0, .375, .5, .125]."""
    weights = sampling.residual(jnp.asarray(TELLING_P)[None], jnp.asarray(TELLING_Q)[None])[0]
    np.testing.assert_allclose(weights / weights.sum(), [0, 0.375, 0.5, 0.125], atol=1e-6)
    np.testing.assert_allclose(weights.sum(), 0.4, atol=1e-6)


def test_residual_of_equal_distributions_is_the_distribution():
    p = jnp.asarray(TELLING_P)[None]
    np.testing.assert_array_equal(sampling.residual(p, p), p)


@pytest.mark.parametrize(
    "accepted, num_drafted, expected",
    [([1, 0, 1, 0], 4, 1), ([1, 1, 1, 1], 4, 4), ([0, 1, 1, 1], 4, 0), ([1, 1, 1, 1], 2, 2), ([], 0, 0)],
)
def test_accepted_is_the_leading_run(accepted, num_drafted, expected):
    outcomes = jnp.asarray([accepted], bool)
    assert acceptance.leading_run(outcomes, jnp.asarray([num_drafted]))[0] == expected


def _draft(tokens, q):
    probs = None if q is None else jnp.asarray(q, jnp.float32)
    tokens = jnp.asarray(tokens, jnp.int32)
    return Draft(tokens, jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32), probs)


def test_acceptance_rate_and_distribution_of_the_telling_pair_with_keys():
    """With `KeyDraws`: 2^16 rows, every count within 5 sigma."""
    num = 2**16
    seeds, zero = jnp.arange(num, dtype=jnp.uint32), jnp.zeros(num, jnp.int32)

    @jax.jit
    def sample():
        draws = KeyDraws.of_round(seeds, zero)
        p, q = (jnp.broadcast_to(jnp.asarray(x, jnp.float32)[None], (num, 4)) for x in (TELLING_P, TELLING_Q))
        token = draws.choose(Stream.DRAFT.at(0), q)
        draft = Draft(token[:, None], jnp.ones(num, jnp.int32), q[:, None])
        result = acceptance.speculative(draws, draft, jnp.stack([p, p], axis=1))
        return result.num_accepted, jnp.where(result.num_accepted > 0, token, result.next_token)

    num_accepted, first = (np.asarray(x) for x in sample())
    assert abs(num_accepted.mean() - 0.6) < 5 * np.sqrt(0.6 * 0.4 / num)
    frequency = np.bincount(first, minlength=4) / num
    assert np.all(np.abs(frequency - TELLING_P) < 5 * np.sqrt(TELLING_P * (1 - TELLING_P) / num))


class Rejects:
    """Draws that reject every draft, and record their arguments."""

    def accept(self, stream, probability):
        self.chance = np.asarray(probability)[0, 0]
        return jnp.zeros(probability.shape, bool)

    def choose(self, stream, weights):
        self.next = np.asarray(weights / weights.sum())[0]
        return jnp.zeros(len(weights), jnp.int32)


@pytest.mark.parametrize("token", [0, 1, 2, 3])
def test_deterministic_draft_keeps_the_distribution(token):
    """A one-hot q: the draft with its probability of acceptance, else what replaces it."""
    draws, p = Rejects(), jnp.asarray(TELLING_P, jnp.float32)
    acceptance.speculative(draws, _draft([[token]], None), jnp.stack([p, p])[None])
    first = draws.chance * np.eye(4)[token] + (1 - draws.chance) * draws.next
    np.testing.assert_allclose(first, TELLING_P, atol=1e-6)


def test_greedy_takes_the_argmax_after_the_first_mismatch():
    """A wrong first draft gives the target's argmax there and no accepted draft."""
    result = acceptance.match_argmax(_draft([[1], [5]], None), jnp.asarray([[5, 7], [5, 7]]))
    assert result.num_accepted.tolist() == [0, 1]
    assert result.next_token.tolist() == [5, 7]


def test_zero_temperature_accepts_the_argmax_only():
    """Token 0 is never let through by p = [.3, .5, ...], although .3 > .25."""
    p = jnp.log(jnp.asarray([[[0.3, 0.5, 0.05, 0.05, 0.05, 0.05]]]))
    q = jnp.log(jnp.asarray([[[0.25, 0.15, 0.15, 0.15, 0.15, 0.15]]]))
    num = 1000
    options, history = Options(jnp.zeros(num)), sampling.History(jnp.zeros((num, 1), jnp.int32), None)

    @jax.jit
    def sample():
        draws = KeyDraws.of_round(jnp.arange(num, dtype=jnp.uint32), jnp.zeros(num, jnp.int32))
        target, drafted = (
            sampling.distribution(jnp.repeat(x, num, axis=0), options, history) for x in (p, q)
        )
        token = draws.choose(Stream.DRAFT.at(0), drafted[:, 0])
        draft = Draft(token[:, None], jnp.ones(num, jnp.int32), drafted)
        result = acceptance.speculative(draws, draft, jnp.concatenate([target, target], axis=1))
        return jnp.where(result.num_accepted > 0, token, result.next_token)

    assert np.all(np.asarray(sample()) == 1)


# ---- results by hand


def _results(rule, num=512, num_nodes=3, num_entries=5, topology=None, **draft_options):
    """Returns the results of a rule on many random drafts, each row with its own noise."""
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(num_entries), (2, num, num_nodes + 1)).astype(np.float32)
    tokens = rng.integers(0, num_entries, (num, num_nodes)).astype(np.int32)
    num_drafted = rng.integers(0, num_nodes + 1, num).astype(np.int32)
    draft = Draft(
        jnp.asarray(tokens), jnp.asarray(num_drafted), jnp.asarray(probs[1, :, :num_nodes]), topology
    )
    keyed = KeyDraws.of_round(jnp.arange(num, dtype=jnp.uint32), jnp.zeros(num, jnp.int32))
    return jax.jit(lambda draft: rule(keyed, draft, jnp.asarray(probs[0])))(draft.replace(**draft_options))


def test_tree_rule_on_a_chain_equals_the_chain_rule():
    """Row by row, with the same noise."""
    chain, tree_rule = _results(acceptance.speculative), _results(acceptance.multi_round)
    assert tree_rule.path is None
    np.testing.assert_array_equal(tree_rule.num_accepted, chain.num_accepted)
    np.testing.assert_array_equal(tree_rule.next_token, chain.next_token)
    assert len(np.unique(chain.num_accepted)) == 4
    deterministic = [_results(rule, probs=None) for rule in (acceptance.speculative, acceptance.multi_round)]
    np.testing.assert_array_equal(*(result.num_accepted for result in deterministic))
    np.testing.assert_array_equal(*(result.next_token for result in deterministic))


@pytest.mark.parametrize("rule", cases.RULES.values(), ids=cases.RULES)
def test_no_rule_accepts_more_than_was_drafted(rule):
    result = _results(rule, num_drafted=jnp.arange(512) % 4)
    assert (np.asarray(result.num_accepted) <= np.arange(512) % 4).all()
    assert len(np.unique(result.num_accepted)) == 4


#            root
#         1   2   3(padding)
#       4  5    6
TREE = Tree(
    jnp.asarray([[0, 0, 0, 1, 1, 2]] * 3), jnp.asarray([[True, True, False, True, True, True]] * 3), 2
)
NODES = jnp.asarray([[1, 2, 3, 4, 5, 4]] * 3)


def test_greedy_walk_takes_the_matching_child_and_no_padding():
    """One row per outcome: two levels, one level, padding only."""
    target_ids = jnp.asarray([[1, 5, 0, 0, 0, 3, 0], [2, 0, 5, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0]])
    draft = Draft(NODES, jnp.asarray([5, 5, 5]), None, TREE)
    keyed = KeyDraws.of_round(jnp.arange(3, dtype=jnp.uint32), jnp.zeros(3, jnp.int32))

    @jax.jit
    def results():
        rules = (acceptance.speculative, acceptance.greedy)
        sampled = [rule(keyed, draft, jax.nn.one_hot(target_ids, 6)) for rule in rules]
        return acceptance.match_argmax(draft, target_ids), sampled

    result, sampled = results()
    assert result.num_accepted.tolist() == [2, 1, 0]
    assert result.path.tolist() == [[1, 5], [2, 0], [0, 0]]
    assert result.next_token.tolist() == [3, 5, 3]
    for other in sampled:
        jax.tree.map(np.testing.assert_array_equal, other, result)


def test_typical_keeps_the_longest_path_of_likely_enough_tokens():
    """Threshold min(.09, .3 exp(-H)): H = 0 gives .09, four equal tokens give .075."""
    probs = np.zeros((3, 7, 6), np.float32)
    probs[..., 0] = 1
    probs[0, 0] = [0, 0.25, 0.25, 0.25, 0.25, 0]  # above .075: both children pass
    probs[0, 2] = [0, 0, 0, 0, 0.9, 0.1]  # the second has a child that passes
    probs[1, 0] = [0.95, 0.05, 0, 0, 0, 0]  # entropy .2, threshold .09: .05 fails
    probs[2, 0] = [0, 1, 0, 0, 0, 0]
    probs[2, 1] = [0, 0, 0, 0, 0.2, 0.8]  # both grandchildren pass: the first
    result = acceptance.Typical()(None, Draft(NODES, jnp.asarray([5] * 3), None, TREE), jnp.asarray(probs))
    assert result.num_accepted.tolist() == [2, 0, 2]
    assert result.path.tolist() == [[2, 6], [0, 0], [1, 4]]
    assert result.next_token.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: acceptance.Lenient(0.0), "`lenience` .* got 0.0"),
        (lambda: acceptance.Lenient(1.5), "`lenience` .* got 1.5"),
        (lambda: acceptance.Typical(epsilon=0.0), "`epsilon` .* got 0.0"),
        (lambda: acceptance.Typical(delta=-1.0), "`delta` .* got -1.0"),
    ],
)
def test_rule_out_of_range_raises(build, words):
    with pytest.raises(ValueError, match=words):
        build()
