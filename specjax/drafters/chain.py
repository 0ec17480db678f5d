"""Filling a draft of K tokens one after another: what drafters of chains have in common.

Axes: B rows, K drafts, V vocabulary.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.draws import Stream
from specjax.types import Context, Draft, Draws

State = TypeVar("State")  # what a step of a drafter needs and gives, a pytree


def empty(
    context: Context,
    logits: jax.Array | jax.ShapeDtypeStruct,
    draws: Draws | None,
    num_draft: int,
    num_drafted: int,
) -> Draft:
    """A draft of K tokens to be filled; q is kept only where something is drawn from it.

    Args:
      context: of the rows.
      logits: `[B, ..., V]`, of which shape and dtype count; abstract ones will do.
      draws: None in the greedy program.
      num_draft: K.
      num_drafted: what every row is said to draft.
    """
    num_rows, num_ids = logits.shape[0], context.options.num_ids or logits.shape[-1]
    tokens = jnp.zeros((num_rows, num_draft), jnp.int32)
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    probs = None if draws is None else jnp.zeros((num_rows, num_draft, num_ids), dtype)
    return Draft(tokens, jnp.full_like(context.length, num_drafted), probs)


def put(
    draft: Draft, logits: jax.Array, context: Context, draws: Draws | None, position: jax.typing.ArrayLike
) -> tuple[Draft, jax.Array]:
    """Draws the draft at `position` from `logits` `[B, 1, V]`; beside it the largest of q, `[B]`."""
    num_draft = draft.tokens.shape[1]
    before = (jnp.arange(num_draft) < position)[None, None]
    history = sampling.history(context, draft.tokens, before)
    if draws is None or draft.probs is None:
        adjusted = sampling.adjust(logits, context.options, history)
        token = sampling.argmax(adjusted)[:, 0]
        return draft.replace(tokens=_set(draft.tokens, token, position)), _largest(adjusted)
    probs = sampling.process(logits, context.options, history)[:, 0]
    token = draws.choose(Stream.DRAFT.at(position), probs)
    draft = draft.replace(
        tokens=_set(draft.tokens, token, position), probs=_set(draft.probs, probs, position)
    )
    # A greedy row's q is one-hot here: it is as confident as in the greedy program.
    greedy = sampling.is_greedy(context.options.temperature)
    adjusted = sampling.adjust(logits, context.options, history)
    return draft, jnp.where(greedy, _largest(adjusted), probs.max(axis=-1))


def draw_up_to(
    draft: Draft,
    logits: jax.Array,
    state: State,
    feed: Callable[[State, jax.Array], tuple[jax.Array, State]],
    context: Context,
    draws: Draws | None,
    wanted: jax.Array,
    min_confidence: float,
) -> tuple[Draft, State]:
    """Fills an empty draft, as many steps as some row still has use for.

    Args:
      draft: of no tokens yet.
      logits: `[B, 1, V]`, of the first draft.
      state: before the first step.
      feed: takes the state and the token drawn last, `[B, 1]`; returns the logits of the next, and the state.
      context, draws: of the round.
      wanted: `[B]`, the most tokens that each row is to draft.
      min_confidence: a row stops before it draws a token from a q whose largest probability is below this.
        Stopping depends on q alone and not on what would be drawn: that would change the law.
    """
    num_draft = draft.tokens.shape[1]

    def add(
        draft: Draft, logits: jax.Array, going: jax.Array, position: jax.Array
    ) -> tuple[Draft, jax.Array]:
        drawn, confidence = put(draft, logits, context, draws, position)
        going = going & (position < wanted)
        if min_confidence:
            going &= confidence >= min_confidence
        return drawn.replace(num_drafted=draft.num_drafted + going), going

    def more(carry: tuple) -> jax.Array:
        position, _, going, _ = carry
        return (position < num_draft) & (going & (position < wanted)).any()

    def step(carry: tuple) -> tuple:
        position, draft, going, state = carry
        logits, state = feed(state, last(draft, position))
        return position + 1, *add(draft, logits, going, position), state

    first = jnp.asarray(0, jnp.int32)
    drawn, going = add(draft, logits, jnp.ones(wanted.shape, bool), first)
    _, draft, _, state = jax.lax.while_loop(more, step, (first + 1, drawn, going, state))
    return draft, state


def last(draft: Draft, position: jax.Array) -> jax.Array:
    """The token `[B, 1]` drafted before `position`."""
    return jax.lax.dynamic_slice_in_dim(draft.tokens, position - 1, 1, axis=1)


def _set(values: jax.Array, entry: jax.Array, position: jax.typing.ArrayLike) -> jax.Array:
    """Replaces entry `position` along axis 1 of `values` `[B, K, ...]` by `entry` `[B, ...]`."""
    return jax.lax.dynamic_update_index_in_dim(values, entry.astype(values.dtype), position, axis=1)


def _largest(logits: jax.Array) -> jax.Array:
    """`[B]`, the largest probability of logits `[B, 1, V]`."""
    logits = logits[:, 0].astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jnp.exp(logits.max(axis=-1) - jax.nn.logsumexp(logits, axis=-1))
