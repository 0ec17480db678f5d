"""Draws the rounds of an output, as in figure 1 of Leviathan et al. 2023.

Each line is a round: the tokens before it, the accepted drafts, the first rejected draft struck through with
the token that replaces it, or the bonus token.
"""

import functools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.text import Text

from experiments.lib import results
from specjax import decode, sharding
from specjax.decode import Request
from specjax.round import LoopState, Program
from specjax.types import Draft

STYLES = {
    "before": "grey50",
    "accepted": "green",
    "rejected": "red strike",
    "correction": "bold blue",
    "bonus": "bold magenta",
}


def trace(request: Request, sampled: bool) -> Iterator[list[tuple[str, list[int]]]]:
    """Yields the rounds of the first row of a request with a drafter, as lists of (style, ids).

    For a tree no rejected draft is shown. A row that ends on an accepted draft has no correction and no
    bonus.
    """
    program, inputs = request
    state = decode.jitted_prefill(program, **inputs)
    first = int(state.context.length[0])
    while bool(state.running[0]):
        draft, before = _propose(program, state, sampled), state
        state = decode.jitted_step(program, state, sampled=sampled)
        tokens = sharding.fetch(state.context.tokens[:1])[0]
        start, end = int(before.context.length[0]), int(state.context.length[0])
        kept = int((state.stats.accepted - before.stats.accepted)[0].sum())
        drafted = int((state.stats.num_drafted - before.stats.num_drafted)[0])
        is_chain, emitted = draft.tree is None, tokens[start:end].tolist()
        yield [
            ("before", tokens[first:start].tolist()),
            ("accepted", emitted[:kept]),
            ("rejected", draft.tokens[0, kept : kept + 1].tolist() if is_chain and kept < drafted else []),
            ("bonus" if is_chain and kept == drafted > 0 else "correction", emitted[kept:]),
        ]


@functools.partial(jax.jit, static_argnames="sampled")
def _propose(program: Program, state: LoopState, sampled: bool) -> Draft:
    """Returns the draft of the next round, drawn with the keys of that round."""
    keys, drafter = decode.round_draws(state, sampled), program.drafter
    assert drafter is not None
    return drafter.propose(state.drafter_state, state.context, keys, None)[0]


def line(tokenizer: Any, parts: list[tuple[str, list[int]]]) -> Text:
    """Returns a round in colour."""
    text = Text()
    for style, ids in parts:
        for piece in tokenizer.convert_ids_to_tokens(ids):
            word = piece.replace("\u2581", " ")
            space = word.startswith(" ")  # a struck-through space would join the word before
            text.append(" " if space else "").append(word[space:], STYLES[style])
    return text


def show(
    console: Console, tokenizer: Any, requests: Sequence[Request], sampled: bool, path: pathlib.Path | None
) -> None:
    """Prints the rounds of the first row of each request; also writes an HTML page to `path` unless None."""
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
        for number, parts in enumerate(trace(request, sampled), 1):
            recorded.print(Text(f"{number:3d} ", "grey50") + line(tokenizer, parts), soft_wrap=True)
        recorded.print()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(path, recorded.export_html(inline_styles=True))
        console.print(f"wrote {path}", soft_wrap=True)
