"""Flags for sampling and verification, shared by the experiments that compare drafters."""

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
_OPTIONS = {
    "top_k": flags.DEFINE_integer("top_k", None, "Keep the so many most likely ids."),
    "top_p": flags.DEFINE_float("top_p", None, "Keep the nucleus of this probability."),
    "min_p": flags.DEFINE_float("min_p", None, "Keep what is this times as likely as the likeliest."),
    "repetition_penalty": flags.DEFINE_float("repetition_penalty", None, "Above 1: repeats less."),
    "min_new_tokens": flags.DEFINE_integer("min_new_tokens", None, "No end token before so many tokens."),
}


def config(temperature: float, max_new_tokens: int, seed: int) -> GenerationConfig:
    """Returns what the flags ask for, at one temperature."""
    asked = {name: flag.value for name, flag in _OPTIONS.items()}
    return GenerationConfig(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed, **asked)


def rule() -> AcceptanceRule:
    """Returns that of --rule; see `parse.rule`."""
    return parse.rule(_RULE.value)


def rule_name() -> str:
    """Returns --rule as reports show it: a lossy one is marked."""
    return _RULE.value if rule().is_lossless else f"{_RULE.value} (lossy)"
