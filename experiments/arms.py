"""The same sources through two programs: the target alone, and with a drafter."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from experiments import measure, progress
from specjax import acceptance, api, decode, sharding
from specjax.drafters import BoundDrafter
from specjax.loading import Model
from specjax.request import Request
from specjax.sampling import Sampling
from specjax.types import AcceptanceRule, Generation, Stats

T = TypeVar("T")


def requests(
    target: Model,
    drafter: BoundDrafter | None,
    sources: Sequence[str],
    *,
    batch_size: int,
    sampling: Sampling | None,
    max_new_tokens: int,
    seed: int,
    truncate: bool = False,
    rule: AcceptanceRule = acceptance.speculative,
) -> list[Request]:
    """One checked request per batch; the last is filled up with copies of the last source.

    All sources are padded to one width, so that there is one program to compile. A source's seed is
    `seed` plus its index, whatever the batch size is.
    """
    sources = [*sources, *[sources[-1]] * (-len(sources) % batch_size)]
    ids, mask = api.encode_sources(target, sources, truncate)

    def request(first: int) -> Request:
        rows = slice(first, first + batch_size)
        return api.prepare(
            target,
            ids[rows],
            mask[rows],
            drafter=drafter,
            rule=rule,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            seed=np.arange(first, first + batch_size) + seed,
        )

    return [request(first) for first in range(0, len(sources), batch_size)]


def decode_one(request: Request) -> Generation:
    """Prefill and loop as two programs, so that the loop can be timed alone."""
    program, params, inputs = request
    return decode.jitted_finish(
        program, decode.jitted_run(program, params, decode.jitted_prefill(program, params, **inputs))
    )


def decode_all(batches: Sequence[Request], num_rows: int, label: str, console: Console) -> Generation:
    """Decodes every batch, with a progress bar; the first `num_rows` rows in one `Generation`."""
    done = []
    for request in progress.track(batches, len(batches), label, console):
        done.append(sharding.fetch(decode_one(request)))
    return joined(done, num_rows)


def joined(parts: Sequence[T], num_rows: int | None = None) -> T:
    """Pytrees of rows `[B, ...]`, one after the other; of all rows the first `num_rows` (None: all)."""
    return jax.tree.map(lambda *rows: np.concatenate(rows)[:num_rows], *parts)


def counted(requests: Sequence[Request], num_rows: int | None = None) -> tuple[Stats, int]:
    """The sums of the first `num_rows` rows (None: all), and the rounds that served them.

    A round serves all rows of its batch, so the slowest row counts.
    """
    stats = [sharding.fetch(decode_one(request).stats) for request in requests]
    return joined(stats, num_rows).total(), sum(int(s.num_rounds.max()) for s in stats)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Both arms in turns, request by request, every result waited for.

    Attributes:
      plain_ms, speculative_ms: milliseconds a token, decode only (encoders excluded).
      speedup: plain over speculative, decode only, turn by turn.
      end_to_end: the same with the encoders of both models in it.
      plain_latency_s, speculative_latency_s: `[requests]`, encoders included, medians over the turns.
      plain_prefill_share, prefill_share: of an arm's time, what its encoders take (two with a draft model).
      gain: tokens a round of one arm over those of the other, a round serving all rows of its batch.
    """

    plain_ms: measure.Spread
    speculative_ms: measure.Spread
    speedup: measure.Spread
    end_to_end: measure.Spread
    plain_latency_s: np.ndarray
    speculative_latency_s: np.ndarray
    plain_prefill_share: float
    prefill_share: float
    gain: float


def time_arms(
    plain: Sequence[Request], speculative: Sequence[Request], num_rows: int, repeats: int, console: Console
) -> Timing:
    """Times prefill and loop of every request, the arms taking turns.

    Tokens are those of the first `num_rows` rows: the rest fills up the last batch.
    """
    arms = {"plain": plain, "speculative": speculative}
    tokens, rounds = {}, {}
    for name, requests in arms.items():  # compiles, too
        total, rounds[name] = counted(requests, num_rows)
        tokens[name] = int(total.num_emitted[0])
    runs = {name: functools.partial(request_seconds, requests) for name, requests in arms.items()}
    turns = list(progress.track(measure.alternate(runs, repeats), repeats, "timing both in turns", console))
    # [turns, requests, 2]: prefill, loop
    times = {name: np.array([turn[name] for turn in turns]) for name in arms}
    per_token = {name: 1e3 * times[name][:, :, 1].sum(1) / tokens[name] for name in arms}
    whole = {name: times[name].sum((1, 2)) / tokens[name] for name in arms}
    share = {name: float(np.median(t[:, :, 0].sum(1) / t.sum((1, 2)))) for name, t in times.items()}
    latency = {name: np.median(times[name].sum(2), 0) for name in arms}
    return Timing(
        plain_ms=measure.Spread.of(per_token["plain"]),
        speculative_ms=measure.Spread.of(per_token["speculative"]),
        speedup=measure.Spread.of(per_token["plain"] / per_token["speculative"]),
        end_to_end=measure.Spread.of(whole["plain"] / whole["speculative"]),
        plain_latency_s=latency["plain"],
        speculative_latency_s=latency["speculative"],
        plain_prefill_share=share["plain"],
        prefill_share=share["speculative"],
        gain=(tokens["speculative"] / rounds["speculative"]) / (tokens["plain"] / rounds["plain"]),
    )


def request_seconds(requests: Sequence[Request]) -> list[tuple[float, float]]:
    """Seconds of prefill and of the loop of each request."""
    seconds = []
    for program, params, inputs in requests:
        started = time.perf_counter()
        state = jax.block_until_ready(decode.jitted_prefill(program, params, **inputs))
        encoded = time.perf_counter()
        jax.block_until_ready(decode.jitted_run(program, params, state))
        seconds.append((encoded - started, time.perf_counter() - encoded))
    return seconds


NUM_PRICED = 16  # sources of a trial, or one batch
NUM_TRIED = 5  # turns


class Price(NamedTuple):
    """What a drafter's rounds cost and bring on the first sources, over plain steps.

    Attributes:
      cost: v + K c + o.
      gain: tokens that a round of a batch emits over those of a plain step; the slowest row counts.
      alpha: accepted over tested drafts; 0 where nothing was drafted.
      num_rows: of a batch.
    """

    cost: float
    gain: float
    alpha: float
    num_rows: int


class Trial:
    """What drafters cost and bring on the first sources."""

    def __init__(
        self, build: Callable[[BoundDrafter | None], list[Request]], sampled: bool, console: Console
    ):
        """`build` gives the requests of a drafter (None: of the target alone) on those sources."""
        self._build, self._sampled, self._console = build, sampled, console

    @functools.cached_property
    def _plain(self) -> list[Request]:
        return self._build(None)

    @functools.cached_property
    def _plain_per_round(self) -> float:
        return self._count(self._plain)[0]

    def price(self, drafter: BoundDrafter) -> Price:
        """By its parts, timed on the first request."""
        requests = self._build(drafter)
        costs = round_costs(requests[0], self._sampled, self._console)
        # A round without a match is a plain step, which leaves nothing for the rest: no less than none.
        cost = costs.v + drafter.drafter.max_depth * costs.c + max(costs.o, 0.0)
        per_round, alpha = self._count(requests)
        # What is compiled depends on it, so all processes go by the clock of the first.
        pair = multihost_utils.broadcast_one_to_all((cost, per_round / self._plain_per_round))
        return Price(*map(float, pair), alpha, len(requests[0].inputs["limit"]))

    def pays(self, drafter: BoundDrafter) -> bool:
        """Whether it is faster than the target alone on these sources, in three of four turns and more."""
        requests = self._build(drafter)
        num_rows = len(requests) * len(requests[0].inputs["limit"])
        timing = time_arms(self._plain, requests, num_rows, NUM_TRIED, self._console)
        return bool(multihost_utils.broadcast_one_to_all(timing.speedup.low) > 1)

    @staticmethod
    def _count(requests: Sequence[Request]) -> tuple[float, float]:
        """Tokens a round of a batch, and alpha."""
        total, num_rounds = counted(requests)
        return total.num_emitted[0] / max(num_rounds, 1), float(np.nan_to_num(total.alpha[0]))


def round_costs(request: Request, sampled: bool, console: Console) -> measure.RoundCosts:
    """The parts of a round, on a request's own state."""
    program, params, inputs = request
    with console.status("timing the parts of a round (four small programs to compile)"):
        state = decode.jitted_prefill(program, params, **inputs)
        return measure.round_costs(program, params, state, sampled)
