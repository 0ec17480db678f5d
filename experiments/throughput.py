"""Thousands of sources: rows refilled as they finish, against batches that wait for their slowest row.

  python -m experiments.throughput --flagfile=configs/throughput.flags --data_dir=DATA

Greedy. Both arms are `specjax.api.generate_all`: the same lengths side by side, the same program; with as
many rows refilled together as there are, a batch is fixed. They take turns, and what comes out is
compared with each source decoded alone.
"""

import functools
import pathlib
from typing import Any

from absl import flags
from rich.console import Console

import specjax
from experiments import arms, columns, identity, list_flags, measure, progress, results, start, tasks
from specjax import api, corpus
from specjax.loading import Model
from specjax.request import Request
from specjax.texts import Output

_TARGET = flags.DEFINE_string("target", None, "Target: a Hugging Face directory or hub id.")
_DRAFT = flags.DEFINE_string("draft", None, "Draft model, the same way, where a column needs one.")
_TASK = tasks.define_task()
_SPLIT = flags.DEFINE_string("split", "test", "Which sources.")
_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", None, "Sources, at most.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_list("batch_size", ["32"], "Rows decoded together; a line of the table each.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Limit of a row.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed turns of each arm.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json, table.md and throughput.png.")


def same_as_alone(target: Model, sources: list[str], output: Output, alone: Output) -> dict[str, Any]:
    """How many sources got the tokens that they get alone, and which of the others were near ties."""

    def request_of(row: int) -> tuple[Request, int]:
        (request,) = arms.requests(
            target,
            None,
            [sources[row]],
            batch_size=1,
            sampling=None,
            seed=0,
            truncate=True,
            max_new_tokens=_MAX_NEW_TOKENS.value,
        )
        return request, 0

    found = identity.differences(alone.token_ids, output.token_ids, request_of)
    same, near_ties = identity.counted(found, len(sources))
    return {"identical_to_alone": same, "num_near_ties": near_ties}


def measure_batch(
    console: Console, target: Model, drafter: Any, sources: list[str], batch_size: int, alone: Output
) -> dict[str, Any]:
    """A line of the table: both arms at one batch size."""
    run = functools.partial(
        api.generate_all,
        target,
        sources,
        batch_size=batch_size,
        drafter=drafter,
        truncate=True,
        max_new_tokens=_MAX_NEW_TOKENS.value,
    )
    names = {"fixed": batch_size, "refilled": corpus.eighth(batch_size, target.mesh)}
    outputs: dict[str, Output] = {}
    for name, num_refilled in names.items():
        with progress.tokens(len(sources), f"B = {batch_size}, {name}, warming up", console) as report:
            outputs[name] = run(num_refilled=num_refilled, on_progress=report)
    timed = {
        name: functools.partial(measure.seconds, functools.partial(run, num_refilled=num_refilled))
        for name, num_refilled in names.items()
    }
    turns = list(
        progress.track(measure.alternate(timed, _REPEATS.value), _REPEATS.value, "timing in turns", console)
    )
    total = outputs["refilled"].stats.total()
    num_tokens = int(total.num_emitted[0])
    gain = measure.Spread.of([turn["fixed"] / turn["refilled"] for turn in turns])
    return {
        "batch_size": batch_size,
        "num_refilled": names["refilled"],
        "num_examples": len(sources),
        "num_tokens": num_tokens,
        "tokens_per_target_call": float(total.tau[0]),
        **{
            f"tokens_per_second_{name}": str(measure.Spread.of([num_tokens / turn[name] for turn in turns]))
            for name in names
        },
        **gain.named("speedup"),
        **same_as_alone(target, sources, outputs["refilled"], alone),
    }


def plot(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """How much more comes out of refilled rows, at each batch size."""
    figure, axis = results.subplots(1, 1, figsize=(1.5 + 1.2 * len(rows), 3.5))
    gains = [row["speedup"] for row in rows]
    spread = [[g - row["speedup_low"] for g, row in zip(gains, rows, strict=True)]]
    spread += [[row["speedup_high"] - g for g, row in zip(gains, rows, strict=True)]]
    axis.bar([f"{row['batch_size']}, K = {row['num_draft']}" for row in rows], gains, yerr=spread, capsize=3)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(xlabel="rows together", title="tokens/s: refilled over fixed")
    results.save_figure(figure, path)


def main(argv: list[str]) -> None:
    del argv
    console = start.console()
    target = specjax.load(_TARGET.value)
    draft = specjax.load(_DRAFT.value) if _DRAFT.value else None
    texts = tasks.pairs(_SPLIT.value, _TASK.value)
    sources = [texts[i][0] for i in range(min(_NUM_EXAMPLES.value or len(texts), len(texts)))]
    alone = functools.partial(
        api.generate_all, target, sources, batch_size=1, truncate=True, max_new_tokens=_MAX_NEW_TOKENS.value
    )
    with progress.tokens(len(sources), "each alone", console) as report:
        reference = alone(on_progress=report)
    rows = []
    for column in columns.columns():
        drafter = None if column == "0" else columns.drafter(target, draft, column)
        for batch_size in list_flags.counts("batch_size", _BATCH_SIZE.value):
            row = measure_batch(console, target, drafter, sources, batch_size, reference)
            rows.append({"num_draft": column, **row})
            if _OUTPUT.value:
                results.write(_OUTPUT.value, "throughput", rows)
    results.show(console, f"tokens a second, {results.hardware()}", rows)
    if _OUTPUT.value:
        plot(pathlib.Path(_OUTPUT.value) / "throughput.png", rows)
        console.print(f"wrote results.json, table.md and throughput.png into {_OUTPUT.value}", soft_wrap=True)


if __name__ == "__main__":
    flags.mark_flags_as_required(["target"])
    start.run(main)
