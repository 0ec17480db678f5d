"""The main job: text in, the target's text out, faster; both runs side by side.

  python -m experiments.generate --flagfile=configs/demo.flags
  python -m experiments.generate --target=DIR --draft=DIR --input=my.txt --output=out
  python -m experiments.generate --target=DIR --input=many.txt --output=out --nocompare --batch_size=32

Prints every translation and whether it is the target's own, then one table: the target alone
against speculative decoding, measured in turns. Without --draft only the target runs. With --nocompare
each source is decoded once, thousands of them: rows that finish get the next source, and a run that was
killed goes on where it was.
"""

import functools
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
from experiments import (
    arms,
    columns,
    dtypes,
    hosts,
    list_flags,
    measure,
    meshes,
    options,
    progress,
    results,
    round_trace,
    side_by_side,
    start,
)
from experiments import rows as rows_lib
from specjax import api, data, sampling, sharding
from specjax.drafters import BoundDrafter
from specjax.loading import Model
from specjax.models import convert
from specjax.request import Request
from specjax.texts import MAX_SOURCE_LENGTH, check_tokenizers
from specjax.types import Generation

_TARGET = flags.DEFINE_string("target", None, "Target: a Hugging Face directory or hub id.")
_DRAFT = flags.DEFINE_string("draft", None, "Draft model, the same way; none: the target alone.")
_INPUT = flags.DEFINE_string("input", "-", "File with one source a line (.gz too); - reads standard input.")
_REFERENCES = flags.DEFINE_string("references", None, "File with one reference a line: quality is reported.")
_METRIC = flags.DEFINE_enum("metric", "bleu", ["bleu", "rouge"], "Which, of --references.")
_PREFIX = flags.DEFINE_string("prefix", "", 'Put before every source: "translate English to German: ".')
_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", None, "Only the first so many sources.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1, "Sources decoded together.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_list("temperature", ["0", "1"], "A column each.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Limit of a row.", lower_bound=1)
_TRUNCATE = flags.DEFINE_bool("truncate", False, "Cut sources that are too long instead of refusing them.")
_SEED = flags.DEFINE_integer("seed", 0, "Of everything drawn.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed turns of each arm; 0 measures nothing.", lower_bound=0)
_NUM_TIMED = flags.DEFINE_integer("num_timed", 16, "Sources in a timed turn, at most.", lower_bound=1)
_COMPARE = flags.DEFINE_bool("compare", True, "Run the target alone as well, and measure both.")
_SHOW = flags.DEFINE_integer("show", 50, "Translations printed.", lower_bound=0)
_ROUNDS = flags.DEFINE_integer(
    "show_rounds", 0, "Sentences whose rounds are drawn; rounds.html in --output.", lower_bound=0
)
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json, table.md and output.txt.")
JOURNAL = "journal.jsonl"  # what is done of a run with --nocompare
_CALL = 16  # tokens of a target call that the memory said before loading has room for


@functools.cache
def read_sources() -> list[str]:
    """The lines asked for; blank ones stay, so that line n of the output answers line n.

    Raises:
      ValueError: there is no text.
    """
    lines = data.split_lines(sys.stdin.read()) if _INPUT.value == "-" else data.read_lines(_INPUT.value)
    lines = lines[: _NUM_EXAMPLES.value]
    if not any(line.strip() for line in lines):
        raise ValueError(f"--input={_INPUT.value}: there is no text in it; give one source a line")
    return lines


def build(
    target: Model, drafter: BoundDrafter | None, sources: Sequence[str], temperature: float, seed: int = 0
) -> list[Request]:
    """The batches of one arm; `seed` is added to --seed."""
    return arms.requests(
        target,
        drafter,
        sources,
        batch_size=_BATCH_SIZE.value,
        sampling=options.sampling(temperature),
        rule=options.rule(),
        max_new_tokens=_MAX_NEW_TOKENS.value,
        seed=_SEED.value + seed,
        truncate=_TRUNCATE.value,
    )


def run_arm(batches: list[Request], name: str, num_rows: int, console: Console) -> rows_lib.Arm:
    """Compiles, then decodes all."""
    with console.status(f"compiling: {name}"):
        first_s = measure.seconds(lambda: arms.decode_one(batches[0]))
    console.print(f"{name}: first call, compilation included, {first_s:.1f} s")
    return rows_lib.Arm(batches, arms.decode_all(batches, num_rows, name, console), first_s)


def show_rows(
    console: Console,
    sources: Sequence[str],
    texts: Sequence[str],
    generation: Generation,
    differing: set[int],
) -> None:
    """Prints source and translation, whether it is the target's own, and tokens per target call."""
    tau = np.asarray(generation.stats.tau)
    for i, source in enumerate(sources[: _SHOW.value]):
        same = (
            "[red]differs from the target alone[/red]" if i in differing else "identical to the target alone"
        )
        console.print(f"[dim]{escape(source)}[/dim]\n  [bold]{escape(texts[i])}[/bold]", highlight=False)
        console.print(f"  {same}, {generation.length[i]} tokens, {tau[i]:.2f} a target call", style="dim")
    if 0 < _SHOW.value < len(sources):
        console.print(f"... and {len(sources) - _SHOW.value} more")


def show_rounds(
    console: Console, target: Model, drafter: BoundDrafter, sources: Sequence[str], temperature: float
) -> None:
    """Draws the rounds of the first --show_rounds sources."""
    shown = enumerate(sources[: _ROUNDS.value])
    requests = [build(target, drafter, [source], temperature, i)[0] for i, source in shown]
    first = _OUTPUT.value and hosts.is_first()
    path = pathlib.Path(_OUTPUT.value) / f"rounds_t{temperature:g}.html" if first else None
    sampled = not sampling.is_greedy(temperature)
    round_trace.show(console, target.tokenizer, requests, sampled, path)


def references() -> rows_lib.References | None:
    """--references of the lines that have a source, or nothing.

    Raises:
      ValueError: not one for each line of --input.
    """
    if not _REFERENCES.value:
        return None
    answers = [answer for line, answer in zip(*_aligned(), strict=True) if line.strip()]
    return rows_lib.References(answers, _METRIC.value)


@functools.cache
def _aligned() -> tuple[list[str], list[str]]:
    lines, answers = read_sources(), data.read_lines(_REFERENCES.value)[: _NUM_EXAMPLES.value]
    if len(lines) != len(answers):
        raise ValueError(
            f"--references={_REFERENCES.value} has {len(answers)} lines, --input={_INPUT.value} has "
            f"{len(lines)}: line n of one must answer line n of the other"
        )
    return lines, answers


def compare(
    console: Console, target: Model, draft: Model | None, sources: list[str], temperature: float
) -> tuple[list[dict[str, object]], list[str]]:
    """Both arms at one temperature: a row of the table for each K, and the speculative texts."""
    console.rule(f"temperature {temperature:g}")
    build_at = functools.partial(build, target, temperature=temperature)
    run = functools.partial(run_arm, num_rows=len(sources), console=console)
    plain = run(build_at(None, sources), "target alone")
    rows: list[dict[str, object]] = []
    for column in side_by_side.compare(
        console,
        target,
        draft,
        plain,
        sources,
        references(),
        build=build_at,
        run=run,
        num_timed=_NUM_TIMED.value,
        repeats=_REPEATS.value,
    ):
        spec, differing = column.arm, column.differing
        texts = api.to_output(target.tokenizer, spec.generation).texts
        if _ROUNDS.value and not rows and column.drafter is not None:
            show_rounds(console, target, column.drafter, sources, temperature)
        if not plain.sampled and not rows:
            show_rows(console, sources, texts, spec.generation, {d.row for d in differing})
        for d in differing:
            kind = "near tie" if d.is_near_tie else "[red]ERROR[/red]"
            console.print(f"{kind}: line {d.row + 1}, token {d.position + 1}, top-2 margin {d.margin:.1e}")
        rows.append(
            {
                "temperature": temperature,
                "num_draft": column.name,
                "rule": options.rule_name(),
                "batch_size": _BATCH_SIZE.value,
                "dtype": target.config.dtype,
                "seed": _SEED.value,
                **column.row,
                "compile_s_target_alone": round(plain.first_s, 1),
                "compile_s_speculative": round(spec.first_s, 1),
            }
        )
    return rows, texts


def target_alone(console: Console, target: Model, sources: list[str]) -> tuple[list[dict], list[str]]:
    """Without a draft: the target's text, and its quality."""
    temperature = float(_TEMPERATURE.value[0])
    batches = build(target, None, sources, temperature)
    plain = run_arm(batches, "target alone", len(sources), console).generation
    texts = api.to_output(target.tokenizer, plain).texts
    for source, text in list(zip(sources, texts, strict=True))[: _SHOW.value]:
        console.print(f"[dim]{escape(source)}[/dim]\n  [bold]{escape(text)}[/bold]", highlight=False)
    row = rows_lib.counts(plain, False, False) | rows_lib.quality(texts, references())
    return [{"temperature": temperature, **row}], texts


def once(
    console: Console, target: Model, draft: Model | None, sources: list[str]
) -> tuple[list[dict], list[str]]:
    """Every source once, by the first of --num_draft and --temperature."""
    column, temperature = columns.columns()[0], float(_TEMPERATURE.value[0])
    asked = draft or not columns.needs_draft(column) or flags.FLAGS["num_draft"].present
    drafter = columns.drafter(target, draft, column) if asked else None
    journal = pathlib.Path(_OUTPUT.value) / JOURNAL if _OUTPUT.value and jax.process_count() == 1 else None
    if journal is not None:
        console.print(
            f"kept in {journal} until all is done: if killed, the same command goes on", soft_wrap=True
        )
    started, counts = time.perf_counter(), []

    def report(done: int, num_tokens: int) -> None:
        counts.append(num_tokens)
        show(done, num_tokens)

    with progress.tokens(len(sources), "decoding", console) as show:
        output = api.generate_all(
            target,
            sources,
            batch_size=_BATCH_SIZE.value,
            drafter=drafter,
            rule=options.rule(),
            sampling=options.sampling(temperature),
            max_new_tokens=_MAX_NEW_TOKENS.value,
            seed=_SEED.value,
            truncate=_TRUNCATE.value,
            journal=journal,
            on_progress=report,
        )
    total = output.stats.total()
    row = {
        "temperature": temperature,
        "num_draft": column if drafter else 0,
        "batch_size": _BATCH_SIZE.value,
        "num_examples": len(sources),
        "num_tokens": int(total.num_emitted[0]),
        "tokens_per_target_call": float(total.tau[0]),
        "num_tokens_of_this_run": counts[-1],
        "seconds_of_this_run": time.perf_counter() - started,
        "compile_s": start.compile_seconds(),
        **rows_lib.quality(output.texts, references()),
    }
    return [row], output.texts


def load(console: Console, mesh: Mesh | None) -> tuple[Model, Model | None]:
    """Target and draft; on a mesh, what they will take of each device is said first."""
    wanted = {"target": (_TARGET.value, sharding.T5_RULES), "draft": (_DRAFT.value, hosts.draft_rules())}
    wanted = {who: (name, rules) for who, (name, rules) in wanted.items() if name}
    if mesh is not None:
        shapes = [
            (who, convert.read_config(name, dtypes.dtype()), rules, _CALL if who == "target" else 1)
            for who, (name, rules) in wanted.items()
        ]
        meshes.show_memory(
            console,
            mesh,
            shapes,
            batch_size=_BATCH_SIZE.value,
            num_source=MAX_SOURCE_LENGTH,
            num_slots=1 + _MAX_NEW_TOKENS.value + _CALL,
        )
    with console.status("loading"):
        models = {
            who: specjax.load(name, dtypes.dtype(), mesh, rules) for who, (name, rules) in wanted.items()
        }
    return models["target"], models.get("draft")


def main(argv: list[str]) -> None:
    del argv
    mesh, console = hosts.start()
    lines = read_sources()
    references()
    columns.check()
    options.rule()
    temperatures = list_flags.numbers("temperature", _TEMPERATURE.value)
    for temperature in temperatures:
        options.sampling(temperature).lay_out(1)
    started = time.perf_counter()
    target, draft = load(console, mesh)
    sizes = [measure.num_params(m.params) / 1e6 for m in (target, draft) if m]
    names = ", ".join(f"{n} {size:.2f} M" for n, size in zip(("target", "draft"), sizes, strict=False))
    console.print(f"{names} parameters, {results.hardware()}, {time.perf_counter() - started:.1f} s to load")
    sources = [_PREFIX.value + line for line in lines if line.strip()]
    if len(sources) < len(lines):
        console.print(f"{len(lines)} lines, {len(lines) - len(sources)} of them blank, which stay blank")
    if not _COMPARE.value:
        rows, texts = once(console, target, draft, sources)
    elif draft is None and not columns.some_need_no_draft():
        rows, texts = target_alone(console, target, sources)
    else:
        check_tokenizers(target.tokenizer, draft and draft.tokenizer)
        runs = [compare(console, target, draft, sources, temperature) for temperature in temperatures]
        rows, texts = [row for run, _ in runs for row in run], runs[0][1]
    title = "target alone against speculative decoding" if _COMPARE.value else "every source once"
    results.show(console, title, rows)
    if _OUTPUT.value and hosts.is_first():
        results.write(_OUTPUT.value, "generate", rows)
        answers = iter(texts)
        answered = [next(answers).replace("\n", "\\n") if line.strip() else "" for line in lines]
        results.write_text(pathlib.Path(_OUTPUT.value) / "output.txt", "".join(f"{a}\n" for a in answered))
        if not _COMPARE.value:
            (pathlib.Path(_OUTPUT.value) / JOURNAL).unlink(missing_ok=True)
        console.print(f"wrote results.json, table.md and output.txt into {_OUTPUT.value}")


if __name__ == "__main__":
    flags.mark_flags_as_required(["target"])
    start.run(main)
