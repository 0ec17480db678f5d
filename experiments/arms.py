"""The same sources through two programs: the target alone, and with a drafter."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from experiments import measure, progress
from specjax import acceptance, analysis, api, decode
from specjax.drafters import BoundDrafter
from specjax.sampling import Sampling
from specjax.types import AcceptanceRule, Generation


def requests(
    target: api.Model, drafter: BoundDrafter | None, sources: Sequence[str], *, batch_size: int,
    sampling: Sampling | None, max_new_tokens: int, seed: int, truncate: bool = False,
    rule: AcceptanceRule = acceptance.speculative,
) -> list[decode.Prepared]:  # fmt: skip
    """One checked request per batch; the last is filled up with copies of the last source.

    A source's seed is `seed` plus its index, whatever the batch size is.
    """
    sources = [*sources, *[sources[-1]] * (-len(sources) % batch_size)]

    def request(first: int) -> decode.Prepared:
        ids, mask = api.encode_sources(target, sources[first : first + batch_size], truncate)
        return decode.prepare(
            target.network,
            target.params,
            ids,
            mask,
            drafter=drafter and drafter.drafter,
            drafter_params=drafter and drafter.params,
            rule=rule,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            seed=np.arange(first, first + batch_size) + seed,
            eos_ids=(target.config.eos_id,),
            pad_id=target.config.pad_id,
            start_id=target.config.start_id,
            num_ids=api.num_ids(target),
        )

    return [request(first) for first in range(0, len(sources), batch_size)]


def decode_one(request: decode.Prepared) -> Generation:
    """Prefill and loop as two programs, so that the loop can be timed alone."""
    program, params, inputs = request
    return decode.jitted_finish(
        program, decode.jitted_run(program, params, decode.jitted_prefill(program, params, **inputs))
    )


def decode_all(batches: Sequence[decode.Prepared], num_rows: int, label: str, console: Console) -> Generation:
    """Decodes every batch, with a progress bar; the first `num_rows` rows in one `Generation`."""
    done = []
    for request in progress.track(batches, len(batches), label, console):
        done.append(jax.device_get(decode_one(request)))
    return jax.tree.map(lambda *rows: np.concatenate(rows)[:num_rows], *done)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Decode-only times of both arms (encoders excluded), measured in turns.

    Attributes:
      plain_ms, speculative_ms: milliseconds a token.
      speedup: plain over speculative, turn by turn.
      costs: the parts of a round.
      predicted: the speed-up that tau and the parts predict.
    """

    plain_ms: measure.Spread
    speculative_ms: measure.Spread
    speedup: measure.Spread
    costs: measure.RoundCosts
    predicted: float


def time_loops(
    plain: Sequence[decode.Prepared], speculative: Sequence[decode.Prepared], repeats: int, console: Console
) -> measure.Spread:
    """The speed-up of one arm over the other, turn by turn: time a token, decode only."""
    _, _, ratios, _ = _turns(plain, speculative, repeats, console)
    return measure.Spread.of(ratios)


def _turns(
    plain: Sequence[decode.Prepared], speculative: Sequence[decode.Prepared], repeats: int, console: Console
) -> tuple[list[float], list[float], list[float], float]:
    """Milliseconds a token of both arms, their ratios, and how many more tokens a round emits."""
    runs = {"plain": _loops(plain), "speculative": _loops(speculative)}
    tokens, rounds = {}, {}
    for name, run in runs.items():
        stats = jax.device_get(run())
        tokens[name] = sum(int(s.num_emitted.sum()) for s in stats)
        rounds[name] = sum(int(s.num_rounds.max()) for s in stats)
    turns = list(progress.track(measure.alternate(runs, repeats), repeats, "timing both in turns", console))
    per_token = {name: [1e3 * turn[name] / tokens[name] for turn in turns] for name in runs}
    ratios = [a / b for a, b in zip(per_token["plain"], per_token["speculative"], strict=True)]
    # A round serves all rows of its batch: tokens per round of one arm over those of the other.
    gain = (tokens["speculative"] / rounds["speculative"]) / (tokens["plain"] / rounds["plain"])
    return per_token["plain"], per_token["speculative"], ratios, gain


def time_arms(
    plain: Sequence[decode.Prepared], speculative: Sequence[decode.Prepared], sampled: bool,
    repeats: int, console: Console,
) -> Timing:  # fmt: skip
    """Times the loops of both arms over the given batches, then the parts of a round."""
    plain_ms, speculative_ms, ratios, gain = _turns(plain, speculative, repeats, console)
    program, params, inputs = speculative[0]
    with console.status("timing the parts of a round (four small programs to compile)"):
        state = decode.jitted_prefill(program, params, **inputs)
        costs = measure.round_costs(program, params, state, sampled)
    return Timing(
        plain_ms=measure.Spread.of(plain_ms),
        speculative_ms=measure.Spread.of(speculative_ms),
        speedup=measure.Spread.of(ratios),
        costs=costs,
        predicted=float(analysis.predicted_speedup(gain, program.max_depth, costs.c, costs.v, costs.o)),
    )


def _loops(batches: Sequence[decode.Prepared]) -> Callable[[], Any]:
    """Runs the loops of all batches from states prefilled here."""
    program, params, _ = batches[0]
    states = [decode.jitted_prefill(program, params, **inputs) for _, _, inputs in batches]
    return lambda: [decode.jitted_run(program, params, state).stats for state in states]
