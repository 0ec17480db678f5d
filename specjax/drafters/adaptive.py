"""Adaptive draft length: a wrapper that chooses the length of each row in each round.

A row's length depends only on what that row has committed so far and on a table of costs, not on measured
time or on other rows. So outputs do not depend on the batch. Decoding is lossless, since the length is fixed
before a token is drawn (Leviathan et al. 2023 name a varying K as future work).

Axes: B rows, K drafts.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.drafters.base import DrafterWrapper
from specjax.types import Context, Drafter, Round


class AdaptiveState(struct.PyTreeNode):
    """The inner drafter's state, and each row's history of acceptance.

    Attributes:
      inner: the inner drafter's state.
      accepted, tested: `[B] float32`, decayed counts of drafts; for trees `tested` counts trees.
    """

    inner: Any
    accepted: jax.Array
    tested: jax.Array


class AdaptiveDrafter(DrafterWrapper):
    """A wrapper that chooses each row's draft length from its own history; 0 is a decoding step.

    The row's alpha is estimated from its accepted and tested drafts, weighted by `decay` per round since
    then, and from `prior_weight` pseudo-drafts accepted at rate `prior_alpha`: so a row that has stopped
    drafting resumes after some rounds. The length is the K of `lengths` with the largest
    (1 - alpha^(K+1)) / (1 - alpha) / cost. A batch runs the largest length that a row chose.

    A tree is drafted whole or not at all: it is drafted while 1 + the mean number of accepted drafts is above
    its cost. The prior of that mean is that of a chain of equal depth at `prior_alpha`.

    Attributes:
      inner: the wrapped drafter.
      lengths: ascending; the last is the inner drafter's K; 0 is allowed.
      costs: time of a round of each length over that of a decoding step: v(K) + K c + o with the symbols of
        `analysis`, and 1 for length 0.
      decay, prior_alpha, prior_weight: see above.
    """

    lengths: tuple[int, ...] = struct.field(pytree_node=False)
    costs: tuple[float, ...] = struct.field(pytree_node=False)
    decay: float = struct.field(pytree_node=False, default=0.9)
    prior_alpha: float = struct.field(pytree_node=False, default=0.8)
    prior_weight: float = struct.field(pytree_node=False, default=2.0)

    @property
    def call_widths(self) -> tuple[int, ...]:
        """The lengths: a target call is as narrow as the longest that a row chose."""
        return self.lengths

    def init(self, context: Context, prefix_width: int) -> AdaptiveState:
        """Starts with an empty history."""
        none = jnp.zeros(context.length.shape, jnp.float32)
        return AdaptiveState(self.inner.init(context, prefix_width), none, none)

    def choose_length(self, state: AdaptiveState, context: Context) -> jax.Array:
        """Returns `[B]`, the length that pays best for each row."""
        del context
        if self.drafts_trees:
            prior = sum(self.prior_alpha**depth for depth in range(1, self.max_depth + 1))
            mean = (state.accepted + self.prior_weight * prior) / (state.tested + self.prior_weight)
            return jnp.where(1 + mean > self.costs[-1], self.num_draft, 0).astype(jnp.int32)
        alpha = state.accepted + self.prior_weight * self.prior_alpha
        alpha = jnp.minimum(alpha / (state.tested + self.prior_weight), 0.99)[:, None]
        lengths = np.array(self.lengths, np.float32)
        # Leviathan et al. 2023, equation 1: expected tokens per round.
        tokens = (1 - alpha ** (lengths + 1)[None, :]) / (1 - alpha)
        best = jnp.argmax(tokens / np.array(self.costs, np.float32)[None, :], axis=1)
        return jnp.asarray(self.lengths, jnp.int32)[best]

    def propose(self, state: AdaptiveState, *args: Any) -> tuple[Any, AdaptiveState]:
        """Proposes up to each row's own length."""
        draft, inner = self.inner.propose(state.inner, *args)
        return draft, state.replace(inner=inner)

    def skip(self, state: AdaptiveState, context: Context) -> AdaptiveState:
        """Delegates to the inner drafter."""
        return state.replace(inner=self.inner.skip(state.inner, context))

    def commit(self, state: AdaptiveState, round: Round) -> AdaptiveState:
        """Adds the round to each row's history."""
        num_drafted, num_accepted = round.draft.num_drafted, round.result.num_accepted
        most = jnp.minimum(1, num_drafted) if self.drafts_trees else num_drafted
        return AdaptiveState(
            self.inner.commit(state.inner, round),
            self.decay * state.accepted + jnp.minimum(num_accepted, num_drafted),
            self.decay * state.tested + jnp.minimum(num_accepted + 1, most),
        )


def adaptive(
    drafter: Drafter, costs: Mapping[int, float], *, min_confidence: float = 0.0, prior_alpha: float = 0.8
) -> AdaptiveDrafter:
    """Returns a drafter that adapts the draft length of each row; see `AdaptiveDrafter`.

    Args:
      drafter: such as `drafters.from_model(draft, 8)` or `drafters.eagle_tree(heads)`.
      costs: K -> cost of a round that drafts K tokens, relative to a decoding step; the largest K is the
        drafter's own, and the only one for a tree. 0 (a decoding step) is added at cost 1.
      min_confidence: a row stops earlier where q's largest probability is below it.
      prior_alpha: the probability of acceptance that a row begins with, from 0 to 1.

    Raises:
      ValueError: `drafter` cannot skip rounds; `costs` do not fit it or are not positive.
    """
    if not isinstance(drafter, Drafter):
        raise ValueError(f"`drafter` must be one of specjax.drafters, got {drafter!r:.80}")
    if not isinstance(costs, Mapping) or not all(isinstance(k, int) for k in costs):
        raise ValueError(f"`costs` must be K -> cost of a round, as in {{1: 1.2, 3: 1.5}}, got {costs!r}")
    if not drafter.can_skip:
        raise ValueError(f"`drafter` must be able to skip rounds, got {type(drafter).__name__}")
    table = {0: 1.0, **costs}
    lengths = tuple(sorted(table))
    if lengths[-1] != drafter.num_draft or lengths[0] < 0:
        raise ValueError(
            f"the largest K of `costs` must be the drafter's num_draft={drafter.num_draft}, got {dict(costs)}"
        )
    if drafter.drafts_trees and len(table) != 2:
        raise ValueError(f"`costs` must contain only K={drafter.num_draft} for a tree, got {dict(costs)}")
    if not all(cost > 0 for cost in table.values()):
        raise ValueError(f"`costs` must be above 0, in units of a decoding step, got {dict(costs)}")
    if not 0 <= min_confidence < 1:
        raise ValueError(f"`min_confidence` must be at least 0 and below 1, got {min_confidence}")
    if not 0 <= prior_alpha <= 1:
        raise ValueError(f"`prior_alpha` must be in 0..1, got {prior_alpha}")
    if min_confidence:
        drafter = drafter.with_min_confidence(min_confidence)
    prices = tuple(float(table[k]) for k in lengths)
    return AdaptiveDrafter(drafter, lengths, prices, prior_alpha=prior_alpha)
