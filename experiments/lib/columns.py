"""The flags --num_draft, --heads and --ngram: the drafters that an experiment compares."""

import dataclasses
import inspect
from typing import Any, NamedTuple

import jax
from absl import flags

from experiments.lib import measure
from specjax import acceptance, drafters, loading
from specjax.drafters import KINDS, AdaptiveDrafter, Kind
from specjax.loading import Model
from specjax.models import heads_io
from specjax.types import AcceptanceRule, Drafter

_COLUMNS = flags.DEFINE_list(
    "num_draft",
    ["5"],
    "Drafters to compare: K, drafted tokens per round; children per level of a tree, 3x2x1; or KIND:NUMBERS. "
    "adaptive:1-3-5 lets each row choose from these K and 0 by measured costs, adaptive+KIND the same for "
    "another kind. staged:5-3 lets copies of up to 3 tokens draft for the draft. int8:5 drafts with the "
    "target in eight bits. Without a draft model: lookup:8 (copies of up to 8 tokens), lookahead:5-3-3 "
    "(columns, n of the n-grams, candidates); with --ngram: ngram:3; with --heads: medusa:3x2x1, eagle:4, "
    "eagle_tree:8-4-3 (nodes, depth, nodes expanded per level), one_pass:5.",
)
_HEADS = flags.DEFINE_multi_string(
    "heads", [], "Directory of heads, trained for the target; may be repeated."
)
_NGRAM = flags.DEFINE_string("ngram", None, "File of an n-gram table; see `experiments.train_ngram`.")


class _Column(NamedTuple):
    """One of --num_draft: its kind, its numbers, and whether its length is adaptive."""

    kind: Kind
    numbers: list[int]
    is_adaptive: bool


def _parse(column: str) -> _Column:
    name, _, numbers = column.rpartition(":")
    if column in KINDS or column == "adaptive":
        raise ValueError(
            f"`--num_draft` must have a number after the kind, got {column}; give, for example, {column}:4"
        )
    is_adaptive = name.split("+")[0] == "adaptive"
    kind = name.removeprefix("adaptive").removeprefix("+") if is_adaptive else name
    kind = kind or ("tree" if "x" in numbers else "chain")
    try:
        sizes = [int(part) for part in numbers.replace("x", "-").split("-")]
        return _Column(KINDS[kind], sizes, is_adaptive)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"`--num_draft` must be a whole number, a tree such as 3x2x1, or KIND:NUMBERS, got {column}; "
            f"kinds are {', '.join(sorted(KINDS))}"
        ) from error


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The parts that a drafter is made of; see `drafters.Parts`."""

    target: Model
    draft: Model | None
    column: str

    def draft_model(self) -> Model:
        if self.draft is None:
            raise ValueError(f"--num_draft={self.column} needs a draft model; give --draft")
        return self.draft

    def int8_target(self) -> Model:
        return loading.int8(self.target)

    def heads(self, kind: str) -> Any:
        """Returns the heads of this kind for this target among --heads."""
        fingerprint = heads_io.fingerprint(self.target.params)
        for directory in _HEADS.value:
            config, made_for = heads_io.read_config(directory)
            if (config.kind, made_for) == (kind, fingerprint):
                return loading.load_heads(directory, self.target)
        raise ValueError(
            f"--num_draft={self.column} needs {kind} heads of this target, got --heads={_HEADS.value}; train "
            "them with `python -m experiments.train_heads`"
        )

    def ngram_table(self) -> drafters.NgramTable:
        if _NGRAM.value is None:
            raise ValueError(
                f"--num_draft={self.column} needs an n-gram table; give --ngram=FILE, as written by "
                "`python -m experiments.train_ngram`"
            )
        return drafters.load_ngram(_NGRAM.value)


def columns() -> list[str]:
    """Returns the values of --num_draft."""
    return _COLUMNS.value


def check() -> None:
    """Checks --num_draft before anything is loaded.

    Raises:
      ValueError: --num_draft is empty or invalid, or a directory of --heads has no heads.
    """
    if not columns():
        raise ValueError("`--num_draft` must not be empty; give at least one, as in --num_draft=5")
    for column in columns():
        if min(_parse(column).numbers) < 1:
            raise ValueError(f"`--num_draft` must be at least 1, got {column}")
    for directory in _HEADS.value:
        heads_io.read_config(directory)


def needs_draft(column: str) -> bool:
    """Returns whether a column needs a draft model."""
    return _parse(column).kind.needs_draft


def all_alike(column: str) -> bool:
    """Returns whether every round drafts equally many tokens, so that one round's costs hold for all."""
    kind, _, is_adaptive = _parse(column)
    return kind.all_alike and not is_adaptive


def has_alpha(column: str, sampled: bool, rule: AcceptanceRule) -> bool:
    """Returns whether alpha is defined: for chains of fixed length under the token-wise rule."""
    kind, _, is_adaptive = _parse(column)
    return not is_adaptive and not kind.is_tree and (not sampled or rule == acceptance.speculative)


def settings(drafter: Drafter | None) -> dict[str, Any]:
    """Returns the fields of a row about its drafter: size, and the costs of an adaptive one."""
    if drafter is None:
        return {"costs": "does not pay off: autoregressive"}
    params = drafter.own_params
    found: dict[str, Any] = {
        "draft_parameters": measure.num_params(params),
        "draft_bytes": sum(x.nbytes for x in jax.tree.leaves(params)),
    }
    if isinstance(drafter, AdaptiveDrafter):
        table = zip(drafter.lengths, drafter.costs, strict=True)
        found["costs"] = ", ".join(f"{length}: {cost:.2f}" for length, cost in table)
    return found


def _check_numbers(kind: Kind, numbers: list[int], column: str) -> None:
    try:
        inspect.signature(kind.make).bind(None, *numbers)
    except TypeError as error:
        raise ValueError(
            f"numbers of `--num_draft` must be those that its kind takes, got {column} ({error})"
        ) from error


def of_parts(parts: drafters.Parts, column: str) -> Drafter:
    """Returns the drafter of fixed length of a column, made from `parts`.

    Raises:
      ValueError: an adaptive column, or numbers that its kind does not take.
    """
    kind, numbers, is_adaptive = _parse(column)
    if is_adaptive:
        raise ValueError(f"`--num_draft` must not be adaptive here, got {column}: costs are not measured")
    _check_numbers(kind, numbers, column)
    return kind.make(parts, *numbers)


def drafter(
    target: Model, draft: Model | None, column: str, trial: measure.Trial | None = None
) -> Drafter | None:
    """Returns the drafter of one column; None for an adaptive one that does not pay off.

    Args:
      target: the target model.
      draft: the draft model; None if the column needs none.
      column: one of --num_draft.
      trial: measures the costs of an adaptive drafter.

    Raises:
      ValueError: an invalid column, or a missing part.
    """
    (kind, numbers, is_adaptive), parts = _parse(column), _Parts(target, draft, column)
    if not is_adaptive:
        return of_parts(parts, column)
    is_one = kind.is_tree or len(numbers) == kind.num_sizes
    sizes = [numbers] if is_one else [[number] for number in numbers]
    _check_numbers(kind, sizes[0], column)
    if trial is None:
        raise ValueError(f"`--num_draft` must not be adaptive here, got {column}: costs are not measured")
    made = [kind.make(parts, *each) for each in sizes]
    if not made[0].can_skip:
        raise ValueError(
            f"`--num_draft` must not be adaptive for a kind that cannot skip drafting, got {column}"
        )
    return _adaptive(made, trial)


def _adaptive(made: list[Drafter], trial: measure.Trial) -> Drafter | None:
    """Returns chains of several lengths, or a tree, as one drafter; None for autoregressive decoding.

    At batch 1 a row chooses its length by its own history, which starts with the alpha of the first sources.
    In a batch all rows pay for the longest draft and wait for the slowest row, which no row can know; so the
    batch gets the length with the best ratio of gain to cost. A drafter that was not faster than
    autoregressive decoding on the first sources is not used.
    """
    prices = [(drafter, trial.price(drafter)) for drafter in made]
    best, price = max(prices, key=lambda pair: pair[1].gain / pair[1].cost)
    if price.gain <= price.cost:
        return None
    if price.num_rows == 1:
        costs = {drafter.num_draft: price.cost for drafter, price in prices}
        longest = max(made, key=lambda one: one.num_draft)
        best = drafters.adaptive(longest, costs, prior_alpha=price.alpha)
    return best if trial.pays(best) else None
