"""K tokens in a single call: a layer on the target's features, with masks for all but the first.

After DFlash (2026, arXiv 2602.06036); the cross-attention to the encoder output is ours. Axes: B rows, K
drafts, W width of the network, V vocabulary.
"""

import jax
import jax.numpy as jnp

from specjax.drafters import chain, pairs
from specjax.types import Context, Draft, Draws, Params


class OnePassDrafter(pairs.PairChain):
    """Draws K tokens from K distributions that do not know of each other's tokens.

    Penalties apart, q_i depends on what was committed and on i alone, and the tokens are drawn from it:
    the rules for chains stay exact. What a call costs hardly grows with K.

    The network has masks for at least K - 1 tokens.
    """

    def run(
        self, params: Params, state: pairs.PairState, context: Context, draws: Draws | None, wanted: jax.Array
    ) -> tuple[Draft, pairs.PairState]:
        """One call on the new pairs and K - 1 masks."""
        del wanted
        hidden, state, ready = pairs.feed(self.network, params, state, context, self.num_draft - 1)
        logits = self.network.head(params, hidden)
        draft = self.empty(params, state, context, draws)
        for position in range(self.num_draft):
            draft, _ = chain.put(draft, logits[:, position : position + 1], context, draws, position)
        return draft.replace(num_drafted=jnp.where(ready, self.num_draft, 0)), state
