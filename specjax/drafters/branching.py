"""Trees of one shape: what drafters that branch alike in every round have in common."""

import dataclasses
from typing import Any

from specjax import tree as tree_lib


@dataclasses.dataclass(frozen=True)
class Branching:
    """A drafter of the tree that `branching` says.

    Raises:
      ValueError: `branching` is empty, no tuple, or holds a number below 1.

    Attributes:
      network: what it runs. Static.
      branching: children of a node at each depth; all 1: a chain.
    """

    network: Any
    branching: tuple[int, ...]
    drafts_trees = True

    def __post_init__(self) -> None:
        tree_lib.check_branching(self.branching)

    @property
    def num_draft(self) -> int:
        """Nodes of the tree."""
        return tree_lib.level_starts(self.branching)[-1] - 1

    @property
    def max_depth(self) -> int:
        """Levels of the tree."""
        return len(self.branching)
