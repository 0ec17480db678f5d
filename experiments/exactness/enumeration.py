"""Exhaustive enumeration of the output distribution of a drafter and a rule, with the library's own rounds.

Nothing here repeats the algorithm. `round.one_round` runs compiled, as in production, on a network small
enough to follow all outcomes of all draws of a round. Only its draws are not random: the round asks for them
through a callback while it runs. So its draws are discovered one after another: at the first draw without
known outcomes every row is split into one row per possible outcome, and the round starts again. Rows carry
their probability. Their caches are passed from round to round, so a wrong roll-back changes the distribution.

Axes: B rows, K drafts, V vocabulary.
"""

import collections
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental import io_callback

from specjax import decode
from specjax import round as round_lib
from specjax.decode import Request
from specjax.round import LoopState, Program
from specjax.types import Draws

OneRound = Callable[[Program, LoopState, Draws | None], LoopState]
Sequences = dict[tuple[int, ...], float]  # the probability of each emitted sequence

# Enumerated programs run a few times only, so they should compile fast (a third of the time, measured). Drawn
# programs have many rows.
COMPILE_SOON = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
RUN_FAST = {"xla_backend_optimization_level": 2}
NUM_ROWS = 1024  # rows of every call, so that a program is compiled once


class ScriptedDraws(struct.PyTreeNode):
    """Draws (`types.Draws`) whose outcomes come from a script while a compiled round runs."""

    script: "Script" = struct.field(pytree_node=False)

    def accept(self, stream: jax.Array, probability: jax.Array) -> jax.Array:
        """See `types.Draws`."""
        chance = jnp.clip(probability, 0, 1)
        return self._draw(stream, jnp.stack([1 - chance, chance], axis=-1)) == 1

    def choose(self, stream: jax.typing.ArrayLike, weights: jax.Array) -> jax.Array:
        """See `types.Draws`."""
        return self._draw(jnp.asarray(stream)[None], weights[:, None])[:, 0]

    def _draw(self, streams: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns outcomes `[B, K]` by weights `[B, K, outcomes]`."""
        if not weights.shape[1]:
            return jnp.zeros(weights.shape[:2], jnp.int32)
        # As bits: `jax.enable_x64` does not apply in the thread of a callback, which would round them.
        bits = jax.lax.bitcast_convert_type(weights, jnp.uint32)
        draw = functools.partial(self.script.draw, dtype=weights.dtype)
        return io_callback(draw, jax.ShapeDtypeStruct(weights.shape[:2], jnp.int32), streams, bits)


class Script:
    """The draws of one run of a round.

    Attributes:
      outcomes: stream -> outcomes `[B]` of the draws that are known.
      asked: stream -> weights `[B, outcomes]` of the first draw that is not known.
      error: what is wrong with a draw; empty if nothing is.
    """

    def begin(self, outcomes: dict[int, np.ndarray]) -> None:
        """Begins a run."""
        self.outcomes, self.error = outcomes, ""
        self.asked: dict[int, np.ndarray] = {}
        self._drawn: set[int] = set()

    def draw(self, streams: np.ndarray, bits: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Returns outcomes `[B, K]`, a stream per column; zeros for unknown outcomes."""
        streams = np.asarray(streams).tolist()
        weights = np.ascontiguousarray(bits).view(dtype).reshape(len(bits), len(streams), -1)
        for stream in streams:
            if stream in self._drawn:
                self.error = f"stream {stream} is drawn from twice in one round"
            self._drawn.add(stream)
        if not self.asked and not self.outcomes.keys() >= set(streams):
            self.asked = dict(zip(streams, weights.swapaxes(0, 1).copy(), strict=True))
        unknown = np.zeros(len(weights), np.int32)
        return np.stack([self.outcomes.get(stream, unknown) for stream in streams], axis=1)


class Branches(NamedTuple):
    """The rows of a run of a round: one for each state and each outcome of the draws known so far.

    Attributes:
      state: `[B]`, index of the state.
      probability: `[B]`.
      outcomes: stream -> `[B] int32`.
    """

    state: np.ndarray
    probability: np.ndarray
    outcomes: dict[int, np.ndarray]

    def take(self, rows: np.ndarray) -> "Branches":
        """Returns some of the rows."""
        outcomes = {stream: outcome[rows] for stream, outcome in self.outcomes.items()}
        return Branches(self.state[rows], self.probability[rows], outcomes)

    def parts(self) -> list["Branches"]:
        """Returns the rows in parts of at most `NUM_ROWS`."""
        starts = range(0, len(self.state), NUM_ROWS)
        return [self.take(np.arange(start, min(start + NUM_ROWS, len(self.state)))) for start in starts]

    def split(self, asked: dict[int, np.ndarray]) -> "Branches":
        """Returns each row once per outcome with a positive weight in `[B, outcomes]`."""
        rows, of_row = self, np.arange(len(self.state))
        for stream, weights in asked.items():
            chance = weights[of_row].astype(np.float64)
            chance /= chance.sum(1, keepdims=True)
            if not (chance >= 0).all():  # NaN fails as well
                raise ValueError(
                    f"weights of stream {stream} must be a distribution, got negative ones or NaN"
                )
            row, outcome = np.nonzero(chance)
            rows, of_row = rows.take(row), of_row[row]
            rows = rows._replace(probability=rows.probability * chance[row, outcome])
            rows.outcomes[stream] = outcome.astype(np.int32)
        return rows


class Outputs(NamedTuple):
    """The probability of each emitted sequence, and the expected numbers of verified and accepted drafts."""

    probability: Sequences
    num_tested: float
    num_accepted: float


class Rounds:
    """Compiled rounds of three kinds: enumerated, greedy, and drawn.

    Args:
      one_round: `round.one_round`, or a faulty version of it.
    """

    def __init__(self, one_round: OneRound = round_lib.one_round):
        self._script = Script()
        draws = ScriptedDraws(self._script)
        self._sampled = jax.jit(lambda *args: one_round(*args, draws), compiler_options=COMPILE_SOON)
        keyed = lambda program, state: one_round(program, state, decode.round_draws(state, sampled=True))  # noqa: E731
        self._drawn = jax.jit(keyed, compiler_options=RUN_FAST)
        self._greedy = jax.jit(lambda *args: one_round(*args, None), compiler_options=COMPILE_SOON)

    def outputs(self, request: Request, num_tokens: int) -> Outputs:
        """Returns the distribution of the first `num_tokens` emitted tokens.

        Args:
          request: has one row. The sampled program runs, at temperature 0 with one-hot distributions.
          num_tokens: rounds run until every outcome is that long or has ended.

        Raises:
          ValueError: a stream is drawn from twice in a round, or its weights are not a distribution.
        """
        states, probability = first_state(request), np.ones(1)
        outputs: Sequences = collections.defaultdict(float)
        counts = np.zeros(2)
        while len(probability):
            after = list(self._one_round(request.program, states, probability))
            probability = np.concatenate([rows.probability for rows, _ in after])
            before = np.concatenate([rows.state for rows, _ in after])
            new = jax.tree.map(lambda *x: np.concatenate(x), *[state for _, state in after])
            for i, count in enumerate((lambda stats: stats.tested, lambda stats: stats.accepted)):
                counts[i] += probability @ (count(new.stats) - count(states.stats)[before]).sum(1)
            states, probability = _collect(new, probability, num_tokens, outputs)
        return Outputs(dict(outputs), *counts.tolist())

    def _one_round(
        self, program: Program, states: LoopState, probability: np.ndarray
    ) -> Iterator[tuple[Branches, LoopState]]:
        """Yields all possible states after a round, in parts."""
        waiting = Branches(np.arange(len(probability)), probability, {}).parts()
        while waiting:
            rows = waiting.pop()
            num_rows = len(rows.state)
            padded = rows.take(np.resize(np.arange(num_rows), NUM_ROWS))
            self._script.begin(padded.outcomes)
            after = self._sampled(program, jax.tree.map(lambda x, i=padded.state: x[i], states))
            after = jax.tree.map(lambda x, n=num_rows: np.asarray(x)[:n], after)
            if self._script.error:
                raise ValueError(self._script.error)
            if self._script.asked:
                waiting += rows.split(self._script.asked).parts()
            else:
                yield rows, after

    def drawn(self, request: Request, seeds: np.ndarray) -> np.ndarray:
        """Returns ids `[num, bucket]` of one sampled run of a one-row request per seed."""
        state = jax.tree.map(lambda x: np.repeat(x, len(seeds), axis=0), first_state(request))
        state = state.replace(seeds=jnp.asarray(seeds, jnp.uint32))
        while np.any(state.running):
            state = self._drawn(request.program, state)
        return np.asarray(decode.finish(request.program, state).tokens)

    def greedy(self, request: Request) -> list[list[int]]:
        """Returns the tokens that the greedy program emits for each row."""
        state = first_state(request)
        while state.running.any():
            state = jax.tree.map(np.asarray, self._greedy(request.program, state))
        done = decode.finish(request.program, state)
        return [tokens[:length].tolist() for tokens, length in zip(done.tokens, done.length, strict=True)]


def first_state(request: Request) -> LoopState:
    """Returns the state after prefill, in numpy."""
    with jax.disable_jit():
        return jax.tree.map(np.asarray, round_lib.prefill(request.program, **request.inputs))


def _collect(
    states: LoopState, probability: np.ndarray, num_tokens: int, outputs: Sequences
) -> tuple[LoopState, np.ndarray]:
    """Adds finished rows to `outputs`; returns the others, with equal states merged."""
    emitted = states.stats.num_emitted
    done = ~states.running | (emitted >= num_tokens)
    start = states.context.length - emitted
    for row in np.flatnonzero(done):
        tokens = states.context.tokens[row, start[row] :][: min(emitted[row], num_tokens)]
        outputs[tuple(tokens.tolist())] += float(probability[row])
    rest = np.flatnonzero(~done)
    states, probability = jax.tree.map(lambda x: x[rest], states), probability[rest]
    if not len(rest):
        return states, probability
    read = (states.context, states.cache, states.drafter_state, emitted[rest])
    leaves = [np.ascontiguousarray(x).reshape(len(rest), -1).view(np.uint8) for x in jax.tree.leaves(read)]
    raw = np.concatenate([x for x in leaves if x.size], axis=1)
    _, first, inverse = np.unique(raw, axis=0, return_index=True, return_inverse=True)
    merged = np.bincount(inverse.reshape(-1), probability, minlength=len(first))
    return jax.tree.map(lambda x: x[first], states), merged


def largest_error(outputs: Sequences, others: Sequences) -> float:
    """Returns the largest absolute difference in probability between two distributions."""
    return max(abs(outputs.get(key, 0.0) - others.get(key, 0.0)) for key in outputs.keys() | others.keys())


def divergence(outputs: Sequences, others: Sequences) -> float:
    """Returns KL(outputs || others) in nats; infinite if `others` lacks a sequence of `outputs`."""
    if any(outputs[key] > 0 and others.get(key, 0.0) == 0 for key in outputs):
        return float("inf")
    return sum(p * float(np.log(p / others[key])) for key, p in outputs.items() if p > 0)
