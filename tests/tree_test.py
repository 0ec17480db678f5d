"""Tree topologies, and decoder calls on them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as cache_lib
from specjax import tree
from specjax.models import t5
from specjax.types import Draft, Tree
from tests.tiny_t5 import CONFIG, random_params

NUM_ROWS, NUM_NODES, NUM_SLOTS = 3, 7, 16


def random_tree(seed: int) -> Tree:
    """A different topology in each row, some nodes padding."""
    rng = np.random.default_rng(seed)
    parents = np.array([[rng.integers(0, i + 1) for i in range(NUM_NODES)] for _ in range(NUM_ROWS)])
    valid = rng.random((NUM_ROWS, NUM_NODES)) < 0.8
    return Tree(jnp.asarray(parents), jnp.asarray(valid), NUM_NODES)


def depths_of(topology: Tree) -> jax.Array:
    return tree.depths_of(tree.ancestors(topology))


def path_to(parents: np.ndarray, position: int) -> list[int]:
    """Call positions from the root to one, by walking up."""
    path = [position]
    while path[0]:
        path.insert(0, int(parents[path[0] - 1]))
    return path


@pytest.mark.parametrize("seed", range(5))
def test_ancestors_and_depths_equal_those_found_by_walking_up(seed):
    topology = random_tree(seed)
    above, depths = np.asarray(tree.ancestors(topology)), np.asarray(depths_of(topology))
    for row in range(NUM_ROWS):
        for position in range(NUM_NODES + 1):
            path = path_to(np.asarray(topology.parents)[row], position)
            assert np.flatnonzero(above[row, position]).tolist() == path
            assert depths[row, position] == len(path) - 1


def test_from_branching_gives_parents_and_depths():
    """The root's two children, then two children each, then one each."""
    topology = tree.from_branching((2, 2, 1), 2)
    assert topology.parents.tolist() == [[0, 0, 1, 1, 2, 2, 3, 4, 5, 6]] * 2
    assert topology.max_depth == 3
    assert tree.level_starts((2, 2, 1)) == [0, 1, 3, 7, 11]
    assert depths_of(topology)[0].tolist() == [0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]


def test_chain_is_the_tree_of_width_one():
    draft = Draft(jnp.zeros((2, 3), jnp.int32), jnp.asarray([3, 1]), None)
    chain = tree.of(draft)
    assert chain.parents.tolist() == [[0, 1, 2]] * 2
    assert chain.valid.tolist() == [[True] * 3, [True, False, False]]
    np.testing.assert_array_equal(tree.before(draft)[0], tree.before(draft.replace(tree=chain))[0])
    start = jnp.asarray([2, 4])
    as_tree, as_chain = tree.layout(chain, start, 9), tree.chain_layout(start, 4, 9)
    np.testing.assert_array_equal(as_tree.positions, as_chain.positions)
    np.testing.assert_array_equal(as_tree.visible, as_chain.visible)


@pytest.fixture(scope="module")
def network():
    params = random_params(CONFIG)
    params["decoder_bias"]["table"] *= 20  # so that a wrong position shows
    return t5.T5Network(params, CONFIG)


SOURCES = np.array([[5, 6, 7, 1], [8, 1, 0, 0], [9, 3, 1, 0]])
PREFIXES = [[0, 11, 12, 13, 14], [0, 15], [0, 16, 17]]
TOKENS = np.random.default_rng(0).integers(2, 40, (NUM_ROWS, NUM_NODES + 1))


@functools.cache
def jitted(name):
    return jax.jit(getattr(t5.T5Network, name), static_argnames="num_slots" if name == "init_cache" else None)


def prefilled(network, num_slots=NUM_SLOTS):
    """A cache of each row's prefix, of different lengths, with garbage beyond them."""
    encoded = jitted("encode")(network, jnp.asarray(SOURCES), jnp.asarray(SOURCES > 0))
    cache = jitted("init_cache")(network, encoded, jnp.asarray(SOURCES > 0), num_slots=num_slots)
    width = max(map(len, PREFIXES))
    tokens = np.array([row + [39] * (width - len(row)) for row in PREFIXES])
    cache = jitted("decode")(network, cache, jnp.asarray(tokens))[2]
    return cache_lib.rollback(cache, jnp.asarray([len(row) for row in PREFIXES]))


@functools.cache
def whole():
    """Teacher forcing, compiled once."""
    return jax.jit(lambda network, *inputs: t5.T5(CONFIG).apply({"params": network.params}, *inputs))


def logits_after(network, row: int, tokens: list[int]) -> np.ndarray:
    """Logits `[V]` after a row's prefix and more tokens, as plain text."""
    tokens = PREFIXES[row] + tokens
    source = jnp.asarray(SOURCES[row : row + 1])
    padded = jnp.asarray(np.pad(tokens, (0, NUM_SLOTS - len(tokens)))[None])
    return np.asarray(whole()(network, source, source > 0, padded))[0, len(tokens) - 1]


@pytest.mark.parametrize("seed", range(3))
def test_tree_logits_equal_sequential_decoding_along_each_path(network, seed):
    """Random trees with padding nodes, rows of different prefix lengths."""
    topology = random_tree(seed)
    cache = prefilled(network)
    layout = tree.layout(topology, cache.length, NUM_SLOTS)
    logits, _, _ = jitted("decode")(network, cache, jnp.asarray(TOKENS), layout)
    for row in range(NUM_ROWS):
        for position in range(NUM_NODES + 1):
            path = path_to(np.asarray(topology.parents)[row], position)
            expected = logits_after(network, row, TOKENS[row, path].tolist())
            np.testing.assert_allclose(logits[row, position], expected, atol=1e-5)


def test_tree_fed_level_by_level_equals_one_call(network):
    """As `ModelTreeDrafter` calls it."""
    topology = tree.from_branching((2, 2), NUM_ROWS)
    cache = prefilled(network)
    start, tokens = cache.length, jnp.asarray(TOKENS[:, :7])
    at_once, _, _ = jitted("decode")(network, cache, tokens, tree.layout(topology, start, NUM_SLOTS))
    parts = []
    for first, last in ((0, 1), (1, 3), (3, 7)):
        layout = tree.layout(topology, start, NUM_SLOTS, first, last)
        logits, _, cache = jitted("decode")(network, cache, tokens[:, first:last], layout)
        parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), at_once, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_cache_keeps_exactly_the_accepted_path(network, seed):
    """Later logits equal autoregressive decoding of the path; earlier slots stay bit-exact."""
    topology = random_tree(seed)
    cache = prefilled(network)
    root = cache.length
    layout = tree.layout(topology, root, NUM_SLOTS)
    _, _, after = jitted("decode")(network, cache, jnp.asarray(TOKENS), layout)
    deepest = np.asarray(depths_of(topology)).argmax(1)
    paths = [path_to(np.asarray(topology.parents)[row], deepest[row])[1:] for row in range(NUM_ROWS)]
    padded = np.array([path + [0] * (NUM_NODES - len(path)) for path in paths])
    kept = jax.jit(cache_lib.keep_path)(after, root, jnp.asarray(padded))
    for row, path in enumerate(paths):
        slots = int(root[row])
        np.testing.assert_array_equal(kept.keys[1][row, ..., :slots], cache.keys[1][row, ..., :slots])
        for offset, position in enumerate(path):
            np.testing.assert_array_equal(
                kept.values[1][row, :, slots + 1 + offset], after.values[1][row, :, slots + position]
            )
    length = root + 1 + np.array([len(path) for path in paths])
    logits, _, _ = jitted("decode")(network, cache_lib.rollback(kept, length), jnp.asarray(TOKENS[:, :1]))
    for row, path in enumerate(paths):
        expected = logits_after(network, row, TOKENS[row, [0, *path, 0]].tolist())
        np.testing.assert_allclose(logits[row, 0], expected, atol=1e-5)
