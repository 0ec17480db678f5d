"""A drafter around another: `adaptive.AdaptiveDrafter`, for one."""

from typing import Any

import jax

from specjax.types import Context, Draft, Drafter, Draws, Network, Round, State


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
