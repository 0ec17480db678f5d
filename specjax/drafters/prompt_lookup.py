"""Copies from the source and from the row's own output: no draft model, no draws.

Prompt lookup (Saxena 2023; suggested by Leviathan et al. 2023, section 6), for encoder-decoders: what
is searched is the encoder's input. Axes: B rows, K drafts, S source length, T token slots.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.drafters.wanted import cut
from specjax.types import Context, Draft, Draws, Params, Round


@dataclasses.dataclass(frozen=True)
class PromptLookupDrafter:
    """Proposes what followed the longest earlier occurrence of the last tokens.

    The last 1 to `max_ngram` committed tokens are looked for in the source and in the row's own
    output; the longest match wins, then one in the source, then the first. Its continuation is the
    draft, cut where source or output end. Its q is one-hot. Without a match nothing is drafted.

    Attributes:
      num_draft: K.
      max_ngram: tokens that are compared at most.
      min_ngram: a shorter match does not count.
    """

    num_draft: int
    max_ngram: int = 3
    min_ngram: int = 1

    @property
    def max_depth(self) -> int:
        """K."""
        return self.num_draft

    @property
    def widths(self) -> tuple[int, ...]:
        """A round in which no row found a match is a plain step."""
        return (0, self.num_draft)

    def init(self, params: Params, context: Context, prefix_width: int) -> None:
        """No state: all that counts is in the context."""
        del params, context, prefix_width

    def propose(
        self, params: Params, state: None, context: Context, draws: Draws | None
    ) -> tuple[Draft, None]:
        """The continuation of the best match of every row."""
        del params, state, draws
        text = jnp.concatenate([context.source_ids, context.tokens], axis=1)
        in_output = jnp.arange(text.shape[1]) >= context.source_ids.shape[1]
        committed = jnp.arange(context.tokens.shape[1])[None, :] < context.length[:, None]
        there = jnp.concatenate([context.source_mask, committed], axis=1)

        def joined(distance: int) -> jax.Array:
            """`[B, S + T]`: whether a position and that so far on are tokens of the same part."""
            same = there & jnp.roll(there, -distance, 1) & (in_output == jnp.roll(in_output, -distance))[None]
            return same & (jnp.arange(text.shape[1]) + distance < text.shape[1])[None]

        run = self._run_lengths(context, text, joined)
        found = (run >= self.min_ngram) & joined(1)  # something follows
        best = jnp.where(found, run, 0).argmax(axis=1)[:, None]
        # The continuation, until it leaves the part.
        index = best + 1 + jnp.arange(self.num_draft)[None, :]
        at = lambda values: jnp.take_along_axis(values, index, axis=1, mode="clip")  # noqa: E731
        part = jnp.broadcast_to(in_output[None], there.shape)
        stays = at(there) & (at(part) == jnp.take_along_axis(part, best, axis=1)) & (index < text.shape[1])
        going = jnp.cumprod(stays, axis=1, dtype=jnp.int32) * found.any(axis=1, keepdims=True)
        return Draft(at(text), going.sum(axis=1, dtype=jnp.int32), None), None

    def propose_up_to(
        self, params: Params, state: None, context: Context, draws: Draws | None, wanted: jax.Array
    ) -> tuple[Draft, None]:
        """The same, cut to `wanted` `[B]`."""
        draft, state = self.propose(params, state, context, draws)
        return cut(draft, wanted), state

    def _run_lengths(
        self, context: Context, text: jax.Array, joined: Callable[[int], jax.Array]
    ) -> jax.Array:
        """`[B, S + T]`: how many tokens up to a position agree with the last ones, at most `max_ngram`."""
        run, matching = jnp.zeros(text.shape, jnp.int32), jnp.ones(text.shape, bool)
        for back in range(self.max_ngram):
            place = context.length - 1 - back
            wanted = jnp.take_along_axis(context.tokens, jnp.maximum(place, 0)[:, None], axis=1)
            same = jnp.roll((text == wanted), back, 1) & jnp.roll(joined(back), back, 1)
            matching &= same & (place >= 0)[:, None]
            run += matching
        return run

    def commit(self, params: Params, state: None, round: Round) -> None:
        """Nothing to do."""
        del params, state, round
