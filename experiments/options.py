"""Flags for how rows choose and drafts are judged, shared by the experiments that decode."""

from absl import flags

from experiments import rules
from specjax import acceptance
from specjax.sampling import Sampling
from specjax.types import AcceptanceRule

_RULE = flags.DEFINE_string(
    "rule",
    "speculative",
    "How drafts are judged above temperature 0: speculative, block, multi_round; lossy: "
    "lenient:0.5, typical or typical:0.09:0.3 (epsilon, delta).",
)
_OPTIONS = {
    "top_k": flags.DEFINE_integer("top_k", None, "Keep the so many most likely ids."),
    "top_p": flags.DEFINE_float("top_p", None, "Keep the nucleus of this probability."),
    "min_p": flags.DEFINE_float("min_p", None, "Keep what is this times as likely as the likeliest."),
    "repetition_penalty": flags.DEFINE_float("repetition_penalty", None, "Above 1: repeats less."),
    "min_new_tokens": flags.DEFINE_integer("min_new_tokens", None, "No end token before so many tokens."),
}


def sampling(temperature: float) -> Sampling:
    """What the flags ask for, at one temperature."""
    asked = {name: flag.value for name, flag in _OPTIONS.items() if flag.value is not None}
    return Sampling(temperature=temperature, **asked)


def rule() -> AcceptanceRule:
    """--rule.

    Raises:
      ValueError: there is no such rule.
    """
    return rules.parse(_RULE.value)


def rule_name() -> str:
    """--rule as reports show it: a lossy one says so."""
    return _RULE.value if acceptance.is_lossless(rule()) else f"{_RULE.value} (lossy)"
