"""The target alone, and beside it each drafter of --num_draft on the same sources."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console

from experiments import arms, columns, identity, options
from experiments import rows as rows_lib
from specjax.drafters import BoundDrafter
from specjax.loading import Model
from specjax.request import Request


class Column(NamedTuple):
    """A drafter beside the target alone.

    Attributes:
      name: as --num_draft has it.
      drafter: None: an adaptive one that does not pay.
      arm: its requests, and what came out.
      row: what is said about it; see `columns.settings` and `rows.compare`.
      differing: where its greedy output is not the target's.
    """

    name: str
    drafter: BoundDrafter | None
    arm: rows_lib.Arm
    row: rows_lib.Row
    differing: list[identity.Difference]


def compare(
    console: Console,
    target: Model,
    draft: Model | None,
    plain: rows_lib.Arm,
    sources: Sequence[str],
    references: rows_lib.References | None,
    *,
    build: Callable[[BoundDrafter | None, Sequence[str]], list[Request]],
    run: Callable[[list[Request], str], rows_lib.Arm],
    num_timed: int,
    repeats: int,
) -> Iterator[Column]:
    """Each drafter of --num_draft, beside the target alone.

    Args:
      draft: the model, where a drafter needs one.
      plain: the target alone on the same sources.
      sources, references: of each row; references may be missing.
      build: makes the requests of a drafter (None: of the target alone) on sources.
      run: decodes requests, under a label.
      num_timed, repeats: see `rows.compare`.
    """
    priced = sources[: max(plain.batch_size, arms.NUM_PRICED)]
    trial_of = lambda drafter: build(drafter, priced)  # noqa: E731
    for name in columns.columns():
        drafter = columns.drafter(target, draft, name, arms.Trial(trial_of, plain.sampled, console))
        arm = run(build(drafter, sources), f"speculative, K = {name}")
        row, differing = rows_lib.compare(
            console,
            target.tokenizer,
            plain,
            arm,
            references,
            has_alpha=columns.has_alpha(name, plain.sampled, options.rule()),
            all_alike=columns.all_alike(name),
            num_timed=num_timed,
            repeats=repeats,
        )
        yield Column(name, drafter, arm, columns.settings(drafter) | row, differing)
