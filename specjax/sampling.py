"""From logits to probabilities.

Axes: B rows, N positions, K drafted tokens, V vocabulary.

`distribution` is the one function that makes a distribution: what is sampled, verified and reported.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.types import Context, Options

GREEDY_BELOW = 1e-5  # a temperature below this is greedy: for draft, target and verifier alike


class History(NamedTuple):
    """What precedes each position whose distribution is wanted.

    Attributes:
      num_new: `[B, N]`, tokens generated before it, drafted ones included.
      seen: `[B, N, V] bool`, ids that occur before it; None where no penalty asks for it.
    """

    num_new: jax.Array
    seen: jax.Array | None


def history(context: Context, drafted: jax.Array, before: jax.Array) -> History:
    """The history at N positions: the committed tokens, and those drafted on the way.

    Args:
      context: committed tokens.
      drafted: `[B, K]` drafted tokens.
      before: `[1 or B, N, K] bool`, True where a drafted token precedes a position.

    Returns:
      A `History` of N positions.
    """
    before = jnp.broadcast_to(before, (drafted.shape[0], *before.shape[1:]))
    committed = (context.length - context.prefix_length)[:, None]
    seen = context.seen
    if seen is not None:
        row, position = (jnp.arange(n) for n in before.shape[:2])
        ids = jnp.where(before, drafted[:, None, :], seen.shape[-1])  # beyond the vocabulary: dropped
        shape = (seen.shape[0], before.shape[1], seen.shape[1])
        seen = jnp.broadcast_to(seen[:, None], shape)
        seen = seen.at[row[:, None, None], position[None, :, None], ids].set(True, mode="drop")
    return History(committed + before.sum(-1, dtype=jnp.int32), seen)


def is_greedy(temperature: jax.Array) -> jax.Array:
    """True where a row's `temperature` `[B]` means argmax."""
    return temperature < GREEDY_BELOW


def argmax(logits: jax.Array) -> jax.Array:
    """Ids `[...] int32` of the largest of `logits` `[..., V]`, the lowest id winning a tie.

    As a maximum and a minimum, both of which a CPU vectorises; its argmax is a scalar loop. A row
    with a NaN gives the last id.
    """
    num_ids = logits.shape[-1]
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    first = jnp.where(logits == logits.max(-1, keepdims=True), ids, num_ids).min(-1)
    return jnp.minimum(first, num_ids - 1)


def adjust_logits(logits: jax.Array, options: Options, history: History) -> jax.Array:
    """What a row decides by, greedy or not: padding ids cut off, penalty and minimum length applied.

    Args:
      logits: `[B, N, V]`, any float dtype.
      options: penalty, minimum length and `num_ids` are read.
      history: at the same positions.

    Returns:
      `[B, N, num_ids]`, float32 or wider.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))[..., : options.num_ids]
    if options.repetition_penalty is not None:
        assert history.seen is not None  # a context with a penalty keeps it
        penalty = options.repetition_penalty.astype(logits.dtype)[:, None, None]
        penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
        logits = jnp.where(history.seen[..., : options.num_ids], penalised, logits)
    if options.min_new_tokens is not None and options.eos_ids:
        early = history.num_new < options.min_new_tokens[:, None]
        is_eos = jnp.isin(jnp.arange(logits.shape[-1]), jnp.asarray(options.eos_ids))
        logits = jnp.where(early[..., None] & is_eos[None, None], -jnp.inf, logits)
    return logits


def distribution(logits: jax.Array, options: Options, history: History) -> jax.Array:
    """The distribution that a row samples from; greedy rows get a one-hot one.

    Args:
      logits: `[B, N, V]`, any float dtype.
      options: what the rows ask for.
      history: at the same positions.

    Returns:
      `[B, N, num_ids]` probabilities, float32 or wider.
    """
    logits = adjust_logits(logits, options, history)
    greedy = is_greedy(options.temperature)
    temperature = jnp.where(greedy, 1.0, options.temperature).astype(logits.dtype)[:, None, None]
    # Subtract the maximum first: at a temperature of 1e-5 large quotients would round away small differences.
    shifted = logits - logits.max(-1, keepdims=True)
    weights = jnp.exp(shifted / temperature)
    soft = _filter(weights / weights.sum(-1, keepdims=True), options)
    hot = jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=soft.dtype)
    # A row with a NaN becomes one-hot. As q that keeps the rule exact; as p it is never emitted: the round
    # sees the raw logits (`round._log_probs`) and ends the row.
    return jnp.where(greedy[:, None, None] | jnp.isnan(soft[..., :1]), hot, soft)


def _filter(probs: jax.Array, options: Options) -> jax.Array:
    """Keeps what top-k, then top-p, then min-p keep of `probs` `[B, N, V]`, and normalises it."""
    of_row = lambda option: option.astype(probs.dtype)[:, None, None]  # noqa: E731
    kept = probs
    if options.top_k is not None:
        limit = options.top_k[:, None, None]
        threshold = threshold_above(kept, jnp.ones_like(kept, jnp.int32), limit)
        kept = jnp.where(kept >= threshold, kept, 0.0)
    if options.top_p is not None:
        top_p = of_row(options.top_p)
        mass = 1.0 if options.top_k is None else kept.sum(-1, keepdims=True)
        threshold = threshold_above(kept, kept, top_p * mass)
        kept = jnp.where((kept >= threshold) | (top_p >= 1), kept, 0.0)
    if options.min_p is not None:
        kept = jnp.where(kept >= of_row(options.min_p) * kept.max(-1, keepdims=True), kept, 0.0)
    if kept is probs:
        return probs
    # Where nothing fell away the distribution stays as it is, to the last bit.
    changed = (kept != probs).any(-1, keepdims=True)
    return jnp.where(changed, kept / kept.sum(-1, keepdims=True), probs)


def threshold_above(values: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
    """The smallest threshold such that what lies above it weighs less than `limit`.

    With weights of one and a limit of k it is the k-th largest value; with the values as weights and
    a limit of p, the smallest probability of a nucleus. Exact: floats that are not negative are
    ordered as their bits are, and the bits are bisected. No sort of the vocabulary.

    Args:
      values: `[B, N, V]` float, not negative.
      weights: `[B, N, V]`, not negative.
      limit: `[B, 1 or N, 1]`, positive, of the dtype of `weights`.

    Returns:
      `[B, N, 1]`, at most the largest value.
    """
    integer = jnp.int64 if values.dtype == jnp.float64 else jnp.int32
    high = jax.lax.bitcast_convert_type(values.max(-1, keepdims=True), integer)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # the threshold is above low and at most high
        middle = low + (high - low + 1) // 2
        above = values > jax.lax.bitcast_convert_type(middle, values.dtype)
        light = jnp.where(above, weights, 0).sum(-1, keepdims=True, dtype=weights.dtype) < limit
        return jnp.where(light, low, middle), jnp.where(light, middle, high)

    _, high = jax.lax.fori_loop(0, jnp.iinfo(integer).bits, halve, (jnp.full_like(high, -1), high))
    return jax.lax.bitcast_convert_type(high, values.dtype)


def residual(target_probs: jax.Array, draft_probs: jax.Array, ratio: jax.Array | None = None) -> jax.Array:
    """Weights of the token that replaces a rejected draft: max(p - q, 0), unnormalised.

    Leviathan et al. 2023, section 2.3 (algorithm 1); with a ratio, Sun et al. 2024, equation 4.

    Args:
      target_probs: `[B, V]`, p at the rejected position.
      draft_probs: `[B, V]`, q there; all zero gives p itself, the bonus token's distribution.
      ratio: `[B]`, by which p counts; None: 1.

    Returns:
      `[B, V]`. Where p = q to the last bit the residual vanishes; a rejection is then possible
      through rounding alone, and p is returned.
    """
    scaled = target_probs if ratio is None else ratio[:, None] * target_probs
    weights = jnp.maximum(scaled - draft_probs, 0.0)
    return jnp.where(weights.sum(-1, keepdims=True) > 0, weights, target_probs)
