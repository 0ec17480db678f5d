"""Prompt lookup: drafts copied from the source and the row's own output, without a model or draws.

Saxena 2023; suggested by Leviathan et al. 2023, section 6. In an encoder-decoder the encoder's input is
searched. Axes: B rows, K drafts, S source length, T token slots.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from specjax.drafters.model import check_num_draft
from specjax.drafters.pairs import check_whole
from specjax.types import Context, Draft, Drafter, Draws, Round


class PromptLookupDrafter(Drafter):
    """A drafter that copies the continuation of the longest earlier match of the last tokens.

    The last 1 to `max_ngram` committed tokens are searched for in the source and in the row's own
    output. The longest match is used; ties prefer the source, then the first match. Its continuation is the
    draft, cut at the end of source or output. Its q is one-hot. Without a match nothing is drafted.

    Attributes:
      num_draft: K.
      max_ngram: the most tokens compared.
      min_ngram: shorter matches are ignored.
    """

    num_draft: int = struct.field(pytree_node=False)
    max_ngram: int = struct.field(pytree_node=False, default=3)
    min_ngram: int = struct.field(pytree_node=False, default=1)

    @property
    def call_widths(self) -> tuple[int, ...]:
        """A round in which no row found a match is a decoding step."""
        return (0, self.num_draft)

    def init(self, context: Context, prefix_width: int) -> None:
        """Returns no state: drafts depend only on the context."""
        del context, prefix_width

    def propose(
        self, state: None, context: Context, draws: Draws | None, max_length: jax.Array | None
    ) -> tuple[Draft, None]:
        """Proposes the continuation of the best match of every row."""
        del state, draws, max_length
        text = jnp.concatenate([context.source_ids, context.tokens], axis=1)
        in_output = jnp.arange(text.shape[1]) >= context.source_ids.shape[1]
        committed = jnp.arange(context.tokens.shape[1])[None, :] < context.length[:, None]
        there = jnp.concatenate([context.source_mask, committed], axis=1)

        def joined(distance: int) -> jax.Array:
            """Returns `[B, S + T]`: whether a position and that `distance` later are tokens of one part."""
            same = there & jnp.roll(there, -distance, 1) & (in_output == jnp.roll(in_output, -distance))[None]
            return same & (jnp.arange(text.shape[1]) + distance < text.shape[1])[None]

        run = self._run_lengths(context, text, joined)
        found = (run >= self.min_ngram) & joined(1)  # something follows
        best = jnp.where(found, run, 0).argmax(axis=1)[:, None]
        # The continuation, until it leaves the source or the output.
        index = best + 1 + jnp.arange(self.num_draft)[None, :]
        at = lambda values: jnp.take_along_axis(values, index, axis=1, mode="clip")  # noqa: E731
        part = jnp.broadcast_to(in_output[None], there.shape)
        stays = at(there) & (at(part) == jnp.take_along_axis(part, best, axis=1)) & (index < text.shape[1])
        going = jnp.cumprod(stays, axis=1, dtype=jnp.int32) * found.any(axis=1, keepdims=True)
        return Draft(at(text), going.sum(axis=1, dtype=jnp.int32), None), None

    def _run_lengths(
        self, context: Context, text: jax.Array, joined: Callable[[int], jax.Array]
    ) -> jax.Array:
        """Returns `[B, S + T]`: how many tokens up to a position match the last ones, at most `max_ngram`."""
        run, matching = jnp.zeros(text.shape, jnp.int32), jnp.ones(text.shape, bool)
        for back in range(self.max_ngram):
            place = context.length - 1 - back
            token = jnp.take_along_axis(context.tokens, jnp.maximum(place, 0)[:, None], axis=1)
            same = jnp.roll((text == token), back, 1) & jnp.roll(joined(back), back, 1)
            matching &= same & (place >= 0)[:, None]
            run += matching
        return run

    def commit(self, state: None, round: Round) -> None:
        """Does nothing: there is no state."""
        del state, round


def prompt_lookup(num_draft: int = 8, max_ngram: int = 3, min_ngram: int = 1) -> PromptLookupDrafter:
    """Returns a drafter that copies the continuation of an earlier match; it needs no draft model.

    Raises:
      ValueError: `num_draft` is below 1, or not 1 <= `min_ngram` <= `max_ngram`.
    """
    check_num_draft(num_draft)
    check_whole(max_ngram=max_ngram, min_ngram=min_ngram)
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(
            f"`min_ngram` must be in 1..`max_ngram`, got min_ngram={min_ngram}, max_ngram={max_ngram}"
        )
    return PromptLookupDrafter(num_draft, max_ngram, min_ngram)
