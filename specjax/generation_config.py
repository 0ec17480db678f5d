"""What a request asks for: how tokens are chosen, how many, by which seeds, and what ends a row."""

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.types import Options

MAX_INT = np.iinfo(np.int32).max
# What other libraries call an option -> its name here.
_ELSEWHERE = {
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "min_length": "min_new_tokens",
    "eos_token_id": "eos_ids",
    "stop_strings": "stop",
    "num_return_sequences": "num_samples",
}

Numbers = float | Sequence[float] | jax.Array | np.ndarray
WholeNumbers = int | Sequence[int] | jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class GenerationConfig:
    """The options of a request. Each number is one for all rows, or one per row.

    Options that change the distribution apply in the order of Hugging Face's `generate`: penalty, minimum
    length, temperature, top-k, top-p, min-p.

    Attributes:
      max_new_tokens: at least 0; the limit of a row.
      temperature: 0 (below 1e-5) is greedy. None: 1 if top_k, top_p or min_p is given, else greedy.
      top_k: at least 1; keeps the k most likely ids, and what ties with the last of them.
      top_p: in (0, 1]; keeps an id if the ids more likely than it have less than this probability
        together (Holtzman et al. 2020, section 3.1); ties are kept or dropped together.
      min_p: in [0, 1]; keeps an id if it is at least this times as likely as the likeliest.
      repetition_penalty: above 0; positive logits of ids seen in the output so far, its given
        prefix and start token included, are divided by it, negative ones multiplied (Keskar et
        al. 2019, section 4.1).
      min_new_tokens: no end token is among the first so many tokens.
      seed: a whole number in 0..2^32 - 1 or a `jax.random.key`, from which each row's seed is made; or one
        per row, which is that row's own. So `seed=3` and `seed=[3]` of one prompt are different seeds: to
        repeat one row of a batch, give every row a seed.
      eos_ids: tokens that end a row; None: the target's own.
      stop: a text or texts that end a row, at the token that completes one (needs a tokenizer).

    >>> config = GenerationConfig(temperature=[0.0, 0.5], top_p=0.9)  # one row greedy, one sampled
    >>> config.to_options(2).temperature.tolist(), config.to_options(2).top_k
    ([0.0, 0.5], None)
    """

    max_new_tokens: WholeNumbers = 64
    temperature: Numbers | None = None
    top_k: WholeNumbers | None = None
    top_p: Numbers | None = None
    min_p: Numbers | None = None
    repetition_penalty: Numbers | None = None
    min_new_tokens: WholeNumbers | None = None
    seed: WholeNumbers = 0
    eos_ids: Sequence[int] | None = None
    stop: str | Sequence[str] = ()

    def updated(self, options: dict[str, Any], also: Iterable[str] = ()) -> "GenerationConfig":
        """Returns the config with `options` in place of its own.

        Args:
          options: values by field.
          also: what else the caller takes, for suggestions.

        Raises:
          ValueError: names that are no options; each with the option that was probably meant.
        """
        known = [field.name for field in dataclasses.fields(self)]
        unknown = sorted(options.keys() - set(known))
        if unknown:
            raise ValueError("; ".join(_unknown(name, [*known, *also]) for name in unknown))
        return dataclasses.replace(self, **options)

    def to_options(self, num_rows: int, eos_ids: tuple[int, ...] = (), num_ids: int | None = None) -> Options:
        """Returns what `sampling.distribution` reads, checked, one entry per row.

        Args:
          num_rows: B.
          eos_ids: end tokens, which `min_new_tokens` suppresses.
          num_ids: ids that exist; None: all.

        Raises:
          ValueError: a value that is out of its range, or not one per row.
        """
        values = {name: getattr(self, name) for name in _RANGES}
        if self.temperature is None:
            values["temperature"] = 0.0 if self.is_greedy else 1.0
        laid_out: Any = {
            name: None if value is None else per_row(name, value, num_rows, *_RANGES[name])
            for name, value in values.items()
        }
        return Options(**laid_out, eos_ids=eos_ids, num_ids=num_ids)

    @property
    def is_greedy(self) -> bool:
        """Whether no row samples; of traced values False."""
        if self.temperature is None:
            return all(x is None for x in (self.top_k, self.top_p, self.min_p))
        if isinstance(self.temperature, jax.core.Tracer):
            return False
        return bool(sampling.is_greedy(jnp.asarray(self.temperature)).all())

    def for_rows(self, index: np.ndarray, num_rows: int) -> "GenerationConfig":
        """Returns the config of rows `index` out of `num_rows`; rows may repeat. Not of traced values."""

        def taken(value: Any) -> Any:
            is_per_row = not isinstance(value, str) and np.ndim(value) == 1 and len(value) == num_rows
            return np.asarray(value)[index] if is_per_row else value

        names = ["max_new_tokens", *_RANGES]
        return dataclasses.replace(self, **{name: taken(getattr(self, name)) for name in names})

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple.

        Raises:
          ValueError: it holds something else than texts, or an empty one.
        """
        strings = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(strings, list | tuple) or not all(isinstance(s, str) and s for s in strings):
            raise ValueError(f"`stop` must be a non-empty string or several, got {self.stop!r:.80}")
        return tuple(strings)


# dtype, smallest, whether the smallest itself is allowed, largest
_RANGES: dict[str, tuple[Any, float, bool, float]] = {
    "temperature": (jnp.float32, 0.0, True, np.inf),
    "top_k": (jnp.int32, 1, True, MAX_INT),
    "top_p": (jnp.float32, 0.0, False, 1.0),
    "min_p": (jnp.float32, 0.0, True, 1.0),
    "repetition_penalty": (jnp.float32, 0.0, False, np.inf),
    "min_new_tokens": (jnp.int32, 0, True, MAX_INT),
}


def _unknown(name: str, known: list[str]) -> str:
    """What to answer to an option that does not exist."""
    close = [_ELSEWHERE[name]] if name in _ELSEWHERE else difflib.get_close_matches(name, known, 1)
    remedy = f"did you mean `{close[0]}`?" if close else f"the options are {', '.join(known)}"
    return f"`{name}` is not supported with speculative decoding; {remedy}"


def per_row(
    name: str,
    value: Any,
    num_rows: int,
    dtype: Any,
    low: float = 0,
    closed: bool = True,
    high: float = np.inf,
) -> jax.Array:
    """Returns `value` as `[B]` of `dtype`; what is not traced is checked.

    Raises:
      ValueError: not one number or `num_rows` of them, not whole where `dtype` is, not in
        `low`..`high` (`low` itself only where `closed`), or not finite.
    """
    if not isinstance(value, jax.core.Tracer):
        array = np.asarray(value)
        whole = jnp.issubdtype(dtype, jnp.integer)
        if array.dtype.kind not in ("iu" if whole else "iuf"):
            raise ValueError(f"`{name}` must be {'a whole number' if whole else 'a number'}, got {value!r}")
        if array.shape not in ((), (num_rows,)):
            raise ValueError(
                f"`{name}` must be one number or one per row ({num_rows}), got shape {array.shape}"
            )
        above = array >= low if closed else array > low
        if not np.all(above & (array <= high) & np.isfinite(array)):  # NaN fails as well
            most = "and finite" if high == np.inf else f"and at most {high:g}"
            raise ValueError(
                f"`{name}` must be {'at least' if closed else 'above'} {low:g} {most}, got {value}"
            )
    return jnp.broadcast_to(jnp.asarray(value, dtype), (num_rows,))


def row_seeds(seed: Any, num_rows: int) -> jax.Array:
    """Returns `[B] uint32`: the seeds given, or one per row made from a single one.

    Args:
      seed: a whole number or a key, or `num_rows` of them.
      num_rows: B.

    Raises:
      ValueError: numbers that are not whole, not in 0..2^32 - 1, or not one or `num_rows`.
    """
    is_key = isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
    if not is_key and not isinstance(seed, jax.core.Tracer):
        array = np.asarray(seed)
        if array.dtype.kind not in "iu" or not np.all((array >= 0) & (array < 2**32)):
            raise ValueError(f"`seed` must be whole numbers in 0..2^32 - 1 or a key, got {seed!r}")
        seed = array.astype(np.uint32)
    seed = seed if is_key else jnp.asarray(seed).astype(jnp.uint32)
    if seed.shape == (num_rows,):
        return jax.vmap(lambda key: jax.random.bits(key, dtype=jnp.uint32))(seed) if is_key else seed
    if seed.shape != ():
        raise ValueError(f"`seed` must be one seed or one per row ({num_rows}), got shape {seed.shape}")
    return jax.vmap(functools.partial(_derived_seed, seed))(jnp.arange(num_rows))


def _derived_seed(seed: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the seed of row `index`; the generator is pinned for whole numbers."""
    is_key = jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
    key = seed if is_key else jax.random.key(seed, impl="threefry2x32")
    return jax.random.bits(jax.random.fold_in(key, index), dtype=jnp.uint32)
