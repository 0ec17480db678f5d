"""The options of a request: how tokens are chosen, how many, from which seeds, and what ends a row."""

import dataclasses
import difflib
import functools
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import hub as hub_files
from specjax import sampling
from specjax.types import LogitsProcessor, Options

MAX_INT = np.iinfo(np.int32).max
# The name of an option in other libraries -> its name here.
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
    """The options of a request. A number applies to all rows, or is given per row; lists of ids apply to all.

    Options that change the distribution apply in the order of Hugging Face's `generate`: bias and suppressed
    ids, penalties, repeated n-grams, bad words, minimum length, `logits_processor`, temperature, top-k,
    top-p, min-p. They apply to the draft's distribution q and the target's p alike, so the output has the
    target's distribution under these options. A row in which they rule out every token ends ("nonfinite").

    Attributes:
      max_new_tokens: at least 0; the limit of a row.
      temperature: 0 (below 1e-5) is greedy. None: 1 if top_k, top_p or min_p is given, else greedy.
      top_k: at least 1; keeps the k most likely ids, and ids that tie with the last of them.
      top_p: in (0, 1]; keeps an id if the ids more likely than it have less than this probability
        together (Holtzman et al. 2020, section 3.1); ties are kept or dropped together.
      min_p: in [0, 1]; keeps an id if it is at least this times as likely as the likeliest.
      repetition_penalty: above 0; positive logits of ids seen in the output so far, its given
        prefix and start token included, are divided by it, negative ones multiplied (Keskar et
        al. 2019, section 4.1).
      presence_penalty: is subtracted from the logits of generated ids, not counting the prefix.
      frequency_penalty: is subtracted once for each time the id was generated; both may be negative.
      no_repeat_ngram_size: n; no n-gram of ids occurs twice in the output, its prefix and start token
        included. One number for all rows; 0: no such limit.
      logit_bias: id -> number added to its logit; -inf: the id never occurs.
      suppress_tokens: ids that never occur.
      begin_suppress_tokens: ids that are not the first token.
      bad_words_ids: sequences of ids that never occur; the end token alone is left out, as transformers does.
      logits_processor: a custom function (logits `[B, N, V]`, `types.History`) -> logits. It must be pure, is
        traced by JAX, and is applied at every position, drafted tokens included. A program is compiled for
        each function object: pass the same one each time, not a new lambda.
      min_new_tokens: no end token occurs among the first so many tokens.
      seed: a whole number in 0..2^32 - 1 or a `jax.random.key`, from which each row's seed is derived; or one
        per row, used as it is. So `seed=3` and `seed=[3]` give one prompt different seeds: to repeat one row
        of a batch, give every row a seed.
      eos_ids: tokens that end a row; None: those of the target.
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
    presence_penalty: Numbers | None = None
    frequency_penalty: Numbers | None = None
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] | None = None
    suppress_tokens: Sequence[int] = ()
    begin_suppress_tokens: Sequence[int] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    logits_processor: LogitsProcessor | None = None
    min_new_tokens: WholeNumbers | None = None
    seed: WholeNumbers = 0
    eos_ids: Sequence[int] | None = None
    stop: str | Sequence[str] = ()

    def updated(self, options: dict[str, Any], also: Iterable[str] = ()) -> "GenerationConfig":
        """Returns the config updated with `options`.

        Args:
          options: values by field.
          also: further argument names of the caller, for suggestions.

        Raises:
          ValueError: an option is unknown; the message suggests the one that was probably meant.
        """
        known = [field.name for field in dataclasses.fields(self)]
        unknown = sorted(options.keys() - set(known))
        if unknown:
            raise ValueError("; ".join(_unknown(name, [*known, *also]) for name in unknown))
        return dataclasses.replace(self, **options)

    def to_options(
        self,
        num_rows: int,
        eos_ids: tuple[int, ...] = (),
        num_ids: int | None = None,
        vocab_size: int | None = None,
    ) -> Options:
        """Checks the options and returns those that `sampling.distribution` reads, one entry per row.

        Args:
          num_rows: B.
          eos_ids: end tokens, which `min_new_tokens` suppresses.
          num_ids: number of ids that exist; ids beyond are never emitted. None: all.
          vocab_size: V; ids must be below it. None: not checked.

        Raises:
          ValueError: a value is out of range, or not one per row.
        """
        values = {name: getattr(self, name) for name in _RANGES}
        if self.temperature is None:
            values["temperature"] = 0.0 if self.is_greedy else 1.0
        laid_out: Any = {
            name: None if value is None else per_row(name, value, num_rows, *_RANGES[name])
            for name, value in values.items()
        }
        size = self.no_repeat_ngram_size
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or not 0 <= size <= MAX_INT:
            raise ValueError(
                "`no_repeat_ngram_size` must be one whole number for all rows, at least 0 and at most "
                f"{MAX_INT}, got {size!r}"
            )
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise ValueError(
                "`logits_processor` must be a function (logits, history) -> logits, got "
                f"{self.logits_processor!r:.80}"
            )
        given = () if self.bad_words_ids is None else self.bad_words_ids
        if not isinstance(given, list | tuple | np.ndarray):
            raise ValueError(f"`bad_words_ids` must be a list of sequences of ids, got {given!r:.80}")
        words = [_ids("bad_words_ids", word, vocab_size) for word in given]
        if not all(words):
            raise ValueError(
                f"`bad_words_ids` must be sequences of ids, none empty, got {self.bad_words_ids}"
            )
        words = [word for word in words if len(word) > 1 or word[0] not in eos_ids]
        suppressed = _ids("suppress_tokens", self.suppress_tokens, vocab_size)
        suppressed += tuple(word[0] for word in words if len(word) == 1)
        bias = _bias(_biases(self.logit_bias, vocab_size), suppressed, num_ids or vocab_size)
        of_all_rows = lambda x: None if x is None else jnp.broadcast_to(x, (num_rows, *x.shape))  # noqa: E731
        return Options(
            **laid_out,
            bias=of_all_rows(bias),
            bad_words=of_all_rows(_right_aligned([word for word in words if len(word) > 1])),
            no_repeat_ngram_size=int(size),
            begin_suppress_tokens=_ids("begin_suppress_tokens", self.begin_suppress_tokens, vocab_size),
            logits_processor=self.logits_processor,
            eos_ids=eos_ids,
            num_ids=num_ids,
        )

    def without_neutral(self) -> "GenerationConfig":
        """Returns the same request without options that have no effect, which would still cost time."""
        temperature = self.temperature
        if temperature is None:
            temperature = 0.0 if self.is_greedy else 1.0

        def is_neutral(name: str, neutral: float) -> bool:
            value = getattr(self, name)
            given = value is not None and not isinstance(value, jax.core.Tracer)
            return given and bool(np.all(np.asarray(value) == neutral))

        neutral: dict[str, Any] = {name: None for name, value in _NEUTRAL.items() if is_neutral(name, value)}
        return dataclasses.replace(self, temperature=temperature, **neutral)

    def described(self) -> dict[str, Any]:
        """Returns the values that outputs depend on, without the seed, as JSON types."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del found["seed"]
        processor = found.pop("logits_processor")
        if processor is not None:
            found["logits_processor"] = f"{processor.__module__}.{processor.__qualname__}"
        found["logit_bias"] = sorted((self.logit_bias or {}).items())
        return {name: _as_json(value) for name, value in found.items()}

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike, **hub: Any) -> "GenerationConfig":
        """Returns the options in a checkpoint's generation_config.json.

        Hugging Face's `max_length` and `min_length` count the start token, `max_new_tokens` and
        `min_new_tokens` do not. Missing values get the defaults of transformers (greedy unless `do_sample`,
        then top-k of 50), except `max_new_tokens`, which stays 64. One warning lists the options that are not
        supported (beams, length penalty, ...).

        Args:
          directory: a local directory, or a hub id.
          **hub: see `load`.

        Raises:
          ValueError: the file is missing or cannot be read.
        """
        name = os.path.expanduser(os.fspath(directory))
        path = hub_files.locate(name, "generation_config.json", hub)
        if path is None:
            raise ValueError(
                f"{name} has no generation_config.json: give a checkpoint that has one, or pass the options "
                "themselves"
            )
        return _from_hf(hub_files.read_json(path))

    @property
    def is_greedy(self) -> bool:
        """Whether no row samples; False for traced values."""
        if self.temperature is None:
            return all(x is None for x in (self.top_k, self.top_p, self.min_p))
        if isinstance(self.temperature, jax.core.Tracer):
            return False
        return bool(sampling.is_greedy(jnp.asarray(self.temperature)).all())

    def for_rows(self, index: np.ndarray, num_rows: int) -> "GenerationConfig":
        """Returns the config of rows `index` of `num_rows`; rows may repeat. Values must not be traced."""

        def taken(value: Any) -> Any:
            is_per_row = not isinstance(value, str) and np.ndim(value) == 1 and len(value) == num_rows
            return np.asarray(value)[index] if is_per_row else value

        names = ["max_new_tokens", *_RANGES]
        return dataclasses.replace(self, **{name: taken(getattr(self, name)) for name in names})

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple.

        Raises:
          ValueError: a value is not a text, or is empty.
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
    "presence_penalty": (jnp.float32, -np.inf, False, np.inf),
    "frequency_penalty": (jnp.float32, -np.inf, False, np.inf),
    "min_new_tokens": (jnp.int32, 0, True, MAX_INT),
}
# The value at which an option has no effect.
_NEUTRAL = {
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_new_tokens": 0,
}


def _ids(name: str, ids: Any, vocab_size: int | None) -> tuple[int, ...]:
    """Returns ids as a tuple.

    Raises:
      ValueError: an id is not a whole number in 0..`vocab_size` - 1; with None, any id is allowed.
    """
    array = np.asarray(() if ids is None else ids)
    array = array.astype(int) if array.shape == (0,) else array
    if array.ndim != 1 or array.dtype.kind not in "iu" or not np.all(array >= 0):
        raise ValueError(f"`{name}` must be a list of ids, whole numbers of at least 0, got {ids!r:.80}")
    if vocab_size is not None and np.any(array >= vocab_size):
        raise ValueError(f"`{name}` must hold ids in 0..{vocab_size - 1}, got {array.max()}")
    return tuple(array.tolist())


def _biases(logit_bias: Any, vocab_size: int | None) -> dict[int, float]:
    """Checks and returns `logit_bias`; -inf is allowed, NaN and inf are not."""
    if logit_bias is None:
        return {}
    if not isinstance(logit_bias, Mapping):
        raise ValueError(f"`logit_bias` must map ids to numbers, as in {{5: -2.0}}, got {logit_bias!r:.80}")
    ids = _ids("logit_bias", list(logit_bias), vocab_size)
    for i, value in zip(ids, logit_bias.values(), strict=True):
        if not isinstance(value, float | int | np.number) or not value < np.inf:  # NaN fails as well
            raise ValueError(f"`logit_bias` must be a number below inf for each id, got {value!r} for id {i}")
    return dict(zip(ids, map(float, logit_bias.values()), strict=True))


def _bias(biases: Mapping[int, float], suppressed: Sequence[int], num_ids: int | None) -> jax.Array | None:
    """Returns the bias `[num_ids] float32` to add to logits, or None. Ids beyond `num_ids` are ignored."""
    if not biases and not suppressed:
        return None
    bias = np.zeros(max([*biases, *suppressed]) + 1 if num_ids is None else num_ids, np.float32)
    for i, value in [*biases.items(), *((i, -np.inf) for i in suppressed)]:
        if i < len(bias):
            bias[i] = value
    if num_ids is not None and np.all(bias == -np.inf):
        raise ValueError("`suppress_tokens` must leave a token, got all of them")
    return jnp.asarray(bias)


def _right_aligned(words: Sequence[tuple[int, ...]]) -> jax.Array | None:
    """Returns `[W, L] int32`, each word at the end of its L ids, -1 before it; None if there are no words."""
    if not words:
        return None
    longest = max(map(len, words))
    return jnp.asarray([(-1,) * (longest - len(word)) + word for word in words], jnp.int32)


def _as_json(value: Any) -> Any:
    """Returns numbers, texts and nested lists of them as JSON types."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return value.tolist()
    return [_as_json(x) for x in value] if isinstance(value, list | tuple | range) else value


# ---- Hugging Face's generation_config.json

# Options with the same name and meaning.
_SAME_IN_HF = (
    "max_new_tokens",
    "min_new_tokens",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
)
# Options that are read only if `do_sample` is True -> their defaults.
_SAMPLING_IN_HF = {"temperature": 1.0, "top_k": 50, "top_p": None, "min_p": None}
# Options that are not supported -> values at which they have no effect.
_NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "typical_p": (1.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "force_words_ids": (),
    "constraints": (),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "max_time": (),
    "num_return_sequences": (1,),
    "token_healing": (False,),
}


def _from_hf(found: Mapping[str, Any]) -> GenerationConfig:
    """Returns the options in a parsed generation_config.json; warns of unsupported ones."""
    found = {key: value for key, value in found.items() if value is not None}
    if not isinstance(found.get("do_sample", False), bool):
        raise ValueError(
            f"`do_sample` of generation_config.json must be true or false, got {found['do_sample']!r}"
        )
    options: dict[str, Any] = {name: found[name] for name in _SAME_IN_HF if name in found}
    # Hugging Face's lengths count the start token.
    if "max_length" in found:
        options.setdefault("max_new_tokens", max(found["max_length"] - 1, 0))
    if "min_length" in found:
        options["min_new_tokens"] = max(options.get("min_new_tokens", 0), found["min_length"] - 1, 0)
    options["temperature"] = 0.0
    if found.get("do_sample"):
        options |= {name: found.get(name, default) for name, default in _SAMPLING_IN_HF.items()}
        options["top_k"] = options["top_k"] or None  # 0: all
    if "eos_token_id" in found:
        eos = found["eos_token_id"]
        options["eos_ids"] = tuple(eos) if isinstance(eos, list) else (eos,)
    if "stop_strings" in found:
        stop = found["stop_strings"]
        options["stop"] = tuple(stop) if isinstance(stop, list) else stop
    ignored = {
        key: found[key] for key, same in _NOT_FOLLOWED.items() if key in found and found[key] not in same
    }
    biases, longer = _sequence_bias(found.get("sequence_bias", []))
    if biases:
        options["logit_bias"] = biases
    if longer:
        ignored["sequence_bias"] = longer
    if ignored:
        listed = ", ".join(f"{key}={value}" for key, value in ignored.items())
        warnings.warn(
            f"generation_config.json asks for {listed}, which speculative decoding does not support; all "
            "other options are used",
            stacklevel=3,
        )
    return GenerationConfig(**options)


def _sequence_bias(pairs: Iterable[Any]) -> tuple[dict[int, float], list[Any]]:
    """Returns the biases of single ids, and the ids of longer sequences, from a list of [ids, bias]."""
    single = {int(ids[0]): float(bias) for ids, bias in pairs if len(ids) == 1}
    return single, [list(ids) for ids, _ in pairs if len(ids) > 1]


def _unknown(name: str, known: list[str]) -> str:
    """Returns the error message for an unknown option."""
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
    """Returns `value` as `[B]` of `dtype`, checked unless it is traced.

    Raises:
      ValueError: `value` is not one number or `num_rows` of them, not whole for an integer `dtype`, not in
        `low`..`high` (`low` itself is allowed only if `closed`), or not finite.
    """
    if not isinstance(value, jax.core.Tracer):
        array = np.asarray(value)
        whole = jnp.issubdtype(dtype, jnp.integer)
        high = min(high, MAX_INT) if whole else high
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
    """Returns seeds `[B] uint32`: those given, or one per row derived from a single seed.

    Args:
      seed: a whole number or a key, or `num_rows` of them.
      num_rows: B.

    Raises:
      ValueError: a seed is not a whole number in 0..2^32 - 1, or there are neither one nor `num_rows`.
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
    """Returns the seed of row `index`; for whole numbers the generator is fixed (threefry)."""
    is_key = jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
    key = seed if is_key else jax.random.key(seed, impl="threefry2x32")
    return jax.random.bits(jax.random.fold_in(key, index), dtype=jnp.uint32)
