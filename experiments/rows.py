"""What a table says about two arms: counts, times, latency, quality. Names as in results.json."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import arms, measure
from specjax import analysis, metrics
from specjax.types import Generation, Stats

Row = dict[str, Any]


def counts(generation: Generation, has_alpha: bool = True) -> Row:
    """What the rounds did; alpha is a notion of chains under the token-wise rule."""
    total = generation.stats.total()
    return {
        "num_examples": len(generation.length),
        "num_tokens": int(total.num_emitted[0]),
        "alpha": float(total.alpha[0]) if has_alpha else "not applicable",
        "accepted_per_round": float(total.accepted_per_round[0]),
        "tokens_per_target_call": float(total.tau[0]),
        "accepted_by_position": _by_position(total),
        "tau_by_position": analysis.expected_tokens_by_position(total.accepted[0], total.tested[0]),
    }


def _by_position(total: Stats) -> str:
    """Accepted over tested drafts at each position of a draft."""
    pairs = zip(np.asarray(total.accepted[0]), np.asarray(total.tested[0]), strict=True)
    return " ".join(f"{accepted / tested:.2f}" if tested else "-" for accepted, tested in pairs)


def times(timing: arms.Timing) -> Row:
    """What a person asks first, in milliseconds a token."""
    return {
        "ms_per_token_target_alone": str(timing.plain_ms),
        "ms_per_token_speculative": str(timing.speculative_ms),
        "speedup": timing.speedup.median,
        "speedup_low": timing.speedup.low,
        "speedup_high": timing.speedup.high,
    }


def parts(timing: arms.Timing, costs: measure.RoundCosts, max_depth: int) -> Row:
    """The parts of a round in plain steps, and what they predict."""
    predicted = float(analysis.predicted_speedup(timing.gain, max_depth, costs.c, costs.v, costs.o))
    return {
        "c": costs.c,
        "verify_cost": costs.v,
        "overhead": costs.o,
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
    for percent in (50, 90, 99):
        row[f"latency_p{percent}_s"] = float(np.percentile(speculative, percent))
        row[f"latency_p{percent}_s_target_alone"] = float(np.percentile(plain, percent))
    return row


def quality(texts: Sequence[str], references: Sequence[str] | None) -> Row:
    """BLEU and its signature; nothing without references."""
    if references is None:
        return {}
    score, signature = metrics.bleu(texts, references)
    return {"quality": score, "metric": f"BLEU {signature}"}
