"""What proposes tokens: one file each, one face each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from specjax.drafters.model import ModelDrafter
from specjax.drafters.model_tree import ModelTreeDrafter
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


__all__ = ["BoundDrafter", "ModelDrafter", "ModelTreeDrafter", "from_model", "tree_from_model"]
