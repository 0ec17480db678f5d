"""The topology of a token tree: depths, ancestors, and where its nodes stand in a decoder call.

Axes: B rows, N nodes, D depth, T cache slots.

    call position   0     1  2  3  4  5        the cat sat          text so far; "sat" is the root
    token           sat   on by up the a                 |- on - the
    parents               0  0  0  1  1                  |     `- a
    depth           0     1  1  1  2  2                  |- by
                                                         `- up

A node's token stands at the root's position plus its depth; it sees the text and its ancestors. In
the cache a call's tokens lie side by side, whatever their depth: `cache.keep_path` then moves the
accepted ones together.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Draft, Layout, Tree


def from_branching(branching: Sequence[int], num_rows: int) -> Tree:
    """A tree in which every node of depth d has `branching[d]` children; nodes in breadth-first order.

    A chain of K is `(1,) * K`.

    Args:
      branching: children per node, each at least 1. Static.
      num_rows: B.
    """
    starts = level_starts(branching)
    levels = [np.arange(starts[depth], starts[depth + 1]) for depth in range(len(branching))]
    parents = np.concatenate([np.repeat(x, width) for x, width in zip(levels, branching, strict=True)])
    of_row = jnp.broadcast_to(jnp.asarray(parents, jnp.int32)[None], (num_rows, len(parents)))
    return Tree(of_row, jnp.ones(of_row.shape, bool), len(branching))


def check_branching(branching: Sequence[int]) -> None:
    """Raises a ValueError where a drafter's `branching` makes no tree."""
    if not isinstance(branching, tuple) or not branching or min(branching) < 1:
        raise ValueError(
            f"`branching` must be a tuple of the children of each level, each at least 1, got {branching}"
        )


def of(draft: Draft) -> Tree:
    """The draft's tree; a chain as the tree of width 1."""
    if draft.tree is not None:
        return draft.tree
    num_rows, num_draft = draft.tokens.shape
    order = jnp.arange(num_draft)[None, :]
    parents = jnp.broadcast_to(order, (num_rows, num_draft))
    return Tree(parents, order < draft.num_drafted[:, None], num_draft)


def level_starts(branching: Sequence[int]) -> list[int]:
    """Call positions at which the levels of such a tree begin, the root's first; its end is the last."""
    sizes = [math.prod(branching[:depth]) for depth in range(len(branching) + 1)]
    return np.cumsum([0, *sizes]).tolist()


def ancestors(tree: Tree) -> jax.Array:
    """`[B, N + 1, N + 1] bool`: True where the second call position is the first or above it."""
    num_rows, num_nodes = tree.parents.shape
    jump = jnp.pad(tree.parents, ((0, 0), (1, 0)))  # the root's parent is the root
    above = jnp.broadcast_to(jnp.eye(num_nodes + 1, dtype=bool)[None], (num_rows, *[num_nodes + 1] * 2))
    # Twice as far up each time; invalid nodes may lie deeper than what can be accepted.
    for _ in range(num_nodes.bit_length()):
        above = above | jnp.take_along_axis(above, jump[:, :, None], axis=1)
        jump = jnp.take_along_axis(jump, jump, axis=1)
    return above


def whole(above: jax.Array, kept: jax.Array) -> jax.Array:
    """`[B, N] bool`: nodes that are `kept` `[B, N]` with all that is above them, by their `ancestors`."""
    return (above[:, 1:, 1:] <= kept[:, None]).all(-1)


def depths_of(above: jax.Array) -> jax.Array:
    """`[B, N + 1] int32`, edges from the root to each call position, from its `ancestors`."""
    return above.sum(-1, dtype=jnp.int32) - 1


def before(draft: Draft) -> jax.Array:
    """Which drafted tokens precede each position of the call: `[1 or B, N + 1, N] bool`.

    A token precedes its own call position, whose logits are of the token after it.
    """
    if draft.tree is not None:
        return ancestors(draft.tree)[:, :, 1:]
    return chain_before(draft.tokens.shape[1])


def chain_before(num_draft: int) -> jax.Array:
    """The same for a chain of K: `[1, K + 1, K] bool`, a triangle."""
    return (jnp.arange(num_draft)[None, :] < jnp.arange(num_draft + 1)[:, None])[None]


def chain_layout(start: jax.Array, num_new: int, num_slots: int) -> Layout:
    """The layout of N tokens that follow each other: slot, position and order are one.

    Args:
      start: `[B]` slot of each row's first new token.
      num_new: N. Static.
      num_slots: T. Static.
    """
    positions = start[:, None] + jnp.arange(num_new)[None, :]
    slots = jnp.arange(num_slots)[None, :]
    return Layout(positions, slots, slots[:, None, :] <= positions[:, :, None])


def layout(tree: Tree, start: jax.Array, num_slots: int, first: int = 0, last: int | None = None) -> Layout:
    """The layout of call positions `first`..`last` - 1 of a tree whose root is in slot `start`.

    Args:
      tree: the topology.
      start: `[B]` slot of each row's root, which is also its position.
      num_slots: T. Static.
      first, last: part of the call; those before it are in the cache already. Static.
    """
    above = ancestors(tree)
    depth = depths_of(above)
    return layout_of(above[:, first:last], depth[:, first:last], depth, start, num_slots)


def layout_of(
    above: jax.Array, depth: jax.Array, key_depth: jax.Array, start: jax.Array, num_slots: int
) -> Layout:
    """The layout of N nodes beside E entries that lie from slot `start` on; they see all before `start`.

    Args:
      above: `[B, N, E] bool`, which of the entries a node sees.
      depth: `[1 or B, N]`, how far behind `start` each node stands in the text.
      key_depth: `[1 or B, E]`, the same of the entries.
      start: `[B]`.
      num_slots: T. Static.
    """
    num_entries = above.shape[2]
    slots = jnp.arange(num_slots)[None, :]
    entry = slots - start[:, None]  # which one each slot holds
    is_entry = (entry >= 0) & (entry < num_entries)
    entry = jnp.clip(entry, 0, num_entries - 1)
    key_depth = jnp.broadcast_to(key_depth, (len(start), num_entries))
    positions = jnp.where(is_entry, start[:, None] + jnp.take_along_axis(key_depth, entry, axis=1), slots)
    index = jnp.broadcast_to(entry[:, None], (*above.shape[:2], num_slots))
    seen = jnp.take_along_axis(above, index, axis=2)
    visible = jnp.where(is_entry[:, None], seen, (slots < start[:, None])[:, None])
    return Layout(start[:, None] + depth, positions, visible)


def draft(
    tree: Tree,
    tokens: jax.Array,
    probs: jax.Array | None = None,
    with_replacement: bool = False,
    num_candidates: int | None = None,
) -> Draft:
    """The draft of a tree's valid nodes; the others as of `types.Draft`."""
    num_drafted = tree.valid.sum(1, dtype=jnp.int32)
    return Draft(tokens, num_drafted, probs, tree, with_replacement, num_candidates)


def keep_nodes(draft: Draft, kept: jax.Array) -> Draft:
    """The draft without the nodes that are not among `kept` `[B, N] bool`."""
    assert draft.tree is not None
    valid = draft.tree.valid & kept
    return draft.replace(tree=draft.tree.replace(valid=valid), num_drafted=valid.sum(1, dtype=jnp.int32))
