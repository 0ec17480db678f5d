"""Compares drafters with autoregressive decoding, and reports both as fields of results.json."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments.lib import arms, columns, measure
from experiments.lib.arms import Arm
from specjax import GenerationConfig, analysis, metrics, sampling, sharding
from specjax.decode import Generation, Request
from specjax.loading import Model
from specjax.types import AcceptanceRule, Drafter, History

Row = dict[str, Any]


class References(NamedTuple):
    """Reference texts, and the metric to compare with: "bleu" or "rouge"."""

    texts: Sequence[str]
    metric: str


class Column(NamedTuple):
    """The results of a drafter.

    Attributes:
      name: its name in --num_draft.
      drafter: the drafter; None for an adaptive one that does not pay off.
      arm: its requests and their outputs.
      texts: its outputs as text.
      row: its row of the table.
      differing: the greedy outputs that differ from autoregressive decoding.
    """

    name: str
    drafter: Drafter | None
    arm: Arm
    texts: list[str]
    row: Row
    differing: "list[Difference]"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Autoregressive decoding and drafters on the same sources with the same options.

    Attributes:
      draft: the draft model, for drafters that need one.
      references: references of the sources, if any.
      batch_size, config, rule, truncate: options of every request; see `arms.requests`.
    """

    console: Console
    target: Model
    draft: Model | None
    sources: Sequence[str]
    references: References | None
    batch_size: int
    config: GenerationConfig
    rule: AcceptanceRule
    truncate: bool

    def build(self, drafter: Drafter | None, sources: Sequence[str], seed: int = 0) -> list[Request]:
        """Returns requests with a drafter (None: without); `seed` is added to that of the config."""
        config = dataclasses.replace(self.config, seed=(self.config.seed + seed) % 2**32)
        common = dict(batch_size=self.batch_size, rule=self.rule, truncate=self.truncate)
        return arms.requests(self.target, drafter, sources, config=config, **common)

    def run(self, drafter: Drafter | None, name: str) -> Arm:
        """Compiles, then decodes all sources."""
        batches = self.build(drafter, self.sources)
        with self.console.status(f"compiling: {name}"):
            first_s = measure.seconds(lambda: arms.decode_one(batches[0]))
        self.console.print(f"{name}: first call {first_s:.1f} s, compilation included")
        return Arm(batches, arms.decode_all(batches, len(self.sources), name, self.console), first_s)

    def columns(self, baseline: Arm, num_timed: int, repeats: int) -> Iterator[Column]:
        """Yields the results of each drafter of --num_draft.

        Args:
          baseline: the result of `run(None, ...)`.
          num_timed: maximum number of sources per timed turn, rounded up to whole batches.
          repeats: timed turns; 0 times nothing.
        """
        target, console = self.target, self.console
        priced = self.sources[: max(self.batch_size, measure.NUM_PRICED)]
        trial = measure.Trial(lambda drafter: self.build(drafter, priced), baseline.sampled, console)
        baseline_quality = quality(texts_of(target, baseline.generation), self.references)
        num_rows, num_requests = len(self.sources), -(-num_timed // self.batch_size)
        for name in columns.columns():
            drafter = columns.drafter(target, self.draft, name, trial)
            arm, all_alike = self.run(drafter, f"speculative, K = {name}"), columns.all_alike(name)
            has_alpha = columns.has_alpha(name, baseline.sampled, self.rule)
            row = columns.settings(drafter) | counts(arm.generation, has_alpha, all_alike)
            differing: list[Difference] = []
            if baseline.sampled:
                row["identical_to_target"] = "not applicable"
            else:
                differing = differences(
                    ids(baseline.generation),
                    ids(arm.generation),
                    lambda i: (baseline.batches[i // self.batch_size], i % self.batch_size),
                )
                row["identical_to_target"], row["num_near_ties"] = counted(differing, num_rows)
            texts = texts_of(target, arm.generation)
            row |= quality(texts, self.references)
            if baseline_quality:
                row["quality_autoregressive"] = baseline_quality["quality"]
            if repeats:
                both = (one.batches[:num_requests] for one in (baseline, arm))
                timing = measure.time_arms(*both, num_rows, repeats, console)
                row["num_timed"] = min(num_requests * self.batch_size, num_rows)
                row |= {**timing.row(), **timing.latency_row()}
                if all_alike:
                    costs = measure.round_costs(arm.batches[0], baseline.sampled, console)
                    row |= timing.parts_row(costs, arm.batches[0].program.max_depth)
            yield Column(name, drafter, arm, texts, row, differing)


# ---- fields of a row


def counts(generation: Generation, has_alpha: bool, all_alike: bool = True) -> Row:
    """Returns the counts of the rounds; see `columns.has_alpha` and `columns.all_alike`."""
    total = generation.stats.total()
    row: Row = {"num_examples": len(generation.length), "num_tokens": int(total.num_emitted[0])}
    row |= {"alpha": float(total.alpha[0]) if has_alpha else "not applicable"}
    row |= {"accepted_per_round": float(total.accepted_per_round[0])}
    row |= {"tokens_per_target_call": float(total.tau[0])}
    row["accepted_by_position"] = (total.accepted[0] / np.maximum(total.num_rounds, 1)).tolist()
    if all_alike:
        row["tau_by_position"] = analysis.expected_tokens_by_position(total.accepted[0], total.tested[0])
    return row


def quality(texts: Sequence[str], references: References | None) -> Row:
    """Returns BLEU, or ROUGE-Lsum, ROUGE-1 and ROUGE-2, with the signature; empty without references."""
    if references is None:
        return {}
    if references.metric == "rouge":
        scores, signature = metrics.rouge(texts, references.texts)
        return {"quality": scores.pop("rougeLsum"), **scores, "metric": f"ROUGE-Lsum {signature}"}
    score, signature = metrics.bleu(texts, references.texts)
    return {"quality": score, "metric": f"BLEU {signature}"}


def texts_of(target: Model, generation: Generation) -> list[str]:
    """Returns the outputs as text."""
    return target.tokenizer.batch_decode(ids(generation), skip_special_tokens=True)


# ---- differences between greedy runs, and near ties

# In float32 a target call on K + 1 tokens rounds differently from a call on one token. Where the two largest
# logits are closer than this, either may win; any other difference is an error.
NEAR_TIE = 1e-4


class Difference(NamedTuple):
    """A row that differs.

    Attributes:
      row: its index.
      position: position of its first token that differs.
      margin: float32 difference of the target's two largest logits there.
    """

    row: int
    position: int
    margin: float

    @property
    def is_near_tie(self) -> bool:
        return self.margin < NEAR_TIE


def differences(
    baseline: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
    request_of: Callable[[int], tuple[Request, int]],
) -> list[Difference]:
    """Returns the rows of two greedy runs that differ, with the target's margin at each first difference.

    Args:
      baseline: ids of each row, by autoregressive decoding.
      others: ids of each row to compare.
      request_of: maps a row to its autoregressive request, and to its index in that batch.
    """
    found = []
    for row, (ours, theirs) in enumerate(zip(baseline, others, strict=True)):
        pairs = enumerate(itertools.zip_longest(ours, theirs))
        position = next((at for at, (one, other) in pairs if one != other), None)
        if position is not None:
            request, index = request_of(row)
            found.append(Difference(row, position, margin(request, ours[:position], index)))
    return found


def counted(found: Sequence[Difference], num_rows: int) -> tuple[str, int]:
    """Returns how many rows are identical, as text, and how many of the others differ at a near tie."""
    return f"{num_rows - len(found)} of {num_rows}", sum(d.is_near_tie for d in found)


def ids(generation: Generation) -> list[list[int]]:
    """Returns the tokens that each row emitted."""
    return [row[:n].tolist() for row, n in zip(generation.tokens, generation.length, strict=True)]


def margin(request: Request, before: Sequence[int], index: int) -> float:
    """Returns the top-2 margin of the target's adjusted logits after the tokens `before` of row `index`."""
    target, inputs = request.program.target, request.inputs
    # The row is repeated over the batch: a mesh divides the rows.
    rows = np.full(len(inputs["limit"]), index)
    source, mask, prefix = (inputs[k][rows] for k in ("source_ids", "source_mask", "prefix"))
    before = np.broadcast_to(np.asarray(before, np.int32), (len(rows), len(before)))
    tokens = jnp.concatenate([prefix, before], axis=1)
    cache = target.init_cache(target.encode(source, mask), mask, tokens.shape[1])
    logits, _, _ = target.decode(cache, tokens)
    tokens, last, options = sharding.fetch((tokens[:1], logits[:1, -1:], inputs["options"]))
    num_new, length = ([[array.shape[1]]] for array in (before, tokens))
    history = History(jnp.asarray(num_new), jnp.asarray(tokens)[:, None], jnp.asarray(length))
    options = jax.tree.map(lambda x: jnp.asarray(x[index][None]), options)
    best, second = jax.lax.top_k(sampling.adjust_logits(jnp.asarray(last), options, history)[0, 0], 2)[0]
    return float(best - second)
