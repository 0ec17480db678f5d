"""A rule for benchmarks that is not a sampler: acceptance is set by hand."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax import acceptance
from specjax.draws import Stream
from specjax.types import AcceptanceRule, Draft, Draws, Verdict


@dataclasses.dataclass(frozen=True)
class Forced:
    """Not a sampler: computes `rule`, then keeps drafts by coins of chance `alpha` instead.

    Attributes:
      rule: whose work is done.
      alpha: in [0, 1], the chance of each draft while all before it were kept.
    """

    rule: AcceptanceRule
    alpha: float

    def __call__(self, draws: Draws, draft: Draft, target_probs: jax.Array) -> Verdict:
        """A verdict whose token is the rule's own and whose length is not."""
        verdict = self.rule(draws, draft, target_probs)
        num_rows, num_draft = draft.tokens.shape
        chance = jnp.full((num_rows, num_draft), self.alpha)
        # Streams beyond those of the round: the coins are not the rule's.
        coins = draws.accept(Stream.ACCEPT.at(num_draft + 1 + jnp.arange(num_draft)), chance)
        forced = acceptance.leading_run(coins, draft.num_drafted)
        # Never true, which the compiler cannot know: the rule's own count has to be computed.
        impossible = verdict.num_accepted > num_draft
        return verdict._replace(num_accepted=jnp.where(impossible, verdict.num_accepted, forced))
