"""A model as drafter: what it proposes, and what its cache holds between rounds."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.exactness import toys
from specjax import decode, drafters
from specjax.drafters import ModelDrafter
from specjax.draws import KeyDraws
from specjax.generation_config import GenerationConfig
from specjax.round import LoopState

V, K, NUM_ROWS = 5, 3, 4
TARGET, DRAFT = (toys.ToyNetwork(jnp.asarray(toys.random_table(seed, V))) for seed in (0, 1))
SOURCES = np.random.default_rng(0).integers(0, V, (NUM_ROWS, 3))
TEMPERATURE = np.array([1.0, 0.6, 0.0, 2.0], np.float32)
PREFIX = np.array([[0, 3, 1], [0, 2, 0], [0, 0, 0], [0, 4, 0]], np.int32)
PREFIX_LENGTH = np.array([3, 2, 1, 2], np.int32)
PROGRAM, INPUTS = decode.prepare(
    TARGET,
    SOURCES,
    np.ones(SOURCES.shape, bool),
    drafter=ModelDrafter(DRAFT, K),
    prefix=PREFIX,
    prefix_length=PREFIX_LENGTH,
    temperature=TEMPERATURE,
    max_new_tokens=12,
    length_bucket=12,
    seed=np.arange(NUM_ROWS),
    eos_ids=(),
)


@pytest.fixture(scope="module")
def states() -> list[LoopState]:
    """The state after the prefill and after each of four rounds."""
    states = [decode.jitted_prefill(PROGRAM, **INPUTS)]
    for _ in range(4):
        states.append(decode.jitted_step(PROGRAM, states[-1], sampled=True))
    return states


@jax.jit
def _propose(state: LoopState):
    draws = KeyDraws.of_round(state.seeds, state.stats.num_rounds)
    return PROGRAM.drafter.propose(state.drafter_state, state.context, draws, None)


def _slots(cache, row: int, count: int) -> list[int]:
    return np.asarray(cache.keys[0])[row, 0, 0, :count].astype(int).tolist()


def test_draft_cache_has_room_for_all_that_the_targets_has(states):
    """And for one more round, so that no write of a draft is out of bounds."""
    for state in states:
        assert state.drafter_state.num_slots == state.cache.num_slots + K
        assert state.context.tokens.shape[1] == PROGRAM.num_slots


def test_rows_advance_by_their_own_counts(states):
    assert len({int(length) for length in states[2].context.length - states[0].context.length}) > 1


def test_q_is_the_drafts_distribution_after_all_committed_and_drafted_tokens(states):
    """Whatever was accepted before; the q kept is the q drawn from."""
    for state in states:
        draft, _ = _propose(state)
        assert draft.probs.dtype == jnp.float32
        assert (draft.num_drafted == K).all()
        for row in range(NUM_ROWS):
            tokens = np.asarray(state.context.tokens)[row, : state.context.length[row]].tolist()
            for position in range(K):
                expected = toys.conditional(
                    DRAFT, SOURCES[row], tokens, GenerationConfig(temperature=TEMPERATURE[row])
                )
                np.testing.assert_allclose(draft.probs[row, position], expected, atol=1e-6)
                assert draft.probs[row, position, draft.tokens[row, position]] > 0
                tokens.append(int(draft.tokens[row, position]))


def test_caches_hold_the_committed_tokens_after_every_round(states):
    """The target's all but the last; the draft's all but the last after its next call."""
    for state in states:
        _, drafter_state = _propose(state)
        for row in range(NUM_ROWS):
            length = int(state.context.length[row])
            tokens = np.asarray(state.context.tokens)[row, :length].tolist()
            assert int(state.cache.length[row]) == length - 1
            assert _slots(state.cache, row, length - 1) == tokens[:-1]
            assert _slots(state.drafter_state, row, max(length - 2, 0)) == tokens[:-2]
            assert _slots(drafter_state, row, length) == tokens


def test_rollback_leaves_earlier_slots_bit_identical(states):
    for before, after in itertools.pairwise(states):
        for row in range(NUM_ROWS):
            length = int(before.cache.length[row])
            np.testing.assert_array_equal(
                before.cache.keys[0][row, ..., :length], after.cache.keys[0][row, ..., :length]
            )


def test_greedy_proposal_is_the_argmax_and_keeps_no_distribution(states):
    state = states[1]
    propose = jax.jit(lambda s: PROGRAM.drafter.propose(s.drafter_state, s.context, None, None))
    draft, _ = propose(state)
    assert draft.probs is None
    for row in range(NUM_ROWS):
        tokens = np.asarray(state.context.tokens)[row, : state.context.length[row]].tolist()
        for token in draft.tokens[row].tolist():
            expected = toys.conditional(DRAFT, SOURCES[row], tokens, GenerationConfig(temperature=0.0))
            assert token == expected.argmax()
            tokens.append(token)


def test_drafters_of_equal_configuration_share_what_is_static():
    """All but their arrays, so an equal drafter built anew compiles nothing."""
    one, other, longer = (
        jax.tree.structure(ModelDrafter(n, k)) for n, k in ((TARGET, K), (DRAFT, K), (DRAFT, 4))
    )
    assert one == other and hash(one) == hash(other)
    assert one != longer


@pytest.mark.parametrize("num_draft", [0, -1])
def test_from_model_refuses_fewer_than_one_draft(num_draft):
    with pytest.raises(ValueError, match=f"`num_draft` must be.*got {num_draft}"):
        drafters.from_model(None, num_draft=num_draft)
