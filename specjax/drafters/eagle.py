"""A layer on the target's features that drafts by its own outputs: a chain, or a tree chosen as it goes.

EAGLE (Li et al. 2024), EAGLE-2 (Li et al. 2024, section 4), EAGLE-3 (Li et al. 2025). Axes: B rows, K
drafts, D depth, k nodes that a level expands, T cache slots, W width of the network, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax import tree as tree_lib
from specjax.drafters import chain, pairs
from specjax.drafters.wanted import nothing_like
from specjax.types import Context, Draft, Draws, Params, Round, Tree


@dataclasses.dataclass(frozen=True)
class EagleDrafter(pairs.PairChain):
    """Draws a chain of K tokens: each step takes the output before it in place of the target's feature.

    Attributes:
      network, num_draft: see `pairs.PairChain`.
      min_confidence: a row stops early by it; see `chain.draw_up_to`.
    """

    min_confidence: float = 0.0

    def run(
        self, params: Params, state: pairs.PairState, context: Context, draws: Draws | None, wanted: jax.Array
    ) -> tuple[Draft, pairs.PairState]:
        """One call on the new pairs, then as many steps as some row still has use for."""
        hidden, state, ready = pairs.feed(self.network, params, state, context)

        def feed(carry: tuple, token: jax.Array) -> tuple[jax.Array, tuple]:
            hidden, cache = carry
            layout = tree_lib.chain_layout(cache.length, 1, cache.num_slots)
            hidden, cache = self.network.decode(params, cache, hidden, token, layout)
            return self.network.head(params, hidden), (hidden, cache)

        empty, logits = self.empty(params, state, context, draws), self.network.head(params, hidden)
        wanted = jnp.where(ready, wanted, 0)
        draft, (_, cache) = chain.draw_up_to(
            empty, logits, (hidden, state.cache), feed, context, draws, wanted, self.min_confidence
        )
        return draft, state.replace(cache=cache_lib.rollback(cache, state.cache.length))


@dataclasses.dataclass(frozen=True)
class EagleTreeDrafter:
    """Drafts the tree of N nodes that the layer finds likeliest (EAGLE-2).

    A node's value is the product of q along its path. Each level expands the k nodes of the largest value by
    their k likeliest tokens; of all nodes made the N of the largest value are kept: values fall
    along a path, so they hang together. Children are not drawn: their q is one-hot.

    Raises:
      ValueError: a number below 1, or more nodes than are made.

    Attributes:
      network: the layer. Static.
      num_draft: N.
      max_depth: D.
      num_expanded: k.
    """

    network: pairs.PairNetwork
    num_draft: int
    max_depth: int
    num_expanded: int
    drafts_trees = True

    def __post_init__(self) -> None:
        made = self.num_expanded + (self.max_depth - 1) * self.num_expanded**2
        if min(self.num_draft, self.max_depth, self.num_expanded) < 1 or self.num_draft > made:
            raise ValueError(
                f"num_draft={self.num_draft}, max_depth={self.max_depth}, num_expanded={self.num_expanded}: "
                f"each must be at least 1, and num_draft at most the {made} nodes that are made"
            )

    def init(self, params: Params, context: Context, prefix_width: int) -> pairs.PairState:
        """See `pairs`."""
        del prefix_width
        num_nodes = self.max_depth * self.num_expanded
        return pairs.init(self.network, params, context, self.max_depth, num_nodes)

    @property
    def widths(self) -> tuple[int, ...]:
        """A round in which no row drafts is a plain step."""
        return (0, self.num_draft)

    def propose(
        self, params: Params, state: pairs.PairState, context: Context, draws: Draws | None
    ) -> tuple[Draft, pairs.PairState]:
        """One call on the new pairs, and one a level below the first."""
        del draws
        return self._run(params, context, state)

    def propose_up_to(
        self, params: Params, state: pairs.PairState, context: Context, draws: Draws | None, wanted: jax.Array
    ) -> tuple[Draft, pairs.PairState]:
        """The same for rows that want a tree; none, and no call, where no row does."""
        del draws
        run = lambda state: self._run(params, context, state)  # noqa: E731
        feed_only = lambda state: pairs.feed(self.network, params, state, context).state  # noqa: E731
        return pairs.draft_if_wanted(run, feed_only, nothing_like(run, state), state, wanted)

    def _run(self, params: Params, context: Context, state: pairs.PairState) -> tuple[Draft, pairs.PairState]:
        width, num_rows = self.num_expanded, len(context.length)
        hidden, state, ready = pairs.feed(self.network, params, state, context)
        value, token = self._children(params, hidden, context)
        values, tokens = [value[:, 0]], [token[:, 0]]
        parents = [jnp.full((num_rows, width), -1)]
        # The nodes that are expanded: of the first level all.
        hidden = jnp.broadcast_to(hidden, (num_rows, width, hidden.shape[-1]))
        front = jnp.broadcast_to(jnp.arange(width)[None], (num_rows, width))
        above = jnp.zeros((num_rows, width, (self.max_depth - 1) * width), bool)
        key_depth, cache = jnp.arange(above.shape[2])[None, :] // width, state.cache
        for depth in range(self.max_depth - 1):
            made_values, made_tokens = (jnp.concatenate(x, axis=1) for x in (values, tokens))
            itself = jnp.eye(width, above.shape[2], depth * width, dtype=bool)
            above = above | itself[None]
            layout = tree_lib.layout_of(
                above, jnp.full((1, width), depth), key_depth, state.cache.length, cache.num_slots
            )
            at_front = jnp.take_along_axis(made_tokens, front, axis=1)
            hidden, cache = self.network.decode(params, cache, hidden, at_front, layout)
            value, token = self._children(params, hidden, context)
            value = value + jnp.take_along_axis(made_values, front, axis=1)[..., None]
            flat = value.reshape(num_rows, -1)
            best = jax.lax.top_k(flat, width)[1]
            origin = best // width  # which node of the front they are children of
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
        return tree_lib.draft(Tree(best_parents, valid, self.max_depth), best_tokens), state

    def _children(self, params: Params, hidden: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """log q and ids `[B, n, k]` of the likeliest tokens after each of n nodes `[B, n, W]`."""
        logits = self.network.head(params, hidden)[..., : context.options.num_ids]
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        value, token = jax.lax.top_k(jax.nn.log_softmax(logits, axis=-1), self.num_expanded)
        return value, token.astype(jnp.int32)

    def _keep_best(
        self, values: jax.Array, tokens: jax.Array, parents: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Tokens and parents' call positions `[B, N]` of the likeliest nodes, in the order they were made."""
        kept = jnp.sort(jax.lax.top_k(values, self.num_draft)[1], axis=1)
        # A node's call position: how many were kept up to it. The root's is 0.
        is_kept = (kept[:, None, :] == jnp.arange(values.shape[1])[None, :, None]).any(-1)
        position = jnp.cumsum(is_kept, axis=1, dtype=jnp.int32)
        parent = jnp.take_along_axis(parents, kept, axis=1)
        above = jnp.take_along_axis(position, jnp.maximum(parent, 0), axis=1)
        return jnp.take_along_axis(tokens, kept, axis=1), jnp.where(parent < 0, 0, above)

    def commit(self, params: Params, state: pairs.PairState, round: Round) -> pairs.PairState:
        """Keeps the pairs of the accepted path."""
        del params
        return pairs.remember(state, round)
