"""From logits to probabilities.

Axes: B rows, N positions, K drafted tokens, V vocabulary.

`process` is the one function that makes a distribution: what is sampled, verified and reported.
"""

import dataclasses
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Context, Options

MAX_INT = np.iinfo(np.int32).max
GREEDY_BELOW = 1e-5  # a temperature below this is greedy: for draft, target and verifier alike


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What a user asks for; `None` in its place is greedy decoding. Each: one number, or one per row.

    Applied in this order, which is that of Hugging Face's `generate`.

    Attributes:
      repetition_penalty: above 0; positive logits of ids seen in the output so far, its given
        prefix and start token included, are divided by it, negative ones multiplied (Keskar et
        al. 2019, section 4.1).
      min_new_tokens: no end token is among the first so many tokens.
      temperature: 0 (below 1e-5) is greedy.
      top_k: at least 1; keeps the k most likely ids, and what ties with the last of them.
      top_p: in (0, 1]; keeps an id if the ids more likely than it have less than this probability
        together (Holtzman et al. 2020, section 3.1); ties are kept or dropped together.
      min_p: in [0, 1]; keeps an id if it is at least this times as likely as the likeliest.

    Raises:
      ValueError: an option that is not among these; all such are named.

    >>> options = Sampling(temperature=[0.0, 0.5], top_p=0.9).lay_out(num_rows=2)  # one greedy, one sampled
    >>> options.temperature.tolist(), options.top_k
    ([0.0, 0.5], None)
    """

    temperature: float | Sequence[float] | jax.Array = 1.0
    top_k: int | Sequence[int] | jax.Array | None = None
    top_p: float | Sequence[float] | jax.Array | None = None
    min_p: float | Sequence[float] | jax.Array | None = None
    repetition_penalty: float | Sequence[float] | jax.Array | None = None
    min_new_tokens: int | Sequence[int] | jax.Array | None = None

    def __new__(cls, *args: Any, **options: Any) -> "Sampling":
        refuse_unknown(options.keys() - {field.name for field in dataclasses.fields(cls)})
        return super().__new__(cls)

    def lay_out(self, num_rows: int, eos_ids: tuple[int, ...] = (), num_ids: int | None = None) -> Options:
        """One entry per row, checked.

        Raises:
          ValueError: a value that is out of its range or not one per row.
        """
        if self.temperature is None:
            raise ValueError("temperature=None: give numbers; sampling=None is greedy")
        values = {name: getattr(self, name) for name in _RANGES}
        values = {
            name: None if value is None else per_row(name, value, num_rows, *_RANGES[name])
            for name, value in values.items()
        }
        return Options(**values, eos_ids=tuple(eos_ids), num_ids=num_ids)


# dtype, smallest, whether the smallest itself is allowed, largest
_RANGES: dict[str, tuple[Any, float, bool, float]] = {
    "temperature": (jnp.float32, 0.0, True, np.inf),
    "top_k": (jnp.int32, 1, True, MAX_INT),
    "top_p": (jnp.float32, 0.0, False, 1.0),
    "min_p": (jnp.float32, 0.0, True, 1.0),
    "repetition_penalty": (jnp.float32, 0.0, False, np.inf),
    "min_new_tokens": (jnp.int32, 0, True, MAX_INT),
}


def refuse_unknown(names: Set[str], what: str = "speculative decoding") -> None:
    """Raises a ValueError that names all of `names`, if there are any, as unsupported by `what`."""
    supported = ", ".join(field.name for field in dataclasses.fields(Sampling))
    misplaced = sorted(name for name in names if name in _RANGES)
    if misplaced:
        raise ValueError(f"{', '.join(misplaced)}: give them as sampling=Sampling({misplaced[0]}=...)")
    if names:
        raise ValueError(
            f"{', '.join(sorted(names))}: not supported with {what}; leave out what is "
            f"not among {supported} (in Sampling)"
        )


def per_row(
    name: str,
    value: Any,
    num_rows: int,
    dtype: Any,
    low: float = 0,
    closed: bool = True,
    high: float = np.inf,
) -> jax.Array:
    """`value` as `[B]` of `dtype`; what is not traced is checked.

    Raises:
      ValueError: not one number or `num_rows` of them, not whole where `dtype` is, not in
        `low`..`high` (`low` itself only where `closed`), or not finite.
    """
    if not isinstance(value, jax.core.Tracer):
        array = np.asarray(value)
        if array.shape not in ((), (num_rows,)):
            raise ValueError(f"{name} has shape {array.shape}: give one number, or one per row ({num_rows})")
        if array.dtype.kind not in ("iu" if jnp.issubdtype(dtype, jnp.integer) else "iuf"):
            raise ValueError(f"{name}={value!r}: give {'whole ' if dtype == jnp.int32 else ''}numbers")
        above = array >= low if closed else array > low
        if not np.all(above & (array <= high) & np.isfinite(array)):  # NaN fails as well
            most = "and finite" if high == np.inf else f"and at most {high:g}"
            raise ValueError(f"{name}={value}: must be {'at least' if closed else 'above'} {low:g} {most}")
    return jnp.broadcast_to(jnp.asarray(value, dtype), (num_rows,))


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


def adjust(logits: jax.Array, options: Options, history: History) -> jax.Array:
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


def process(logits: jax.Array, options: Options, history: History) -> jax.Array:
    """The distribution that a row samples from; greedy rows get a one-hot one.

    Args:
      logits: `[B, N, V]`, any float dtype.
      options: what the rows ask for.
      history: at the same positions.

    Returns:
      `[B, N, num_ids]` probabilities, float32 or wider.
    """
    logits = adjust(logits, options, history)
    greedy = is_greedy(options.temperature)
    temperature = jnp.where(greedy, 1.0, options.temperature).astype(logits.dtype)[:, None, None]
    shifted = logits - logits.max(-1, keepdims=True)
    soft = _filter(jax.nn.softmax(shifted / temperature, axis=-1), options)
    hot = jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=soft.dtype)
    # A NaN as q would make the rule inexact; a target's is reported by whoever reads its logits.
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
