"""What several drafters share: trees of one shape, and a drafter around another."""

from typing import Any

import jax
from flax import struct

from specjax import tree as tree_lib
from specjax.types import Context, Draft, Drafter, Draws, Network, Round, State


class BranchingDrafter(Drafter):
    """A drafter of trees that branch alike in every round.

    Raises:
      ValueError: `branching` is empty, no tuple, or holds a number below 1.

    Attributes:
      network: what it runs.
      branching: children of a node at each depth: (3, 2, 1) makes 3 + 6 + 6 nodes; all 1: a chain.
    """

    network: Any
    branching: tuple[int, ...] = struct.field(pytree_node=False)

    drafts_trees = True

    def __post_init__(self) -> None:
        tree_lib.check_branching(self.branching)

    @property
    def num_draft(self) -> int:
        """Nodes of the tree."""
        return tree_lib.level_starts(self.branching)[-1] - 1

    @property
    def max_depth(self) -> int:
        """Levels of the tree."""
        return len(self.branching)


class DrafterWrapper(Drafter):
    """A drafter around another, which declares and does what the inner one does unless overridden.

    Attributes:
      inner: the drafter.
    """

    inner: Drafter

    @property
    def num_draft(self) -> int:
        """Of the inner drafter, as all that follows."""
        return self.inner.num_draft

    @property
    def max_depth(self) -> int:
        return self.inner.max_depth

    @property
    def num_candidates(self) -> int:
        return self.inner.num_candidates

    @property
    def drafts_trees(self) -> bool:
        return self.inner.drafts_trees

    @property
    def call_widths(self) -> tuple[int, ...]:
        return self.inner.call_widths

    @property
    def can_skip(self) -> bool:
        return self.inner.can_skip

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.inner.feature_layers

    @property
    def vocabulary(self) -> Any:
        return self.inner.vocabulary

    @property
    def cache_sharding(self) -> Any:
        return self.inner.cache_sharding

    @property
    def own_params(self) -> Any:
        return self.inner.own_params

    def check(self, target: Network) -> None:
        self.inner.check(target)

    def with_min_confidence(self, min_confidence: float) -> Drafter:
        return self.replace(inner=self.inner.with_min_confidence(min_confidence))

    def init(self, context: Context, prefix_width: int) -> State:
        return self.inner.init(context, prefix_width)

    def choose_length(self, state: State, context: Context) -> jax.Array | None:
        return self.inner.choose_length(state, context)

    def propose(
        self, state: State, context: Context, draws: Draws | None, max_length: jax.Array | None
    ) -> tuple[Draft, State]:
        return self.inner.propose(state, context, draws, max_length)

    def skip(self, state: State, context: Context) -> State:
        return self.inner.skip(state, context)

    def commit(self, state: State, round: Round) -> State:
        return self.inner.commit(state, round)
