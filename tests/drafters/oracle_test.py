"""Drafters that know the target's output: every draft is accepted."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.exactness.cases import DRAFTERS, Toys
from experiments.exactness.toys import OracleHeads, OracleNetwork
from specjax import decode
from specjax import tree as tree_lib
from specjax.drafters import AdaptiveDrafter, LookaheadDrafter
from specjax.types import Tree

K, LENGTH = 3, 30
ORACLE = OracleNetwork(jnp.asarray([3, 4, 5, 6, 2, 1, 3]))  # 0 3 6 3 6 ...; 2 5 1 4 2 ...
SOURCE = np.array([[0, 0, 0, 0], [5, 1, 4, 2]])
MASK = np.ones(SOURCE.shape, bool)


def drafter_of(name, num_draft=K):
    return DRAFTERS[name].make(Toys(ORACLE, ORACLE, OracleHeads(ORACLE)), num_draft)


@pytest.mark.parametrize("name", [name for name in DRAFTERS if DRAFTERS[name].warm_up])
def test_oracle_is_accepted_to_the_last(name):
    drafter = drafter_of(name)
    request = dict(
        prefix=np.array([[0], [2]]), max_new_tokens=np.array([LENGTH, LENGTH - 1]), seed=0, eos_ids=()
    )
    plain = decode.generate(ORACLE, SOURCE, MASK, **request)
    tokens, counts = [[], []], [[], []]

    def on_round(emitted):
        for row in range(2):
            tokens[row] += emitted[row]
            counts[row].append(len(emitted[row]))

    decode.generate(ORACLE, SOURCE, MASK, drafter=drafter, on_round=on_round, **request)
    for row in range(2):
        assert tokens[row] == plain.tokens[row, : plain.length[row]].tolist()
        seen, late = 0, []
        for count in counts[row]:
            if seen >= DRAFTERS[name].warm_up and count and seen + count < len(tokens[row]):
                late.append(count)
            seen += count
        assert late and set(late) == {drafter.max_depth + 1}, (
            f"row {row} emitted {counts[row]} tokens in its rounds; after the first {DRAFTERS[name].warm_up} "
            f"tokens each round must emit {drafter.max_depth + 1}, all drafts and one more"
        )


class Pausing(AdaptiveDrafter):
    """Drafts nothing for eleven rounds, which is more than pairs are kept for, then all it can."""

    def choose_length(self, state, context):
        return jnp.where(state.tested < 11, 0, self.num_draft)

    def commit(self, state, round):
        inner = self.inner.commit(state.inner, round)
        return state.replace(inner=inner, tested=state.tested + 1)


@pytest.mark.parametrize("name", [name for name in DRAFTERS if DRAFTERS[name].warm_up == 1])
def test_after_a_long_pause_it_is_accepted_to_the_last_again(name):
    inner = drafter_of(name, num_draft=2)
    stats = decode.generate(
        ORACLE,
        SOURCE,
        MASK,
        drafter=Pausing(inner, (0, inner.num_draft), (1.0, 2.0)),
        prefix=np.array([[0], [2]]),
        max_new_tokens=11 + 4 * (inner.max_depth + 1),
        seed=0,
        eos_ids=(),
    ).stats
    assert stats.num_rounds.tolist() == [15, 15]
    assert stats.accepted.sum(1).tolist() == [4 * inner.max_depth] * 2


def test_the_window_of_lookahead_is_a_chain_with_its_guesses_below():
    drafter = LookaheadDrafter(4, ngram=4, num_ngrams=2)
    parents = jnp.asarray(drafter._parents())[None]
    above = tree_lib.ancestors(Tree(parents, jnp.ones(parents.shape, bool), drafter.max_depth))
    depth = tree_lib.depths_of(above)[0]
    window = depth[drafter.num_candidates + 1 :].reshape(3, 4)
    assert window.tolist() == [[1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]
    assert above[0, :, 0].all()
    assert depth[1:7].tolist() == [1, 2, 3, 1, 2, 3]


def test_layouts_of_trees_see_each_node_and_what_is_above_it():
    """Of EAGLE-2's levels: positions grow by one a level, and a node sees all pairs and its own line."""
    above = (
        jnp.zeros((2, 2, 4), bool).at[:, 0, jnp.array([1, 2])].set(True).at[:, 1, jnp.array([0, 3])].set(True)
    )
    at_depth_1, width = jnp.ones((1, 2), jnp.int32), 2
    layout = tree_lib.layout_of(
        above, at_depth_1, jnp.arange(4)[None] // width, jnp.array([3, 5]), num_slots=12
    )
    assert layout.positions.tolist() == [[4, 4], [6, 6]]
    assert layout.key_positions[0, :7].tolist() == [0, 1, 2, 3, 3, 4, 4]
    assert np.flatnonzero(layout.visible[0, 0]).tolist() == [0, 1, 2, 4, 5]
    assert np.flatnonzero(layout.visible[1, 1]).tolist() == [0, 1, 2, 3, 4, 5, 8]
