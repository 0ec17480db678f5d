"""Autoregressive drafting of a chain of K tokens, shared by the drafters of chains.

Axes: B rows, K drafts, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.draws import Stream
from specjax.types import Context, Draft, Draws

Carry = TypeVar("Carry")  # a pytree: a drafter's state between steps


def draft_chain(
    logits: jax.Array,
    carry: Carry,
    feed: Callable[[Carry, jax.Array], tuple[jax.Array, Carry]],
    context: Context,
    draws: Draws | None,
    num_draft: int,
    max_length: jax.Array | None = None,
    min_confidence: float = 0.0,
) -> tuple[Draft, Carry]:
    """Drafts one token per step: K steps in a scan, or a loop until no row drafts another token.

    Args:
      logits: `[B, 1, V]`, logits of the first draft.
      carry: the carry before the first step.
      feed: takes the carry and the last token drawn, `[B, 1]`; returns the next logits and the carry.
      context, draws: those of the round.
      num_draft: K. Static.
      max_length: `[B]`, the most tokens that each row drafts; None: K, in a scan.
      min_confidence: a row stops before it draws a token from a q whose largest probability is below this.
        Stopping depends only on q, not on the token drawn: that would change the output distribution.
    """
    draft = empty(context, logits, draws, num_draft)
    if max_length is None and not min_confidence:
        draft, _ = append(draft, logits, context, draws, 0)

        def scanned(state: tuple, position: jax.Array) -> tuple[tuple, None]:
            draft, carry = state
            logits, carry = feed(carry, _last(draft, position))
            return (append(draft, logits, context, draws, position)[0], carry), None

        if num_draft > 1:  # `jax.disable_jit` rejects a scan of no steps
            (draft, carry), _ = jax.lax.scan(scanned, (draft, carry), jnp.arange(1, num_draft))
        return draft.replace(num_drafted=jnp.full_like(context.length, num_draft)), carry

    limit = jnp.full_like(context.length, num_draft) if max_length is None else max_length

    def extend(
        draft: Draft, logits: jax.Array, going: jax.Array, position: jax.Array
    ) -> tuple[Draft, jax.Array]:
        """Appends a token to the rows that continue; also returns which rows do."""
        drawn, confidence = append(draft, logits, context, draws, position)
        going = going & (position < limit)
        if min_confidence:
            going &= confidence >= min_confidence
        return drawn.replace(num_drafted=draft.num_drafted + going), going

    def more(state: tuple) -> jax.Array:
        position, _, going, _ = state
        return (position < num_draft) & (going & (position < limit)).any()

    def step(state: tuple) -> tuple:
        position, draft, going, carry = state
        logits, carry = feed(carry, _last(draft, position))
        return position + 1, *extend(draft, logits, going, position), carry

    first = jnp.asarray(0, jnp.int32)
    draft, going = extend(draft, logits, jnp.ones(limit.shape, bool), first)
    _, draft, _, carry = jax.lax.while_loop(more, step, (first + 1, draft, going, carry))
    return draft, carry


def empty(
    context: Context, logits: jax.Array | jax.ShapeDtypeStruct, draws: Draws | None, num_draft: int
) -> Draft:
    """Returns an empty draft of K tokens; it has a q only if tokens are drawn from one.

    Args:
      context: the context of the round.
      logits: `[B, ..., V]`, possibly abstract: only shape and dtype are read.
      draws: None in the greedy program.
      num_draft: K.
    """
    num_rows, num_ids = logits.shape[0], context.options.num_ids or logits.shape[-1]
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    probs = None if draws is None else jnp.zeros((num_rows, num_draft, num_ids), dtype)
    return Draft(jnp.zeros((num_rows, num_draft), jnp.int32), jnp.zeros_like(context.length), probs)


def append(
    draft: Draft, logits: jax.Array, context: Context, draws: Draws | None, position: jax.typing.ArrayLike
) -> tuple[Draft, jax.Array]:
    """Draws the draft at `position` from `logits` `[B, 1, V]`; also returns the largest q, `[B]`."""
    before = (jnp.arange(draft.tokens.shape[1]) < position)[None, None]
    history = sampling.history(context, draft.tokens, before)
    if draws is None:
        adjusted = sampling.adjust_logits(logits, context.options, history)
        token = sampling.argmax(adjusted)[:, 0]
        return draft.replace(tokens=_set(draft.tokens, token, position)), _largest(adjusted)
    assert draft.probs is not None  # see `empty`
    probs = sampling.distribution(logits, context.options, history)[:, 0]
    token = draws.choose(Stream.DRAFT.at(position), probs)
    draft = draft.replace(
        tokens=_set(draft.tokens, token, position), probs=_set(draft.probs, probs, position)
    )
    # A greedy row's q is one-hot here; its confidence is that of the greedy program.
    greedy = sampling.is_greedy(context.options.temperature)
    adjusted = sampling.adjust_logits(logits, context.options, history)
    return draft, jnp.where(greedy, _largest(adjusted), probs.max(axis=-1))


def _last(draft: Draft, position: jax.Array) -> jax.Array:
    """Returns the token `[B, 1]` drafted before `position`."""
    return jax.lax.dynamic_slice_in_dim(draft.tokens, position - 1, 1, axis=1)


def _set(values: jax.Array, entry: jax.Array, position: Any) -> jax.Array:
    """Replaces entry `position` along axis 1 of `values` `[B, K, ...]` by `entry` `[B, ...]`."""
    return jax.lax.dynamic_update_index_in_dim(values, entry.astype(values.dtype), position, axis=1)


def _largest(logits: jax.Array) -> jax.Array:
    """Returns `[B]`, the largest probability of logits `[B, 1, V]`."""
    logits = logits[:, 0].astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jnp.exp(logits.max(axis=-1) - jax.nn.logsumexp(logits, axis=-1))
