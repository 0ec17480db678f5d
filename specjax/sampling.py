"""Logits to probabilities.

Axes: B rows, N positions, K drafted tokens, V vocabulary, T token slots.

`distribution` is the only function that computes one: for sampling, verification and reports alike.
"""

import jax
import jax.numpy as jnp

from specjax.types import Context, History, Options

GREEDY_BELOW = 1e-5  # a temperature below this is greedy: for draft, target and verifier alike


def history(context: Context, drafted: jax.Array, before: jax.Array) -> History:
    """Returns the history of N positions: the committed tokens, and the drafted tokens before each.

    Args:
      context: committed tokens.
      drafted: `[B, K]` drafted tokens, each after the tokens that precede it.
      before: `[1 or B, N, K] bool`, True where a drafted token precedes a position.
    """
    before = jnp.broadcast_to(before, (drafted.shape[0], *before.shape[1:]))
    num_drafted = before.sum(-1, dtype=jnp.int32)
    num_new = (context.length - context.prefix_length)[:, None] + num_drafted
    if not context.options.read_tokens:
        return History(num_new)
    num_slots = context.tokens.shape[1]
    committed = jnp.arange(num_slots)[None, :] < context.length[:, None]
    tokens = jnp.where(committed, context.tokens, -1)[:, None]
    tokens = jnp.broadcast_to(tokens, (*before.shape[:2], num_slots))
    place = context.length[:, None, None] + jnp.cumsum(before, axis=-1) - 1
    place = jnp.where(before, place, num_slots)  # beyond the text: dropped
    row, position = (jnp.arange(n) for n in before.shape[:2])
    tokens = tokens.at[row[:, None, None], position[None, :, None], place].set(drafted[:, None], mode="drop")
    return History(num_new, tokens, context.length[:, None] + num_drafted)


def is_greedy(temperature: jax.Array) -> jax.Array:
    """True where a row's `temperature` `[B]` means argmax."""
    return temperature < GREEDY_BELOW


def argmax(logits: jax.Array) -> jax.Array:
    """Returns the ids `[...] int32` of the largest `logits` `[..., V]`; the lowest id wins a tie.

    Computed as a maximum and a minimum, which XLA vectorises on a CPU, where its argmax is a scalar loop. A
    row with a NaN gives the last id.
    """
    num_ids = logits.shape[-1]
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    first = jnp.where(logits == logits.max(-1, keepdims=True), ids, num_ids).min(-1)
    return jnp.minimum(first, num_ids - 1)


def adjust_logits(logits: jax.Array, options: Options, history: History) -> jax.Array:
    """Applies all options that change logits, for greedy rows too, in the order of `GenerationConfig`.

    Args:
      logits: `[B, N, V]`, any float dtype.
      options: all are read but temperature, top-k, top-p and min-p.
      history: the tokens before the same positions.

    Returns:
      `[B, N, num_ids]`, float32 or wider.

    Raises:
      ValueError: `logits_processor` returns another shape.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))[..., : options.num_ids]
    of_row = lambda option: option.astype(logits.dtype)[:, None, None]  # noqa: E731
    num_slots = 0 if history.tokens is None else history.tokens.shape[-1]
    if options.bias is not None:
        logits = logits + options.bias.astype(logits.dtype)[:, None]
    if options.repetition_penalty is not None:
        penalty = of_row(options.repetition_penalty)
        penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
        logits = jnp.where(_counts(history, logits, new_only=False) > 0, penalised, logits)
    if options.frequency_penalty is not None:
        counts = _counts(history, logits, new_only=True).astype(logits.dtype)
        logits = logits - of_row(options.frequency_penalty) * counts
    if options.presence_penalty is not None:
        occurs = _counts(history, logits, new_only=True) > 0
        logits = jnp.where(occurs, logits - of_row(options.presence_penalty), logits)
    # An n-gram longer than the text cannot occur twice.
    if options.no_repeat_ngram_size and options.no_repeat_ngram_size <= num_slots:
        completions = _completions_of_ngrams(history, options.no_repeat_ngram_size)
        logits = jnp.where(_marked(completions, logits), -jnp.inf, logits)
    if options.bad_words is not None:
        logits = jnp.where(
            _marked(_completions_of_words(history, options.bad_words), logits), -jnp.inf, logits
        )
    if options.min_new_tokens is not None and options.eos_ids:
        early = history.num_new < options.min_new_tokens[:, None]
        logits = jnp.where(early[..., None] & _is_any_of(options.eos_ids, logits), -jnp.inf, logits)
    if options.begin_suppress_tokens:
        begins = (history.num_new == 0)[..., None]
        logits = jnp.where(begins & _is_any_of(options.begin_suppress_tokens, logits), -jnp.inf, logits)
    if options.logits_processor is not None:
        processed = options.logits_processor(logits, history)
        if jnp.shape(processed) != logits.shape:
            raise ValueError(
                f"`logits_processor` must return the shape of its logits, {logits.shape}, got "
                f"{jnp.shape(processed)}"
            )
        logits = processed.astype(logits.dtype)
    return logits


def _counts(history: History, logits: jax.Array, new_only: bool) -> jax.Array:
    """Returns `[B, N, V]`, how often each id occurs before a position; `new_only`: among generated tokens."""
    assert history.tokens is not None and history.length is not None  # see `Options.read_tokens`
    first = (history.length - history.num_new)[..., None] if new_only else 0
    slots = jnp.arange(history.tokens.shape[-1])[None, None, :]
    counted = (slots >= first) & (slots < history.length[..., None])
    return _added(jnp.where(counted, history.tokens, -1), logits)


def _completions_of_ngrams(history: History, size: int) -> jax.Array:
    """Returns `[B, N, T - size + 1]`, the ids after earlier copies of the last `size` - 1 ids, else -1."""
    assert history.tokens is not None and history.length is not None
    num_starts = history.tokens.shape[-1] - size + 1
    starts = jnp.arange(num_starts)[None, None, :]
    same = starts + size - 1 < history.length[..., None]
    for k in range(size - 1):
        last = jnp.take_along_axis(
            history.tokens, (history.length - (size - 1) + k)[..., None], -1, mode="clip"
        )
        same &= history.tokens[..., k : k + num_starts] == last
    return jnp.where(same, history.tokens[..., size - 1 :], -1)


def _completions_of_words(history: History, words: jax.Array) -> jax.Array:
    """Returns `[B, N, W]`, the last id of each of `words` `[B, W, L]` that it would complete, else -1."""
    assert history.tokens is not None and history.length is not None
    num_before = words.shape[-1] - 1
    place = history.length[..., None] - num_before + jnp.arange(num_before)[None, None, :]
    recent = jnp.take_along_axis(history.tokens, jnp.maximum(place, 0), axis=-1)
    recent = jnp.where(place >= 0, recent, -2)[:, :, None]
    needed = words[:, None, :, :-1]
    complete = ((needed < 0) | (needed == recent)).all(-1)
    return jnp.where(complete, words[:, None, :, -1], -1)


def _added(ids: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns `[B, N, V]`, how often each id occurs in `ids` `[B, N, ...]`; -1 is ignored."""
    row, position = (jnp.arange(n) for n in logits.shape[:2])
    ids = jnp.where(ids < 0, logits.shape[-1], ids)  # beyond the vocabulary: dropped
    zeros = jnp.zeros(logits.shape, jnp.int32)
    return zeros.at[row[:, None, None], position[None, :, None], ids].add(1, mode="drop")


def _marked(ids: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns `[B, N, V] bool`, which ids occur in `ids` `[B, N, ...]`."""
    return _added(ids, logits) > 0


def _is_any_of(ids: tuple[int, ...], logits: jax.Array) -> jax.Array:
    """Returns `[1, 1, V] bool`, which ids are among `ids`."""
    return jnp.isin(jnp.arange(logits.shape[-1]), jnp.asarray(ids))[None, None]


def has_choice(logits: jax.Array) -> jax.Array:
    """Returns `[B, N] bool`: whether adjusted `logits` `[B, N, V]` have no NaN and allow some token."""
    largest = logits.max(-1)
    return (largest > -jnp.inf) & ~jnp.isnan(largest)


def distribution(logits: jax.Array, options: Options, history: History) -> jax.Array:
    """Returns the distribution that a row samples from; it is one-hot for greedy rows.

    Args:
      logits: `[B, N, V]`, any float dtype.
      options: the options of each row.
      history: the tokens before the same positions.

    Returns:
      `[B, N, num_ids]` probabilities, float32 or wider.
    """
    logits = adjust_logits(logits, options, history)
    greedy = is_greedy(options.temperature)
    temperature = jnp.where(greedy, 1.0, options.temperature).astype(logits.dtype)[:, None, None]
    # Subtract the maximum first: at a temperature of 1e-5 large quotients would lose small differences.
    shifted = logits - logits.max(-1, keepdims=True)
    weights = jnp.exp(shifted / temperature)
    soft = _filter(weights / weights.sum(-1, keepdims=True), options)
    hot = jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=soft.dtype)
    # A row with a NaN becomes one-hot. As q it keeps the rule exact. As p it emits no token, since the round
    # checks the raw logits (`round._log_probs`) and ends the row.
    return jnp.where(greedy[:, None, None] | jnp.isnan(soft[..., :1]), hot, soft)


def _filter(probs: jax.Array, options: Options) -> jax.Array:
    """Applies top-k, then top-p, then min-p to `probs` `[B, N, V]`, and normalises the rest."""
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
    # Where nothing was filtered the distribution stays bit-exact.
    changed = (kept != probs).any(-1, keepdims=True)
    return jnp.where(changed, kept / kept.sum(-1, keepdims=True), probs)


def threshold_above(values: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
    """Returns the smallest threshold such that the values above it weigh less than `limit` together.

    With weights of one and limit k it is the k-th largest value. With the values as weights and limit p it is
    the smallest probability of the nucleus. The result is exact and needs no sort: non-negative floats have
    the order of their bit patterns, which are bisected.

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
    """Returns the weights of the token that replaces a rejected draft: max(p - q, 0), unnormalised.

    Leviathan et al. 2023, section 2.3 (algorithm 1); with a ratio, Sun et al. 2024, equation 4.

    Args:
      target_probs: `[B, V]`, p at the rejected position.
      draft_probs: `[B, V]`, q there; all zero gives p itself, the bonus token's distribution.
      ratio: `[B]`, a factor of p; None: 1.

    Returns:
      `[B, V]`. If p and q are equal the residual is zero; a rejection is then a rounding error, and p is
      returned.
    """
    scaled = target_probs if ratio is None else ratio[:, None] * target_probs
    weights = jnp.maximum(scaled - draft_probs, 0.0)
    return jnp.where(weights.sum(-1, keepdims=True) > 0, weights, target_probs)
