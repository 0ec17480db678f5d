"""Measures the speed-up of pairs over temperature, K and batch size, and compares it with its prediction.

  python -m experiments.speedup --flagfile=configs/small_draft_sizes.flags --data_dir=DATA

Every combination of the lists is a row: counts, the parts of a round, predicted and measured speed-up
(decoding only and end to end), latencies and quality of both arms, and two properties that may explain
differences between tasks: the target's entropy and the share of copied tokens. All arms are timed in turns.
"""

import functools
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from rich.console import Console

import specjax
from experiments.lib import arms, columns, options, parse, results, start, tasks
from experiments.lib.compare import Comparison, References
from specjax import analysis, data
from specjax.loading import Model
from specjax.texts import check_vocabularies
from specjax.training import loop

_PAIRS = flags.DEFINE_multi_string(
    "pair",
    [],
    "TASK,TARGET,DRAFT,LIMIT: models are Hugging Face directories or hub ids, LIMIT is new tokens.",
)
_SPLIT = flags.DEFINE_string("split", "test", "Split of the task: validation to choose, test to report.")
_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", 100, "Number of sources.", lower_bound=1)
_NUM_TIMED = flags.DEFINE_integer("num_timed", 32, "Maximum number of sources per timed turn.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_list("temperature", ["0", "1"], "Temperatures.")
_BATCH_SIZE = flags.DEFINE_list("batch_size", ["1"], "Batch sizes.")
_DTYPE = parse.define_dtype()
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed turns of each arm; 0 times nothing.", lower_bound=0)
_SEED = parse.define_seed()
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json, table.md and speedup.png.")


class Pair(NamedTuple):
    """A target and a draft on a task; `limit` is the maximum of new tokens per row."""

    task: str
    target: str
    draft: str
    limit: int

    @classmethod
    def parse(cls, text: str) -> "Pair":
        """Returns one --pair.

        Raises:
          ValueError: not four parts, an unknown task, or an invalid limit.
        """
        parts = text.split(",")
        if len(parts) != 4 or parts[0] not in data.TASKS or not parts[3].isdecimal():
            raise ValueError(f"`--pair` must be TASK,TARGET,DRAFT,LIMIT, got {text}; {cls._remedy(parts)}")
        return cls(*parts[:3], int(parts[3]))

    @staticmethod
    def _remedy(parts: Sequence[str]) -> str:
        if len(parts) != 4:
            return f"give four parts separated by commas, not {len(parts)}"
        if parts[0] not in data.TASKS:
            return f"give a task of {', '.join(sorted(data.TASKS))}"
        return "give the maximum of new tokens as LIMIT"


@functools.cache
def load(name: str) -> Model:
    return specjax.load(name, _DTYPE.value)


@functools.partial(jax.jit, static_argnums=0)
def entropy(module: Any, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the entropy of a model's distributions in nats, `[B, N]`."""
    log_probs = jax.nn.log_softmax(loop.teacher_forced_logits(module, params, batch))
    return -(jnp.exp(log_probs) * log_probs).sum(-1)


def describe(target: Model, baseline: arms.Arm) -> dict[str, float]:
    """Returns the target's entropy, and the share of its output tokens that also occur in the source."""
    entropies, copied = [], []
    tokens, lengths = baseline.generation.tokens, baseline.generation.length
    for first, request in zip(itertools.count(0, baseline.batch_size), baseline.batches, strict=False):
        source, mask = (np.asarray(request.inputs[name]) for name in ("source_ids", "source_mask"))
        padded = np.zeros((len(source), tokens.shape[1]), np.int32)
        rows = tokens[first : first + len(source)]
        padded[: len(rows)] = rows
        batch = {"source_ids": source, "source_mask": mask, "target_ids": padded}
        found = np.asarray(entropy(target.module, target.params, batch))
        for i, length in enumerate(lengths[first : first + len(source)]):
            entropies.append(found[i, :length])
            copied.append(np.isin(rows[i, :length], source[i][mask[i]][:-1]))
    return {
        "target_entropy": float(np.concatenate(entropies).mean()),
        "copied_share": float(np.concatenate(copied).mean()),
    }


def compare(
    console: Console, pair: Pair, texts: Sequence[data.TextPair], temperature: float, batch_size: int
) -> Iterator[dict[str, Any]]:
    """Yields the rows of one pair, temperature and batch size: one for each --num_draft."""
    target, draft = load(pair.target), load(pair.draft)
    check_vocabularies(target.network.vocabulary, draft.network.vocabulary)
    sources, references = zip(*texts, strict=True)
    comparison = Comparison(
        console,
        target,
        draft,
        sources,
        References(references, data.TASKS[pair.task].metric),
        batch_size,
        options.config(temperature, pair.limit, _SEED.value),
        options.rule(),
        truncate=True,
    )
    baseline = comparison.run(None, "autoregressive")
    shared = {"task": pair.task, "target": pair.target, "temperature": temperature}
    shared |= {"batch_size": batch_size, "rule": options.rule_name(), "dtype": target.config.dtype}
    shared |= {"seed": _SEED.value, **describe(target, baseline)}
    for name, drafter, _, _, row, _ in comparison.columns(baseline, _NUM_TIMED.value, _REPEATS.value):
        if name.isdecimal() and "c" in row and row["alpha"] != "not applicable":
            tau = analysis.expected_tokens(row["alpha"], int(name))
            predicted = analysis.predicted_speedup(tau, int(name), row["c"], row["verify_cost"])
            row["predicted_speedup_iid"] = float(predicted)
        has_draft = drafter is not None and drafter.vocabulary is not None
        yield shared | {"draft": pair.draft if has_draft else "none", "num_draft": name} | row
        jax.clear_caches()  # compiled programs hold hundreds of memory maps each, and a process may run out


def labels(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """Returns labels of the fields, among `names`, in which the rows differ."""
    varying = [name for name in names if len({str(row[name]) for row in rows}) > 1] or names[:1]
    short = {"temperature": "T = ", "batch_size": "B = ", "num_draft": "K = "}

    def value(row: dict[str, Any], name: str) -> str:
        shown = f"{row[name]:g}" if isinstance(row[name], float) else row[name]
        if name in ("target", "draft"):
            # As in "captions-draft" in a folder of models, or "captions/draft-hf" of a run.
            shown = "/".join(pathlib.PurePath(shown).parts[-2:])
        return f"{short.get(name, '')}{shown}"

    return [", ".join(value(row, name) for name in varying) for row in rows]


def plot(rows: Sequence[dict[str, Any]]) -> Any:
    """Returns a figure: measured and predicted speed-up, and latencies of both arms, one line per row."""
    from matplotlib import ticker

    figure, (left, right) = results.subplots(1, 2, figsize=(12, 1.5 + 0.45 * len(rows)), sharey=True)
    at = np.arange(len(rows))
    measured, low, high = (np.array([row[f"speedup{end}"] for row in rows]) for end in ("", "_low", "_high"))
    left.barh(at - 0.18, measured, 0.36, xerr=[measured - low, high - measured], capsize=2, label="measured")
    predicted = [row.get("predicted_speedup", np.nan) for row in rows]
    left.barh(at + 0.18, predicted, 0.36, label="predicted from the parts", alpha=0.5)
    left.axvline(1, color="black", linewidth=0.8)
    left.set_yticks(at, labels(rows, ("task", "draft", "temperature", "batch_size", "num_draft")), fontsize=9)
    left.invert_yaxis()
    left.set_title("speed-up over autoregressive decoding, encoder time excluded")
    left.legend(fontsize=8)
    for arm, name, offset, color in (
        ("_autoregressive", "autoregressive", -0.12, "C7"),
        ("", "speculative", 0.12, "C0"),
    ):
        for percent, marker in ((50, "o"), (90, ">")):
            ms = [1e3 * row[f"latency_p{percent}_s{arm}"] for row in rows]
            right.plot(ms, at + offset, marker, color=color, label=f"p{percent}, {name}")
    right.set_xscale("log")
    right.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    right.xaxis.set_major_formatter(ticker.ScalarFormatter())
    right.xaxis.set_minor_formatter(ticker.NullFormatter())
    right.set_title("milliseconds per request, encoder time included")
    right.grid(axis="x", which="both", alpha=0.3)
    right.legend(fontsize=8)
    return figure


def main(console: Console) -> None:
    if not _PAIRS.value:
        raise ValueError("`--pair` must be given; give at least one TASK,TARGET,DRAFT,LIMIT")
    pairs = [Pair.parse(text) for text in _PAIRS.value]
    columns.check()
    temperatures = parse.numbers("temperature", _TEMPERATURE.value)
    grid = list(itertools.product(pairs, temperatures, parse.counts("batch_size", _BATCH_SIZE.value)))
    rows: list[dict[str, Any]] = []
    for i, (pair, temperature, batch_size) in enumerate(grid, 1):
        console.rule(f"{i} of {len(grid)}: {pair.task}, {pair.draft}, T = {temperature:g}, B = {batch_size}")
        texts = tasks.first(tasks.pairs(_SPLIT.value, pair.task), _NUM_EXAMPLES.value)
        for row in compare(console, pair, texts, temperature, batch_size):
            rows.append(row)
            if _OUTPUT.value:
                results.write(_OUTPUT.value, "speedup", rows)
    results.show(console, f"speed-up on {results.hardware()}", rows)
    results.save(console, _OUTPUT.value, "speedup", rows, (lambda: plot(rows)) if _REPEATS.value else None)


if __name__ == "__main__":
    start.run(main)
