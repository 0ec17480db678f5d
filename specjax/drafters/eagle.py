"""EAGLE drafters: a layer on the target's features that drafts a chain or a dynamic tree.

EAGLE (Li et al. 2024), EAGLE-2 (Li et al. 2024, section 4), EAGLE-3 (Li et al. 2025). Axes: B rows, K
drafts, D depth, k nodes expanded per level, T cache slots, W width of the network, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax import cache as cache_lib
from specjax import tree as tree_lib
from specjax.drafters import chain, pairs
from specjax.drafters.model import check_num_draft
from specjax.types import Context, Draft, Drafter, Draws, Tree


class EagleDrafter(pairs.PairDrafter):
    """A drafter of chains: each step reads the output of the one before in place of the target's feature.

    Attributes:
      num_draft: K.
      min_confidence: a row stops when q is less confident; see `chain.draft_chain`.
    """

    num_draft: int = struct.field(pytree_node=False)
    min_confidence: float = struct.field(pytree_node=False, default=0.0)

    def with_min_confidence(self, min_confidence: float) -> Drafter:
        """Returns the drafter with this threshold."""
        return self.replace(min_confidence=min_confidence)

    def propose(
        self, state: pairs.PairState, context: Context, draws: Draws | None, max_length: jax.Array | None
    ) -> tuple[Draft, pairs.PairState]:
        """Makes one call on the new pairs, then a step for each further token."""
        hidden, state, ready = self.feed(state, context)

        def feed(carry: tuple, token: jax.Array) -> tuple[jax.Array, tuple]:
            hidden, cache = carry
            layout = tree_lib.chain_layout(cache.length, 1, cache.num_slots)
            hidden, cache = self.network.decode(cache, hidden, token, layout)
            return self.network.logits(hidden), (hidden, cache)

        draft, (_, cache) = chain.draft_chain(
            self.network.logits(hidden),
            (hidden, state.cache),
            feed,
            context,
            draws,
            self.num_draft,
            max_length,
            self.min_confidence,
        )
        draft = draft.replace(num_drafted=jnp.where(ready, draft.num_drafted, 0))
        return draft, state.replace(cache=cache_lib.rollback(cache, state.cache.length))


class EagleTreeDrafter(pairs.PairDrafter):
    """A drafter of dynamic trees: the N most likely nodes under the layer (EAGLE-2).

    A node's value is the product of q along its path. Each level expands the k nodes of the largest value by
    their k most likely tokens. Of all generated nodes the N of the largest value are kept; values never
    increase along a path, so these form a tree. Children are not drawn: their q is one-hot.

    Raises:
      ValueError: a number is below 1, or `num_draft` exceeds the number of generated nodes.

    Attributes:
      num_draft: N.
      depth: D.
      num_expanded: k.
    """

    num_draft: int = struct.field(pytree_node=False)
    depth: int = struct.field(pytree_node=False)
    num_expanded: int = struct.field(pytree_node=False)

    drafts_trees = True

    def __post_init__(self) -> None:
        made = self.num_expanded + (self.depth - 1) * self.num_expanded**2
        if min(self.num_draft, self.depth, self.num_expanded) < 1 or self.num_draft > made:
            raise ValueError(
                f"`num_draft`, `max_depth` and `num_expanded` must be at least 1, and num_draft at most the "
                f"{made} generated nodes, got {self.num_draft}, {self.depth} and {self.num_expanded}"
            )

    @property
    def max_depth(self) -> int:
        """D."""
        return self.depth

    @property
    def num_extra_slots(self) -> int:
        """The nodes expanded on all levels."""
        return self.depth * self.num_expanded

    def propose(
        self, state: pairs.PairState, context: Context, draws: Draws | None, max_length: jax.Array | None
    ) -> tuple[Draft, pairs.PairState]:
        """Makes one call on the new pairs, then one per level below the first."""
        del draws, max_length
        width, num_rows = self.num_expanded, len(context.length)
        hidden, state, ready = self.feed(state, context)
        value, token = self._children(hidden, context)
        values, tokens = [value[:, 0]], [token[:, 0]]
        parents = [jnp.full((num_rows, width), -1)]
        # The nodes to expand: all of the first level.
        hidden = jnp.broadcast_to(hidden, (num_rows, width, hidden.shape[-1]))
        front = jnp.broadcast_to(jnp.arange(width)[None], (num_rows, width))
        above = jnp.zeros((num_rows, width, (self.depth - 1) * width), bool)
        key_depth, cache = jnp.arange(above.shape[2])[None, :] // width, state.cache
        for depth in range(self.depth - 1):
            made_values, made_tokens = (jnp.concatenate(x, axis=1) for x in (values, tokens))
            itself = jnp.eye(width, above.shape[2], depth * width, dtype=bool)
            above = above | itself[None]
            layout = tree_lib.layout_of(
                above, jnp.full((1, width), depth), key_depth, state.cache.length, cache.num_slots
            )
            at_front = jnp.take_along_axis(made_tokens, front, axis=1)
            hidden, cache = self.network.decode(cache, hidden, at_front, layout)
            value, token = self._children(hidden, context)
            value = value + jnp.take_along_axis(made_values, front, axis=1)[..., None]
            flat = value.reshape(num_rows, -1)
            best = jax.lax.top_k(flat, width)[1]
            origin = best // width  # index of their parent in the front
            values.append(flat)
            tokens.append(token.reshape(num_rows, -1))
            parents.append(jnp.repeat(front, width, axis=1))
            hidden = jnp.take_along_axis(hidden, origin[..., None], axis=1)
            above = jnp.take_along_axis(above, origin[..., None], axis=1)
            front = made_values.shape[1] + best
        state = state.replace(cache=cache_lib.rollback(cache, state.cache.length))
        all_nodes = [jnp.concatenate(x, axis=1) for x in (values, tokens, parents)]
        best_tokens, best_parents = self._keep_best(*all_nodes)
        valid = jnp.broadcast_to(ready[:, None], best_tokens.shape)
        return tree_lib.draft(Tree(best_parents, valid, self.depth), best_tokens), state

    def _children(self, hidden: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """Returns log q and ids `[B, n, k]` of the most likely tokens after each of n nodes `[B, n, W]`."""
        logits = self.network.logits(hidden)[..., : context.options.num_ids]
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        value, token = jax.lax.top_k(jax.nn.log_softmax(logits, axis=-1), self.num_expanded)
        return value, token.astype(jnp.int32)

    def _keep_best(
        self, values: jax.Array, tokens: jax.Array, parents: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns tokens and parents' call positions `[B, N]` of the most likely nodes, in their order."""
        kept = jnp.sort(jax.lax.top_k(values, self.num_draft)[1], axis=1)
        # A node's call position is the number of kept nodes up to and including it; the root's is 0.
        is_kept = (kept[:, None, :] == jnp.arange(values.shape[1])[None, :, None]).any(-1)
        position = jnp.cumsum(is_kept, axis=1, dtype=jnp.int32)
        parent = jnp.take_along_axis(parents, kept, axis=1)
        above = jnp.take_along_axis(position, jnp.maximum(parent, 0), axis=1)
        return jnp.take_along_axis(tokens, kept, axis=1), jnp.where(parent < 0, 0, above)


def eagle(heads: Any, num_draft: int = 4) -> EagleDrafter:
    """Returns a drafter of chains from an EAGLE layer (`specjax.load_heads`).

    Raises:
      ValueError: `heads` are of another kind; `num_draft` is below 1.
    """
    pairs.check_heads(heads, "eagle", 1)
    check_num_draft(num_draft)
    return EagleDrafter(heads, num_draft)


def eagle_tree(heads: Any, num_draft: int = 8, max_depth: int = 4, num_expanded: int = 3) -> EagleTreeDrafter:
    """Returns a drafter of dynamic trees from an EAGLE layer (EAGLE-2, Li et al. 2024).

    Args:
      heads: heads from `specjax.load_heads`.
      num_draft: N, number of nodes kept.
      max_depth: D, number of levels.
      num_expanded: k, number of nodes expanded per level, and of children of each.

    Raises:
      ValueError: `heads` are of another kind; `num_draft` exceeds the number of generated nodes.
    """
    pairs.check_heads(heads, "eagle", 1)
    pairs.check_whole(num_draft=num_draft, max_depth=max_depth, num_expanded=num_expanded)
    return EagleTreeDrafter(heads, num_draft, max_depth, num_expanded)
