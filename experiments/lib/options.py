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
    "How drafts are verified above temperature 0: speculative, block, multi_round; lossy: "
    "lenient:0.5, typical or typical:0.09:0.3 (epsilon, delta).",
)
_NUMBERS = {
    "top_k": flags.DEFINE_integer("top_k", None, "Keep the so many most likely ids."),
    "top_p": flags.DEFINE_float("top_p", None, "Keep the nucleus of this probability."),
    "min_p": flags.DEFINE_float("min_p", None, "Keep what is this times as likely as the likeliest."),
    "repetition_penalty": flags.DEFINE_float("repetition_penalty", None, "Above 1: repeats less."),
    "presence_penalty": flags.DEFINE_float(
        "presence_penalty", None, "Taken off the logits of ids generated."
    ),
    "frequency_penalty": flags.DEFINE_float("frequency_penalty", None, "The same, for each time they were."),
    "no_repeat_ngram_size": flags.DEFINE_integer("no_repeat_ngram_size", None, "No so many ids occur twice."),
    "min_new_tokens": flags.DEFINE_integer("min_new_tokens", None, "No end token before so many tokens."),
}
_IDS = {
    "suppress_tokens": flags.DEFINE_list("suppress_tokens", None, "Ids that never occur: 5,17."),
    "begin_suppress_tokens": flags.DEFINE_list("begin_suppress_tokens", None, "Ids that are not the first."),
}
_BAD_WORDS = flags.DEFINE_multi_string(
    "bad_words_ids", None, "A sequence of ids that never occurs, 5,17; may be given several times."
)
_BIAS = flags.DEFINE_list("logit_bias", None, "What is added to logits, ID:NUMBER: 5:-2.5,17:-inf.")


def config(
    temperature: float, max_new_tokens: int, seed: int, base: GenerationConfig | None = None
) -> GenerationConfig:
    """Returns what the flags ask for, at one temperature.

    Args:
      base: what holds where a flag is not given; None: the defaults.

    Raises:
      ValueError: a list that cannot be read; the flag is named.
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
        raise ValueError(f"--{flag}={','.join(values)}: give ids, whole numbers from 0, as in --{flag}=5,17")
    return tuple(map(int, values))


def _biases(values: Sequence[str]) -> dict[int, float]:
    pairs = [value.partition(":") for value in values]
    try:
        return {int(token): float(bias) for token, _, bias in pairs}
    except ValueError as error:
        raise ValueError(
            f"--logit_bias={','.join(values)}: give ID:NUMBER, as in --logit_bias=5:-2.5,17:-inf"
        ) from error


def rule() -> AcceptanceRule:
    """Returns that of --rule; see `parse.rule`."""
    return parse.rule(_RULE.value)


def rule_name() -> str:
    """Returns --rule as reports show it: a lossy one is marked."""
    return _RULE.value if rule().is_lossless else f"{_RULE.value} (lossy)"
