"""K tokens in a single call: a layer on the target's features, with masks for all but the first.

After DFlash (2026) and, with cross-attention to the encoder output, Beagle (2025). Axes: B rows, K
drafts, W width of the network, V vocabulary.
"""

import dataclasses

from specjax.drafters import chain, pairs
from specjax.types import Context, Draft, Draws, Params, Round


@dataclasses.dataclass(frozen=True)
class OnePassDrafter:
    """Draws K tokens from K distributions that do not know of each other's tokens.

    q_i depends on what was committed and on i alone, and the tokens are drawn from it: the rules for
    chains stay exact. What a call costs hardly grows with K. A row's first round is a plain step.

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
        """A round in which no row has a pair is a plain step."""
        return (0, self.num_draft)

    def init(self, params: Params, context: Context, prefix_width: int) -> pairs.PairState:
        """See `pairs`."""
        del prefix_width
        return pairs.init(self.network, params, context, self.num_draft, self.num_draft)

    def propose(
        self, params: Params, state: pairs.PairState, context: Context, draws: Draws | None
    ) -> tuple[Draft, pairs.PairState]:
        """One call on the new pairs and K - 1 masks."""
        hidden, state = pairs.feed(self.network, params, state, context, self.num_draft - 1)
        logits = self.network.head(params, hidden)
        draft = chain.empty(context, logits, draws, self.num_draft, self.num_draft)
        for position in range(self.num_draft):
            draft, _ = chain.put(draft, logits[:, position : position + 1], context, draws, position)
        return pairs.drafted_by_those_with_pairs(draft, state), state

    def commit(self, params: Params, state: pairs.PairState, round: Round) -> pairs.PairState:
        """Keeps the pairs that the round added."""
        del params
        return pairs.remember(state, round)
