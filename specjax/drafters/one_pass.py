"""K tokens in a single call: a layer on the target's features, with masks for all but the first.

After DFlash (2026) and, with cross-attention to the encoder output, Beagle (2025). Axes: B rows, K
drafts, W width of the network, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.drafters import chain, pairs
from specjax.types import Context, Draft, Draws, Params, Round


@dataclasses.dataclass(frozen=True)
class OnePassDrafter:
    """Draws K tokens from K distributions that do not know of each other's tokens.

    Penalties apart, q_i depends on what was committed and on i alone, and the tokens are drawn from it:
    the rules for chains stay exact. What a call costs hardly grows with K.

    Attributes:
      network: the layer, with masks for at least K - 1 tokens. Static.
      num_draft: K.
    """

    network: pairs.PairNetwork
    num_draft: int

    @property
    def max_depth(self) -> int:
        """K."""
        return self.num_draft

    @property
    def widths(self) -> tuple[int, ...]:
        """A round in which no row drafts is a plain step."""
        return (0, self.num_draft)

    def init(self, params: Params, context: Context, prefix_width: int) -> pairs.PairState:
        """See `pairs`."""
        del prefix_width
        return pairs.init(self.network, params, context, self.num_draft, self.num_draft)

    def propose(
        self, params: Params, state: pairs.PairState, context: Context, draws: Draws | None
    ) -> tuple[Draft, pairs.PairState]:
        """One call on the new pairs and K - 1 masks."""
        return self._run(params, context, draws, state)

    def propose_up_to(
        self, params: Params, state: pairs.PairState, context: Context, draws: Draws | None,
        wanted: jax.Array, min_confidence: float = 0.0,
    ) -> tuple[Draft, pairs.PairState]:  # fmt: skip
        """The same, cut to `wanted` `[B]`; no call where no row wants any."""
        del min_confidence
        run = lambda state: self._run(params, context, draws, state)  # noqa: E731
        feed_only = lambda state: pairs.feed(self.network, params, state, context).state  # noqa: E731
        like = pairs.logits_like(self.network, params, state)
        nothing = chain.empty(context, like, draws, self.num_draft, 0)
        return pairs.draft_if_wanted(run, feed_only, nothing, state, wanted)

    def _run(
        self, params: Params, context: Context, draws: Draws | None, state: pairs.PairState
    ) -> tuple[Draft, pairs.PairState]:
        hidden, state, ready = pairs.feed(self.network, params, state, context, self.num_draft - 1)
        logits = self.network.head(params, hidden)
        draft = chain.empty(context, logits, draws, self.num_draft, self.num_draft)
        for position in range(self.num_draft):
            draft, _ = chain.put(draft, logits[:, position : position + 1], context, draws, position)
        return draft.replace(num_drafted=jnp.where(ready, self.num_draft, 0)), state

    def commit(self, params: Params, state: pairs.PairState, round: Round) -> pairs.PairState:
        """Keeps the pairs that the round added."""
        del params
        return pairs.remember(state, round)
