"""The main job: text in, the target's text out, faster; both runs side by side.

  python -m experiments.generate --flagfile=configs/demo.flags
  python -m experiments.generate --target=DIR --draft=DIR --input=my.txt --output=out
  python -m experiments.generate --target=DIR --input=many.txt --output=out --nocompare --batch_size=32

Prints every translation and whether it is the target's own, then one table: autoregressive against
speculative decoding, measured in turns. Without --draft the target decodes autoregressively. With --nocompare
each source is decoded once, thousands of them: rows that finish get the next source, and a run that was
killed goes on where it was.
"""

import os
import pathlib
import sys
import time
from collections.abc import Sequence

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh
from rich.console import Console
from rich.markup import escape

import specjax
from experiments.lib import (
    columns,
    compare,
    measure,
    meshes,
    options,
    parse,
    progress,
    results,
    round_trace,
    start,
)
from experiments.lib.compare import Comparison, References, Row
from specjax import api, data, sharding
from specjax.decode import Generation
from specjax.loading import Model
from specjax.models import convert
from specjax.texts import MAX_SOURCE_LENGTH, check_vocabularies
from specjax.types import Drafter

_TARGET = flags.DEFINE_string("target", None, "Target: a Hugging Face directory or hub id.")
_DRAFT = flags.DEFINE_string("draft", None, "Draft model, the same way; none: autoregressive decoding.")
_INPUT = flags.DEFINE_string("input", "-", "File with one source a line (.gz too); - reads standard input.")
_REFERENCES = flags.DEFINE_string("references", None, "File with one reference a line: quality is reported.")
_METRIC = flags.DEFINE_enum("metric", "bleu", ["bleu", "rouge"], "Which, of --references.")
_PREFIX = flags.DEFINE_string("prefix", "", 'Put before every source: "translate English to German: ".')
_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", None, "Only the first so many sources.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1, "Sources decoded together.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_list("temperature", ["0", "1"], "A column each.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Limit of a row.", lower_bound=1)
_TRUNCATE = flags.DEFINE_bool("truncate", False, "Cut sources that are too long instead of raising an error.")
_DTYPE = parse.define_dtype()
_SEED = flags.DEFINE_integer("seed", 0, "Of everything drawn.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed turns of each arm; 0 measures nothing.", lower_bound=0)
_NUM_TIMED = flags.DEFINE_integer("num_timed", 16, "Sources in a timed turn, at most.", lower_bound=1)
_COMPARE = flags.DEFINE_bool("compare", True, "Decode autoregressively as well, and measure both.")
_SHOW = flags.DEFINE_integer("show", 50, "Translations printed.", lower_bound=0)
_ROUNDS = flags.DEFINE_integer("show_rounds", 0, "Sentences whose rounds are drawn.", lower_bound=0)
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json, table.md and output.txt.")
meshes.define_flags()
JOURNAL = "journal.jsonl"  # what is done of a run with --nocompare
_CALL = 16  # tokens of a target call that the memory printed before loading has room for


def read_sources() -> list[str]:
    """Returns the lines asked for; blank ones stay, so that line n of the output answers line n.

    Raises:
      ValueError: there is no text.
    """
    lines = data.split_lines(sys.stdin.read()) if _INPUT.value == "-" else data.read_lines(_INPUT.value)
    lines = lines[: _NUM_EXAMPLES.value]
    if not any(line.strip() for line in lines):
        raise ValueError(f"--input={_INPUT.value}: there is no text in it; give one source a line")
    return lines


def references(lines: Sequence[str]) -> References | None:
    """Returns --references of the `lines` that have a source; None: there are none.

    Raises:
      ValueError: not one for each line of --input.
    """
    if not _REFERENCES.value:
        return None
    answers = data.read_lines(_REFERENCES.value)[: _NUM_EXAMPLES.value]
    if len(lines) != len(answers):
        raise ValueError(
            f"--references={_REFERENCES.value} has {len(answers)} lines, --input={_INPUT.value} has "
            f"{len(lines)}: line n of one must answer line n of the other"
        )
    answered = [answer for line, answer in zip(lines, answers, strict=True) if line.strip()]
    return References(answered, _METRIC.value)


def show_rows(
    console: Console,
    sources: Sequence[str],
    texts: Sequence[str],
    generation: Generation | None = None,
    differing: Sequence[compare.Difference] = (),
) -> None:
    """Prints source and translation; of a speculative arm, whether it is the target's own, and its tau."""
    changed = {difference.row for difference in differing}
    for i, (source, text) in enumerate(zip(sources[: _SHOW.value], texts, strict=False)):
        console.print(f"[dim]{escape(source)}[/dim]\n  [bold]{escape(text)}[/bold]", highlight=False)
        if generation is not None:
            same = "[red]differs from[/red]" if i in changed else "identical to"
            tau = np.asarray(generation.stats.tau)[i]
            counts = f"{generation.length[i]} tokens, {tau:.2f} a target call"
            console.print(f"  {same} autoregressive decoding, {counts}", style="dim")
    if 0 < _SHOW.value < len(sources):
        console.print(f"... and {len(sources) - _SHOW.value} more")


def show_rounds(comparison: Comparison, drafter: Drafter, sampled: bool, name: str) -> None:
    """Draws the rounds of the first --show_rounds sources; into `name`.html, if there is an --output."""
    sources = comparison.sources[: _ROUNDS.value]
    requests = [comparison.build(drafter, [source], i)[0] for i, source in enumerate(sources)]
    path = pathlib.Path(_OUTPUT.value) / f"{name}.html" if _OUTPUT.value and meshes.is_first() else None
    round_trace.show(comparison.console, comparison.target.tokenizer, requests, sampled, path)


def compared(comparison: Comparison, temperature: float) -> tuple[list[Row], list[str]]:
    """Runs both arms at one temperature; returns a row for each K, and the last speculative texts."""
    console, sources = comparison.console, comparison.sources
    console.rule(f"temperature {temperature:g}")
    plain = comparison.run(None, "autoregressive")
    rows: list[Row] = []
    for column in comparison.columns(plain, _NUM_TIMED.value, _REPEATS.value):
        if _ROUNDS.value and not rows and column.drafter is not None:
            show_rounds(comparison, column.drafter, plain.sampled, f"rounds_t{temperature:g}")
        if not plain.sampled and not rows:
            show_rows(console, sources, column.texts, column.arm.generation, column.differing)
        for d in column.differing:
            kind = "near tie" if d.is_near_tie else "[red]ERROR[/red]"
            console.print(f"{kind}: line {d.row + 1}, token {d.position + 1}, top-2 margin {d.margin:.1e}")
        row = {"temperature": temperature, "num_draft": column.name, "rule": options.rule_name()}
        row |= {"batch_size": _BATCH_SIZE.value, "dtype": comparison.target.config.dtype, "seed": _SEED.value}
        row |= {**column.row, "compile_s_target_alone": round(plain.first_s, 1)}
        rows.append(row | {"compile_s_speculative": round(column.arm.first_s, 1)})
    return rows, column.texts


def autoregressive(comparison: Comparison, temperature: float) -> tuple[list[Row], list[str]]:
    """Returns the target's text without a draft, and its quality."""
    generation = comparison.run(None, "autoregressive").generation
    texts = compare.texts_of(comparison.target, generation)
    show_rows(comparison.console, comparison.sources, texts)
    row = compare.counts(generation, False, False) | compare.quality(texts, comparison.references)
    return [{"temperature": temperature, **row}], texts


def once(comparison: Comparison, temperature: float) -> tuple[list[Row], list[str]]:
    """Decodes every source once, by the first of --num_draft and --temperature."""
    console, target, draft = comparison.console, comparison.target, comparison.draft
    sources, column = comparison.sources, columns.columns()[0]
    asked = draft or not columns.needs_draft(column) or flags.FLAGS["num_draft"].present
    drafter = columns.drafter(target, draft, column) if asked else None
    journal = pathlib.Path(_OUTPUT.value) / JOURNAL if _OUTPUT.value and jax.process_count() == 1 else None
    if journal is not None:
        console.print(
            f"kept in {journal} until all is done: if killed, the same command goes on", soft_wrap=True
        )
    started, num_tokens = time.perf_counter(), 0

    def report(done: int, so_far: int) -> None:
        nonlocal num_tokens
        num_tokens = so_far
        show(done, so_far)

    with progress.tokens(len(sources), "decoding", console) as show:
        output = api.generate_all(
            target,
            sources,
            batch_size=comparison.batch_size,
            drafter=drafter,
            rule=comparison.rule,
            config=comparison.config,
            truncate=comparison.truncate,
            journal=journal,
            on_progress=report,
        )
    total = output.stats.total()
    row = {"temperature": temperature, "num_draft": column if drafter else 0, "batch_size": _BATCH_SIZE.value}
    row |= {"num_examples": len(sources), "num_tokens": int(total.num_emitted[0])}
    row |= {"tokens_per_target_call": float(total.tau[0]), "num_tokens_of_this_run": num_tokens}
    row |= {"seconds_of_this_run": time.perf_counter() - started, "compile_s": start.compile_seconds()}
    return [row | compare.quality(output.texts, comparison.references)], output.texts


def load(console: Console, mesh: Mesh | None) -> tuple[Model, Model | None]:
    """Loads target and draft; on a mesh, what they will take of each device is printed first."""
    asked = {"target": (_TARGET.value, sharding.T5_RULES), "draft": (_DRAFT.value, meshes.draft_rules())}
    asked = {who: (name, rules) for who, (name, rules) in asked.items() if name}
    started, dtype = time.perf_counter(), _DTYPE.value
    if mesh is not None:
        num_new = {"target": _CALL, "draft": 1}
        meshes.show_memory(
            console,
            mesh,
            [
                (who, convert.read_config(name, dtype), rules, num_new[who])
                for who, (name, rules) in asked.items()
            ],
            batch_size=_BATCH_SIZE.value,
            num_source=MAX_SOURCE_LENGTH,
            num_slots=1 + _MAX_NEW_TOKENS.value + _CALL,
        )
    with console.status("loading"):
        models = {who: specjax.load(name, dtype, mesh, rules) for who, (name, rules) in asked.items()}
    names = ", ".join(f"{who} {measure.num_params(m.params) / 1e6:.2f} M" for who, m in models.items())
    console.print(f"{names} parameters, {results.hardware()}, {time.perf_counter() - started:.1f} s to load")
    return models["target"], models.get("draft")


def main(console: Console) -> None:
    mesh = meshes.join()
    console.quiet = not meshes.is_first()
    lines = read_sources()
    answers, rule = references(lines), options.rule()
    columns.check()
    temperatures = parse.numbers("temperature", _TEMPERATURE.value)
    configs = [options.config(t, _MAX_NEW_TOKENS.value, _SEED.value) for t in temperatures]
    for config in configs:
        config.to_options(1)
    target, draft = load(console, mesh)
    sources = [_PREFIX.value + line for line in lines if line.strip()]
    if len(sources) < len(lines):
        console.print(f"{len(lines)} lines, {len(lines) - len(sources)} of them blank, which stay blank")
    common = console, target, draft, sources, answers, _BATCH_SIZE.value
    comparisons = [Comparison(*common, config, rule, _TRUNCATE.value) for config in configs]
    if not _COMPARE.value:
        rows, texts = once(comparisons[0], temperatures[0])
    elif draft is None and all(map(columns.needs_draft, columns.columns())):
        rows, texts = autoregressive(comparisons[0], temperatures[0])
    else:
        check_vocabularies(target.network.vocabulary, draft and draft.network.vocabulary)
        runs = [compared(*pair) for pair in zip(comparisons, temperatures, strict=True)]
        rows, texts = [row for run, _ in runs for row in run], runs[0][1]
    title = "autoregressive against speculative decoding" if _COMPARE.value else "every source once"
    results.show(console, title, rows)
    if _OUTPUT.value and meshes.is_first():
        results.write(_OUTPUT.value, "generate", rows)
        answers = iter(texts)
        answered = [next(answers).replace("\n", "\\n") if line.strip() else "" for line in lines]
        results.write_text(pathlib.Path(_OUTPUT.value) / "output.txt", "".join(f"{a}\n" for a in answered))
        if not _COMPARE.value:
            (pathlib.Path(_OUTPUT.value) / JOURNAL).unlink(missing_ok=True)
        console.print(f"wrote results.json, table.md and output.txt into {_OUTPUT.value}")


if __name__ == "__main__":
    start.run(main, required=["target"])
