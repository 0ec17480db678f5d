"""The law of a trained pair's first tokens: drawn from the real program, and the target's own.

Axes: V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments import arms, exact_law, sampled_law
from specjax import acceptance, decode, rounds
from specjax.drafters import BoundDrafter
from specjax.loading import Model
from specjax.request import Request
from specjax.sampling import Sampling
from specjax.types import AcceptanceRule

LIMIT = 8  # new tokens of a row: more than the two looked at, so that no draft is cut
MIN_PROBABILITY = 1e-9  # first tokens rarer than this are not followed to a second one


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A target, its draft, and the sources that are decoded."""

    target: Model
    draft: Model
    sources: Sequence[str]

    def request(
        self, source: str, drafter: BoundDrafter | None, rule: AcceptanceRule, sampling: Sampling
    ) -> Request:
        """One row, its source decoded."""
        (request,) = arms.requests(
            self.target,
            drafter,
            [source],
            batch_size=1,
            sampling=sampling,
            max_new_tokens=LIMIT,
            seed=0,
            rule=rule,
        )
        return request

    @functools.cache  # noqa: B019 - a pair lives as long as the experiment
    def laws(self, sampling: Sampling) -> list[np.ndarray]:
        """The target's own law of the first two tokens, of each source; see `Drawn`."""
        plain = functools.partial(self.request, drafter=None, rule=acceptance.speculative, sampling=sampling)
        return [target_law(plain(source), sampling) for source in self.sources]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What was drawn and what should have been.

    Attributes:
      tokens: one array `[num, 2]` a source, in the order of drawing.
      laws: one matrix `[V, V] float64` a source: the probability of a first and a second token; a
        first token that ends the row has all of it at the pad id.
      tau: tokens per target call of the rounds that were run.
    """

    tokens: list[np.ndarray]
    laws: list[np.ndarray]
    tau: float


def draw(
    pair: Pair,
    drafter: BoundDrafter,
    rule: AcceptanceRule,
    sampling: Sampling,
    num: int,
    batch_size: int,
    seed: int,
    track: Callable[[Sequence], Iterable],
) -> Drawn:
    """`num` draws over all sources together: two rounds each, which emit two tokens at least."""
    tokens, emitted, calls = [], 0, 0
    for index, source in enumerate(pair.sources):
        program, params, inputs = pair.request(source, drafter, rule, sampling)
        state = decode.jitted_prefill(program, params, **inputs)
        drawn = []
        first_seed = (seed * len(pair.sources) + index) * num
        for first in track(range(0, num // len(pair.sources), batch_size)):
            seeds = jnp.asarray(first_seed + first + np.arange(batch_size), jnp.uint32)
            after = _two_rounds(program, params, state, seeds)
            drawn.append(np.asarray(after[0]))
            emitted, calls = emitted + int(after[1]), calls + int(after[2])
        tokens.append(np.concatenate(drawn))
    return Drawn(tokens, pair.laws(sampling), emitted / calls)


@functools.partial(jax.jit, static_argnums=0)
def _two_rounds(
    program: rounds.Program, params: rounds.AllParams, state: rounds.LoopState, seeds: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first two tokens of as many runs as there are `seeds`; tokens and target calls in all."""
    state = sampled_law.repeated(state, seeds)
    for _ in range(2):
        state = decode.step(program, params, state, sampled=True)
    generation = decode.finish(program, state)
    return generation.tokens[:, :2], generation.stats.num_emitted.sum(), generation.stats.num_rounds.sum()


def target_law(request: Request, sampling: Sampling, chunk: int = 256) -> np.ndarray:
    """`[V, V] float64`: the target's own law of the first two tokens, from teacher-forced logits."""
    program, params, inputs = request
    network, mask = program.target, inputs["source_mask"]
    encoded = jax.jit(network.encode)(params.target, inputs["source_ids"], mask)
    num_ids = inputs["options"].num_ids or network.vocab_size
    start = int(inputs["prefix"][0, 0])

    @jax.jit
    def logits_after(tokens: jax.Array) -> jax.Array:
        """`[B, V]` after decoder inputs `[B, N]`."""
        repeat = lambda x: jnp.repeat(x, tokens.shape[0], axis=0)  # noqa: E731
        cache = network.init_cache(params.target, repeat(encoded), repeat(mask), tokens.shape[1])
        return network.decode(params.target, cache, tokens)[0][:, -1, :num_ids]

    of = functools.partial(exact_law.distribution, options=sampling, eos_ids=program.eos_ids)
    first = of(np.asarray(logits_after(jnp.asarray([[start]])))[0], [start], num_new=0)
    law = np.zeros((num_ids, num_ids))
    law[:, program.pad_id] = first  # of those that are not followed
    followed = np.flatnonzero(first > MIN_PROBABILITY)
    for begin in range(0, len(followed), chunk):
        ids = np.resize(followed[begin : begin + chunk], chunk)  # one shape: the last chunk wraps around
        logits = np.asarray(logits_after(jnp.asarray(np.stack([np.full(chunk, start), ids], axis=1))))
        for token, row in zip(ids, logits, strict=True):
            law[token] = first[token] * of(row, [start, int(token)], num_new=1)
    for eos in program.eos_ids:
        law[eos] = 0
        law[eos, program.pad_id] = first[eos]
    return law


def g_test(drawn: Drawn, num_tokens: int, num: int | None = None) -> sampled_law.GTest:
    """The G-test of every source, added up, of the first `num` draws (None: all)."""
    tests = []
    for tokens, law in zip(drawn.tokens, drawn.laws, strict=True):
        tokens = tokens if num is None else tokens[: num // len(drawn.laws)]
        counts = np.zeros(law.shape)
        np.add.at(counts, tuple(tokens.T), 1)
        axis = 1 if num_tokens == 1 else ()
        tests.append(sampled_law.g_test(*(x.sum(axis).reshape(-1) for x in (counts, law))))
    return sampled_law.combined(tests)
