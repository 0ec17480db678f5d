"""Drafters, one module each. A new drafter is registered here."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from specjax.drafters.adaptive import AdaptiveDrafter, adaptive
from specjax.drafters.base import DrafterWrapper
from specjax.drafters.eagle import EagleDrafter, EagleTreeDrafter, eagle, eagle_tree
from specjax.drafters.lookahead import LookaheadDrafter, lookahead
from specjax.drafters.medusa import MedusaDrafter, medusa
from specjax.drafters.model import ModelDrafter, ModelTreeDrafter, from_model, tree_from_model
from specjax.drafters.ngram import NgramDrafter, NgramTable, ngram
from specjax.drafters.ngram import learn as learn_ngram
from specjax.drafters.ngram import load as load_ngram
from specjax.drafters.ngram import save as save_ngram
from specjax.drafters.one_pass import OnePassDrafter, one_pass
from specjax.drafters.prompt_lookup import PromptLookupDrafter, prompt_lookup
from specjax.drafters.staged import StagedDrafter, staged
from specjax.types import Drafter


class Parts(Protocol):
    """The components of drafters; each method raises a ValueError if its component is missing."""

    def draft_model(self) -> Any:
        """Returns the draft model, loaded."""

    def int8_target(self) -> Any:
        """Returns the target with int8 weights."""

    def heads(self, kind: str) -> Any:
        """Returns the target's heads of a kind."""

    def ngram_table(self) -> Any:
        """Returns an n-gram table in the target's tokens."""


class Kind(NamedTuple):
    """A kind of drafter as scripts name it, KIND:NUMBERS.

    Attributes:
      make: a function of `Parts` and the numbers.
      is_tree: the numbers are the shape of a tree.
      all_alike: all rounds have the same draft length, so that the timings of one represent all.
      needs_draft: a draft model is needed.
      num_sizes: how many numbers a chain takes.
    """

    make: Callable[..., Drafter]
    is_tree: bool = False
    all_alike: bool = True
    needs_draft: bool = True
    num_sizes: int = 1


KINDS = {
    "chain": Kind(lambda parts, k: from_model(parts.draft_model(), k)),
    "tree": Kind(lambda parts, *branching: tree_from_model(parts.draft_model(), branching), is_tree=True),
    "staged": Kind(
        lambda parts, k, copied: staged(parts.draft_model(), prompt_lookup(copied), k),
        all_alike=False,
        num_sizes=2,
    ),
    "int8": Kind(lambda parts, k: from_model(parts.int8_target(), k), needs_draft=False),
    "lookup": Kind(lambda parts, k: prompt_lookup(k), all_alike=False, needs_draft=False),
    "ngram": Kind(lambda parts, k: ngram(parts.ngram_table(), k), needs_draft=False),
    "lookahead": Kind(lambda parts, *sizes: lookahead(*sizes), is_tree=True, needs_draft=False),
    "medusa": Kind(
        lambda parts, *branching: medusa(parts.heads("medusa"), branching), is_tree=True, needs_draft=False
    ),
    "eagle": Kind(lambda parts, k: eagle(parts.heads("eagle"), k), needs_draft=False),
    "eagle_tree": Kind(
        lambda parts, *sizes: eagle_tree(parts.heads("eagle"), *sizes), is_tree=True, needs_draft=False
    ),
    "one_pass": Kind(lambda parts, k: one_pass(parts.heads("one_pass"), k), needs_draft=False),
}

__all__ = [
    "KINDS",
    "AdaptiveDrafter",
    "DrafterWrapper",
    "EagleDrafter",
    "EagleTreeDrafter",
    "Kind",
    "LookaheadDrafter",
    "MedusaDrafter",
    "ModelDrafter",
    "ModelTreeDrafter",
    "NgramDrafter",
    "NgramTable",
    "OnePassDrafter",
    "Parts",
    "PromptLookupDrafter",
    "StagedDrafter",
    "adaptive",
    "eagle",
    "eagle_tree",
    "from_model",
    "learn_ngram",
    "load_ngram",
    "lookahead",
    "medusa",
    "ngram",
    "one_pass",
    "prompt_lookup",
    "save_ngram",
    "staged",
    "tree_from_model",
]
