"""--num_draft and --heads: which drafters a table compares, a column of it each."""

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
    "K, drafted tokens a round, or a tree's children per level: 3x2x1. Or KIND:NUMBERS. adaptive:1-3-5 lets "
    "rows choose from these K and 0, by costs measured first, and adaptive+KIND from those of another kind. "
    "staged:5-3 lets copies of up to 3 draft for "
    "the draft; int8:5 drafts with the target in eight bits; without a model: lookup:8 (copies of up to 8), "
    "with --ngram: ngram:3; "
    "lookahead:5-3-3 (columns, n of the n-grams, candidates); with --heads: medusa:3x2x1, eagle:4, "
    "eagle_tree:8-4-3 (nodes, depth, nodes expanded a level), one_pass:5. A column each.",
)
_HEADS = flags.DEFINE_multi_string(
    "heads", [], "Directory of heads; they serve the target they were made for."
)
_NGRAM = flags.DEFINE_string("ngram", None, "File of an n-gram table; see `experiments.train_ngram`.")


class _Column(NamedTuple):
    """One of --num_draft: the kind, the numbers behind its name, and whether it adapts."""

    kind: Kind
    numbers: list[int]
    is_adaptive: bool


def _parse(column: str) -> _Column:
    name, _, numbers = column.rpartition(":")
    is_adaptive = name.split("+")[0] == "adaptive"
    kind = name.removeprefix("adaptive").removeprefix("+") if is_adaptive else name
    kind = kind or ("tree" if "x" in numbers else "chain")
    try:
        sizes = [int(part) for part in numbers.replace("x", "-").split("-")]
        return _Column(KINDS[kind], sizes, is_adaptive)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"--num_draft={column}: give a whole number, a tree such as 3x2x1, or KIND:NUMBERS with one of "
            f"{', '.join(sorted(KINDS))}"
        ) from error


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What the drafter of a column can be made of; see `drafters.Parts`."""

    target: Model
    draft: Model | None
    column: str

    def draft_model(self) -> Model:
        if self.draft is None:
            raise ValueError(f"--num_draft={self.column} needs a draft model, and none is given")
        return self.draft

    def int8_target(self) -> Model:
        return loading.int8(self.target)

    def heads(self, kind: str) -> Any:
        """Returns those of --heads that are of this kind, for this target."""
        fingerprint = heads_io.fingerprint(self.target.params)
        for directory in _HEADS.value:
            config, made_for = heads_io.read_config(directory)
            if (config.kind, made_for) == (kind, fingerprint):
                return loading.load_heads(directory, self.target)
        raise ValueError(
            f"--num_draft={self.column} needs {kind} heads of this target; --heads={_HEADS.value} has none: "
            "train some with `python -m experiments.train_heads`"
        )

    def ngram_table(self) -> drafters.NgramTable:
        if _NGRAM.value is None:
            raise ValueError(
                f"--num_draft={self.column} needs an n-gram table: give --ngram=FILE, as "
                "`python -m experiments.train_ngram` writes it"
            )
        return drafters.load_ngram(_NGRAM.value)


def columns() -> list[str]:
    """Returns --num_draft, one text a column."""
    return _COLUMNS.value


def check() -> None:
    """Checks --num_draft before anything is loaded.

    Raises:
      ValueError: there is none, or an invalid one; or a directory of --heads holds none.
    """
    if not columns():
        raise ValueError("--num_draft is empty: give at least one, as in --num_draft=5")
    for column in columns():
        if min(_parse(column).numbers) < 1:
            raise ValueError(f"--num_draft={column}: give numbers of at least 1")
    for directory in _HEADS.value:
        heads_io.read_config(directory)


def needs_draft(column: str) -> bool:
    """Returns whether a column needs a draft model."""
    return _parse(column).kind.needs_draft


def all_alike(column: str) -> bool:
    """Returns whether every round drafts as much as every other, so that the parts of one stand for all."""
    kind, _, is_adaptive = _parse(column)
    return kind.all_alike and not is_adaptive


def has_alpha(column: str, sampled: bool, rule: AcceptanceRule) -> bool:
    """Returns whether alpha means anything: for chains that do not adapt, under the token-wise rule."""
    kind, _, is_adaptive = _parse(column)
    return not is_adaptive and not kind.is_tree and (not sampled or rule == acceptance.speculative)


def settings(drafter: Drafter | None) -> dict[str, Any]:
    """Returns what a row states of a drafter: its size, and the costs that an adaptive one goes by."""
    if drafter is None:
        return {"costs": "more than it brings: autoregressive"}
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
        raise ValueError(f"--num_draft={column}: not the numbers that this kind takes ({error})") from error


def of_parts(parts: drafters.Parts, column: str) -> Drafter:
    """Returns the drafter of a column that does not adapt, made of `parts`.

    Raises:
      ValueError: an adaptive column, or numbers that its kind does not take.
    """
    kind, numbers, is_adaptive = _parse(column)
    if is_adaptive:
        raise ValueError(f"--num_draft={column}: costs are not measured here; leave adaptive out")
    _check_numbers(kind, numbers, column)
    return kind.make(parts, *numbers)


def drafter(
    target: Model, draft: Model | None, column: str, trial: measure.Trial | None = None
) -> Drafter | None:
    """Returns the drafter of one column; see --num_draft. None: an adaptive one that does not pay.

    Args:
      target: whose heads, or whose own weights, draft.
      draft: the model; None where a column needs none.
      column: one of --num_draft.
      trial: by which an adaptive one is made.

    Raises:
      ValueError: an unknown column, or what it is made of is missing.
    """
    (kind, numbers, is_adaptive), parts = _parse(column), _Parts(target, draft, column)
    if not is_adaptive:
        return of_parts(parts, column)
    is_one = kind.is_tree or len(numbers) == kind.num_sizes
    sizes = [numbers] if is_one else [[number] for number in numbers]
    _check_numbers(kind, sizes[0], column)
    if trial is None:
        raise ValueError(f"--num_draft={column}: costs are not measured here; give one length")
    made = [kind.make(parts, *each) for each in sizes]
    if not made[0].can_skip:
        raise ValueError(f"--num_draft={column}: this kind cannot be turned off; leave adaptive out")
    return _adaptive(made, trial)


def _adaptive(made: list[Drafter], trial: measure.Trial) -> Drafter | None:
    """Returns chains of several lengths, or a tree, as one drafter; None: autoregressive decoding.

    A row alone drafts as its own history suggests, beginning with that of the first sources. Rows of a
    batch all pay for the longest draft and wait for the slowest, which no row can know: they get what
    paid best. What was not faster than autoregressive decoding on the first sources is left out altogether.
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
