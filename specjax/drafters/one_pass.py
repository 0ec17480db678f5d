"""K tokens in a single call: a layer on the target's features, with masks for all but the first.

After DFlash (2026, arXiv 2602.06036); the cross-attention to the encoder output is ours. Axes: B rows, K
drafts, W width of the network, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax.drafters import chain, pairs
from specjax.drafters.model import check_num_draft
from specjax.types import Context, Draft, Draws


class OnePassDrafter(pairs.PairDrafter):
    """Draws K tokens from K distributions that do not know of each other's tokens.

    Penalties apart, q_i depends on what was committed and on i alone, and the tokens are drawn from it:
    the rules for chains stay exact. What a call costs hardly grows with K.

    Attributes:
      num_draft: K; the network has masks for at least K - 1 tokens.
    """

    num_draft: int = struct.field(pytree_node=False)

    def propose(
        self, state: pairs.PairState, context: Context, draws: Draws | None, max_length: jax.Array | None
    ) -> tuple[Draft, pairs.PairState]:
        """One call on the new pairs and K - 1 masks."""
        del max_length
        hidden, state, ready = self.feed(state, context, self.num_draft - 1)
        logits = self.network.logits(hidden)
        draft = chain.empty(context, logits, draws, self.num_draft)
        for position in range(self.num_draft):
            draft, _ = chain.append(draft, logits[:, position : position + 1], context, draws, position)
        return draft.replace(num_drafted=jnp.where(ready, self.num_draft, 0)), state


def one_pass(heads: Any, num_draft: int = 5) -> OnePassDrafter:
    """Returns a drafter of chains from a one-pass layer (`specjax.load_heads`).

    Raises:
      ValueError: heads of another kind, or trained for fewer tokens; `num_draft` is below 1.
    """
    check_num_draft(num_draft)
    pairs.check_heads(heads, "one_pass", num_draft)
    return OnePassDrafter(heads, num_draft)
