"""What proposes tokens: one file each, one face each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from specjax.drafters.model import ModelDrafter
from specjax.drafters.model_tree import ModelTreeDrafter
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
    """A loaded model (`specjax.load`) as drafter of `num_draft` tokens a round.

    With `share_encoder` its decoder reads the target's encoder output, and its own encoder is not used.

    Raises:
      ValueError: `num_draft` is below 1.
    """
    if num_draft < 1:
        raise ValueError(f"num_draft={num_draft}: must be at least 1; drafter=None decodes plainly")
    drafter = ModelDrafter(draft.network, num_draft, share_encoder)
    return BoundDrafter(drafter, draft.params, draft.tokenizer)


def tree_from_model(
    draft: Any, branching: Sequence[int], with_replacement: bool = False, share_encoder: bool = False
) -> BoundDrafter:
    """A loaded model as drafter of a token tree; `branching` (3, 2, 1) drafts 3 + 6 + 6 nodes.

    With `share_encoder` its decoder reads the target's encoder output.

    Raises:
      ValueError: `branching` is empty or holds a number below 1.
    """
    drafter = ModelTreeDrafter(draft.network, tuple(branching), with_replacement, share_encoder)
    return BoundDrafter(drafter, draft.params, draft.tokenizer)


def prompt_lookup(num_draft: int = 8, max_ngram: int = 3, min_ngram: int = 1) -> BoundDrafter:
    """Copies what followed the last tokens earlier, in the source or in the output; needs no model.

    Raises:
      ValueError: `num_draft` is below 1, or not 1 <= `min_ngram` <= `max_ngram`.
    """
    if num_draft < 1:
        raise ValueError(f"num_draft={num_draft}: must be at least 1; drafter=None decodes plainly")
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(f"min_ngram={min_ngram}, max_ngram={max_ngram}: give 1 <= min_ngram <= max_ngram")
    return BoundDrafter(PromptLookupDrafter(num_draft, max_ngram, min_ngram), None)


__all__ = [
    "BoundDrafter", "ModelDrafter", "ModelTreeDrafter", "PromptLookupDrafter", "from_model", "prompt_lookup",
    "tree_from_model",
]  # fmt: skip
