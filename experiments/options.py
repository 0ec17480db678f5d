"""Flags for how rows choose and drafts are judged, shared by the experiments that decode."""

from collections.abc import Callable
from typing import Any

from absl import flags

from specjax import acceptance, controller, drafters
from specjax.drafters import BoundDrafter
from specjax.sampling import Sampling
from specjax.types import AcceptanceRule

_NUM_DRAFT = flags.DEFINE_list(
    "num_draft",
    ["5"],
    "K, drafted tokens a round, or a tree's children per level: 3x2x1; lookup:8 copies up to 8 from the "
    "source or the output, without a draft model; adaptive:1-3-5 lets rows choose from these and 0, by "
    "costs measured first. A column each.",
)
_LOOKUP, _ADAPTIVE = "lookup:", "adaptive:"
CostOf = Callable[[int], float]  # K -> a round's cost over a plain step
_RULE = flags.DEFINE_string(
    "rule", "speculative",
    "How drafts are judged above temperature 0: speculative, block, multi_round; lossy: "
    "lenient:0.5, typical or typical:0.09:0.3 (epsilon, delta).",
)  # fmt: skip
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
    return parse_rule(_RULE.value)


def rule_name() -> str:
    """--rule as reports show it: a lossy one says so."""
    return _RULE.value if acceptance.is_lossless(rule()) else f"{_RULE.value} (lossy)"


def parse_rule(text: str) -> AcceptanceRule:
    """A rule by its name, its numbers after colons.

    Raises:
      ValueError: there is no such rule, or a number that is none.
    """
    name, *numbers = text.split(":")
    make: dict[str, Callable[..., AcceptanceRule]] = {
        "speculative": lambda: acceptance.speculative,
        "block": lambda: acceptance.block,
        "multi_round": lambda: acceptance.multi_round,
        "lenient": acceptance.Lenient,
        "typical": acceptance.Typical,
    }
    try:
        return make[name](*map(float, numbers))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"--rule={text}: give one of {', '.join(make)}; lenient needs its number, as in lenient:0.5 "
            f"({error})"
        ) from error


def columns() -> list[str]:
    """--num_draft, one text a column."""
    return _NUM_DRAFT.value


def copies() -> bool:
    """Whether a column copies."""
    return any(column.startswith(_LOOKUP) for column in columns())


def all_alike(column: str) -> bool:
    """Whether every round drafts as much as every other, so that the parts of one stand for all."""
    return not column.startswith((_LOOKUP, _ADAPTIVE))


def has_alpha(column: str, sampled: bool) -> bool:
    """Whether alpha means anything there: for chains under the token-wise rule."""
    return "x" not in column and (not sampled or rule() is acceptance.speculative)


def settings(drafter: BoundDrafter) -> dict[str, Any]:
    """What a row should say about a drafter beside its column: the costs that an adaptive one goes by."""
    adaptive = drafter.drafter
    if not isinstance(adaptive, controller.AdaptiveDrafter):
        return {}
    table = zip(adaptive.lengths, adaptive.costs, strict=True)
    return {"costs": ", ".join(f"{length}: {cost:.2f}" for length, cost in table)}


def drafter(draft: Any, column: str, cost_of: CostOf | None = None) -> BoundDrafter:
    """The drafter of one column: "5" a chain, "3x2x1" a tree of a loaded model, "lookup:8" copies.

    Args:
      draft: the model.
      column: see --num_draft.
      cost_of: called for each length of an adaptive one.

    Raises:
      ValueError: it is none of these.
    """
    kind = next((kind for kind in (_LOOKUP, _ADAPTIVE) if column.startswith(kind)), "")
    separator = {"": "x", _LOOKUP: "x", _ADAPTIVE: "-"}[kind]
    try:
        numbers = [int(part) for part in column.removeprefix(kind).split(separator)]
        if kind == _LOOKUP and len(numbers) > 1:
            raise ValueError("copies are a chain")
    except ValueError as error:
        raise ValueError(
            f"--num_draft={column}: give a whole number, a tree such as 3x2x1, lookup:8 or adaptive:1-3-5"
        ) from error
    if kind == _LOOKUP:
        return drafters.prompt_lookup(numbers[0])
    if draft is None:
        raise ValueError(f"--num_draft={column} needs a draft model, and none is given")
    if kind == _ADAPTIVE:
        if cost_of is None:
            raise ValueError(f"--num_draft={column}: costs are not measured here; give one length")
        return controller.adaptive(drafters.from_model(draft, max(numbers)), {k: cost_of(k) for k in numbers})
    if len(numbers) > 1:
        return drafters.tree_from_model(draft, numbers)
    return drafters.from_model(draft, numbers[0])
