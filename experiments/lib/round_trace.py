"""Draws the rounds of an output, as in figure 1 of Leviathan et al. 2023.

Each line is a round: the tokens before it, the accepted drafts, the first rejected draft struck through with
the token that replaces it, or the bonus token. They are printed, and written as an animated SVG in which the
lines appear one by one.
"""

import functools
import html
import itertools
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
LEGEND = [piece for name in STYLES for piece in ((name, name), ("  ", "before"))]
_CSS = """text { font: 14px ui-monospace, Menlo, Consolas, monospace; white-space: pre; fill: #888; }
.accepted { fill: #1a7f37; } .rejected { fill: #cf222e; text-decoration: line-through; }
.correction { fill: #0969da; font-weight: bold; } .bonus { fill: #8250df; font-weight: bold; }
.round { animation: appear .4s both; } @keyframes appear { from { opacity: 0; } }"""
_LINE_HEIGHT, _CHARACTER_WIDTH, _SECONDS = 20, 8.5, 0.9  # pixels, pixels, between two lines


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


def words(tokenizer: Any, parts: list[tuple[str, list[int]]]) -> list[tuple[str, str]]:
    """Returns a round as pieces of text with their styles; spaces are of style "before"."""
    pieces = []
    for style, ids in parts:
        for piece in tokenizer.convert_ids_to_tokens(ids):
            word = piece.replace("\u2581", " ")
            if word.startswith(" "):  # a struck-through space would join the word before
                pieces.append((" ", "before"))
            pieces.append((word.removeprefix(" "), style))
    return pieces


def svg(rounds: Sequence[list[tuple[str, str]]]) -> str:
    """Returns an SVG with a line for the `words` of each round, or a gap for none; they appear one by one."""
    lines = [LEGEND, *rounds]
    body = []
    for i, pieces in enumerate(lines):
        spans = []
        for style, group in itertools.groupby(pieces, lambda piece: piece[1]):
            text = html.escape("".join(text for text, _ in group))
            spans.append(text if style == "before" else f'<tspan class="{style}">{text}</tspan>')
        delay = f' class="round" style="animation-delay: {_SECONDS * i:.1f}s"' if i else ""
        if spans:
            body.append(f'<text x="8" y="{_LINE_HEIGHT * (i + 1)}"{delay}>{"".join(spans)}</text>')
    width = 16 + _CHARACTER_WIDTH * max(sum(len(text) for text, _ in pieces) for pieces in lines)
    size = f'width="{width:.0f}" height="{_LINE_HEIGHT * len(lines) + 12}"'
    inner = "\n".join([f"<style>{_CSS}</style>", *body])
    return f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" {size}>\n{inner}\n</svg>\n'


def show(
    console: Console, tokenizer: Any, requests: Sequence[Request], sampled: bool, path: pathlib.Path | None
) -> None:
    """Prints the rounds of the first row of each request; also writes an SVG to `path` unless None."""
    console.print(Text.assemble("rounds: ", *((text, STYLES[style]) for text, style in LEGEND)))
    drawn: list[list[tuple[str, str]]] = []
    for request in requests:
        for number, parts in enumerate(trace(request, sampled), 1):
            drawn.append([(f"{number:3d} ", "before"), *words(tokenizer, parts)])
            shown = ((text, STYLES[style]) for text, style in drawn[-1])
            console.print(Text.assemble(*shown), soft_wrap=True)
        drawn.append([])
        console.print()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(path, svg(drawn[:-1]))
        console.print(f"wrote {path}", soft_wrap=True)
