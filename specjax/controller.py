"""How many tokens a row drafts: a drafter around another, with a length for every row and round.

A row's length depends on what that row has committed so far and on a table of costs: never on a
clock, nor on the rows beside it. So outputs do not depend on the batch, and the law is the target's:
the length is fixed before a token is drawn (Leviathan et al. 2023 name a varying K as future work).

Axes: B rows, K drafts.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.drafters import BoundDrafter
from specjax.drafters.around import Around
from specjax.types import Context, Draft, Draws, Params, Round


class AdaptiveState(struct.PyTreeNode):
    """The inner drafter's state, and what became of a row's drafts.

    Attributes:
      inner: of the drafter.
      accepted, tested: `[B] float32`, drafts, older ones counting less; of trees `tested` is how many.
    """

    inner: Any
    accepted: jax.Array
    tested: jax.Array


@dataclasses.dataclass(frozen=True)
class AdaptiveDrafter(Around):
    """Lets each row draft as many tokens as its own history says pay best; 0 is a plain step.

    The row's alpha is estimated from its accepted and tested drafts, `decay` times less for each
    round that has passed since, and from `prior_weight` imaginary drafts accepted at `prior_alpha`: so a
    row that has stopped drafting tries again after a while. The length is the K of `lengths` with the
    largest (1 - alpha^(K+1)) / (1 - alpha) / cost. A batch runs the longest that a row asks for.

    A tree is drafted whole or not at all: while 1 + its mean number of accepted drafts, beginning with what
    a chain as deep would have at `prior_alpha`, is above its cost.

    Attributes:
      inner: what drafts; it has `propose_up_to`.
      lengths: growing; the last is the inner drafter's K; 0 may be among them.
      costs: of a round of each length, over a plain step: v(K) + K c + o, and 1 for 0.
      decay, prior_alpha, prior_weight: see above.
    """

    lengths: tuple[int, ...]
    costs: tuple[float, ...]
    decay: float = 0.9
    prior_alpha: float = 0.8
    prior_weight: float = 2.0

    @property
    def is_tree(self) -> bool:
        """Whether the inner drafter drafts trees."""
        return getattr(self.inner, "drafts_trees", False)

    @property
    def widths(self) -> tuple[int, ...]:
        """The lengths: a target call is as narrow as the longest that a row asked for."""
        return self.lengths

    def init(self, params: Params, context: Context, prefix_width: int) -> AdaptiveState:
        """No drafts yet."""
        none = jnp.zeros(context.length.shape, jnp.float32)
        return AdaptiveState(self.inner.init(params, context, prefix_width), none, none)

    def propose(
        self, params: Params, state: AdaptiveState, context: Context, draws: Draws | None
    ) -> tuple[Draft, AdaptiveState]:
        """Up to each row's own length."""
        wanted = jnp.minimum(self.wanted(state), context.draft_budget)
        draft, inner = self.inner.propose_up_to(params, state.inner, context, draws, wanted)
        return draft, state.replace(inner=inner)

    def wanted(self, state: AdaptiveState) -> jax.Array:
        """`[B]`, the length that pays best for each row."""
        if self.is_tree:
            prior = sum(self.prior_alpha**depth for depth in range(1, self.max_depth + 1))
            mean = (state.accepted + self.prior_weight * prior) / (state.tested + self.prior_weight)
            return jnp.where(1 + mean > self.costs[-1], self.num_draft, 0).astype(jnp.int32)
        alpha = state.accepted + self.prior_weight * self.prior_alpha
        alpha = jnp.minimum(alpha / (state.tested + self.prior_weight), 0.99)[:, None]
        lengths = np.array(self.lengths, np.float32)
        # Leviathan et al. 2023, equation 1: what a round emits on average.
        tokens = (1 - alpha ** (lengths + 1)[None, :]) / (1 - alpha)
        best = jnp.argmax(tokens / np.array(self.costs, np.float32)[None, :], axis=1)
        return jnp.asarray(self.lengths, jnp.int32)[best]

    def commit(self, params: Params, state: AdaptiveState, round: Round) -> AdaptiveState:
        """Adds the round to each row's history."""
        accepted = jnp.minimum(round.verdict.num_accepted, round.draft.num_drafted)
        most = jnp.minimum(1, round.draft.num_drafted) if self.is_tree else round.draft.num_drafted
        tested = jnp.minimum(round.verdict.num_accepted + 1, most)
        return AdaptiveState(
            self.inner.commit(params, state.inner, round),
            self.decay * state.accepted + accepted,
            self.decay * state.tested + tested,
        )


def adaptive(
    drafter: BoundDrafter,
    costs: Mapping[int, float],
    *,
    min_confidence: float = 0.0,
    prior_alpha: float = 0.8,
) -> BoundDrafter:
    """A drafter that drafts as much as pays for each row; see `AdaptiveDrafter`.

    Args:
      drafter: such as `drafters.from_model(draft, 8)` or `drafters.eagle_tree(heads)`.
      costs: K -> cost of a round that drafts K tokens, over a plain step; the largest K is the
        drafter's own, and of a tree the only one. 0 (a plain step) is added at cost 1.
      min_confidence: a row stops earlier where q's largest probability is below it.
      prior_alpha: the chance of acceptance that a row begins with, from 0 to 1.

    Raises:
      ValueError: a drafter that cannot; costs that do not fit the drafter or are not positive.
    """
    if not isinstance(drafter, BoundDrafter):
        raise ValueError(f"drafter={drafter!r:.80}: give what specjax.drafters make")
    inner: Any = drafter.drafter
    if not isinstance(costs, Mapping) or not all(isinstance(k, int) for k in costs):
        raise ValueError(f"costs={costs!r}: give K -> cost of a round, as in {{1: 1.2, 3: 1.5}}")
    if not hasattr(inner, "propose_up_to"):
        raise ValueError(f"{type(inner).__name__} cannot adapt its length: give another drafter")
    table = {0: 1.0, **costs}
    lengths = tuple(sorted(table))
    if lengths[-1] != inner.num_draft or lengths[0] < 0:
        raise ValueError(
            f"costs={dict(costs)}: the largest K must be the drafter's num_draft={inner.num_draft}"
        )
    if getattr(inner, "drafts_trees", False) and len(table) != 2:
        raise ValueError(f"costs={dict(costs)}: a tree is drafted whole, so give {inner.num_draft} alone")
    if not all(cost > 0 for cost in table.values()):
        raise ValueError(f"costs={dict(costs)}: must be above 0, in units of a plain step")
    if min_confidence and not hasattr(inner, "min_confidence"):
        name = type(inner).__name__
        raise ValueError(f"min_confidence={min_confidence}: {name} does not draft step by step; leave it out")
    if not 0 <= min_confidence < 1:
        raise ValueError(f"min_confidence={min_confidence}: must be at least 0 and below 1")
    if not 0 <= prior_alpha <= 1:
        raise ValueError(f"prior_alpha={prior_alpha}: must be in 0..1")
    if min_confidence:
        inner = dataclasses.replace(inner, min_confidence=min_confidence)
    prices = tuple(float(table[k]) for k in lengths)
    made = AdaptiveDrafter(inner, lengths, prices, prior_alpha=prior_alpha)
    return drafter._replace(drafter=made)
