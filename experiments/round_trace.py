"""The rounds of a sentence, drawn like figure 1 of Leviathan et al. 2023.

A line a round: the tokens before it, the accepted drafts, the rejected draft struck through and what stands
in its place, or the bonus token.
"""

import functools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.text import Text

from experiments import results
from specjax import decode, rounds, sharding
from specjax.request import Request
from specjax.types import Draft

STYLES = {
    "before": "grey50",
    "accepted": "green",
    "rejected": "red strike",
    "correction": "bold blue",
    "bonus": "bold magenta",
}


class TracedRound(NamedTuple):
    """A round of one row, as ids.

    Attributes:
      before: what was emitted before it.
      accepted: the drafts that were kept.
      rejected: the draft that was not, if one was; of a tree nobody can say which.
      next_token: from the residual, or the bonus; empty where the row ended on an accepted draft.
      is_bonus: whether all drafts were kept.
    """

    before: list[int]
    accepted: list[int]
    rejected: list[int]
    next_token: list[int]
    is_bonus: bool


def trace(request: Request, sampled: bool) -> Iterator[TracedRound]:
    """The rounds of the first row of a request that has a drafter."""
    program, params, inputs = request
    state = decode.jitted_prefill(program, params, **inputs)
    first = int(state.context.length[0])
    while bool(state.running[0]):
        draft, before = _propose(program, params.drafter, state, sampled), state
        state = decode.jitted_step(program, params, state, sampled=sampled)
        tokens = sharding.fetch(state.context.tokens[:1])[0]
        start, end = int(before.context.length[0]), int(state.context.length[0])
        kept = int((state.stats.accepted - before.stats.accepted)[0].sum())
        drafted = int((state.stats.num_drafted - before.stats.num_drafted)[0])
        rejected = draft.tokens[0, kept : kept + 1].tolist() if draft.tree is None and kept < drafted else []
        emitted = tokens[start:end].tolist()
        is_bonus = not rejected and drafted > 0 and draft.tree is None
        yield TracedRound(tokens[first:start].tolist(), emitted[:kept], rejected, emitted[kept:], is_bonus)


@functools.partial(jax.jit, static_argnames=("program", "sampled"))
def _propose(program: rounds.Program, params: Any, state: rounds.LoopState, sampled: bool) -> Draft:
    """What the next round will draft, by its own keys."""
    keys = decode.round_draws(state, sampled)
    assert program.drafter is not None
    return program.drafter.propose(params, state.drafter_state, state.context, keys)[0]


def line(tokenizer: Any, traced: TracedRound) -> Text:
    """A round in colour."""
    parts = [
        ("before", traced.before),
        ("accepted", traced.accepted),
        ("rejected", traced.rejected),
        ("bonus" if traced.is_bonus else "correction", traced.next_token),
    ]
    text = Text()
    for style, ids in parts:
        for piece in tokenizer.convert_ids_to_tokens(ids):
            word = piece.replace("\u2581", " ")
            space = word.startswith(" ")  # a line through a space would run into the word before
            text.append(" " if space else "").append(word[space:], STYLES[style])
    return text


def show(
    console: Console, tokenizer: Any, requests: Sequence[Request], sampled: bool, path: pathlib.Path | None
) -> None:
    """Prints the rounds of each request's first row; the same as an HTML page, if `path` says where."""
    recorded = Console(
        record=True,
        file=console.file,
        width=console.width,
        force_terminal=console.is_terminal,
        quiet=console.quiet,
    )
    legend = Text("rounds: ")
    for name, style in STYLES.items():
        legend.append(name, style).append("  ")
    recorded.print(legend, soft_wrap=True)
    for request in requests:
        for number, traced in enumerate(trace(request, sampled), 1):
            recorded.print(Text(f"{number:3d} ", "grey50") + line(tokenizer, traced), soft_wrap=True)
        recorded.print()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(path, recorded.export_html(inline_styles=True))
        console.print(f"wrote {path}", soft_wrap=True)
