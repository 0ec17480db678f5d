"""--num_draft and --heads: which drafters a table compares, a column of it each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from absl import flags

from experiments import options
from specjax import acceptance, api, controller, drafters, rounds
from specjax.drafters import BoundDrafter
from specjax.models import heads_io

_COLUMNS = flags.DEFINE_list(
    "num_draft",
    ["5"],
    "K, drafted tokens a round, or a tree's children per level: 3x2x1. Or KIND:NUMBERS. adaptive:1-3-5 lets "
    "rows choose from these K and 0, by costs measured first; staged:5-3 lets copies of up to 3 draft for the "
    "draft; int8:5 drafts with the target in eight bits; without a model: lookup:8 (copies of up to 8), "
    "lookahead:5-3-3 (columns, n of the n-grams, candidates); with --heads: medusa:3x2x1, eagle:4, "
    "eagle_tree:8-4-3 (nodes, depth, nodes expanded a level), one_pass:5. A column each.",
)
_HEADS = flags.DEFINE_multi_string(
    "heads", [], "Directory of heads; they serve the target they were made for."
)
CostOf = Callable[[int], float]  # K -> a round's cost over a plain step


class _Sources(NamedTuple):
    """What a drafter can be made of."""

    target: api.Model
    draft: api.Model | None
    column: str
    cost_of: CostOf | None

    def model(self) -> api.Model:
        if self.draft is None:
            raise ValueError(f"--num_draft={self.column} needs a draft model, and none is given")
        return self.draft

    def heads(self, kind: str) -> api.LoadedHeads:
        """Those of --heads that are of this kind, for this target."""
        fingerprint = heads_io.fingerprint(self.target.params)
        for directory in _HEADS.value:
            config, made_for = heads_io.read_config(directory)
            if (config.kind, made_for) == (kind, fingerprint):
                return api.load_heads(directory, self.target)
        raise ValueError(
            f"--num_draft={self.column} needs {kind} heads of this target; --heads={_HEADS.value} has none: "
            "train some with `python -m experiments.train_heads`"
        )

    def adaptive(self, *lengths: int) -> BoundDrafter:
        if self.cost_of is None:
            raise ValueError(f"--num_draft={self.column}: costs are not measured here; give one length")
        drafter = drafters.from_model(self.model(), max(lengths))
        return controller.adaptive(drafter, {k: self.cost_of(k) for k in lengths})

    def staged(self, num_draft: int, num_copied: int) -> BoundDrafter:
        inner = drafters.prompt_lookup(num_copied)
        return drafters.staged(self.model(), inner, num_draft, rounds)


class _Kind(NamedTuple):
    """A kind of column: how it is made from the numbers behind its name, and what is true of it."""

    make: Callable[..., BoundDrafter]
    is_tree: bool = False
    all_alike: bool = True  # every round drafts as much as every other
    needs_draft: bool = True


_KINDS = {
    "chain": _Kind(lambda s, k: drafters.from_model(s.model(), k)),
    "tree": _Kind(lambda s, *branching: drafters.tree_from_model(s.model(), branching), is_tree=True),
    "adaptive": _Kind(lambda s, *lengths: s.adaptive(*lengths), all_alike=False),
    "staged": _Kind(lambda s, k, copied: s.staged(k, copied), all_alike=False),
    "int8": _Kind(lambda s, k: drafters.from_model(api.int8(s.target), k), needs_draft=False),
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


def _parse(column: str) -> tuple[_Kind, list[int]]:
    name, colon, numbers = column.rpartition(":")
    if not colon:
        name = "tree" if "x" in column else "chain"
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


def need_no_draft() -> bool:
    """Whether every column does without a draft model."""
    return all(not _parse(column)[0].needs_draft for column in columns())


def all_alike(column: str) -> bool:
    """Whether every round drafts as much as every other, so that the parts of one stand for all."""
    return _parse(column)[0].all_alike


def has_alpha(column: str, sampled: bool) -> bool:
    """Whether alpha means anything there: for chains under the token-wise rule."""
    return not _parse(column)[0].is_tree and (not sampled or options.rule() is acceptance.speculative)


def settings(drafter: BoundDrafter) -> dict[str, Any]:
    """What a row should say about a drafter: its size, and the costs that an adaptive one goes by."""
    has_heads = isinstance(drafter.params, dict) and "heads" in drafter.params
    arrays = jax.tree.leaves(drafter.params["heads"] if has_heads else drafter.params)
    found: dict[str, Any] = {
        "draft_parameters": sum(x.size for x in arrays), "draft_bytes": sum(x.nbytes for x in arrays)
    }  # fmt: skip
    adaptive = drafter.drafter
    if isinstance(adaptive, controller.AdaptiveDrafter):
        table = zip(adaptive.lengths, adaptive.costs, strict=True)
        found["costs"] = ", ".join(f"{length}: {cost:.2f}" for length, cost in table)
    return found


def drafter(
    target: api.Model, draft: api.Model | None, column: str, cost_of: CostOf | None = None
) -> BoundDrafter:
    """The drafter of one column; see --num_draft.

    Args:
      target: whose heads, or whose own weights, draft.
      draft: the model; None where a column needs none.
      column: one of --num_draft.
      cost_of: called for each length of an adaptive one.

    Raises:
      ValueError: it is none that there is, or what it is made of is missing.
    """
    kind, numbers = _parse(column)
    try:
        return kind.make(_Sources(target, draft, column, cost_of), *numbers)
    except TypeError as error:
        raise ValueError(f"--num_draft={column}: not the numbers that this kind takes ({error})") from error
