"""A drafter around another: `controller.AdaptiveDrafter`, for one."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Around:
    """Says of itself what the inner drafter says of itself; see `types.Drafter`.

    Attributes:
      inner: a drafter.
    """

    inner: Any

    @property
    def num_draft(self) -> int:
        """Of the inner drafter."""
        return self.inner.num_draft

    @property
    def max_depth(self) -> int:
        """Of the inner drafter."""
        return self.inner.max_depth

    def __getattr__(self, name: str) -> Any:
        """What a drafter may say and need not; functions are not passed on."""
        if name in ("drafts_trees", "network", "share_encoder", "widths"):
            return getattr(self.inner, name)
        raise AttributeError(f"{type(self).__name__} has no {name}")
