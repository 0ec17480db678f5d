"""Heads on the target's last hidden state that each say one token further ahead.

Medusa (Cai et al. 2024). Axes: B rows, N nodes, D depth, M width of the features, V vocabulary.
"""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct

from specjax import tree as tree_lib
from specjax.drafters.branching import Branching
from specjax.drafters.wanted import draft_if_wanted, nothing_like
from specjax.types import Context, Draft, Draws, Params, Round


class AheadNetwork(Protocol):
    """Heads as a pure function. Hashable: static."""

    @property
    def vocab_size(self) -> int:
        """V."""

    def ahead(self, params: Params, features: jax.Array, depth: int) -> jax.Array:
        """Logits `[B, depth, V]` of the tokens 2, 3, ... after features `[B, M]`."""


class MedusaState(struct.PyTreeNode):
    """The target's feature `[B, M]` that chose the last token, and whether there is one, `[B] bool`."""

    feature: jax.Array
    ready: jax.Array


@dataclasses.dataclass(frozen=True)
class MedusaDrafter(Branching):
    """Drafts a tree of the heads' likeliest tokens: a node of depth d has the first of head d as children.

    They are not drawn: their q is one-hot, and above temperature 0 x is accepted with probability p(x).
    Penalties do not move the heads' ranks. A row's first round is a plain step.

    Raises:
      ValueError: `branching` is empty, no tuple, or holds a number below 1.

    Attributes:
      network: the heads, at least as many as the tree is deep. Static.
      branching: children of a node at each depth; all 1: a chain.
    """

    network: AheadNetwork

    @property
    def widths(self) -> tuple[int, ...]:
        """A round in which no row drafts is a plain step."""
        return (0, self.num_draft)

    def init(self, params: Params, context: Context, prefix_width: int) -> MedusaState:
        """No feature before the first target call."""
        del params, prefix_width
        num_rows, _, width = context.encoded.shape
        feature = jnp.zeros((num_rows, width), context.encoded.dtype)
        return MedusaState(feature, jnp.zeros(num_rows, bool))

    def propose(
        self, params: Params, state: MedusaState, context: Context, draws: Draws | None
    ) -> tuple[Draft, MedusaState]:
        """One call of all heads."""
        del draws
        return self._run(params, context, state)

    def propose_up_to(
        self, params: Params, state: MedusaState, context: Context, draws: Draws | None, wanted: jax.Array
    ) -> tuple[Draft, MedusaState]:
        """The same for rows that want a tree; none, and no call, where no row does."""
        del draws
        run = functools.partial(self._run, params, context)
        return draft_if_wanted(run, lambda state: state, nothing_like(run, state), state, wanted)

    def _run(self, params: Params, context: Context, state: MedusaState) -> tuple[Draft, MedusaState]:
        logits = self.network.ahead(params, state.feature, self.max_depth)[..., : context.options.num_ids]
        tree = tree_lib.from_branching(self.branching, len(context.length))
        num_parents, levels = 1, []
        for depth, num_children in enumerate(self.branching):
            ranked = jax.lax.top_k(logits[:, depth], num_children)[1]
            levels.append(jnp.tile(ranked, (1, num_parents)))
            num_parents *= num_children
        tokens = jnp.concatenate(levels, axis=1).astype(jnp.int32)
        tree = tree.replace(valid=tree.valid & state.ready[:, None])
        return tree_lib.draft(tree, tokens), state

    def commit(self, params: Params, state: MedusaState, round: Round) -> MedusaState:
        """Keeps the feature after the last accepted token, from which `next_token` was chosen."""
        del params
        verdict = round.verdict
        last = jnp.take_along_axis(verdict.call_positions, verdict.num_accepted[:, None], axis=1)
        feature = jnp.take_along_axis(round.features, last[..., None], axis=1)[:, 0]
        return MedusaState(feature.astype(state.feature.dtype), jnp.ones_like(state.ready))
