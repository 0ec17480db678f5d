"""Base classes of drafters: trees of one shape, and wrappers of another drafter."""

from typing import Any

import jax
from flax import struct

from specjax import tree as tree_lib
from specjax.types import Context, Draft, Drafter, Draws, Network, Round, State


class BranchingDrafter(Drafter):
    """A drafter of trees of the same shape in every round.

    Raises:
      ValueError: `branching` is empty, is not a tuple, or contains a number below 1.

    Attributes:
      network: the network that drafts.
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
    """A wrapper of another drafter; members that it does not override are the inner drafter's.

    Attributes:
      inner: the wrapped drafter.
    """

    inner: Drafter

    @property
    def num_draft(self) -> int:
        """The inner drafter's, like all members below."""
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
