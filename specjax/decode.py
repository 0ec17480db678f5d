"""The generation loop and token-level `generate`.

Axes: B rows, K drafts, V vocabulary, T token slots, S source length.

Everything between the prompt and the last token is one XLA program with fixed shapes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import acceptance, draws, rounds, sharding
from specjax import sampling as sampling_lib
from specjax.program import AllParams, LoopState, Program
from specjax.request import Request, prepare
from specjax.rounds import one_round, prefill
from specjax.sampling import Sampling
from specjax.types import AcceptanceRule, Drafter, Generation, Network, Params

OnRound = Callable[[list[list[int]]], None]
# (ids emitted so far, how many of them were there before this round) -> how many to keep, None for all
Stop = Callable[[list[int], int], int | None]


def round_draws(state: LoopState, sampled: bool) -> draws.KeyDraws | None:
    """The keys of the round that comes next; None in the greedy program."""
    return draws.KeyDraws.of_round(state.seeds, state.stats.num_rounds) if sampled else None


def step(program: Program, params: AllParams, state: LoopState, sampled: bool) -> LoopState:
    """`one_round` with this round's keys; `sampled` static: False is the greedy program."""
    return one_round(program, params, state, round_draws(state, sampled))


def run(
    program: Program, params: AllParams, state: LoopState, max_running: jax.typing.ArrayLike = 0
) -> LoopState:
    """Rounds until no more than `max_running` rows run: until every row has ended.

    Greedy batches take a branch of their own, which draws nothing and makes no distribution.
    """

    def loop(sampled: bool, state: LoopState) -> LoopState:
        body = functools.partial(step, program, params, sampled=sampled)
        return jax.lax.while_loop(lambda state: state.running.sum() > max_running, body, state)

    any_sampled = ~sampling_lib.is_greedy(state.context.options.temperature).all()
    return jax.lax.cond(any_sampled, functools.partial(loop, True), functools.partial(loop, False), state)


def finish(program: Program, state: LoopState) -> Generation:
    """Cuts the result out of the loop's state."""
    start = state.context.length - state.stats.num_emitted
    index = start[:, None] + jnp.arange(program.length_bucket)[None, :]
    log_probs = jnp.take_along_axis(state.log_probs, index[..., None], axis=1)
    return Generation(
        tokens=jnp.take_along_axis(state.context.tokens, index, axis=1),
        log_probs=log_probs[..., 0],
        processed_log_probs=log_probs[..., 1],
        length=state.stats.num_emitted,
        finish_reason=state.finish_reason,
        stats=state.stats,
    )


@functools.partial(jax.jit, static_argnums=0)
def jitted_generate(program: Program, params: AllParams, inputs: dict[str, Any]) -> Generation:
    """A request from prefill to result, one compiled program."""
    return finish(program, run(program, params, prefill(program, params, **inputs)))


# The parts of it, compiled one by one: for loops on the host, and for timing.
jitted_prefill = jax.jit(prefill, static_argnums=0)
jitted_run = jax.jit(run, static_argnums=0)
jitted_finish = jax.jit(finish, static_argnums=0)
jitted_step = jax.jit(step, static_argnames=("program", "sampled"))
jitted_end_rows = jax.jit(rounds.end_rows, static_argnums=0)


def _generate_by_rounds(
    program: Program, params: AllParams, inputs: dict[str, Any], on_round: OnRound | None, stop: Stop | None
) -> Generation:
    """`jitted_generate` driven from the host, one jitted round at a time."""
    sampled = bool((~sampling_lib.is_greedy(inputs["options"].temperature)).any())
    state = jitted_prefill(program, params, **inputs)
    while bool(state.running.any()):
        before = state
        state = jitted_step(program, params, state, sampled=sampled)
        if stop is not None:
            state = _apply_stop(program, before, state, stop)
        if on_round is not None:
            tokens, start, end = sharding.fetch(
                (state.context.tokens, before.context.length, state.context.length)
            )
            spans = zip(tokens, start, end, strict=True)
            on_round([row[a:b].tolist() for row, a, b in spans])
    return jitted_finish(program, state)


def _apply_stop(program: Program, before: LoopState, after: LoopState, stop: Stop) -> LoopState:
    """Asks `stop` about the rows that emitted tokens in this round, and ends them where it says."""
    tokens, length, num_before, num_after = sharding.fetch(
        (after.context.tokens, after.context.length, before.stats.num_emitted, after.stats.num_emitted)
    )
    kept, ended = num_after.copy(), np.zeros(len(num_after), bool)
    for row in np.flatnonzero(num_after > num_before):
        emitted = tokens[row, length[row] - num_after[row] : length[row]].tolist()
        end = stop(emitted, int(num_before[row]))
        if end is None:
            continue
        if not num_before[row] < end <= num_after[row]:
            raise ValueError(f"stop returned {end}: give a count in {num_before[row] + 1}..{num_after[row]}")
        kept[row], ended[row] = end, True
    if not ended.any():
        return after
    return jitted_end_rows(program, before, after, kept, ended)


def generate(
    target: Network,
    target_params: Params,
    source_ids: jax.Array | np.ndarray,
    source_mask: jax.Array | np.ndarray,
    *,
    drafter: Drafter | None = None,
    drafter_params: Params = None,
    rule: AcceptanceRule = acceptance.speculative,
    sampling: Sampling | None = None,
    max_new_tokens: jax.typing.ArrayLike = 64,
    seed: jax.typing.ArrayLike,
    prefix: jax.Array | None = None,
    prefix_length: jax.Array | None = None,
    length_bucket: int | None = None,
    eos_ids: Sequence[int] = (1,),
    pad_id: int = 0,
    start_id: int = 0,
    num_ids: int | None = None,
    on_round: OnRound | None = None,
    stop: Stop | None = None,
) -> Generation:
    """Decodes a batch, speculatively when a drafter is given; one compiled program.

    The output has the law of the target alone whatever the drafter is (Leviathan et al. 2023);
    at temperature 0 it is the target's greedy output. May be called under the user's own
    `jax.jit`, with everything static closed over and `length_bucket` given.

    Args:
      target: the target network. Static.
      target_params: its params; they stay usable (nothing of them is donated).
      source_ids: `[B, S] int32`.
      source_mask: `[B, S] bool`, True at real tokens.
      drafter: what proposes tokens; None decodes plainly. Static.
      drafter_params: the drafter's params.
      rule: how drafts are judged where the temperature is above zero (see `acceptance`). Static.
      sampling: how rows choose; None: greedy.
      max_new_tokens: one number or `[B]`, at least 0.
      seed: one integer, from which each row's is made, or `[B]`, one per row.
      prefix: `[B, P] int32` decoder input so far, start token first; None: the start token alone.
      prefix_length: `[B]` in 1..P; None: all of it.
      length_bucket: slots for output, at least `max_new_tokens` (a traced one is cut to it). Static;
        None: the smallest bucket that holds it.
      eos_ids: tokens that end a row. Static.
      pad_id, start_id: as the target was trained with.
      num_ids: ids that exist, where the vocabulary is padded to more rows: the others are never
        emitted, and a draft padded to another size fits. Static. None: all.
      on_round: called after every round with the ids that each row emitted in it; the loop then
        runs on the host, one jitted round at a time. Not under jit.
      stop: called after every round for each row that emitted something, with all its ids and how many
        of them were there before; returns how many to keep if the row ends there, else None. Runs
        on the host as well.

    Returns:
      A `Generation`.

    Raises:
      ValueError: an argument that cannot be used, named with its value and a remedy.
    """
    request = prepare(
        target,
        target_params,
        source_ids,
        source_mask,
        drafter=drafter,
        drafter_params=drafter_params,
        rule=rule,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        seed=seed,
        prefix=prefix,
        prefix_length=prefix_length,
        length_bucket=length_bucket,
        eos_ids=eos_ids,
        pad_id=pad_id,
        start_id=start_id,
        num_ids=num_ids,
    )
    return generate_requested(request, on_round, stop)


def generate_requested(
    request: Request, on_round: OnRound | None = None, stop: Stop | None = None
) -> Generation:
    """`generate`, its arguments checked already."""
    if on_round is None and stop is None:
        return jitted_generate(*request)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(request[1:])):
        raise ValueError("on_round and stop run on the host: leave them out under jit")
    return _generate_by_rounds(*request, on_round, stop)
