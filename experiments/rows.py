"""What a table says about two arms: counts, times, latency, quality. Names as in results.json."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from experiments import arms, identity, measure
from specjax import analysis, api, metrics, sharding
from specjax.request import Request
from specjax.sampling import is_greedy
from specjax.types import Generation

Row = dict[str, Any]


class Arm(NamedTuple):
    """Checked requests and what came out of them, one row a source.

    Attributes:
      batches: all of one size and one temperature.
      generation: a row for each source, none for what fills up the last batch.
      first_s: seconds of the first call, compilation included; None: not measured.
    """

    batches: Sequence[Request]
    generation: Generation
    first_s: float | None = None

    @property
    def batch_size(self) -> int:
        """Rows of a request."""
        return len(self.batches[0].inputs["limit"])

    @property
    def sampled(self) -> bool:
        """Whether it is not greedy."""
        return not is_greedy(sharding.fetch(self.batches[0].inputs["options"].temperature)).all()


def compare(
    console: Console,
    tokenizer: Any,
    plain: Arm,
    speculative: Arm,
    references: "References | None",
    *,
    has_alpha: bool,
    all_alike: bool,
    num_timed: int,
    repeats: int,
) -> tuple[Row, list[identity.Difference]]:
    """The row of one drafter; beside it where its greedy output differs from the target's.

    Args:
      tokenizer: of the target.
      references: for the quality, or None.
      has_alpha: whether alpha means anything: chains under the token-wise rule.
      all_alike: whether every round drafts K tokens, so that one round's parts stand for all.
      num_timed: sources in a timed turn, at most; whole batches are timed.
      repeats: timed turns; 0 times nothing.
    """
    num_rows, batch_size = len(plain.generation.length), plain.batch_size
    row = counts(speculative.generation, has_alpha, all_alike)
    differing: list[identity.Difference] = []
    if not plain.sampled:
        differing = identity.differences(
            identity.ids(plain.generation),
            identity.ids(speculative.generation),
            lambda i: (plain.batches[i // batch_size], i % batch_size),
        )
        row["identical_to_target"], row["num_near_ties"] = identity.counted(differing, num_rows)
    texts = [api.to_output(tokenizer, arm.generation).texts for arm in (speculative, plain)]
    row |= quality(texts[0], references)
    row |= {"quality_target": quality(texts[1], references).get("quality", "not run")}
    if not repeats:
        return row, differing
    num_requests = -(-num_timed // batch_size)
    both = (arm.batches[:num_requests] for arm in (plain, speculative))
    timing = arms.time_arms(*both, num_rows, repeats, console)
    row |= {"num_timed": min(num_requests * batch_size, num_rows), **times(timing), **end_to_end(timing)}
    if all_alike:
        costs = arms.round_costs(speculative.batches[0], plain.sampled, console)
        row |= parts(timing, costs, speculative.batches[0].program.max_depth)
    return row, differing


def counts(generation: Generation, has_alpha: bool, all_alike: bool = True) -> Row:
    """What the rounds did; see `compare`."""
    total = generation.stats.total()
    row = {
        "num_examples": len(generation.length),
        "num_tokens": int(total.num_emitted[0]),
        "alpha": float(total.alpha[0]) if has_alpha else "not applicable",
        "accepted_per_round": float(total.accepted_per_round[0]),
        "tokens_per_target_call": float(total.tau[0]),
    }
    if all_alike:
        row["tau_by_position"] = analysis.expected_tokens_by_position(total.accepted[0], total.tested[0])
    return row


def times(timing: arms.Timing) -> Row:
    """What a person asks first, in milliseconds a token."""
    return {
        "ms_per_token_target_alone": str(timing.plain_ms),
        "ms_per_token_speculative": str(timing.speculative_ms),
        **timing.speedup.named("speedup"),
    }


def parts(timing: arms.Timing, costs: measure.RoundCosts, max_depth: int) -> Row:
    """The parts of a round in plain steps, and what they predict for the sources that were timed."""
    predicted = float(analysis.predicted_speedup(timing.gain, max_depth, costs.c, costs.v, costs.o))
    return {
        "c": costs.c,
        "draft_cost": costs.c * max_depth,
        "verify_cost": costs.v,
        "overhead": costs.o,
        "tokens_per_round_timed": timing.gain,
        "predicted_speedup": predicted,
        "measured_over_predicted": timing.speedup.median / predicted,
    }


def end_to_end(timing: arms.Timing) -> Row:
    """Encoders included: the speed-up, and the seconds of a request in both arms."""
    plain, speculative = timing.plain_latency_s, timing.speculative_latency_s
    row: Row = {
        "speedup_end_to_end": timing.end_to_end.median,
        "prefill_share": timing.prefill_share,
        "prefill_share_target_alone": timing.plain_prefill_share,
        "share_slower": float((speculative > plain).mean()),
    }
    for percent in (50, 90, 99) if len(plain) >= 100 else (50, 90):
        row[f"latency_p{percent}_s"] = float(np.percentile(speculative, percent))
        row[f"latency_p{percent}_s_target_alone"] = float(np.percentile(plain, percent))
    return row


class References(NamedTuple):
    """What texts are held against, and by which metric: "bleu" or "rouge"."""

    texts: Sequence[str]
    metric: str


def quality(texts: Sequence[str], references: References | None) -> Row:
    """BLEU, or ROUGE-Lsum with the others beside it, and the signature; nothing without references."""
    if references is None:
        return {}
    if references.metric == "rouge":
        scores, signature = metrics.rouge(texts, references.texts)
        return {"quality": scores.pop("rougeLsum"), **scores, "metric": f"ROUGE-Lsum {signature}"}
    score, signature = metrics.bleu(texts, references.texts)
    return {"quality": score, "metric": f"BLEU {signature}"}
