"""The one way to measure: times of alternating arms, warm, waited for; the parts of a round; sizes.

Absolute times on a shared machine drift: only ratios within one run are reported as findings.
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
        """Returns the median as `name`, the quartiles as `name`_low and `name`_high, for a row."""
        return {name: self.median, f"{name}_low": self.low, f"{name}_high": self.high}

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def num_params(params: Any) -> int:
    """Returns the numbers in all arrays of `params`."""
    return sum(x.size for x in jax.tree.leaves(params))


def seconds(function: Callable[[], Any]) -> float:
    """Returns the wall time of one call, results waited for."""
    started = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - started


def alternate(timed: Mapping[str, Callable[[], T]], repeats: int) -> Iterator[dict[str, T]]:
    """Yields what each arm reports, `repeats` times; the arms take turns and turns are reversed.

    Call each arm once before, to compile.
    """
    names = list(timed)
    for repeat in range(repeats):
        yield {name: timed[name]() for name in (names if repeat % 2 == 0 else names[::-1])}


# ---- whole requests


AUTOREGRESSIVE, SPECULATIVE = "autoregressive", "speculative"  # the arms, as in results.json


@dataclasses.dataclass(frozen=True)
class Timing:
    """Both arms in turns, request by request, every result waited for. A row is fields of results.json.

    Attributes:
      seconds: of each arm, `[turns, requests, 2]`: prefill (with a draft model two encoders) and loop.
      tokens: that an arm emitted.
      rounds: that served them, a round serving all rows of its batch.
    """

    seconds: dict[str, np.ndarray]
    tokens: dict[str, int]
    rounds: dict[str, int]

    def ms_per_token(self, arm: str, part: slice = slice(1, 2)) -> np.ndarray:
        """Returns `[turns]` of the loop, encoder time excluded; of `part` of the last axis."""
        return 1e3 * self.seconds[arm][:, :, part].sum((1, 2)) / self.tokens[arm]

    def speedup(self, part: slice = slice(1, 2)) -> Spread:
        """Returns autoregressive over speculative time per token, turn by turn."""
        return Spread.of(self.ms_per_token(AUTOREGRESSIVE, part) / self.ms_per_token(SPECULATIVE, part))

    def row(self) -> dict[str, Any]:
        """Returns what a person asks first, in milliseconds a token."""
        both = (AUTOREGRESSIVE, SPECULATIVE)
        ms = {f"ms_per_token_{arm}": str(Spread.of(self.ms_per_token(arm))) for arm in both}
        return ms | self.speedup().named("speedup")

    def latency_row(self) -> dict[str, Any]:
        """Returns, encoder time included, the speed-up and the seconds of a request in both arms."""
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
        """Returns the parts of a round in decoding steps, and what they predict for the sources timed."""
        per_round = {arm: self.tokens[arm] / self.rounds[arm] for arm in self.tokens}
        gain = per_round[SPECULATIVE] / per_round[AUTOREGRESSIVE]
        predicted = float(analysis.predicted_speedup(gain, max_depth, costs.c, costs.v, costs.o))
        row = {"c": costs.c, "draft_cost": costs.c * max_depth, "verify_cost": costs.v, "overhead": costs.o}
        row |= {"tokens_per_round_timed": gain, "predicted_speedup": predicted}
        return row | {"measured_over_predicted": self.speedup().median / predicted}


def time_arms(
    baseline: Sequence[Request], speculative: Sequence[Request], num_rows: int, repeats: int, console: Console
) -> Timing:
    """Times prefill and loop of every request, the arms taking turns.

    Tokens are those of the first `num_rows` rows: the rest fills up the last batch.
    """
    both = {AUTOREGRESSIVE: baseline, SPECULATIVE: speculative}
    counted = {arm: arms.counted(requests, num_rows) for arm, requests in both.items()}  # compiles, too
    timed = {arm: functools.partial(request_seconds, requests) for arm, requests in both.items()}
    turns = list(progress.track(alternate(timed, repeats), repeats, "timing both in turns", console))
    return Timing(
        {arm: np.array([turn[arm] for turn in turns]) for arm in both},
        {arm: int(total.num_emitted[0]) for arm, (total, _) in counted.items()},
        {arm: num_rounds for arm, (_, num_rounds) in counted.items()},
    )


def request_seconds(requests: Sequence[Request]) -> list[tuple[float, float]]:
    """Returns the seconds of prefill and of the loop of each request."""
    found = []
    for program, inputs in requests:
        started = time.perf_counter()
        state = jax.block_until_ready(decode.jitted_prefill(program, **inputs))
        encoded = time.perf_counter()
        jax.block_until_ready(decode.jitted_run(program, state))
        found.append((encoded - started, time.perf_counter() - encoded))
    return found


# ---- the parts of a round

_TIMES = 30  # that a part runs inside one program


class RoundCosts(NamedTuple):
    """The parts of a round, over the time of a decoding step: a target call on one token and its choice.

    Attributes:
      c: one draft step; for a tree, one level of it.
      v: the target call on N + 1 tokens.
      o: everything else.
    """

    c: float
    v: float
    o: float


def round_costs(request: Request, sampled: bool, console: Console, repeats: int = 7) -> RoundCosts:
    """Times the parts of a round on a state in the middle of a generation.

    Each part runs 30 times inside one program, the state put back in place each time; the parts
    alternate, and medians are taken.

    Args:
      request: with a drafter.
      sampled: which of the two programs.
    """
    program, inputs = request
    with console.status("timing the parts of a round (four small programs to compile)"):
        state = decode.jitted_prefill(program, **inputs)
        # A drafter on the target's features has none before the first round; a row that ended drafts nothing.
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
    """Returns v(K) of the target for each K of `num_draft`; no drafter runs. See `round_costs`."""
    program, inputs = request
    state = decode.jitted_prefill(program, **inputs)
    calls = {
        str(k): repeated(functools.partial(verify_again, k + 1), program, state)
        for k in dict.fromkeys(num_draft)
    }
    median = medians({"baseline": _step(program, state, sampled), **calls}, repeats)
    return {k: median[str(k)] / median["baseline"] for k in num_draft}


def medians(parts: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Returns the seconds of one of the 30 times in each part; the parts take turns."""
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
    """Returns a function that runs a round of autoregressive decoding 30 times."""
    counts = jax.tree.map(lambda x: x[:, :0] if x.ndim == 2 else x, state.stats)
    baseline = state.replace(drafter_state=None, stats=counts)
    return repeated(functools.partial(round_again, sampled), program.replace(drafter=None), baseline)


def round_again(sampled: bool, program: Program, state: LoopState) -> LoopState:
    """Runs a whole round; what it committed is taken back, its caches stay as they came out."""
    after = decode.step(program, state, sampled)
    return state.replace(
        context=state.context.replace(tokens=after.context.tokens),
        cache=cache_lib.rollback(after.cache, state.cache.length),
        drafter_state=_taken_back(state.drafter_state, after.drafter_state),
        log_probs=after.log_probs,
        stats=state.stats.replace(num_rounds=after.stats.num_rounds),
    )


def draft_again(sampled: bool, program: Program, state: LoopState) -> LoopState:
    """Runs a drafter's proposal; its counts are put back."""
    assert program.drafter is not None
    keys = decode.round_draws(state, sampled)
    draft, drafter_state = program.drafter.propose(state.drafter_state, state.context, keys, None)
    seeds = state.seeds + draft.tokens.sum().astype(state.seeds.dtype)  # so that nothing is left out
    return state.replace(drafter_state=_taken_back(state.drafter_state, drafter_state), seeds=seeds)


def _taken_back(before: Any, after: Any) -> Any:
    """A drafter's state with its buffers as they came out, and its counts as they were."""
    return jax.tree.map(lambda x, y: x if x.ndim < 2 else y, before, after)


def verify_again(num_new: int, program: Program, state: LoopState) -> LoopState:
    """Runs a target call on `num_new` tokens; the cache is put back."""
    chain = state.context.window(state.context.length - 1, num_new)
    logits, _, cache = program.target.decode(state.cache, chain)
    seeds = state.seeds + logits.argmax(-1).sum().astype(state.seeds.dtype)
    return state.replace(cache=cache_lib.rollback(cache, state.cache.length), seeds=seeds)


# ---- trials: what adaptive lengths are chosen by

NUM_PRICED = 16  # sources of a trial, or one batch
NUM_TRIED = 5  # turns


class Price(NamedTuple):
    """What a drafter's rounds cost and bring on the first sources, over decoding steps.

    Attributes:
      cost: v + K c + o.
      gain: tokens that a round of a batch emits over those of a decoding step; the slowest row counts.
      alpha: accepted over tested drafts; 0 where nothing was drafted.
      num_rows: of a batch.
    """

    cost: float
    gain: float
    alpha: float
    num_rows: int


@dataclasses.dataclass(frozen=True)
class Trial:
    """What drafters cost and bring on the first sources.

    Attributes:
      build: returns the requests of a drafter (None: autoregressive decoding) on those sources.
      sampled: which of the two programs.
    """

    build: Callable[[Drafter | None], list[Request]]
    sampled: bool
    console: Console

    @functools.cached_property
    def _baseline(self) -> tuple[list[Request], float]:
        """Requests of autoregressive decoding, and the tokens of a round."""
        requests = self.build(None)
        return requests, self._count(requests)[0]

    def price(self, drafter: Drafter) -> Price:
        """Returns the price by the parts of a round, timed on the first request."""
        requests = self.build(drafter)
        costs = round_costs(requests[0], self.sampled, self.console)
        # A round without a match is a decoding step, which leaves nothing for the rest: no less than none.
        cost = costs.v + drafter.max_depth * costs.c + max(costs.o, 0.0)
        per_round, alpha = self._count(requests)
        # What is compiled depends on it, so all processes go by the clock of the first.
        pair = multihost_utils.broadcast_one_to_all((cost, per_round / self._baseline[1]))
        return Price(*map(float, pair), alpha, len(requests[0].inputs["limit"]))

    def pays(self, drafter: Drafter) -> bool:
        """Returns whether it is faster than autoregressive decoding in three of four turns and more."""
        requests = self.build(drafter)
        num_rows = len(requests) * len(requests[0].inputs["limit"])
        timing = time_arms(self._baseline[0], requests, num_rows, NUM_TRIED, self.console)
        return bool(multihost_utils.broadcast_one_to_all(timing.speedup().low) > 1)

    @staticmethod
    def _count(requests: Sequence[Request]) -> tuple[float, float]:
        """Returns the tokens a round of a batch, and alpha."""
        total, num_rounds = arms.counted(requests)
        return total.num_emitted[0] / max(num_rounds, 1), float(np.nan_to_num(total.alpha[0]))
