"""What proposes tokens: one file each, one face each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from specjax.drafters.eagle import EagleDrafter, EagleTreeDrafter
from specjax.drafters.lookahead import LookaheadDrafter
from specjax.drafters.medusa import MedusaDrafter
from specjax.drafters.model import ModelDrafter
from specjax.drafters.model_tree import ModelTreeDrafter
from specjax.drafters.one_pass import OnePassDrafter
from specjax.drafters.prompt_lookup import PromptLookupDrafter
from specjax.types import Drafter, Params


class BoundDrafter(NamedTuple):
    """A drafter with its arrays, as `specjax.generate` takes it.

    Attributes:
      drafter: the configuration.
      params: its arrays.
      tokenizer: of the model behind it; None where there is none.
    """

    drafter: Drafter
    params: Params
    tokenizer: Any = None


def from_model(draft: Any, num_draft: int = 5, share_encoder: bool = False) -> BoundDrafter:
    """A loaded model as drafter of a chain (Leviathan et al. 2023).

    Args:
      draft: of `specjax.load`.
      num_draft: K, tokens a round.
      share_encoder: its decoder reads the target's encoder output, and its own encoder is not used.

    Raises:
      ValueError: `num_draft` is below 1.
    """
    check_num_draft(num_draft)
    check_draft(draft)
    drafter = ModelDrafter(draft.network, num_draft, share_encoder)
    return BoundDrafter(drafter, draft.params, draft.tokenizer)


def tree_from_model(
    draft: Any, branching: Sequence[int], with_replacement: bool = False, share_encoder: bool = False
) -> BoundDrafter:
    """A loaded model as drafter of a token tree (Miao et al. 2024).

    Args:
      draft: of `specjax.load`.
      branching: children of a node on each level; (3, 2, 1) drafts 3 + 6 + 6 nodes.
      with_replacement: siblings are independent draws; else each is drawn from what is left.
      share_encoder: its decoder reads the target's encoder output.

    Raises:
      ValueError: `branching` is empty or holds a number below 1.
    """
    check_draft(draft)
    drafter = ModelTreeDrafter(draft.network, _branching(branching), with_replacement, share_encoder)
    return BoundDrafter(drafter, draft.params, draft.tokenizer)


def prompt_lookup(num_draft: int = 8, max_ngram: int = 3, min_ngram: int = 1) -> BoundDrafter:
    """Copies what followed the last tokens earlier, in the source or in the output; needs no model.

    Raises:
      ValueError: `num_draft` is below 1, or not 1 <= `min_ngram` <= `max_ngram`.
    """
    check_num_draft(num_draft)
    _check_whole(max_ngram=max_ngram, min_ngram=min_ngram)
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(f"min_ngram={min_ngram}, max_ngram={max_ngram}: give 1 <= min_ngram <= max_ngram")
    return BoundDrafter(PromptLookupDrafter(num_draft, max_ngram, min_ngram), None)


def medusa(heads: Any, branching: Sequence[int] = (3, 2, 1)) -> BoundDrafter:
    """Medusa heads (`specjax.load_heads`) as drafter of a tree; `branching` as of `tree_from_model`.

    Raises:
      ValueError: heads of another kind, or fewer than the tree is deep.
    """
    branching = _branching(branching)
    _check_heads(heads, "medusa", len(branching))
    return BoundDrafter(MedusaDrafter(heads.network, branching), heads.params)


def eagle(heads: Any, num_draft: int = 4) -> BoundDrafter:
    """An EAGLE layer (`specjax.load_heads`) as drafter of a chain.

    Raises:
      ValueError: heads of another kind; `num_draft` is below 1.
    """
    _check_heads(heads, "eagle", 1)
    check_num_draft(num_draft)
    return BoundDrafter(EagleDrafter(heads.network, num_draft), heads.params)


def eagle_tree(heads: Any, num_draft: int = 8, max_depth: int = 4, num_expanded: int = 3) -> BoundDrafter:
    """An EAGLE layer as drafter of a tree that it chooses as it goes (EAGLE-2, Li et al. 2024).

    Args:
      heads: of `specjax.load_heads`.
      num_draft: N, nodes that are kept.
      max_depth: levels that are made.
      num_expanded: nodes of a level that get children, as many each.

    Raises:
      ValueError: heads of another kind; more nodes than are made.
    """
    _check_heads(heads, "eagle", 1)
    _check_whole(num_draft=num_draft, max_depth=max_depth, num_expanded=num_expanded)
    return BoundDrafter(EagleTreeDrafter(heads.network, num_draft, max_depth, num_expanded), heads.params)


def one_pass(heads: Any, num_draft: int = 5) -> BoundDrafter:
    """A one-pass layer (`specjax.load_heads`) as drafter of a chain.

    Raises:
      ValueError: heads of another kind, or trained for fewer tokens; `num_draft` is below 1.
    """
    check_num_draft(num_draft)
    _check_heads(heads, "one_pass", num_draft)
    return BoundDrafter(OnePassDrafter(heads.network, num_draft), heads.params)


def lookahead(num_columns: int = 5, ngram: int = 3, num_candidates: int = 3) -> BoundDrafter:
    """N-grams that the target makes on the side (Fu et al. 2024); needs no model.

    Args:
      num_columns, ngram: width and depth of the window in which they are made.
      num_candidates: n-grams that are proposed in a round.

    Raises:
      ValueError: a number that is too small.
    """
    _check_whole(num_columns=num_columns, ngram=ngram, num_candidates=num_candidates)
    return BoundDrafter(LookaheadDrafter(num_columns, ngram, num_candidates), None)


def check_num_draft(num_draft: Any) -> None:
    if not isinstance(num_draft, int) or num_draft < 1:
        raise ValueError(
            f"num_draft={num_draft!r}: must be at least 1, a whole number; drafter=None decodes plainly"
        )


def _check_whole(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, int):
            raise ValueError(f"{name}={value!r}: give a whole number")


def _branching(branching: Any) -> tuple[int, ...]:
    """Children of each level, as a tuple of whole numbers."""
    if not isinstance(branching, list | tuple) or not all(isinstance(n, int) for n in branching):
        raise ValueError(f"branching={branching!r}: give the children of each level, as in (3, 2, 1)")
    return tuple(branching)


def check_draft(draft: Any) -> None:
    if not all(hasattr(draft, part) for part in ("network", "params", "tokenizer")):
        raise ValueError(f"draft={draft!r:.80}: load it first, draft = specjax.load(...)")


def _check_heads(heads: Any, kind: str, depth: int) -> None:
    config: Any = getattr(getattr(heads, "network", None), "config", None)
    if not hasattr(config, "kind"):
        raise ValueError(
            f"heads={heads!r:.80}: load some first, heads = specjax.load_heads(directory, target)"
        )
    if config.kind != kind:
        raise ValueError(f"these are heads of the kind {config.kind!r}: {kind} needs some of {kind!r}")
    if depth > config.num_steps:
        raise ValueError(
            f"a draft is {depth} deep, but the heads were trained for {config.num_steps}: draft less, or "
            "train others"
        )


__all__ = [
    "BoundDrafter",
    "EagleDrafter",
    "EagleTreeDrafter",
    "LookaheadDrafter",
    "MedusaDrafter",
    "ModelDrafter",
    "ModelTreeDrafter",
    "OnePassDrafter",
    "PromptLookupDrafter",
    "eagle",
    "eagle_tree",
    "from_model",
    "lookahead",
    "medusa",
    "one_pass",
    "prompt_lookup",
    "tree_from_model",
]
