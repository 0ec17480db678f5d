"""The rules, through the real rounds: the exact law, and the faults that must spoil it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import exact_law, law_cases, sampled_law
from experiments.law_cases import Case
from experiments.planted_bugs import BUGS, CHAIN, GREEDY, GREEDY_TREE, TWIN, planted
from specjax import acceptance, rounds, sampling
from specjax.drafters.prompt_lookup import PromptLookupDrafter
from specjax.draws import KeyDraws, Stream
from specjax.sampling import Sampling
from specjax.types import Draft, Options, Tree

TELLING_P = np.array([0.2, 0.4, 0.3, 0.1])
TELLING_Q = np.array([0.6, 0.25, 0.1, 0.05])

# `experiments.losslessness` enumerates every combination; here stand the token-wise rule with all of
# them, and for the other rules what they treat differently, and all options at once.
CASES = {
    key: case
    for key, case in law_cases.all_cases().items()
    if key[0] in ("speculative", "none")
    or key[2] == "prefix, end tokens, all options"
    or key[1:] == ("chain of 2", "temperature 0.6")
    or key[1] in ("3 drafts of 3", "2 argmax drafts", *law_cases.TREES_OF_OTHERS)
    or (key[1].startswith("tree 2x1, ") and "all options" not in key[1])
    or key[1] == "tree 2x1, all options, without replacement"
}


def law_of(case: Case) -> exact_law.Law:
    """The law of a case without a fault, enumerated once for all tests that ask for it."""
    return _law_of(dataclasses.replace(case, rule=None), case.rule())


@functools.cache
def _law_of(case: Case, rule) -> exact_law.Law:
    """Cases whose functions give one rule are one case."""
    return dataclasses.replace(case, rule=lambda: rule).run()


greedy_paths_of = functools.cache(Case.greedy_paths)  # without a fault, as above


@pytest.mark.parametrize("key", CASES, ids="-".join)
def test_output_law_equals_target(key):
    """Every lossless rule with every option."""
    case = CASES[key]
    law = law_of(case)
    assert exact_law.law_error(law.probability, case.target_law()) < case.bar
    if case.branching and case.options.temperature:
        assert 0.1 < law.num_accepted / law.num_tested  # both branches were taken
        assert law.num_accepted / law.num_tested < 1 - 1e-3 or case.is_tree or len(set(case.branching)) > 1


@pytest.mark.parametrize("key", law_cases.lossy_cases())
def test_lossy_rule_is_seen_to_be_lossy(key):
    case = law_cases.lossy_cases()[key]
    assert not acceptance.is_lossless(case.rule())
    assert case.error() > 1e-2


def test_lenience_raises_no_probability_by_more_than_its_inverse():
    """Leviathan et al. 2023, appendix A.5: of the first token."""
    case = dataclasses.replace(CHAIN, rule=lambda: acceptance.Lenient(0.5), num_tokens=1)
    law, target = case.run().probability, case.target_law()
    assert all(law[key] <= target[key] / 0.5 + 1e-12 for key in law)


@pytest.mark.parametrize("branching", [(1, 1), (2, 1)])
def test_twin_draft_is_always_accepted(branching):
    """A draft cache that lacks or garbles a token would be rejected sometimes."""
    case = dataclasses.replace(TWIN, branching=branching, num_tokens=3)
    law = case.run(twin=True)
    assert exact_law.law_error(law.probability, case.target_law()) < 1e-12
    assert abs(law.num_accepted - law.num_tested) < 1e-12


def test_block_verification_accepts_at_least_as_much_as_the_token_wise_rule():
    """Sun et al. 2024, theorem 2: on random pairs of four spreads, first round; equal at temperature 0."""
    gains = []
    for seed in range(12):
        options = Sampling(temperature=[0.4, 0.7, 1.0, 1.5][seed % 4])
        accepted = []
        for rule in (acceptance.speculative, acceptance.block):
            case = Case(rule=lambda rule=rule: rule, options=options, num_tokens=1, branching=(1, 1, 1))
            tables = [exact_law.random_table(s, 3, dtype=np.float64) for s in (10 + seed, 50 + seed)]
            with jax.enable_x64(True):
                law = exact_law.exact_law(
                    case.program(), rounds.AllParams(*tables), law_cases.SOURCE, 1, options
                )
            accepted.append(law.num_accepted)
        gains.append(accepted[1] / accepted[0])
    assert min(gains) > 1 - 1e-12 and np.mean(gains) > 1.02
    zero = [
        dataclasses.replace(TWIN, rule=rule, options=Sampling(temperature=0.0)).run().num_accepted
        for rule in (law_cases.RULES["speculative"], law_cases.RULES["block"])
    ]
    assert zero[0] == zero[1]


def test_draft_that_is_not_a_number_keeps_the_law(monkeypatch):
    """A draft that overflows costs speed, not exactness."""
    table = TWIN.params().target
    broken = rounds.AllParams(table, np.full_like(table, np.nan))
    expected = TWIN.target_law()
    monkeypatch.setattr(Case, "params", lambda self, twin: broken)
    assert exact_law.law_error(TWIN.run().probability, expected) < 1e-12


@pytest.mark.parametrize("case", [GREEDY, GREEDY_TREE], ids=["chain", "tree"])
def test_greedy_program_follows_the_targets_argmax(case):
    assert all(tokens == path for tokens, path in greedy_paths_of(case))


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name):
    bug = BUGS[name]
    with planted(bug):
        match bug.shows:
            case "law":
                assert bug.case.error() > 1e-6  # a million times what passes
            case "raises":
                with pytest.raises((ValueError, TypeError), match="drawn twice in one round|incompatible"):
                    bug.case.run()
            case "twin":
                law = bug.case.run(twin=True)  # only the speed suffers
                assert exact_law.law_error(law.probability, bug.case.target_law()) < 1e-12
                assert law.num_accepted < 0.99 * law.num_tested
            case "greedy":
                assert any(tokens != path for tokens, path in bug.case.greedy_paths())
            case "sampled":
                assert sampled_law.sampled_test(bug.case, num=2**16).p_value < 1e-3


CONTROLS = list(dict.fromkeys((bug.shows, bug.case) for bug in BUGS.values()))


@pytest.mark.parametrize("shows, case", CONTROLS, ids=[f"{i}-{s}" for i, (s, _) in enumerate(CONTROLS)])
def test_without_a_fault_the_check_that_catches_it_passes(shows, case):
    """Else a planted fault would be caught for no reason."""
    if shows == "greedy":
        assert all(tokens == path for tokens, path in greedy_paths_of(case))
    elif shows == "twin":
        law = case.run(twin=True)
        assert law.num_accepted > (1 - 1e-9) * law.num_tested
    elif shows == "sampled":
        assert sampled_law.sampled_test(case, num=2**16).p_value > 1e-3
    else:
        assert exact_law.law_error(law_of(case).probability, case.target_law()) < case.bar


@pytest.mark.parametrize("case", [CHAIN, dataclasses.replace(CHAIN, options=Sampling(top_k=2))])
def test_drawn_samples_of_cut_and_ended_rows_have_the_targets_law(case):
    assert sampled_law.sampled_test(case, num=2**16).p_value > 1e-3


def test_g_tests_of_several_laws_add_up():
    """Degrees of freedom are counted law by law: under the null, p is uniform."""
    random, law = np.random.default_rng(0), np.full(6, 1 / 6)
    p_values = [
        sampled_law.combined(
            [sampled_law.g_test(random.multinomial(600, law), law) for _ in range(3)]
        ).p_value
        for _ in range(2000)
    ]
    assert abs(np.mean(np.array(p_values) < 0.05) - 0.05) < 5 * np.sqrt(0.05 * 0.95 / 2000)


def test_g_test_pools_rare_cells_and_rejects_the_impossible():
    law = np.array([0.5, 0.3, 0.2 - 2e-4, 1e-4, 1e-4])
    result = sampled_law.g_test(np.array([5000, 3000, 1998, 1, 1.0]), law)
    assert result.num_cells == 3 and result.p_value > 0.9
    assert sampled_law.g_test(np.array([5200, 2800, 2000, 0, 0.0]), law).p_value < 1e-3
    assert sampled_law.g_test(np.array([50.0, 50, 1]), np.array([0.5, 0.5, 0.0])).p_value == 0


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
    coins = jnp.asarray([accepted], bool)
    assert acceptance.leading_run(coins, jnp.asarray([num_drafted]))[0] == expected


def _draft(tokens, q):
    probs = None if q is None else jnp.asarray(q, jnp.float32)
    tokens = jnp.asarray(tokens, jnp.int32)
    return Draft(tokens, jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32), probs)


def test_acceptance_rate_and_law_of_the_telling_pair_with_keys():
    """With the keys of production: 2^16 rows, every count within 5 sigma."""
    num = 2**16
    seeds, zero = jnp.arange(num, dtype=jnp.uint32), jnp.zeros(num, jnp.int32)

    @jax.jit
    def sample():
        draws = KeyDraws.of_round(seeds, zero)
        p, q = (jnp.broadcast_to(jnp.asarray(x, jnp.float32)[None], (num, 4)) for x in (TELLING_P, TELLING_Q))
        token = draws.choose(Stream.DRAFT.at(0), q)
        draft = Draft(token[:, None], jnp.ones(num, jnp.int32), q[:, None])
        verdict = acceptance.speculative(draws, draft, jnp.stack([p, p], axis=1))
        return verdict.num_accepted, jnp.where(verdict.num_accepted > 0, token, verdict.next_token)

    num_accepted, first = (np.asarray(x) for x in sample())
    assert abs(num_accepted.mean() - 0.6) < 5 * np.sqrt(0.6 * 0.4 / num)
    frequency = np.bincount(first, minlength=4) / num
    assert np.all(np.abs(frequency - TELLING_P) < 5 * np.sqrt(TELLING_P * (1 - TELLING_P) / num))


def _deterministic_law(p, token):
    """The first token's law under a one-hot draft, by script."""
    outcomes = exact_law.round_script(PromptLookupDrafter(1), len(p))
    rows = len(outcomes[int(Stream.NEXT.at(0))])
    draws = exact_law.ScriptedDraws(outcomes)
    target = jnp.broadcast_to(jnp.asarray(p, jnp.float32)[None, None], (rows, 2, len(p)))
    verdict = acceptance.speculative(draws, _draft([[token]] * rows, None), target)
    first = np.where(np.asarray(verdict.num_accepted) > 0, token, verdict.next_token)
    return np.bincount(first, draws.probability, len(p))


@pytest.mark.parametrize("token", [0, 1, 2, 3])
def test_deterministic_draft_keeps_the_law(token):
    """A one-hot q."""
    np.testing.assert_allclose(_deterministic_law(TELLING_P, token), TELLING_P, atol=1e-6)


def test_greedy_takes_the_argmax_after_the_first_mismatch():
    """A wrong first draft gives the target's argmax there and no accepted draft."""
    verdict = acceptance.greedy(_draft([[1], [5]], None), jnp.asarray([[5, 7], [5, 7]]))
    assert verdict.num_accepted.tolist() == [0, 1]
    assert verdict.next_token.tolist() == [5, 7]


def test_zero_temperature_accepts_the_argmax_only():
    """Token 0 is never let through by p = [.3, .5, ...], although .3 > .25."""
    p = jnp.log(jnp.asarray([[[0.3, 0.5, 0.05, 0.05, 0.05, 0.05]]]))
    q = jnp.log(jnp.asarray([[[0.25, 0.15, 0.15, 0.15, 0.15, 0.15]]]))
    num = 1000
    options, history = Options(jnp.zeros(num)), sampling.History(jnp.zeros((num, 1), jnp.int32), None)

    @jax.jit
    def sample():
        draws = KeyDraws.of_round(jnp.arange(num, dtype=jnp.uint32), jnp.zeros(num, jnp.int32))
        target, drafted = (sampling.process(jnp.repeat(x, num, axis=0), options, history) for x in (p, q))
        token = draws.choose(Stream.DRAFT.at(0), drafted[:, 0])
        draft = Draft(token[:, None], jnp.ones(num, jnp.int32), drafted)
        verdict = acceptance.speculative(draws, draft, jnp.concatenate([target, target], axis=1))
        return jnp.where(verdict.num_accepted > 0, token, verdict.next_token)

    assert np.all(np.asarray(sample()) == 1)


# ---- verdicts by hand


def _verdicts(rule, num=512, num_nodes=3, num_entries=5, topology=None, **draft_options):
    """Verdicts of a rule on many random drafts, each row its own noise."""
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
    chain, tree_rule = _verdicts(acceptance.speculative), _verdicts(acceptance.multi_round)
    assert tree_rule.path is None
    np.testing.assert_array_equal(tree_rule.num_accepted, chain.num_accepted)
    np.testing.assert_array_equal(tree_rule.next_token, chain.next_token)
    assert len(np.unique(chain.num_accepted)) == 4
    deterministic = [_verdicts(rule, probs=None) for rule in (acceptance.speculative, acceptance.multi_round)]
    np.testing.assert_array_equal(*(verdict.num_accepted for verdict in deterministic))
    np.testing.assert_array_equal(*(verdict.next_token for verdict in deterministic))


@pytest.mark.parametrize("rule", [acceptance.speculative, acceptance.block, acceptance.multi_round])
def test_no_rule_accepts_more_than_was_drafted(rule):
    verdict = _verdicts(rule, num_drafted=jnp.arange(512) % 4)
    assert (np.asarray(verdict.num_accepted) <= np.arange(512) % 4).all()
    assert len(np.unique(verdict.num_accepted)) == 4


def _one_hot(ids, num_entries=6):
    return jax.nn.one_hot(jnp.asarray(ids), num_entries)


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
    verdict = acceptance.greedy(draft, target_ids)
    assert verdict.num_accepted.tolist() == [2, 1, 0]
    assert verdict.path.tolist() == [[1, 5], [2, 0], [0, 0]]
    assert verdict.next_token.tolist() == [3, 5, 3]
    keyed = KeyDraws.of_round(jnp.arange(3, dtype=jnp.uint32), jnp.zeros(3, jnp.int32))
    sampled = acceptance.speculative(keyed, draft, _one_hot(target_ids))
    jax.tree.map(np.testing.assert_array_equal, sampled, verdict)


def test_typical_keeps_the_longest_path_of_likely_enough_tokens():
    """Threshold min(.09, .3 exp(-H)): H = 0 gives .09, four equal tokens give .075."""
    probs = np.zeros((3, 7, 6), np.float32)
    probs[..., 0] = 1
    probs[0, 0] = [0, 0.25, 0.25, 0.25, 0.25, 0]  # above .075: both children pass
    probs[0, 2] = [0, 0, 0, 0, 0.9, 0.1]  # the second has a child that passes
    probs[1, 0] = [0.95, 0.05, 0, 0, 0, 0]  # entropy .2, threshold .09: .05 fails
    probs[2, 0] = [0, 1, 0, 0, 0, 0]
    probs[2, 1] = [0, 0, 0, 0, 0.2, 0.8]  # both grandchildren pass: the first
    verdict = acceptance.Typical()(None, Draft(NODES, jnp.asarray([5] * 3), None, TREE), jnp.asarray(probs))
    assert verdict.num_accepted.tolist() == [2, 0, 2]
    assert verdict.path.tolist() == [[2, 6], [0, 0], [1, 4]]
    assert verdict.next_token.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: acceptance.Lenient(0.0), "lenience=0.0"),
        (lambda: acceptance.Lenient(1.5), "lenience=1.5"),
        (lambda: acceptance.Typical(epsilon=0.0), "epsilon=0.0"),
        (lambda: acceptance.Typical(delta=-1.0), "delta=-1.0"),
    ],
)
def test_rule_out_of_range_is_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()
