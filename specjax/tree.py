"""The topology of a token tree: depths, ancestors, and the layout of its nodes in a decoder call.

Axes: B rows, N nodes, D depth, T cache slots.

    call position   0     1  2  3  4  5        the cat sat          text so far; "sat" is the root
    token           sat   on by up the a                 |- on - the
    parents               0  0  0  1  1                  |     `- a
    depth           0     1  1  1  2  2                  |- by
                                                         `- up

The position of a node in the text is the root's plus its depth; the node sees the text and its ancestors. The
cache stores a call's tokens in consecutive slots, whatever their depth; `cache.keep_path` then moves the
accepted ones together.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Draft, Layout, Tree


def from_branching(branching: Sequence[int], num_rows: int) -> Tree:
    """Returns a tree whose nodes of depth d have `branching[d]` children each, in breadth-first order.

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
    """Raises a ValueError if a drafter's `branching` does not describe a tree."""
    if not isinstance(branching, tuple) or not branching or min(branching) < 1:
        raise ValueError(
            f"`branching` must be a tuple of the children of each level, each at least 1, got {branching}"
        )


def of(draft: Draft) -> Tree:
    """Returns the tree of a draft; a chain becomes a tree of width 1."""
    if draft.tree is not None:
        return draft.tree
    num_rows, num_draft = draft.tokens.shape
    order = jnp.arange(num_draft)[None, :]
    parents = jnp.broadcast_to(order, (num_rows, num_draft))
    return Tree(parents, order < draft.num_drafted[:, None], num_draft)


def level_starts(branching: Sequence[int]) -> list[int]:
    """Returns the call position at which each level begins, from the root's on; the last entry is the end."""
    sizes = [math.prod(branching[:depth]) for depth in range(len(branching) + 1)]
    return np.cumsum([0, *sizes]).tolist()


def ancestors(tree: Tree) -> jax.Array:
    """Returns `[B, N + 1, N + 1] bool`: True at [i, j] if call position j is i or an ancestor of i."""
    num_rows, num_nodes = tree.parents.shape
    jump = jnp.pad(tree.parents, ((0, 0), (1, 0)))  # the root's parent is the root
    above = jnp.broadcast_to(jnp.eye(num_nodes + 1, dtype=bool)[None], (num_rows, *[num_nodes + 1] * 2))
    # Each step doubles the distance; N bounds it, since invalid nodes may be deeper than `max_depth`.
    for _ in range(num_nodes.bit_length()):
        above = above | jnp.take_along_axis(above, jump[:, :, None], axis=1)
        jump = jnp.take_along_axis(jump, jump, axis=1)
    return above


def whole(above: jax.Array, kept: jax.Array) -> jax.Array:
    """Returns `[B, N] bool`: nodes that are `kept` `[B, N]` together with all their ancestors (`above`)."""
    return (above[:, 1:, 1:] <= kept[:, None]).all(-1)


def depths_of(above: jax.Array) -> jax.Array:
    """Returns `[B, N + 1] int32`, the depth of each call position, from its `ancestors`."""
    return above.sum(-1, dtype=jnp.int32) - 1


def before(draft: Draft) -> jax.Array:
    """Returns which drafted tokens precede the next token at each call position: `[1 or B, N + 1, N] bool`.

    A token counts as preceding its own call position, whose logits predict the token after it.
    """
    if draft.tree is not None:
        return ancestors(draft.tree)[:, :, 1:]
    return chain_before(draft.tokens.shape[1])


def chain_before(num_draft: int) -> jax.Array:
    """Returns `before` for a chain of K: a triangle `[1, K + 1, K] bool`."""
    return (jnp.arange(num_draft)[None, :] < jnp.arange(num_draft + 1)[:, None])[None]


def chain_layout(start: jax.Array, num_new: int, num_slots: int) -> Layout:
    """Returns the layout of a chain of N tokens, for which slot and position are equal.

    Args:
      start: `[B]` slot of each row's first new token.
      num_new: N. Static.
      num_slots: T. Static.
    """
    positions = start[:, None] + jnp.arange(num_new)[None, :]
    slots = jnp.arange(num_slots)[None, :]
    return Layout(positions, slots, slots[:, None, :] <= positions[:, :, None])


def layout(tree: Tree, start: jax.Array, num_slots: int, first: int = 0, last: int | None = None) -> Layout:
    """Returns the layout of call positions `first`..`last` - 1 of a tree whose root is in slot `start`.

    Args:
      tree: the topology.
      start: `[B]` slot of each row's root, which is also its position.
      num_slots: T. Static.
      first, last: the part of the call; earlier call positions are already in the cache. Static.
    """
    above = ancestors(tree)
    depth = depths_of(above)
    return layout_of(above[:, first:last], depth[:, first:last], depth, start, num_slots)


def layout_of(
    above: jax.Array, depth: jax.Array, key_depth: jax.Array, start: jax.Array, num_slots: int
) -> Layout:
    """Returns the layout of N nodes over E entries from slot `start` on; all slots before it are visible.

    Args:
      above: `[B, N, E] bool`, the entries that a node sees.
      depth: `[1 or B, N]`, position of each node relative to `start`.
      key_depth: `[1 or B, E]`, position of each entry relative to `start`.
      start: `[B]`.
      num_slots: T. Static.
    """
    num_entries = above.shape[2]
    slots = jnp.arange(num_slots)[None, :]
    entry = slots - start[:, None]  # the index of the entry in each slot
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
    """Returns the draft of a tree's valid nodes; for the other arguments see `types.Draft`."""
    num_drafted = tree.valid.sum(1, dtype=jnp.int32)
    return Draft(tokens, num_drafted, probs, tree, with_replacement, num_candidates)


def keep_nodes(draft: Draft, kept: jax.Array) -> Draft:
    """Returns the draft with only the nodes in `kept` `[B, N] bool`."""
    assert draft.tree is not None
    valid = draft.tree.valid & kept
    return draft.replace(tree=draft.tree.replace(valid=valid), num_drafted=valid.sum(1, dtype=jnp.int32))
