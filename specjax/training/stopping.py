"""Early stopping: the best validation result so far, and when to stop waiting for a better one."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Best:
    """The best validation result so far.

    Attributes:
      larger_is_better: True for BLEU, False for a loss.
      step, value: of the best; None before the first.
      num_worse: results since then, none of them better.
    """

    larger_is_better: bool
    step: int | None = None
    value: float | None = None
    num_worse: int = 0

    def update(self, step: int, value: float) -> "Best":
        """With one more result. A tie, or a NaN, is not better."""
        if self.value is None:
            better = value == value
        else:
            better = value > self.value if self.larger_is_better else value < self.value
        if better:
            return dataclasses.replace(self, step=step, value=value, num_worse=0)
        return dataclasses.replace(self, num_worse=self.num_worse + 1)

    def should_stop(self, patience: int) -> bool:
        """Whether `patience` results in a row were not better; never with `patience` 0."""
        return 0 < patience <= self.num_worse
