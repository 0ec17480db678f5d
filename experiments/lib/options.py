"""Flags for sampling and verification, shared by the experiments that compare drafters."""

from collections.abc import Sequence
from typing import Any

from absl import flags

from experiments.lib import parse
from specjax import GenerationConfig
from specjax.types import AcceptanceRule

_RULE = flags.DEFINE_string(
    "rule",
    "speculative",
    "Acceptance rule above temperature 0: speculative, block or multi_round; lossy: lenient:0.5, typical, "
    "or typical:0.09:0.3 (epsilon, delta).",
)
_NUMBERS = {
    "top_k": flags.DEFINE_integer("top_k", None, "Keep this many most likely ids."),
    "top_p": flags.DEFINE_float("top_p", None, "Keep the nucleus of this probability."),
    "min_p": flags.DEFINE_float("min_p", None, "Keep ids at least this times as likely as the likeliest."),
    "repetition_penalty": flags.DEFINE_float("repetition_penalty", None, "Above 1: fewer repetitions."),
    "presence_penalty": flags.DEFINE_float(
        "presence_penalty", None, "Subtracted from the logits of generated ids."
    ),
    "frequency_penalty": flags.DEFINE_float("frequency_penalty", None, "Subtracted for each occurrence."),
    "no_repeat_ngram_size": flags.DEFINE_integer(
        "no_repeat_ngram_size", None, "No n-gram of this length occurs twice."
    ),
    "min_new_tokens": flags.DEFINE_integer("min_new_tokens", None, "No end token before this many tokens."),
}
_IDS = {
    "suppress_tokens": flags.DEFINE_list("suppress_tokens", None, "Ids that never occur, as in 5,17."),
    "begin_suppress_tokens": flags.DEFINE_list("begin_suppress_tokens", None, "Ids that never occur first."),
}
_BAD_WORDS = flags.DEFINE_multi_string(
    "bad_words_ids", None, "Sequence of ids that never occurs, as in 5,17; may be repeated."
)
_BIAS = flags.DEFINE_list("logit_bias", None, "Added to logits, ID:NUMBER, as in 5:-2.5,17:-inf.")


def config(
    temperature: float, max_new_tokens: int, seed: int, base: GenerationConfig | None = None
) -> GenerationConfig:
    """Returns the config of the flags at one temperature.

    Args:
      base: options where no flag is given; None: the defaults.

    Raises:
      ValueError: an invalid list.
    """
    asked: dict[str, Any] = {name: flag.value for name, flag in _NUMBERS.items()}
    asked |= {name: flag.value and _ids(name, flag.value) for name, flag in _IDS.items()}
    words = _BAD_WORDS.value
    asked["bad_words_ids"] = words and tuple(_ids("bad_words_ids", word.split(",")) for word in words)
    asked["logit_bias"] = _BIAS.value and _biases(_BIAS.value)
    given = {name: value for name, value in asked.items() if value is not None}
    given |= dict(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    return (base or GenerationConfig()).updated(given)


def _ids(flag: str, values: Sequence[str]) -> tuple[int, ...]:
    if not values or not all(value.strip().isdecimal() for value in values):
        raise ValueError(f"`--{flag}` must be ids, whole numbers as in 5,17, got {','.join(values)}")
    return tuple(map(int, values))


def _biases(values: Sequence[str]) -> dict[int, float]:
    pairs = [value.partition(":") for value in values]
    try:
        return {int(token): float(bias) for token, _, bias in pairs}
    except ValueError as error:
        raise ValueError(
            f"`--logit_bias` must be ID:NUMBER, as in 5:-2.5,17:-inf, got {','.join(values)}"
        ) from error


def rule() -> AcceptanceRule:
    """Returns the acceptance rule of --rule; see `parse.rule`."""
    return parse.rule(_RULE.value)


def rule_name() -> str:
    """Returns --rule for a report: lossy rules are marked."""
    return _RULE.value if rule().is_lossless else f"{_RULE.value} (lossy)"
