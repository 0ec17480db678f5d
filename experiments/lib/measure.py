"""Times arms in alternating turns, and the parts of a round.

Programs are compiled and run once before they are timed, and every result is waited for. Absolute times drift
on a shared machine; only ratios within one run are reported as findings.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from experiments.lib import arms, progress
from specjax import analysis, decode
from specjax import cache as cache_lib
from specjax.decode import Request
from specjax.round import LoopState, Program
from specjax.types import Drafter

T = TypeVar("T")
Body = Callable[[Program, LoopState], LoopState]


class Spread(NamedTuple):
    """Median with the first and the third quartile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Any) -> "Spread":
        low, median, high = np.percentile(np.asarray(values, float), [25, 50, 75])
        return cls(float(median), float(low), float(high))

    def named(self, name: str) -> dict[str, float]:
        """Returns fields for a row: the median as `name`, the quartiles as `name`_low and `name`_high."""
        return {name: self.median, f"{name}_low": self.low, f"{name}_high": self.high}

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def num_params(params: Any) -> int:
    """Returns the number of parameters."""
    return sum(x.size for x in jax.tree.leaves(params))


def seconds(function: Callable[[], Any]) -> float:
    """Returns the wall time of one call, until its results are ready."""
    started = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - started


def alternate(timed: Mapping[str, Callable[[], T]], repeats: int) -> Iterator[dict[str, T]]:
    """Yields the result of each arm, `repeats` times; every other turn has the arms in reverse order.

    Call each arm once before, to compile it.
    """
    names = list(timed)
    for repeat in range(repeats):
        yield {name: timed[name]() for name in (names if repeat % 2 == 0 else names[::-1])}


# ---- whole requests


AUTOREGRESSIVE, SPECULATIVE = "autoregressive", "speculative"  # the arms, as in results.json


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of both arms in turns, per request; the methods that return rows use the fields of results.json.

    Attributes:
      seconds: `[turns, requests, 2]` for each arm: prefill (two encoders with a draft model) and loop.
      tokens: tokens that each arm emitted.
      rounds: rounds that each arm ran; a round serves all rows of its batch.
    """

    seconds: dict[str, np.ndarray]
    tokens: dict[str, int]
    rounds: dict[str, int]

    def ms_per_token(self, arm: str, part: slice = slice(1, 2)) -> np.ndarray:
        """Returns milliseconds per token `[turns]` of `part`, by default the loop (encoder time excluded)."""
        return 1e3 * self.seconds[arm][:, :, part].sum((1, 2)) / self.tokens[arm]

    def speedup(self, part: slice = slice(1, 2)) -> Spread:
        """Returns autoregressive over speculative time per token, by turn."""
        return Spread.of(self.ms_per_token(AUTOREGRESSIVE, part) / self.ms_per_token(SPECULATIVE, part))

    def row(self) -> dict[str, Any]:
        """Returns milliseconds per token of both arms, and the speed-up."""
        both = (AUTOREGRESSIVE, SPECULATIVE)
        ms = {f"ms_per_token_{arm}": str(Spread.of(self.ms_per_token(arm))) for arm in both}
        return ms | self.speedup().named("speedup")

    def latency_row(self) -> dict[str, Any]:
        """Returns speed-up and latencies per request, encoder time included."""
        latency = {arm: np.median(seconds.sum(2), 0) for arm, seconds in self.seconds.items()}
        share = {arm: float(np.median(x[:, :, 0].sum(1) / x.sum((1, 2)))) for arm, x in self.seconds.items()}
        row = {"speedup_end_to_end": self.speedup(slice(None)).median, "prefill_share": share[SPECULATIVE]}
        row |= {f"prefill_share_{AUTOREGRESSIVE}": share[AUTOREGRESSIVE]}
        row |= {"share_slower": float((latency[SPECULATIVE] > latency[AUTOREGRESSIVE]).mean())}
        for percent in (50, 90, 99) if len(latency[AUTOREGRESSIVE]) >= 100 else (50, 90):
            row[f"latency_p{percent}_s"] = float(np.percentile(latency[SPECULATIVE], percent))
            baseline_s = float(np.percentile(latency[AUTOREGRESSIVE], percent))
            row[f"latency_p{percent}_s_{AUTOREGRESSIVE}"] = baseline_s
        return row

    def parts_row(self, costs: "RoundCosts", max_depth: int) -> dict[str, Any]:
        """Returns the parts of a round in decoding steps, and the speed-up that they predict."""
        per_round = {arm: self.tokens[arm] / self.rounds[arm] for arm in self.tokens}
        gain = per_round[SPECULATIVE] / per_round[AUTOREGRESSIVE]
        predicted = float(analysis.predicted_speedup(gain, max_depth, costs.c, costs.v, costs.o))
        row = {"c": costs.c, "draft_cost": costs.c * max_depth, "verify_cost": costs.v, "overhead": costs.o}
        row |= {"tokens_per_round_timed": gain, "predicted_speedup": predicted}
        return row | {"measured_over_predicted": self.speedup().median / predicted}


def time_arms(
    baseline: Sequence[Request], speculative: Sequence[Request], num_rows: int, repeats: int, console: Console
) -> Timing:
    """Times prefill and loop of every request, with both arms in turns.

    Tokens are counted for the first `num_rows` rows; the others fill up the last batch.
    """
    both = {AUTOREGRESSIVE: baseline, SPECULATIVE: speculative}
    counted = {arm: arms.counted(requests, num_rows) for arm, requests in both.items()}  # also compiles
    timed = {arm: functools.partial(request_seconds, requests) for arm, requests in both.items()}
    turns = list(progress.track(alternate(timed, repeats), repeats, "timing both arms in turns", console))
    return Timing(
        {arm: np.array([turn[arm] for turn in turns]) for arm in both},
        {arm: int(total.num_emitted[0]) for arm, (total, _) in counted.items()},
        {arm: num_rounds for arm, (_, num_rounds) in counted.items()},
    )


def request_seconds(requests: Sequence[Request]) -> list[tuple[float, float]]:
    """Returns the seconds of prefill and loop of each request."""
    found = []
    for program, inputs in requests:
        started = time.perf_counter()
        state = jax.block_until_ready(decode.jitted_prefill(program, **inputs))
        encoded = time.perf_counter()
        jax.block_until_ready(decode.jitted_run(program, state))
        found.append((encoded - started, time.perf_counter() - encoded))
    return found


# ---- the parts of a round

_TIMES = 30  # runs of a part in one program


class RoundCosts(NamedTuple):
    """The times of the parts of a round, in decoding steps (a target call on one token and its choice).

    Attributes:
      c: a draft step; for a tree, one level.
      v: the target call on K + 1 tokens.
      o: the rest of the round.
    """

    c: float
    v: float
    o: float


def round_costs(request: Request, sampled: bool, console: Console, repeats: int = 7) -> RoundCosts:
    """Times the parts of a round on a state in the middle of a generation.

    Each part runs 30 times in one program, and the state is restored each time. The parts alternate; medians
    are returned.

    Args:
      request: a request with a drafter.
      sampled: whether to time the sampled program or the greedy one.
    """
    program, inputs = request
    with console.status("timing the parts of a round (four small programs to compile)"):
        state = decode.jitted_prefill(program, **inputs)
        # Before the first round a drafter has no features of the target; a finished row drafts nothing.
        after = decode.jitted_step(program, state, sampled=sampled)
        state = after if bool(after.running.all()) else state
        bodies = {
            "round": functools.partial(round_again, sampled),
            "draft": functools.partial(draft_again, sampled),
            "verify": functools.partial(verify_again, program.num_draft + 1),
        }
        parts = {name: repeated(body, program, state) for name, body in bodies.items()}
        median = medians({"baseline": _step(program, state, sampled), **parts}, repeats)
    unit = median["baseline"]
    rest = median["round"] - median["draft"] - median["verify"]
    return RoundCosts(median["draft"] / program.max_depth / unit, median["verify"] / unit, rest / unit)


def verify_costs(
    request: Request, sampled: bool, num_draft: Sequence[int], repeats: int = 7
) -> dict[int, float]:
    """Returns v(K) of the target for each K of `num_draft`, without a drafter; see `round_costs`."""
    program, inputs = request
    state = decode.jitted_prefill(program, **inputs)
    calls = {
        str(k): repeated(functools.partial(verify_again, k + 1), program, state)
        for k in dict.fromkeys(num_draft)
    }
    median = medians({"baseline": _step(program, state, sampled), **calls}, repeats)
    return {k: median[str(k)] / median["baseline"] for k in num_draft}


def medians(parts: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Returns the median seconds of one run of each part; the parts take turns."""
    for part in parts.values():
        jax.block_until_ready(part())
    timed = {name: functools.partial(seconds, part) for name, part in parts.items()}
    times = list(alternate(timed, repeats))
    return {name: float(np.median([t[name] for t in times])) / _TIMES for name in parts}


def repeated(body: Body, program: Program, state: LoopState) -> Callable[[], LoopState]:
    """Returns a function that runs `body` 30 times in one program."""

    @jax.jit
    def run(program: Program, state: LoopState) -> LoopState:
        return jax.lax.fori_loop(0, _TIMES, lambda i, state: body(program, state), state)

    return functools.partial(run, program, state)


def _step(program: Program, state: LoopState, sampled: bool) -> Callable[[], LoopState]:
    """Returns a function that runs a decoding step 30 times in one program."""
    counts = jax.tree.map(lambda x: x[:, :0] if x.ndim == 2 else x, state.stats)
    baseline = state.replace(drafter_state=None, stats=counts)
    return repeated(functools.partial(round_again, sampled), program.replace(drafter=None), baseline)


def round_again(sampled: bool, program: Program, state: LoopState) -> LoopState:
    """Runs a whole round, then restores lengths and counts; the contents of the caches stay changed."""
    after = decode.step(program, state, sampled)
    return state.replace(
        context=state.context.replace(tokens=after.context.tokens),
        cache=cache_lib.rollback(after.cache, state.cache.length),
        drafter_state=_taken_back(state.drafter_state, after.drafter_state),
        log_probs=after.log_probs,
        stats=state.stats.replace(num_rounds=after.stats.num_rounds),
    )


def draft_again(sampled: bool, program: Program, state: LoopState) -> LoopState:
    """Runs the drafter's proposal, then restores its counts."""
    assert program.drafter is not None
    keys = decode.round_draws(state, sampled)
    draft, drafter_state = program.drafter.propose(state.drafter_state, state.context, keys, None)
    seeds = state.seeds + draft.tokens.sum().astype(state.seeds.dtype)  # so that nothing is left out
    return state.replace(drafter_state=_taken_back(state.drafter_state, drafter_state), seeds=seeds)


def _taken_back(before: Any, after: Any) -> Any:
    """Returns a drafter's state with the buffers of `after` and the counts of `before`."""
    return jax.tree.map(lambda x, y: x if x.ndim < 2 else y, before, after)


def verify_again(num_new: int, program: Program, state: LoopState) -> LoopState:
    """Runs a target call on `num_new` tokens, then restores the length of the cache."""
    chain = state.context.window(state.context.length - 1, num_new)
    logits, _, cache = program.target.decode(state.cache, chain)
    seeds = state.seeds + logits.argmax(-1).sum().astype(state.seeds.dtype)
    return state.replace(cache=cache_lib.rollback(cache, state.cache.length), seeds=seeds)


# ---- trials, by which adaptive lengths are chosen

NUM_PRICED = 16  # sources of a trial, or one batch if that is more
NUM_TRIED = 5  # timed turns of a trial


class Price(NamedTuple):
    """Cost and gain of a drafter's rounds on the first sources.

    Attributes:
      cost: v + K c + o, in decoding steps.
      gain: tokens per round of a batch over those per decoding step.
      alpha: accepted over verified drafts; 0 if nothing was drafted.
      num_rows: batch size.
    """

    cost: float
    gain: float
    alpha: float
    num_rows: int


@dataclasses.dataclass(frozen=True)
class Trial:
    """Measures the cost and gain of drafters on the first sources.

    Attributes:
      build: returns the requests of a drafter (None: autoregressive decoding) on these sources.
      sampled: whether the sampled program runs, or the greedy one.
    """

    build: Callable[[Drafter | None], list[Request]]
    sampled: bool
    console: Console

    @functools.cached_property
    def _baseline(self) -> tuple[list[Request], float]:
        """Requests of autoregressive decoding, and their tokens per round."""
        requests = self.build(None)
        return requests, self._count(requests)[0]

    def price(self, drafter: Drafter) -> Price:
        """Returns the price of a drafter; the parts of a round are timed on the first request."""
        requests = self.build(drafter)
        costs = round_costs(requests[0], self.sampled, self.console)
        # Noise may make o negative, for instance where a round without drafts is a decoding step.
        cost = costs.v + drafter.max_depth * costs.c + max(costs.o, 0.0)
        per_round, alpha = self._count(requests)
        # The compiled program depends on these numbers, so all processes use those of the first.
        pair = multihost_utils.broadcast_one_to_all((cost, per_round / self._baseline[1]))
        return Price(*map(float, pair), alpha, len(requests[0].inputs["limit"]))

    def pays(self, drafter: Drafter) -> bool:
        """Returns whether it is faster than autoregressive decoding in at least three of four turns."""
        requests = self.build(drafter)
        num_rows = len(requests) * len(requests[0].inputs["limit"])
        timing = time_arms(self._baseline[0], requests, num_rows, NUM_TRIED, self.console)
        return bool(multihost_utils.broadcast_one_to_all(timing.speedup().low) > 1)

    @staticmethod
    def _count(requests: Sequence[Request]) -> tuple[float, float]:
        """Returns the tokens per round of a batch, and alpha."""
        total, num_rounds = arms.counted(requests)
        return total.num_emitted[0] / max(num_rounds, 1), float(np.nan_to_num(total.alpha[0]))
