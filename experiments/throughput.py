"""Compares continuous batching with fixed batches, which wait for their slowest row, on thousands of sources.

  python -m experiments.throughput --flagfile=configs/throughput.flags --data_dir=DATA

Decoding is greedy. Both arms are `specjax.generate_all` with the same program and the same order of sources:
a batch whose rows are all refilled together is a fixed batch. The arms take turns, and the outputs are
compared with each source decoded alone.
"""

import functools
from collections.abc import Callable
from typing import Any

from absl import flags
from rich.console import Console

import specjax
from experiments.lib import arms, columns, compare, measure, parse, progress, results, start, tasks
from specjax import GenerationConfig, corpus
from specjax.decode import Request
from specjax.loading import Model
from specjax.texts import Output

_TARGET = flags.DEFINE_string("target", None, "Target: a Hugging Face directory or hub id.")
_DRAFT = flags.DEFINE_string("draft", None, "Draft model, given like --target, if --num_draft needs one.")
_TASK = tasks.define_task()
_SPLIT = flags.DEFINE_string("split", "test", "Split of the task.")
_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", None, "Maximum number of sources.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_list("batch_size", ["32"], "Batch sizes.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Maximum new tokens per row.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed turns of each arm.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json, table.md and throughput.png.")


def same_as_alone(target: Model, sources: list[str], output: Output, alone: Output) -> dict[str, Any]:
    """Returns how many outputs are identical to decoding alone, and how many others are near ties."""
    config = GenerationConfig(max_new_tokens=_MAX_NEW_TOKENS.value)

    def request_of(row: int) -> tuple[Request, int]:
        (request,) = arms.requests(target, None, [sources[row]], batch_size=1, config=config, truncate=True)
        return request, 0

    found = compare.differences(alone.token_ids, output.token_ids, request_of)
    same, near_ties = compare.counted(found, len(sources))
    return {"identical_to_alone": same, "num_near_ties": near_ties}


def measure_batch(
    console: Console,
    generate_all: Callable[..., Output],
    batch_size: int,
    num_refilled: int,
    num_sources: int,
) -> tuple[Output, dict[str, Any]]:
    """Times both arms at one batch size; returns the output of continuous batching, and a row."""
    run = functools.partial(generate_all, batch_size=batch_size)
    names = {"fixed": batch_size, "refilled": num_refilled}
    outputs: dict[str, Output] = {}
    for name, num in names.items():
        with progress.tokens(num_sources, f"B = {batch_size}, {name}, warming up", console) as report:
            outputs[name] = run(num_refilled=num, on_progress=report)
    calls = {name: functools.partial(run, num_refilled=num) for name, num in names.items()}
    timed = {name: functools.partial(measure.seconds, call) for name, call in calls.items()}
    alternating = measure.alternate(timed, _REPEATS.value)
    turns = list(progress.track(alternating, _REPEATS.value, "timing in turns", console))
    total = outputs["refilled"].stats.total()
    num_tokens = int(total.num_emitted[0])
    row: dict[str, Any] = {"batch_size": batch_size, "num_refilled": num_refilled}
    row |= {"num_examples": num_sources, "num_tokens": num_tokens}
    row |= {"tokens_per_target_call": float(total.tau[0])}
    for name in names:
        row[f"tokens_per_second_{name}"] = str(measure.Spread.of([num_tokens / turn[name] for turn in turns]))
    row |= measure.Spread.of([turn["fixed"] / turn["refilled"] for turn in turns]).named("speedup")
    return outputs["refilled"], row


def plot(rows: list[dict[str, Any]]) -> Any:
    """Returns a figure: the speed-up of continuous batching at each batch size."""
    figure, axis = results.subplots(1, 1, figsize=(1.5 + 1.2 * len(rows), 3.5))
    names = [f"{row['batch_size']}, K = {row['num_draft']}" for row in rows]
    gains, low, high = ([row[f"speedup{end}"] for row in rows] for end in ("", "_low", "_high"))
    spread = [
        [g - x for g, x in zip(gains, low, strict=True)],
        [x - g for g, x in zip(gains, high, strict=True)],
    ]
    axis.bar(names, gains, yerr=spread, capsize=3)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(xlabel="batch size", title="tokens/s: continuous over fixed batches")
    return figure


def main(console: Console) -> None:
    target = specjax.load(_TARGET.value)
    draft = specjax.load(_DRAFT.value) if _DRAFT.value else None
    texts = tasks.first(tasks.pairs(_SPLIT.value, _TASK.value), _NUM_EXAMPLES.value)
    sources = [source for source, _ in texts]
    generate_all = functools.partial(
        specjax.generate_all, target, sources, truncate=True, max_new_tokens=_MAX_NEW_TOKENS.value
    )
    with progress.tokens(len(sources), "decoding each source alone", console) as report:
        alone = generate_all(batch_size=1, on_progress=report)
    rows = []
    for column in columns.columns():
        drafter = None if column == "0" else columns.drafter(target, draft, column)
        drafted = functools.partial(generate_all, drafter=drafter)
        for batch_size in parse.counts("batch_size", _BATCH_SIZE.value):
            num_refilled = corpus.default_refill_size(batch_size, target.mesh)
            output, row = measure_batch(console, drafted, batch_size, num_refilled, len(sources))
            rows.append({"num_draft": column, **row, **same_as_alone(target, sources, output, alone)})
            if _OUTPUT.value:
                results.write(_OUTPUT.value, "throughput", rows)
    results.show(console, f"tokens per second, {results.hardware()}", rows)
    results.save(console, _OUTPUT.value, "throughput", rows, lambda: plot(rows))


if __name__ == "__main__":
    start.run(main, required=["target"])
