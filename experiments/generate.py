"""Generates text with a target and a drafter, and compares it with autoregressive decoding.

  python -m experiments.generate --flagfile=configs/demo.flags
  python -m experiments.generate --target=DIR --draft=DIR --input=my.txt --output=out
  python -m experiments.generate --target=DIR --input=many.txt --output=out --nocompare --batch_size=32
  python -m experiments.generate --target=DIR --input=news.jsonl.gz --input_field=article --output=out \
    --nocompare --max_source_length=2048
  cat my.txt | python -m experiments.generate --target=DIR --nocompare --temperature=0 > translated.txt

By default the script prints each output and whether it is identical to autoregressive decoding, then a table
that compares both, timed in turns. Without --draft the target decodes autoregressively.

--nocompare decodes each source once with continuous batching (finished rows get the next source), for many
sources; an interrupted run resumes. Without --output it prints the outputs on standard output and everything
else on standard error.

Line n of the outputs belongs to line n, or record n, of --input. --output holds them as output.txt, and as
output.jsonl with line number, id of the record, token ids, log-probabilities, finish reason and tau.
"""

import os
import pathlib
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
    inputs,
    measure,
    meshes,
    options,
    outputs,
    parse,
    progress,
    results,
    round_trace,
    start,
)
from experiments.lib.compare import Comparison, References, Row
from specjax import GenerationConfig, api, corpus, data, decode, loading, sharding
from specjax.decode import Generation
from specjax.loading import Model
from specjax.models import convert
from specjax.texts import MAX_SOURCE_LENGTH, Output, check_vocabularies
from specjax.types import Drafter

_TARGET = flags.DEFINE_string("target", None, "Target: a Hugging Face directory or hub id.")
_DRAFT = flags.DEFINE_string(
    "draft", None, "Draft model, given like --target; without it decoding is autoregressive."
)
_INPUT = flags.DEFINE_string(
    "input",
    "-",
    "Sources: a file of text lines, JSON lines, CSV or TSV, may be gzipped; - is standard input.",
)
_ID_FIELD = flags.DEFINE_string(
    "id_field", "id", "Field of --input to copy to output.jsonl, where a record has it."
)
_REFERENCES = flags.DEFINE_string("references", None, "File with one reference per line, to report quality.")
_REFERENCE_FIELD = flags.DEFINE_string("reference_field", None, "Field of --input that holds the reference.")
_METRIC = flags.DEFINE_enum("metric", "bleu", ["bleu", "rouge"], "Metric for the references.")
_PREFIX = flags.DEFINE_string(
    "prefix", "", 'Prefix of every source, such as "translate English to German: ".'
)
_NUM_EXAMPLES = flags.DEFINE_integer(
    "num_examples", None, "Use only the first this many sources.", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1, "Number of sources decoded together.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_list(
    "temperature", ["0", "1"], "Temperatures to compare; --nocompare uses the first."
)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Maximum new tokens per row.", lower_bound=1)
_GENERATION_CONFIG = flags.DEFINE_string(
    "generation_config",
    None,
    "Directory or hub id with a generation_config.json to take options from; flags given override it.",
)
_MAX_SOURCE_LENGTH = flags.DEFINE_integer(
    "max_source_length", MAX_SOURCE_LENGTH, "Maximum tokens per source.", lower_bound=1
)
_TRUNCATE = flags.DEFINE_bool("truncate", False, "Truncate longer sources instead of raising an error.")
_DTYPE = parse.define_dtype()
_SEED = parse.define_seed()
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed turns of each arm; 0 times nothing.", lower_bound=0)
_NUM_TIMED = flags.DEFINE_integer("num_timed", 16, "Maximum number of sources per timed turn.", lower_bound=1)
_COMPARE = flags.DEFINE_bool("compare", True, "Also decode autoregressively, and time both.")
_SHOW = flags.DEFINE_integer("show", 50, "Number of outputs to print.", lower_bound=0)
_ROUNDS = flags.DEFINE_integer("show_rounds", 0, "Number of sources whose rounds to draw.", lower_bound=0)
_OUTPUT = flags.DEFINE_string(
    "output", None, "Directory for results.json, table.md, output.txt and output.jsonl."
)
_OUTPUT_FORMAT = flags.DEFINE_enum(
    "output_format",
    "lines",
    outputs.FORMATS,
    "Format of the outputs that --nocompare prints without --output.",
)
meshes.define_flags()
JOURNAL = "journal.jsonl"  # the finished outputs of a run with --nocompare
_CALL = 16  # tokens of a target call that the memory estimate before loading allows for


def read_input() -> tuple[list[inputs.Line], list[str]]:
    """Returns the requested lines and their texts; blank ones stay, so that line n answers line n.

    Raises:
      ValueError: no line has text.
    """
    lines = inputs.read(_INPUT.value, _NUM_EXAMPLES.value)
    texts = inputs.texts(_INPUT.value, lines)
    if not any(text.strip() for text in texts):
        raise ValueError(
            f"{inputs.name(_INPUT.value)} must contain text, got blank lines only; give one source per line"
        )
    return lines, texts


def references(lines: Sequence[inputs.Line], texts: Sequence[str]) -> References | None:
    """Returns the references of the lines whose `texts` are not blank; None without references.

    Raises:
      ValueError: both flags are given, or the numbers of lines differ.
    """
    path, field = _REFERENCES.value, _REFERENCE_FIELD.value
    if path and field:
        raise ValueError(
            f"`--reference_field` and `--references` must not both be given, got {field} and {path}"
        )
    if path:
        answers = data.read_lines(path)[: _NUM_EXAMPLES.value]
    elif field:
        answers = inputs.texts(_INPUT.value, lines, field)
    else:
        return None
    if len(texts) != len(answers):
        raise ValueError(
            f"`--references` must have one line for each of {inputs.name(_INPUT.value)} ({len(texts)}), got "
            f"{len(answers)} in {path}"
        )
    answered = [answer for text, answer in zip(texts, answers, strict=True) if text.strip()]
    return References(answered, _METRIC.value)


def show_rows(
    console: Console,
    asked: Sequence[str],
    texts: Sequence[str],
    generation: Generation | None = None,
    differing: Sequence[compare.Difference] = (),
) -> None:
    """Prints sources and outputs; for a speculative arm also whether they are identical, and tau."""
    changed = {difference.row for difference in differing}
    for i, (source, text) in enumerate(zip(asked[: _SHOW.value], texts, strict=False)):
        console.print(f"[dim]{escape(source)}[/dim]\n  [bold]{escape(text)}[/bold]", highlight=False)
        if generation is not None:
            same = "[red]differs from[/red]" if i in changed else "identical to"
            tau = np.asarray(generation.stats.tau)[i]
            counts = f"{generation.length[i]} tokens, {tau:.2f} per target call"
            console.print(f"  {same} autoregressive decoding, {counts}", style="dim")
    if 0 < _SHOW.value < len(asked):
        console.print(f"... and {len(asked) - _SHOW.value} more")


def show_rounds(comparison: Comparison, drafter: Drafter, sampled: bool, name: str) -> None:
    """Draws the rounds of the first --show_rounds sources, also into `name`.svg in --output."""
    first = comparison.sources[: _ROUNDS.value]
    requests = [comparison.build(drafter, [source], i)[0] for i, source in enumerate(first)]
    path = pathlib.Path(_OUTPUT.value) / f"{name}.svg" if _OUTPUT.value and meshes.is_first() else None
    round_trace.show(comparison.console, comparison.target.tokenizer, requests, sampled, path)


def compared(comparison: Comparison, temperature: float) -> tuple[list[Row], Output]:
    """Runs both arms at one temperature; returns a row per drafter, and the last speculative outputs."""
    console = comparison.console
    console.rule(f"temperature {temperature:g}")
    baseline = comparison.run(None, "autoregressive")
    rows: list[Row] = []
    for column in comparison.columns(baseline, _NUM_TIMED.value, _REPEATS.value):
        if _ROUNDS.value and not rows and column.drafter is not None:
            show_rounds(comparison, column.drafter, baseline.sampled, f"rounds_t{temperature:g}")
        if not baseline.sampled and not rows:
            show_rows(console, comparison.sources, column.texts, column.arm.generation, column.differing)
        for d in column.differing:
            kind = "near tie" if d.is_near_tie else "[red]ERROR[/red]"
            console.print(f"{kind}: line {d.row + 1}, token {d.position + 1}, top-2 margin {d.margin:.1e}")
        row = {"temperature": temperature, "num_draft": column.name, "rule": options.rule_name()}
        row |= {"batch_size": _BATCH_SIZE.value, "dtype": comparison.target.config.dtype, "seed": _SEED.value}
        row |= {**column.row, "compile_s_autoregressive": round(baseline.first_s, 1)}
        rows.append(row | {"compile_s_speculative": round(column.arm.first_s, 1)})
    return rows, api.to_output(comparison.target.tokenizer, column.arm.generation)


def autoregressive(comparison: Comparison, temperature: float) -> tuple[list[Row], Output]:
    """Returns the outputs of autoregressive decoding, and their quality."""
    generation = comparison.run(None, "autoregressive").generation
    output = api.to_output(comparison.target.tokenizer, generation)
    show_rows(comparison.console, comparison.sources, output.texts)
    row = compare.counts(generation, False, False) | compare.quality(output.texts, comparison.references)
    return [{"temperature": temperature, **row}], output


def once(comparison: Comparison, temperature: float) -> tuple[list[Row], Output]:
    """Decodes every source once, with the first of --num_draft and --temperature."""
    console, target, draft = comparison.console, comparison.target, comparison.draft
    total, column = len(comparison.sources), columns.columns()[0]
    asked = draft or not columns.needs_draft(column) or flags.FLAGS["num_draft"].present
    drafter = columns.drafter(target, draft, column) if asked else None
    journal = pathlib.Path(_OUTPUT.value) / JOURNAL if _OUTPUT.value and jax.process_count() == 1 else None
    if journal is not None:
        console.print(
            f"finished outputs are in {journal}; if interrupted, run the same command to resume",
            soft_wrap=True,
        )
    started, num_done, num_tokens = time.perf_counter(), 0, 0

    def report(done: int, so_far: int) -> None:
        nonlocal num_done, num_tokens
        num_done, num_tokens = done, so_far
        show(done, so_far)

    try:
        with progress.tokens(total, "decoding", console) as show:
            output = api.generate_all(
                target,
                comparison.sources,
                batch_size=comparison.batch_size,
                drafter=drafter,
                rule=comparison.rule,
                config=comparison.config,
                truncate=comparison.truncate,
                journal=journal,
                on_progress=report,
            )
    except KeyboardInterrupt as interrupt:
        kept = f"{num_done} of {total} outputs are kept in {journal}; run the same command to resume"
        lost = f"{num_done} of {total} outputs are lost; --output=DIRECTORY would keep them"
        raise KeyboardInterrupt(kept if journal is not None else lost) from interrupt
    stats = output.stats.total()
    row = {"temperature": temperature, "num_draft": column if drafter else 0, "batch_size": _BATCH_SIZE.value}
    row |= {"num_examples": total, "num_tokens": int(stats.num_emitted[0])}
    row |= {"tokens_per_target_call": float(stats.tau[0]), "num_tokens_of_this_run": num_tokens}
    row |= {"seconds_of_this_run": time.perf_counter() - started, "compile_s": start.compile_seconds()}
    return [row | compare.quality(output.texts, comparison.references)], output


def asked_models() -> dict[str, tuple[str, sharding.Rules]]:
    """Returns the name and partition rules of --target, and of --draft if given."""
    asked = {"target": (_TARGET.value, sharding.T5_RULES), "draft": (_DRAFT.value, meshes.draft_rules())}
    return {who: (name, rules) for who, (name, rules) in asked.items() if name}


def check_before_loading(
    console: Console, mesh: Mesh | None, lines: Sequence[inputs.Line], texts: Sequence[str], limit: int
) -> None:
    """Checks lengths of sources and memory, and prints the memory that models and long sources will take.

    Args:
      lines, texts: the lines that are not blank, and their texts.
      limit: maximum new tokens per row.

    Raises:
      ValueError: a source is too long, or sources and `limit` tokens exceed the memory.
    """
    asked, rows = asked_models(), _BATCH_SIZE.value
    start.note_hub(console, [name for name, _ in asked.values()])
    configs = {who: convert.read_config(name, _DTYPE.value) for who, (name, _) in asked.items()}
    lengths = [len(ids) for ids in loading.load_tokenizer(_TARGET.value)(texts, verbose=False).input_ids]
    longest = max(lengths)
    if _TRUNCATE.value:
        longest = min(longest, _MAX_SOURCE_LENGTH.value)
    else:
        remedy = f"give --max_source_length={longest}, or --truncate to truncate them"
        inputs.check_lengths(_INPUT.value, lines, lengths, _MAX_SOURCE_LENGTH.value, remedy)
    config, (_, rules) = configs["target"], asked["target"]
    small = mesh or sharding.make_mesh(1, 1)
    decode.check_memory(loading.outline(config, small, rules).network, rows, longest, limit)
    if longest > MAX_SOURCE_LENGTH:
        together = rows if _COMPARE.value else corpus.default_refill_size(rows, mesh)
        meshes.show_source_memory(console, config, small, rows, together, data.source_buckets(longest)[-1])
    if mesh is not None:
        num_new = {"target": _CALL, "draft": 1}
        meshes.show_memory(
            console,
            mesh,
            [(who, configs[who], rules, num_new[who]) for who, (_, rules) in asked.items()],
            batch_size=rows,
            num_source=max(longest, MAX_SOURCE_LENGTH),
            num_slots=1 + limit + _CALL,
        )


def load(console: Console, mesh: Mesh | None) -> tuple[Model, Model | None]:
    """Returns target and draft, loaded onto the mesh."""
    started = time.perf_counter()
    with console.status("loading"):
        models = {
            who: specjax.load(name, _DTYPE.value, mesh, rules, _MAX_SOURCE_LENGTH.value)
            for who, (name, rules) in asked_models().items()
        }
    names = ", ".join(f"{who} {measure.num_params(m.params) / 1e6:.2f} M" for who, m in models.items())
    console.print(f"{names} parameters, {results.hardware()}, {time.perf_counter() - started:.1f} s to load")
    return models["target"], models.get("draft")


def requested() -> tuple[list[float], list[GenerationConfig]]:
    """Returns the temperatures, and the configuration for each.

    Raises:
      ValueError: an option is out of range, or is supported with --nocompare only.
    """
    name, given = _GENERATION_CONFIG.value, flags.FLAGS
    base = GenerationConfig.from_pretrained(name) if name else None
    temperatures, limit = parse.numbers("temperature", _TEMPERATURE.value), _MAX_NEW_TOKENS.value
    if base is not None and not given["temperature"].present:
        temperatures = [base.temperature]
    if base is not None and not given["max_new_tokens"].present:
        limit = base.max_new_tokens
    configs = [options.config(t, limit, _SEED.value, base) for t in temperatures]
    for config in configs:
        config.to_options(1)
    if configs[0].stop_strings and _COMPARE.value:
        raise ValueError(
            f"stop strings of --generation_config={name} are supported with --nocompare only; add it"
        )
    return temperatures, configs


def main(console: Console) -> None:
    mesh = meshes.join()
    prints_outputs = not (_COMPARE.value or _OUTPUT.value)
    if prints_outputs:
        console = start.console(stderr=True)
    console.quiet = not meshes.is_first()
    lines, texts = read_input()
    answers, rule = references(lines, texts), options.rule()
    columns.check()
    temperatures, configs = requested()
    has_source = [bool(text.strip()) for text in texts]
    asked = [_PREFIX.value + text for text, is_asked in zip(texts, has_source, strict=True) if is_asked]
    of = [line for line, is_asked in zip(lines, has_source, strict=True) if is_asked]
    check_before_loading(console, mesh, of, asked, configs[0].max_new_tokens)
    target, draft = load(console, mesh)
    if len(asked) < len(lines):
        unscored = "" if answers is None else ", which do not count in the quality"
        console.print(
            f"{len(lines) - len(asked)} of {len(lines)} sources are blank; so are their outputs{unscored}"
        )
    common = console, target, draft, asked, answers, _BATCH_SIZE.value
    comparisons = [Comparison(*common, config, rule, _TRUNCATE.value) for config in configs]
    if not _COMPARE.value:
        rows, output = once(comparisons[0], temperatures[0])
    elif draft is None and all(map(columns.needs_draft, columns.columns())):
        rows, output = autoregressive(comparisons[0], temperatures[0])
    else:
        check_vocabularies(target.network.vocabulary, draft and draft.network.vocabulary)
        rows, first = [], []
        for comparison, temperature in zip(comparisons, temperatures, strict=True):
            found_rows, found_output = compared(comparison, temperature)
            rows, first = rows + found_rows, first or [found_output]
            if _OUTPUT.value and meshes.is_first():
                results.write(_OUTPUT.value, "generate", rows)
        (output,) = first
    found = outputs.records(lines, _ID_FIELD.value, has_source, output)
    title = "autoregressive against speculative decoding" if _COMPARE.value else "each source decoded once"
    # Files first: the reader of the console may have left.
    if _OUTPUT.value and meshes.is_first():
        results.write(_OUTPUT.value, "generate", rows)
        outputs.write(pathlib.Path(_OUTPUT.value), found)
        if not _COMPARE.value:
            (pathlib.Path(_OUTPUT.value) / JOURNAL).unlink(missing_ok=True)
    elif prints_outputs and meshes.is_first():
        outputs.show(found, _OUTPUT_FORMAT.value)
    results.show(console, title, rows)
    if _OUTPUT.value:
        console.print(f"wrote results.json, table.md, output.txt and output.jsonl into {_OUTPUT.value}")


if __name__ == "__main__":
    start.run(main, required=["target"])
