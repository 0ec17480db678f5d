"""The target's call on a draft, and the rule's verdict on it.

Axes: B rows, N drafted tokens, D most of them that can be accepted (N = D = K for a chain), V vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import acceptance, sampling
from specjax import tree as tree_lib
from specjax.program import Program
from specjax.types import Context, Draft, Params, Verdict


class Judged(NamedTuple):
    """What the target says to a draft. Axes N and D are the drafter's, however narrow the call was.

    Attributes:
      verdict: of the rule.
      emitted: `[B, D + 1]`, the accepted tokens, then `next_token` in all places.
      log_probs: `[B, D + 1, 2] float32` of `emitted`, raw and processed.
      finite: `[B, D + 1] bool`, whether the logits that they were judged by are numbers.
      logits: `[B, N + 1, V]` of the target.
      features: `[B, N + 1, F]` of the target.
      target_probs: `[B, N + 1, V]`, p; None in the greedy program.
      cache: the target's, with the call's tokens in it.
    """

    verdict: Verdict
    emitted: jax.Array
    log_probs: jax.Array
    finite: jax.Array
    logits: jax.Array
    features: jax.Array
    target_probs: jax.Array | None
    cache: Any


def judge(
    program: Program,
    width: int,
    target_params: Params,
    cache: Any,
    context: Context,
    draft: Draft,
    draws: Any,
) -> Judged:
    """One target call on the last token and the first `width` drafts, and the rule's verdict.

    Args:
      program: static.
      width: drafts that the call has room for, one of `program.widths`. Static.
      target_params, cache: of the target; the cache holds all committed tokens but the last.
      context: before the round.
      draft: what was proposed; of a chain no more than `width` tokens.
      draws: this round's randomness, or None for the greedy program.
    """
    num_draft, max_depth, is_tree = draft.tokens.shape[1], draft.max_depth, draft.tree is not None
    if width < num_draft:
        assert width == 0 or not is_tree  # a tree is drafted whole or not at all
        probs = None if draft.probs is None else draft.probs[:, :width]
        draft = draft.replace(tokens=draft.tokens[:, :width], probs=probs, tree=None)
    root = context.length - 1
    last = jnp.take_along_axis(context.tokens, root[:, None], axis=1)
    layout = None if draft.tree is None else tree_lib.layout(draft.tree, root, program.num_slots)
    logits, features, cache = program.target.decode(
        target_params, cache, jnp.concatenate([last, draft.tokens], axis=1), layout
    )
    judged, of_judged = _candidates(draft), logits[:, : (draft.num_candidates or logits.shape[1]) + 1]
    verdict, target_probs = _verify(program, context, judged, of_judged, draws)
    emitted = _emitted(judged, verdict)
    log_probs, finite = _log_probs(of_judged, target_probs, emitted, verdict)

    def widen(array: jax.Array, size: int, mode: str = "constant") -> jax.Array:
        missing = size - array.shape[1]
        return jnp.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2), mode)

    if width < num_draft:
        emitted, log_probs, finite = (widen(x, max_depth + 1, "edge") for x in (emitted, log_probs, finite))
        logits, features = (widen(x, num_draft + 1) for x in (logits, features))
        target_probs = None if target_probs is None else widen(target_probs, num_draft + 1)
        if is_tree:
            verdict = verdict._replace(path=jnp.zeros((len(root), max_depth), jnp.int32))
    return Judged(verdict, emitted, log_probs, finite, logits, features, target_probs, cache)


def _candidates(draft: Draft) -> Draft:
    """The part of a draft that is judged."""
    if draft.num_candidates is None or draft.tree is None:
        return draft
    parents, valid = (x[:, : draft.num_candidates] for x in (draft.tree.parents, draft.tree.valid))
    return draft.replace(
        tokens=draft.tokens[:, : draft.num_candidates], tree=draft.tree.replace(parents=parents, valid=valid)
    )


def _verify(
    program: Program, context: Context, draft: Draft, logits: jax.Array, draws: Any
) -> tuple[Verdict, jax.Array | None]:
    """The rule's verdict on `logits` `[B, N + 1, V]`; beside it p, None for the greedy program."""
    history = sampling.history(context, draft.tokens, tree_lib.before(draft))
    if draws is None:
        adjusted = sampling.adjust(logits, context.options, history)
        return acceptance.greedy(draft, sampling.argmax(adjusted)), None
    target_probs = sampling.process(logits, context.options, history)
    return program.rule(draws, draft, target_probs), target_probs


def _emitted(draft: Draft, verdict: Verdict) -> jax.Array:
    """`[B, D + 1]`: the accepted tokens, then `next_token` (in all places after them)."""
    tokens = draft.tokens
    if verdict.path is not None:
        tokens = jnp.take_along_axis(tokens, jnp.maximum(verdict.path - 1, 0), axis=1)
    positions = jnp.arange(draft.max_depth + 1)[None, :]
    padded = jnp.pad(tokens, ((0, 0), (0, 1)))
    return jnp.where(positions < verdict.num_accepted[:, None], padded, verdict.next_token[:, None])


def _log_probs(
    logits: jax.Array, target_probs: jax.Array | None, emitted: jax.Array, verdict: Verdict
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities `[B, D + 1, 2]` of `emitted` `[B, D + 1]`, raw and processed.

    Beside them `[B, D + 1] bool`: whether the logits at a position are numbers.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    log_normaliser = jax.nn.logsumexp(logits, axis=-1)
    at_emitted = functools.partial(jnp.take_along_axis, indices=emitted[..., None], axis=-1)
    if verdict.path is not None:  # each token was emitted after the node before it on the path
        along = functools.partial(jnp.take_along_axis, indices=verdict.call_positions[..., None], axis=1)
        logits, log_normaliser = along(logits), along(log_normaliser[..., None])[..., 0]
        target_probs = None if target_probs is None else along(target_probs)
    raw = at_emitted(logits)[..., 0] - log_normaliser
    processed = jnp.zeros_like(raw) if target_probs is None else jnp.log(at_emitted(target_probs)[..., 0])
    return jnp.stack([raw, processed], axis=-1), jnp.isfinite(log_normaliser)
