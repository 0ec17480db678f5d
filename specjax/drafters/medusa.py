"""Heads on the target's last hidden state that each predict one token further ahead.

Medusa (Cai et al. 2024). Axes: B rows, N nodes, D depth, M width of the features, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from specjax import tree as tree_lib
from specjax.drafters.base import BranchingDrafter
from specjax.drafters.model import as_branching
from specjax.drafters.pairs import check_heads
from specjax.types import Context, Draft, Draws, Network, Round


class AheadNetwork(Protocol):
    """The interface of Medusa heads with their params, as of `models.heads.HeadsNetwork`."""

    @property
    def params(self) -> Any:
        """The heads' own params."""

    @property
    def num_features(self) -> int:
        """M."""

    @property
    def cache_sharding(self) -> Any:
        """Sharding of its cache on a mesh; None: one device."""

    def check(self, target: Network) -> None:
        """Raises a ValueError if they were trained for another target."""

    def ahead(self, features: jax.Array, depth: int) -> jax.Array:
        """Returns logits `[B, depth, V]` of the tokens 2, 3, ... positions ahead of features `[B, M]`."""


class MedusaState(struct.PyTreeNode):
    """The target's feature `[B, M]` from which the last token was chosen, and whether it exists, `[B]`."""

    feature: jax.Array
    ready: jax.Array


class MedusaDrafter(BranchingDrafter):
    """A drafter of trees: the children of a node at depth d are the most likely tokens of head d.

    They are not drawn: their q is one-hot, and above temperature 0 x is accepted with probability p(x).
    Penalties do not change the heads' ranking. A row's first round is a decoding step.

    Attributes:
      network: the heads, at least as many as the depth of the tree.
    """

    network: AheadNetwork

    @property
    def call_widths(self) -> tuple[int, ...]:
        """A round in which no row drafts is a decoding step."""
        return (0, self.num_draft)

    @property
    def own_params(self) -> Any:
        """The heads' own params; the output head may be the target's."""
        return self.network.params

    @property
    def cache_sharding(self) -> Any:
        """The network's."""
        return self.network.cache_sharding

    def check(self, target: Network) -> None:
        """Raises a ValueError if the heads were trained for another target."""
        self.network.check(target)

    def init(self, context: Context, prefix_width: int) -> MedusaState:
        """Starts without a feature, until the first target call."""
        del prefix_width
        num_rows = len(context.length)
        feature = jnp.zeros((num_rows, self.network.num_features), context.encoded.dtype)
        return MedusaState(feature, jnp.zeros(num_rows, bool))

    def propose(
        self, state: MedusaState, context: Context, draws: Draws | None, max_length: jax.Array | None
    ) -> tuple[Draft, MedusaState]:
        """Runs all heads in one call."""
        del draws, max_length
        logits = self.network.ahead(state.feature, self.max_depth)[..., : context.options.num_ids]
        tree = tree_lib.from_branching(self.branching, len(context.length))
        num_parents, levels = 1, []
        for depth, num_children in enumerate(self.branching):
            ranked = jax.lax.top_k(logits[:, depth], num_children)[1]
            levels.append(jnp.tile(ranked, (1, num_parents)))
            num_parents *= num_children
        tokens = jnp.concatenate(levels, axis=1).astype(jnp.int32)
        tree = tree.replace(valid=tree.valid & state.ready[:, None])
        return tree_lib.draft(tree, tokens), state

    def commit(self, state: MedusaState, round: Round) -> MedusaState:
        """Keeps the feature after the last accepted token, from which `next_token` was chosen."""
        last = jnp.take_along_axis(round.call_positions, round.result.num_accepted[:, None], axis=1)
        feature = jnp.take_along_axis(round.features, last[..., None], axis=1)[:, 0]
        return MedusaState(feature.astype(state.feature.dtype), jnp.ones_like(state.ready))


def medusa(heads: Any, branching: Sequence[int] = (3, 2, 1)) -> MedusaDrafter:
    """Returns a drafter of trees from Medusa heads (`specjax.load_heads`).

    Args:
      heads: heads from `specjax.load_heads`.
      branching: see `tree_from_model`.

    Raises:
      ValueError: `heads` are of another kind, or fewer than the depth of the tree.
    """
    branching = as_branching(branching)
    check_heads(heads, "medusa", len(branching))
    return MedusaDrafter(heads, branching)
