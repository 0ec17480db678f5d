"""Rules that judge a draft: keep a prefix of it and choose the token after.

Axes: B rows, K drafts, V vocabulary. p is the target's distribution, q the draft's.
"""

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.sampling import Stream
from specjax.types import Draft, Draws, Verdict


def speculative(draws: Draws, draft: Draft, target_probs: jax.Array) -> Verdict:
    """The token-wise rule: the output has exactly the law p (Leviathan et al. 2023, algorithm 1).

    Draft i is accepted with probability min(1, p_i(x) / q_i(x)) while all before it were. The
    token after the accepted ones comes from the residual max(p - q, 0), or from p when nothing
    was rejected.

    Args:
      draws: streams ACCEPT and NEXT are used.
      draft: K tokens and the `probs` that they were drawn from (None: one-hot).
      target_probs: `[B, K + 1, V]`.

    Returns:
      The verdict; `num_accepted` never exceeds `draft.num_drafted`.
    """
    num_draft = draft.tokens.shape[1]
    p = _at_tokens(target_probs[:, :num_draft], draft.tokens)
    q = jnp.ones_like(p) if draft.probs is None else _at_tokens(draft.probs, draft.tokens)
    probability = p / jnp.where(q > 0, q, 1.0)  # above 1: a coin that always falls right
    accepted = draws.accept(Stream.ACCEPT.at(jnp.arange(num_draft)), probability)
    num_accepted = leading_run(accepted, draft.num_drafted)
    next_token = draws.choose(Stream.NEXT.at(0), _next_weights(draft, target_probs, num_accepted))
    return Verdict(num_accepted, next_token)


def greedy(draft: Draft, target_ids: jax.Array) -> Verdict:
    """The same rule at temperature 0: p and q are one-hot, so ids are compared, nothing is drawn.

    Args:
      draft: K tokens; `probs` is not read.
      target_ids: `[B, K + 1]`, the target's argmax at each position of the chain.

    Returns:
      The verdict; `num_accepted` never exceeds `draft.num_drafted`.
    """
    num_accepted = leading_run(draft.tokens == target_ids[:, :-1], draft.num_drafted)
    return Verdict(num_accepted, _at_position(target_ids, num_accepted))


def leading_run(accepted: jax.Array, num_drafted: jax.Array) -> jax.Array:
    """How many of the first `num_drafted` `[B]` entries of `accepted` `[B, K]` precede a False."""
    proposed = jnp.arange(accepted.shape[1])[None, :] < num_drafted[:, None]
    return jnp.cumprod((accepted & proposed).astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32)


def _next_weights(draft: Draft, target_probs: jax.Array, num_accepted: jax.Array) -> jax.Array:
    """Weights `[B, V]` of the token after the accepted ones: the residual, or p for the bonus."""
    target = _at_position(target_probs, num_accepted)
    num_draft = draft.tokens.shape[1]
    if num_draft == 0:
        return target
    index = jnp.minimum(num_accepted, num_draft - 1)
    if draft.probs is None:
        rejected = _at_position(draft.tokens, index)
        drafted = jax.nn.one_hot(rejected, target.shape[-1], dtype=target.dtype)
    else:
        drafted = _at_position(draft.probs, index)
    was_rejected = num_accepted < draft.num_drafted
    return sampling.residual(target, jnp.where(was_rejected[:, None], drafted, 0.0))


def _at_tokens(probs: jax.Array, tokens: jax.Array) -> jax.Array:
    """Probabilities `[B, K]` of `tokens` `[B, K]` under `probs` `[B, K, V]`."""
    return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]


def _at_position(values: jax.Array, position: jax.Array) -> jax.Array:
    """Each row's entry `[B, ...]` of `values` `[B, N, ...]` at its `position` `[B]`."""
    return values[jnp.arange(values.shape[0]), position]
