"""The one way to measure: times of alternating arms, warm, waited for; the parts of a round; sizes.

Absolute times on a shared machine drift: only ratios within one run are reported as findings.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from specjax import cache as cache_lib
from specjax import decode
from specjax.program import AllParams, LoopState, Program

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median with the first and the third quartile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        low, median, high = np.percentile(np.asarray(values, float), [25, 50, 75])
        return cls(float(median), float(low), float(high))

    def named(self, name: str) -> dict[str, float]:
        """For a row: the median as `name`, the quartiles as `name`_low and `name`_high."""
        return {name: self.median, f"{name}_low": self.low, f"{name}_high": self.high}

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def num_params(params: Any) -> int:
    """Numbers in all arrays of `params`."""
    return sum(x.size for x in jax.tree.leaves(params))


def seconds(function: Callable[[], Any]) -> float:
    """Wall time of one call, results waited for."""
    started = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - started


def alternate(arms: Mapping[str, Callable[[], T]], repeats: int) -> Iterator[dict[str, T]]:
    """Yields what each arm says it took, `repeats` times; the arms take turns and turns are reversed.

    Call each arm once before, to compile.
    """
    names = list(arms)
    for repeat in range(repeats):
        order = names if repeat % 2 == 0 else names[::-1]
        yield {name: arms[name]() for name in order}


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """The parts of a round, in units of `plain_s`, a round of plain decoding.

    Attributes:
      plain_s: seconds of a plain round: a target call on one token and the choice of the next.
      c: one draft step; for a tree, one level of it.
      v: the target call on N + 1 tokens.
      o: everything else.
    """

    plain_s: float
    c: float
    v: float
    o: float


def round_costs(
    program: Program, params: AllParams, state: LoopState, sampled: bool, repeats: int = 7
) -> RoundCosts:
    """Times the parts of a round on a state in the middle of a generation.

    Each part runs 30 times inside one program, the state put back in place each time; the parts
    alternate, and medians are taken.

    Args:
      program: with a drafter.
      params: of target and drafter.
      state: as `decode.jitted_prefill` returned it.
      sampled: which of the two programs.
    """
    # A drafter on the target's features has none before the first round; a row that ended drafts nothing.
    after = decode.jitted_step(program, params, state, sampled=sampled)
    state = after if bool(after.running.all()) else state
    arms = {
        "plain": _plain(program, params, state, sampled),
        "round": repeated(functools.partial(round_again, program, sampled), params, state),
        "draft": repeated(functools.partial(draft_again, program, sampled), params, state),
        "verify": repeated(functools.partial(verify_again, program, program.num_draft + 1), params, state),
    }
    median = medians(arms, repeats)
    unit, num_steps = median["plain"], program.max_depth
    rest = median["round"] - median["draft"] - median["verify"]
    return RoundCosts(unit, median["draft"] / num_steps / unit, median["verify"] / unit, rest / unit)


def verify_costs(
    program: Program,
    params: AllParams,
    state: LoopState,
    sampled: bool,
    num_draft: Sequence[int],
    repeats: int = 7,
) -> dict[int, float]:
    """v(K) of the target for each K of `num_draft`; the drafter is not run. See `round_costs`."""
    arms = {"plain": _plain(program, params, state, sampled)}
    for k in num_draft:
        arms[str(k)] = repeated(functools.partial(verify_again, program, k + 1), params, state)
    median = medians(arms, repeats)
    return {k: median[str(k)] / median["plain"] for k in num_draft}


_TIMES = 30


def medians(arms: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Seconds of one of the 30 times in each arm; the arms take turns."""
    for arm in arms.values():
        jax.block_until_ready(arm())
    timed = {name: functools.partial(seconds, arm) for name, arm in arms.items()}
    times = list(alternate(timed, repeats))
    return {name: float(np.median([t[name] for t in times])) / _TIMES for name in arms}


def _plain(program: Program, params: AllParams, state: LoopState, sampled: bool) -> Callable[[], Any]:
    """A round of the target alone, repeated."""
    plain = dataclasses.replace(program, drafter=None)
    plain_state = state.replace(
        drafter_state=None, stats=jax.tree.map(lambda x: x[:, :0] if x.ndim == 2 else x, state.stats)
    )
    return repeated(functools.partial(round_again, plain, sampled), params, plain_state)


def repeated(body: Callable, params: AllParams, state: LoopState) -> Callable[[], Any]:
    """Runs `body(params, state) -> state` 30 times in one program."""

    @jax.jit
    def run(params: AllParams, state: LoopState) -> LoopState:
        return jax.lax.fori_loop(0, _TIMES, lambda i, state: body(params, state), state)

    return lambda: run(params, state)


def round_again(program: Program, sampled: bool, params: AllParams, state: LoopState) -> LoopState:
    """A whole round; what it committed is taken back, its caches stay as they came out."""
    after = decode.step(program, params, state, sampled)
    return state.replace(
        context=state.context.replace(tokens=after.context.tokens),
        cache=cache_lib.rollback(after.cache, state.cache.length),
        drafter_state=_taken_back(state.drafter_state, after.drafter_state),
        log_probs=after.log_probs,
        stats=state.stats.replace(num_rounds=after.stats.num_rounds),
    )


def draft_again(program: Program, sampled: bool, params: AllParams, state: LoopState) -> LoopState:
    """A drafter's proposal; its counts are put back."""
    keys = decode.round_draws(state, sampled)
    draft, drafter_state = program.drafter.propose(params.drafter, state.drafter_state, state.context, keys)
    seeds = state.seeds + draft.tokens.sum().astype(state.seeds.dtype)  # so that nothing is left out
    return state.replace(drafter_state=_taken_back(state.drafter_state, drafter_state), seeds=seeds)


def _taken_back(before: Any, after: Any) -> Any:
    """A drafter's state with its buffers as they came out, and its counts as they were."""
    return jax.tree.map(lambda x, y: x if x.ndim < 2 else y, before, after)


def verify_again(program: Program, num_new: int, params: AllParams, state: LoopState) -> LoopState:
    """A target call on `num_new` tokens; the cache is put back."""
    chain = state.context.window(state.context.length - 1, num_new)
    logits, _, cache = program.target.decode(params.target, state.cache, chain)
    seeds = state.seeds + logits.argmax(-1).sum().astype(state.seeds.dtype)
    return state.replace(cache=cache_lib.rollback(cache, state.cache.length), seeds=seeds)
