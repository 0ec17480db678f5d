"""Drafters that know what the target will say are accepted to the last token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.exact_law import GARBAGE
from specjax import cache as cache_lib
from specjax import decode
from specjax import tree as tree_lib
from specjax.controller import AdaptiveDrafter
from specjax.drafters.eagle import EagleDrafter, EagleTreeDrafter
from specjax.drafters.lookahead import LookaheadDrafter
from specjax.drafters.medusa import MedusaDrafter
from specjax.drafters.model import ModelDrafter
from specjax.drafters.model_tree import ModelTreeDrafter
from specjax.drafters.one_pass import OnePassDrafter
from specjax.drafters.prompt_lookup import PromptLookupDrafter
from specjax.staged import StagedDrafter, StagedParams
from specjax.types import Tree

V, LENGTH = 7, 30


@dataclasses.dataclass(frozen=True)
class Markov:
    """A network, and heads on it, that know the next token from the last one: a feature is a token.

    Params: `[V]`, what follows each token.
    """

    vocab_size: int = V
    encoded_width: int = 1
    num_steps: int = 4
    feature_layers: tuple[int, ...] = ()

    def encode(self, params, source_ids, source_mask):
        return jnp.zeros((*source_ids.shape, 1))

    def init_cache(self, params, encoded, source_mask, num_slots):
        keys = jnp.full((len(encoded), 1, 1, num_slots), GARBAGE)
        length = jnp.zeros(len(encoded), jnp.int32)
        return cache_lib.Cache((keys,), (keys.swapaxes(2, 3),), length, (keys,), (keys,), source_mask)

    def decode(self, params, cache, *inputs):
        """As a target `(tokens, layout)`, as heads `(hidden, tokens, layout, num_masks)`."""
        if jnp.issubdtype(inputs[0].dtype, jnp.integer):
            features = inputs[0][..., None].astype(jnp.float32)
            cache = cache.replace(length=cache.length + features.shape[1])
            return self.head(params, features), features, cache
        _, tokens, layout, *rest = inputs
        num_masks = rest[0] if rest else 0
        cache = cache.replace(length=cache.length + tokens.shape[1] + num_masks)
        # What a pair's token says; a mask stands further on than the last pair that it sees.
        outputs = [tokens]
        if num_masks:
            start = layout.positions[:, 0]
            num_new = layout.positions[:, tokens.shape[1]] - start
            last = jnp.take_along_axis(tokens, jnp.maximum(num_new - 1, 0)[:, None], axis=1)
            for _ in range(num_masks):
                last = params[last]
                outputs.append(last)
        return jnp.concatenate(outputs, axis=1)[..., None].astype(jnp.float32), cache

    def hidden(self, params, features):
        return features

    def ahead(self, params, features, depth):
        token, levels = params[features[:, 0].astype(jnp.int32)], []
        for _ in range(depth):
            token = params[token]
            levels.append(20 * jax.nn.one_hot(token, V))
        return jnp.stack(levels, axis=1)

    def head(self, params, features):
        return 20 * jax.nn.one_hot(params[features[..., 0].astype(jnp.int32)], V)


NETWORK = Markov()
DRAFTERS = {
    "model": ModelDrafter(NETWORK, 3),
    "tree": ModelTreeDrafter(NETWORK, (2, 1, 1)),
    "medusa": MedusaDrafter(NETWORK, (2, 1, 1)),
    "eagle": EagleDrafter(NETWORK, 3),
    "eagle_tree": EagleTreeDrafter(NETWORK, num_draft=4, max_depth=3, num_expanded=2),
    "one_pass": OnePassDrafter(NETWORK, 3),
    "lookahead": LookaheadDrafter(3, ngram=4, num_candidates=2),
    "prompt_lookup": PromptLookupDrafter(3, max_ngram=2),
    "staged, a model drafts": StagedDrafter(NETWORK, 3, ModelDrafter(NETWORK, 2)),
    "staged, copies draft": StagedDrafter(NETWORK, 3, PromptLookupDrafter(2)),
}
WARM_UP = {"lookahead": 12, "prompt_lookup": 12}  # tokens until both rows are in their cycles, and those seen


@pytest.mark.parametrize("name", DRAFTERS)
def test_oracle_is_accepted_to_the_last(name):
    follows = jnp.asarray([3, 4, 5, 6, 2, 1, 3])  # 0 3 6 3 6 ...; 2 5 1 4 2 ...
    params = {"staged": StagedParams(follows, follows)}.get(name.split(",")[0], follows)
    if name == "staged, copies draft":
        params = StagedParams(follows)
    drafter = DRAFTERS[name]
    request = dict(
        prefix=np.array([[0], [2]]), max_new_tokens=np.array([LENGTH, LENGTH - 1]), seed=0, eos_ids=()
    )
    source = np.array([[0, 0, 0, 0], [5, 1, 4, 2]])
    mask = np.ones(source.shape, bool)
    plain = decode.generate(NETWORK, follows, source, mask, **request)
    tokens, counts = [[], []], [[], []]

    def on_round(emitted):
        for row in range(2):
            tokens[row] += emitted[row]
            counts[row].append(len(emitted[row]))

    decode.generate(
        NETWORK, follows, source, mask, drafter=drafter, drafter_params=params, on_round=on_round, **request
    )
    for row in range(2):
        assert tokens[row] == plain.tokens[row, : plain.length[row]].tolist()
        seen, late = 0, []
        for count in counts[row]:
            if seen >= WARM_UP.get(name, 1) and count and seen + count < len(tokens[row]):
                late.append(count)
            seen += count
        assert late and set(late) == {drafter.max_depth + 1}, (row, counts[row])


class Pausing(AdaptiveDrafter):
    """Drafts nothing for eleven rounds, which is more than pairs are kept for, then all it can."""

    def wanted(self, state):
        return jnp.where(state.tested < 11, 0, self.num_draft)

    def commit(self, params, state, round):
        inner = self.inner.commit(params, state.inner, round)
        return state.replace(inner=inner, tested=state.tested + 1)


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in WARM_UP])
def test_after_a_long_pause_it_is_accepted_to_the_last_again(name):
    follows = jnp.asarray([3, 4, 5, 6, 2, 1, 3])
    params = StagedParams(follows, follows) if name.startswith("staged") else follows
    inner = DRAFTERS[name]
    drafter = Pausing(inner, (0, inner.num_draft), (1.0, 2.0))
    source = np.array([[0, 0, 0, 0], [5, 1, 4, 2]])
    stats = decode.generate(
        NETWORK,
        follows,
        source,
        np.ones(source.shape, bool),
        drafter=drafter,
        drafter_params=params,
        prefix=np.array([[0], [2]]),
        max_new_tokens=11 + 4 * (inner.max_depth + 1),
        seed=0,
        eos_ids=(),
    ).stats
    assert stats.num_rounds.tolist() == [15, 15]
    assert stats.accepted.sum(1).tolist() == [4 * inner.max_depth] * 2


def test_the_window_of_lookahead_is_a_chain_with_its_guesses_below():
    drafter = LookaheadDrafter(4, ngram=4, num_candidates=2)
    parents = jnp.asarray(drafter._parents())[None]
    above = tree_lib.ancestors(Tree(parents, jnp.ones(parents.shape, bool), drafter.max_depth))
    depth = tree_lib.depths_of(above)[0]
    window = depth[drafter.num_candidate_nodes + 1 :].reshape(3, 4)
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
