"""K tokens in a single call of a layer on the target's features, with masks for all but the first.

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
    """A drafter of K tokens, each drawn independently of the others.

    Penalties apart, q_i depends only on the committed tokens and on i, and token i is drawn from it: the
    rules for chains remain lossless. The cost of a call hardly grows with K.

    Attributes:
      num_draft: K; the network has masks for at least K - 1 tokens.
    """

    num_draft: int = struct.field(pytree_node=False)

    def propose(
        self, state: pairs.PairState, context: Context, draws: Draws | None, max_length: jax.Array | None
    ) -> tuple[Draft, pairs.PairState]:
        """Makes one call on the new pairs and K - 1 masks."""
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
      ValueError: `heads` are of another kind or trained for fewer tokens; `num_draft` is below 1.
    """
    check_num_draft(num_draft)
    pairs.check_heads(heads, "one_pass", num_draft)
    return OnePassDrafter(heads, num_draft)
