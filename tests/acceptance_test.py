"""The rule, through the real rounds: the exact law, and the faults that must spoil it."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import exact_law
from specjax import acceptance, decode, rounds, sampling
from specjax.drafters.model import ModelDrafter
from specjax.types import Draft
from tests.planted_bugs import BUGS

SOURCE = np.array([2, 1, 0])
TELLING_P = np.array([0.2, 0.4, 0.3, 0.1])
TELLING_Q = np.array([0.6, 0.25, 0.1, 0.05])


@dataclasses.dataclass(frozen=True)
class Case:
    """An enumeration: shape, temperature and what ends a row."""

    vocab_size: int = 3
    num_draft: int = 2
    num_tokens: int = 4
    temperature: float = 0.6
    prefix: tuple[int, ...] = (0,)
    eos_ids: tuple[int, ...] = ()
    limit: int | None = None
    dtype: type = np.float64

    def program(self) -> rounds.Program:
        """Built anew each time: the rule is looked up after a fault was planted."""
        network = exact_law.ToyNetwork(self.vocab_size)
        drafter = ModelDrafter(network, self.num_draft) if self.num_draft else None
        return rounds.Program(
            network, drafter, acceptance.speculative, 8, len(self.prefix), self.eos_ids, pad_id=0
        )

    def tables(self, twin: bool) -> rounds.AllParams:
        target, draft = (exact_law.random_table(seed, self.vocab_size, dtype=self.dtype) for seed in (0, 1))
        return rounds.AllParams(target, target if twin else draft)

    def run(self, twin: bool = False) -> tuple[exact_law.Law, float]:
        """The law of the real rounds, and its distance from the target's."""
        params = self.tables(twin)
        num_tokens = min(self.num_tokens, self.limit or self.num_tokens)
        with jax.enable_x64(True) if self.dtype is np.float64 else contextlib.nullcontext():
            law = exact_law.exact_law(
                self.program(), params, SOURCE, self.num_tokens, self.temperature, np.array(self.prefix),
                self.limit,
            )  # fmt: skip
        expected = exact_law.target_law(
            params.target, SOURCE, num_tokens, self.temperature, np.array(self.prefix), self.eos_ids
        )
        return law, exact_law.law_error(law.probability, expected)


# One shape for most cases: primitives compile once per shape.
CASES = {
    "two_drafts": Case(),
    "temperature_1": Case(temperature=1.0),
    "end_token_inside_the_draft": Case(eos_ids=(2,)),
    "limit_cuts_the_draft": Case(limit=3),
    "prefix": Case(prefix=(0, 2, 1), eos_ids=(2,), num_tokens=3),
    "temperature_0": Case(temperature=0.0),
    "float32": Case(dtype=np.float32, eos_ids=(2,)),
    "no_draft": Case(num_draft=0),
    "one_draft_of_four": Case(vocab_size=4, num_draft=1),
    "three_drafts_of_two": Case(vocab_size=2, num_draft=3, num_tokens=6, eos_ids=()),
}
SLOW_CASES = {
    "three_drafts": Case(num_draft=3, eos_ids=(2,)),
    "two_drafts_of_four": Case(vocab_size=4, num_tokens=3),
}
LAW_CASE = Case(eos_ids=(2,), limit=3)  # a cut at the limit, an end token, full acceptance
TWIN_CASE = Case(num_tokens=4)


@pytest.mark.parametrize("name", CASES)
def test_output_law_equals_target(name):
    """B02, B03, B05, B09, B10, B14."""
    law, error = CASES[name].run()
    assert error < (1e-12 if CASES[name].dtype is np.float64 else 1e-6)
    if CASES[name].num_draft and CASES[name].temperature:
        assert 0.1 < law.num_accepted / law.num_tested < 0.9  # both branches were taken


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_output_law_of_larger_cases_equals_target(name):
    assert SLOW_CASES[name].run()[1] < 1e-12


def test_twin_draft_is_always_accepted():
    """B38, B45: a draft cache that lacks or garbles a token would be rejected sometimes."""
    law, error = TWIN_CASE.run(twin=True)
    assert error < 1e-12
    assert abs(law.num_accepted - law.num_tested) < 1e-12


def _greedy_tokens(case: Case) -> list[tuple[list[int], list[int]]]:
    """What the greedy program emits for four sources, beside the target's argmax path."""
    program, tables = case.program(), case.tables(twin=False)
    params = jax.tree.map(jnp.asarray, tables)
    pairs = []
    for source in np.array([[2, 1, 0], [0, 1, 2], [1, 1, 1], [2, 0, 2]]):
        with jax.disable_jit():
            state = exact_law.first_state(program, params, source, 0.0, None, case.num_tokens)
            state = jax.tree.map(jnp.asarray, state)
            while bool(state.running.any()):
                state = rounds.one_round(program, params, state, None)
        (path,) = exact_law.target_law(tables.target, source, case.num_tokens, 0.0)
        pairs.append((decode.finish(program, state).tokens[0, : case.num_tokens].tolist(), list(path)))
    return pairs


def test_draft_that_is_not_a_number_keeps_the_law(monkeypatch):
    """A draft that overflows costs speed, not exactness."""
    table = TWIN_CASE.tables(twin=True).target
    broken = rounds.AllParams(table, np.full_like(table, np.nan))
    monkeypatch.setattr(Case, "tables", lambda self, twin: broken)
    assert TWIN_CASE.run()[1] < 1e-12


GREEDY_CASE = Case(num_tokens=8, dtype=np.float32)


def test_greedy_program_follows_the_targets_argmax():
    assert all(tokens == path for tokens, path in _greedy_tokens(GREEDY_CASE))


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name, monkeypatch):
    BUGS[name].plant(monkeypatch)
    match BUGS[name].shows:
        case "law":
            assert LAW_CASE.run()[1] > 1e-3
        case "raises":
            with pytest.raises(ValueError, match="drawn twice in one round"):
                LAW_CASE.run()
        case "twin":
            law, error = TWIN_CASE.run(twin=True)
            assert error < 1e-12  # only the speed suffers
            assert law.num_accepted < 0.99 * law.num_tested
        case "greedy":
            assert any(tokens != path for tokens, path in _greedy_tokens(GREEDY_CASE))


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
    """B35."""
    coins = jnp.asarray([accepted], bool)
    assert acceptance.leading_run(coins, jnp.asarray([num_drafted]))[0] == expected


def _draft(tokens, q):
    probs = None if q is None else jnp.asarray(q, jnp.float32)
    tokens = jnp.asarray(tokens, jnp.int32)
    return Draft(tokens, jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32), probs)


def test_acceptance_rate_and_law_of_the_telling_pair_with_keys():
    """B06, with the keys of production: 2^16 rows, every count within 5 sigma."""
    num = 2**16
    seeds, zero = jnp.arange(num, dtype=jnp.uint32), jnp.zeros(num, jnp.int32)

    @jax.jit
    def sample():
        draws = sampling.KeyDraws.of_round(seeds, zero)
        p, q = (jnp.broadcast_to(jnp.asarray(x, jnp.float32)[None], (num, 4)) for x in (TELLING_P, TELLING_Q))
        token = draws.choose(sampling.Stream.DRAFT.at(0), q)
        draft = Draft(token[:, None], jnp.ones(num, jnp.int32), q[:, None])
        verdict = acceptance.speculative(draws, draft, jnp.stack([p, p], axis=1))
        return verdict.num_accepted, jnp.where(verdict.num_accepted > 0, token, verdict.next_token)

    num_accepted, first = (np.asarray(x) for x in sample())
    assert abs(num_accepted.mean() - 0.6) < 5 * np.sqrt(0.6 * 0.4 / num)
    frequency = np.bincount(first, minlength=4) / num
    assert np.all(np.abs(frequency - TELLING_P) < 5 * np.sqrt(TELLING_P * (1 - TELLING_P) / num))


def _deterministic_law(p, token):
    """The first token's law under a one-hot draft, by script."""
    outcomes = exact_law.round_script(len(p), 1, 1)
    del outcomes[int(sampling.Stream.DRAFT.at(0))]
    rows = len(outcomes[int(sampling.Stream.NEXT.at(0))])
    draws = exact_law.ScriptedDraws(outcomes)
    target = jnp.broadcast_to(jnp.asarray(p, jnp.float32)[None, None], (rows, 2, len(p)))
    verdict = acceptance.speculative(draws, _draft([[token]] * rows, None), target)
    first = np.where(np.asarray(verdict.num_accepted) > 0, token, verdict.next_token)
    return np.bincount(first, draws.probability, len(p)) / len(p)  # DRAFT was enumerated as well


@pytest.mark.parametrize("token", [0, 1, 2, 3])
def test_deterministic_draft_keeps_the_law(token):
    """B01, B13: a one-hot q."""
    np.testing.assert_allclose(_deterministic_law(TELLING_P, token), TELLING_P, atol=1e-6)


def test_greedy_takes_the_argmax_after_the_first_mismatch():
    """B04: a wrong first draft gives the target's argmax there and no accepted draft."""
    verdict = acceptance.greedy(_draft([[1], [5]], None), jnp.asarray([[5, 7], [5, 7]]))
    assert verdict.num_accepted.tolist() == [0, 1]
    assert verdict.next_token.tolist() == [5, 7]


def test_zero_temperature_accepts_the_argmax_only():
    """B03: p = [.3, .5, ...] never lets token 0 through, although .3 > .25."""
    p = jnp.log(jnp.asarray([[0.3, 0.5, 0.05, 0.05, 0.05, 0.05]]))
    q = jnp.log(jnp.asarray([[0.25, 0.15, 0.15, 0.15, 0.15, 0.15]]))
    num = 1000
    temperature = jnp.zeros(num)

    @jax.jit
    def sample():
        draws = sampling.KeyDraws.of_round(jnp.arange(num, dtype=jnp.uint32), jnp.zeros(num, jnp.int32))
        target, drafted = (sampling.process(jnp.repeat(x, num, axis=0), temperature) for x in (p, q))
        token = draws.choose(sampling.Stream.DRAFT.at(0), drafted)
        draft = Draft(token[:, None], jnp.ones(num, jnp.int32), drafted[:, None])
        verdict = acceptance.speculative(draws, draft, jnp.stack([target, target], axis=1))
        return jnp.where(verdict.num_accepted > 0, token, verdict.next_token)

    assert np.all(np.asarray(sample()) == 1)
