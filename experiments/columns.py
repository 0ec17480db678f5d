"""--num_draft and --heads: which drafters a table compares, a column of it each."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from absl import flags

from experiments import arms, measure
from specjax import acceptance, controller, drafters, loading, staged
from specjax.drafters import BoundDrafter
from specjax.loading import Model
from specjax.models import heads_io
from specjax.types import AcceptanceRule

_COLUMNS = flags.DEFINE_list(
    "num_draft",
    ["5"],
    "K, drafted tokens a round, or a tree's children per level: 3x2x1. Or KIND:NUMBERS. adaptive:1-3-5 lets "
    "rows choose from these K and 0, by costs measured first, and adaptive+KIND from those of another kind. "
    "staged:5-3 lets copies of up to 3 draft for "
    "the draft; int8:5 drafts with the target in eight bits; without a model: lookup:8 (copies of up to 8), "
    "lookahead:5-3-3 (columns, n of the n-grams, candidates); with --heads: medusa:3x2x1, eagle:4, "
    "eagle_tree:8-4-3 (nodes, depth, nodes expanded a level), one_pass:5. A column each.",
)
_HEADS = flags.DEFINE_multi_string(
    "heads", [], "Directory of heads; they serve the target they were made for."
)


class _Sources(NamedTuple):
    """What a drafter can be made of."""

    target: Model
    draft: Model | None
    column: str
    trial: arms.Trial | None

    def model(self) -> Model:
        if self.draft is None:
            raise ValueError(f"--num_draft={self.column} needs a draft model, and none is given")
        return self.draft

    def heads(self, kind: str) -> loading.LoadedHeads:
        """Those of --heads that are of this kind, for this target."""
        fingerprint = heads_io.fingerprint(self.target.params)
        for directory in _HEADS.value:
            config, made_for = heads_io.read_config(directory)
            if (config.kind, made_for) == (kind, fingerprint):
                return loading.load_heads(directory, self.target)
        raise ValueError(
            f"--num_draft={self.column} needs {kind} heads of this target; --heads={_HEADS.value} has none: "
            "train some with `python -m experiments.train_heads`"
        )

    def adaptive(self, kind: "_Kind", numbers: list[int]) -> BoundDrafter | None:
        """Chains of the lengths `numbers`, or a tree of that shape; None: the target alone.

        A row alone drafts as its own history says, beginning with what the first sources said. Rows of a
        batch all pay for the longest draft and wait for the slowest, which no row can know: they get what
        paid best. What was not faster than the target alone on the first sources is left out altogether.
        """
        if self.trial is None:
            raise ValueError(f"--num_draft={self.column}: costs are not measured here; give one length")
        is_one = kind.is_tree or len(numbers) == kind.num_sizes
        made = [kind.make(self, *sizes) for sizes in ([numbers] if is_one else [[k] for k in numbers])]
        if not hasattr(made[0].drafter, "propose_up_to"):
            raise ValueError(f"--num_draft={self.column}: this kind cannot be turned off; leave adaptive out")
        prices = [(drafter, self.trial.price(drafter)) for drafter in made]
        best, price = max(prices, key=lambda pair: pair[1].gain / pair[1].cost)
        if price.gain <= price.cost:
            return None
        if price.num_rows == 1:
            costs = {drafter.drafter.num_draft: price.cost for drafter, price in prices}
            longest = max(made, key=lambda one: one.drafter.num_draft)
            best = controller.adaptive(longest, costs, prior_alpha=price.alpha)
        return best if self.trial.pays(best) else None

    def staged(self, num_draft: int, num_copied: int) -> BoundDrafter:
        inner = drafters.prompt_lookup(num_copied)
        return staged.from_model(self.model(), inner, num_draft)


class _Kind(NamedTuple):
    """A kind of column: how it is made from the numbers behind its name, and what is true of it."""

    make: Callable[..., BoundDrafter]
    is_tree: bool = False
    all_alike: bool = True  # every round drafts as much as every other
    needs_draft: bool = True
    num_sizes: int = 1  # numbers of a chain


_KINDS = {
    "chain": _Kind(lambda s, k: drafters.from_model(s.model(), k)),
    "tree": _Kind(lambda s, *branching: drafters.tree_from_model(s.model(), branching), is_tree=True),
    "staged": _Kind(lambda s, k, copied: s.staged(k, copied), all_alike=False, num_sizes=2),
    "int8": _Kind(lambda s, k: drafters.from_model(loading.int8(s.target), k), needs_draft=False),
    "lookup": _Kind(lambda s, k: drafters.prompt_lookup(k), all_alike=False, needs_draft=False),
    "lookahead": _Kind(lambda s, *sizes: drafters.lookahead(*sizes), is_tree=True, needs_draft=False),
    "medusa": _Kind(
        lambda s, *branching: drafters.medusa(s.heads("medusa"), branching), is_tree=True, needs_draft=False
    ),
    "eagle": _Kind(lambda s, k: drafters.eagle(s.heads("eagle"), k), needs_draft=False),
    "eagle_tree": _Kind(
        lambda s, *sizes: drafters.eagle_tree(s.heads("eagle"), *sizes), is_tree=True, needs_draft=False
    ),
    "one_pass": _Kind(lambda s, k: drafters.one_pass(s.heads("one_pass"), k), needs_draft=False),
}


_ADAPTIVE = "adaptive"


def _parse(column: str) -> tuple[_Kind, list[int]]:
    name, _, numbers = column.rpartition(":")
    name = name.removeprefix(_ADAPTIVE).removeprefix("+") or ("tree" if "x" in numbers else "chain")
    try:
        return _KINDS[name], [int(part) for part in numbers.replace("x", "-").split("-")]
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"--num_draft={column}: give a whole number, a tree such as 3x2x1, or KIND:NUMBERS with one of "
            f"{', '.join(sorted(_KINDS))}"
        ) from error


def columns() -> list[str]:
    """--num_draft, one text a column."""
    return _COLUMNS.value


def check() -> None:
    """Refuses a --num_draft that nothing can be made of, before anything is loaded.

    Raises:
      ValueError: there is none, or one is no column.
    """
    if not columns():
        raise ValueError("--num_draft is empty: give at least one, as in --num_draft=5")
    for column in columns():
        if min(_parse(column)[1]) < 1:
            raise ValueError(f"--num_draft={column}: give numbers of at least 1")


def needs_draft(column: str) -> bool:
    """Whether a column needs a draft model."""
    return _parse(column)[0].needs_draft


def some_need_no_draft() -> bool:
    """Whether a column does without a draft model."""
    return not all(map(needs_draft, columns()))


def all_alike(column: str) -> bool:
    """Whether every round drafts as much as every other, so that the parts of one stand for all."""
    return _parse(column)[0].all_alike and not column.startswith(_ADAPTIVE)


def has_alpha(column: str, sampled: bool, rule: AcceptanceRule) -> bool:
    """Whether alpha means anything there: for chains that do not adapt, under the token-wise rule."""
    return (
        not column.startswith(_ADAPTIVE)
        and not _parse(column)[0].is_tree
        and (not sampled or rule is acceptance.speculative)
    )


def settings(drafter: BoundDrafter | None) -> dict[str, Any]:
    """What a row should say about a drafter: its size, and the costs that an adaptive one goes by."""
    if drafter is None:
        return {"costs": "more than it brings: the target alone"}
    has_heads = isinstance(drafter.params, dict) and "heads" in drafter.params
    params = drafter.params["heads"] if has_heads else drafter.params
    found: dict[str, Any] = {
        "draft_parameters": measure.num_params(params),
        "draft_bytes": sum(x.nbytes for x in jax.tree.leaves(params)),
    }
    adaptive = drafter.drafter
    if isinstance(adaptive, controller.AdaptiveDrafter):
        table = zip(adaptive.lengths, adaptive.costs, strict=True)
        found["costs"] = ", ".join(f"{length}: {cost:.2f}" for length, cost in table)
    return found


def drafter(
    target: Model, draft: Model | None, column: str, trial: arms.Trial | None = None
) -> BoundDrafter | None:
    """The drafter of one column; see --num_draft. None: an adaptive one that does not pay.

    Args:
      target: whose heads, or whose own weights, draft.
      draft: the model; None where a column needs none.
      column: one of --num_draft.
      trial: by which an adaptive one is made.

    Raises:
      ValueError: it is none that there is, or what it is made of is missing.
    """
    kind, numbers = _parse(column)
    sources, is_adaptive = _Sources(target, draft, column, trial), column.startswith(_ADAPTIVE)
    lengths = numbers[:1] if is_adaptive and not kind.is_tree and kind.num_sizes == 1 else numbers
    try:
        inspect.signature(kind.make).bind(sources, *lengths)
    except TypeError as error:
        raise ValueError(f"--num_draft={column}: not the numbers that this kind takes ({error})") from error
    return sources.adaptive(kind, numbers) if is_adaptive else kind.make(sources, *numbers)
