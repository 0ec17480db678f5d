"""Copies from the source and from the row's own output: no draft model, no draws.

Prompt lookup (Saxena 2023; suggested by Leviathan et al. 2023, section 6), for encoder-decoders: what
is searched is the encoder's input. Axes: B rows, K drafts, S source length, T token slots.
"""

import dataclasses

import jax
import jax.numpy as jnp

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
        num_source, num_slots = context.source_ids.shape[1], context.tokens.shape[1]
        text = jnp.concatenate([context.source_ids, context.tokens], axis=1)
        # Where each part of `text` begins, and where it ends in a row: `[B, S + T]`.
        in_source = (jnp.arange(num_source + num_slots) < num_source)[None, :]
        begin = jnp.where(in_source, 0, num_source)
        source_end = _count_to_last(context.source_mask)
        end = jnp.where(in_source, source_end[:, None], num_source + context.length[:, None])
        run = self._run_lengths(context, text, begin)
        position = jnp.arange(num_source + num_slots)[None, :]
        found = (run >= self.min_ngram) & (position + 1 < end)  # something follows
        best = jnp.where(found, run, 0).argmax(axis=1)
        first = best + 1
        index = jnp.minimum(first[:, None] + jnp.arange(self.num_draft)[None, :], text.shape[1] - 1)
        room = jnp.take_along_axis(end, best[:, None], axis=1)[:, 0] - first
        num_drafted = jnp.where(found.any(axis=1), jnp.minimum(room, self.num_draft), 0)
        return Draft(jnp.take_along_axis(text, index, axis=1), num_drafted.astype(jnp.int32), None), None

    def propose_up_to(
        self, params: Params, state: None, context: Context, draws: Draws | None, wanted: jax.Array,
        min_confidence: float = 0.0,
    ) -> tuple[Draft, None]:  # fmt: skip
        """The same, cut to `wanted` `[B]`; copies have no q to be confident by."""
        del min_confidence
        draft, state = self.propose(params, state, context, draws)
        return draft.replace(num_drafted=jnp.minimum(draft.num_drafted, wanted)), state

    def _run_lengths(self, context: Context, text: jax.Array, begin: jax.Array) -> jax.Array:
        """`[B, S + T]`: how many tokens up to a position agree with the last ones, at most `max_ngram`."""
        position = jnp.arange(text.shape[1])[None, :]
        run, matching = jnp.zeros(text.shape, jnp.int32), jnp.ones(text.shape, bool)
        for back in range(self.max_ngram):
            place = context.length - 1 - back
            wanted = jnp.take_along_axis(context.tokens, jnp.maximum(place, 0)[:, None], axis=1)
            there = jnp.pad(text, ((0, 0), (back, 0)))[:, : text.shape[1]]
            matching &= (there == wanted) & (position - back >= begin) & (place >= 0)[:, None]
            run += matching
        return run

    def commit(self, params: Params, state: None, round: Round) -> None:
        """Nothing to do."""
        del params, state, round


def _count_to_last(mask: jax.Array) -> jax.Array:
    """`[B]`: one more than the index of the last True of `mask` `[B, S]`; 0 if there is none."""
    return jnp.where(mask, jnp.arange(1, mask.shape[1] + 1)[None, :], 0).max(axis=1)
