"""G-tests of sampled outputs: the library's rounds with their own random numbers.

Toy models are tested against a distribution computed in numpy, a trained pair against the logits of its
target. The p-value of a perfect sampler is uniform: below 1e-3 in one of a thousand tests, above .99 in one
of a hundred. So a test rejects for a small p, and a large p means nothing.

Axes: B rows, V vocabulary.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from experiments.exactness import cases, toys
from experiments.exactness.cases import Case
from experiments.exactness.enumeration import Rounds, Sequences
from experiments.lib import arms
from specjax import GenerationConfig, Model, acceptance, decode
from specjax.decode import Request
from specjax.round import LoopState, Program
from specjax.types import AcceptanceRule, Drafter

REJECT_BELOW = 1e-3  # p-value
MIN_EXPECTED = 5.0  # cells with a smaller expected count are pooled


class GTest(NamedTuple):
    """A likelihood-ratio test of counts against a distribution.

    Attributes:
      statistic: G = 2 sum observed ln(observed / expected).
      num_cells: number of cells after pooling.
      num_free: degrees of freedom: cells less one, summed over the tested distributions.
      p_value: p-value of a chi-square with these degrees of freedom; 0 if something impossible was drawn.
    """

    statistic: float
    num_cells: int
    num_free: int
    p_value: float


def combined(tests: Sequence[GTest]) -> GTest:
    """Combines independent tests by adding their statistics and degrees of freedom."""
    statistic, num_cells, num_free, _ = (sum(values) for values in zip(*tests, strict=True))
    return GTest(statistic, num_cells, num_free, float(scipy.stats.chi2.sf(statistic, num_free)))


def g_test(observed: np.ndarray, probs: np.ndarray) -> GTest:
    """Tests counts `[C]` against probabilities `[C]`, with rare cells pooled."""
    expected = probs / probs.sum() * observed.sum()
    if observed[probs == 0].any():
        return GTest(float("inf"), len(probs), len(probs) - 1, 0.0)
    rare = expected < MIN_EXPECTED
    if 0 < expected[rare].sum() < MIN_EXPECTED:  # too few even when pooled: add the rarest other cell
        rare |= expected == expected[~rare].min()
    observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (observed, expected))
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(observed) == 1:
        return GTest(0.0, 1, 0, 1.0)  # one outcome: nothing to test
    statistic, p_value = scipy.stats.power_divergence(observed, expected, lambda_="log-likelihood")
    return GTest(float(statistic), len(observed), len(observed) - 1, float(p_value))


def g_test_of_sequences(observed: dict[tuple[int, ...], int], expected: Sequences) -> GTest:
    """Tests counts of sequences."""
    keys = sorted(expected.keys() | observed.keys())
    counts, probs = ([d.get(key, 0) for key in keys] for d in (observed, expected))
    return g_test(np.array(counts, float), np.array(probs))


# ---- toys


def toy_test(case: Case, rounds: Rounds | None = None, num: int = 2**16) -> GTest:
    """Returns the G-test of `num` sampled runs of a case in float32; `rounds` None: the library's."""
    limit = min(case.num_tokens, int(case.config.max_new_tokens))
    config = dataclasses.replace(case.config, max_new_tokens=limit)
    case = dataclasses.replace(case, config=config, dtype=np.float32)
    tokens = (rounds or cases.library_rounds()).drawn(case.request(), np.arange(num))[:, :limit]
    padded = {(*key, *[0] * (limit - len(key))): p for key, p in case.expected().items()}  # like the rows
    return g_test_of_sequences(collections.Counter(map(tuple, tokens.tolist())), padded)


# ---- a trained pair

LIMIT = 8  # maximum new tokens: more than the two tested, so that the limit truncates no draft
MIN_PROBABILITY = 1e-9  # rarer first tokens get no distribution of a second token


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A target, its draft, and the sources to decode."""

    target: Model
    draft: Model
    sources: Sequence[str]

    def request(
        self, source: str, drafter: Drafter | None, rule: AcceptanceRule, config: GenerationConfig
    ) -> Request:
        """Returns a request of one row."""
        config = dataclasses.replace(config, max_new_tokens=LIMIT)
        (request,) = arms.requests(self.target, drafter, [source], batch_size=1, config=config, rule=rule)
        return request

    @functools.cache  # noqa: B019 - a pair lives as long as the experiment
    def expected(self, config: GenerationConfig) -> list[np.ndarray]:
        """Returns the target's distribution of the first two tokens for each source; see `Drawn`."""
        requests = [self.request(source, None, acceptance.speculative, config) for source in self.sources]
        return [first_two_tokens(request, config) for request in requests]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Drawn tokens and their expected distribution.

    Attributes:
      tokens: an array `[num, 2]` per source, in the order of drawing.
      expected: a matrix `[V, V] float64` per source: the probability of each first and second token. A first
        token that ends the row has all of its probability at the pad id.
      tau: tokens per target call of these rounds.
    """

    tokens: list[np.ndarray]
    expected: list[np.ndarray]
    tau: float

    def g_test(self, num_tokens: int, num: int | None = None) -> GTest:
        """Returns the combined G-test of all sources, with the first `num` draws (None: all)."""
        tests = []
        for tokens, probs in zip(self.tokens, self.expected, strict=True):
            tokens = tokens if num is None else tokens[: num // len(self.expected)]
            counts = np.zeros(probs.shape)
            np.add.at(counts, tuple(tokens.T), 1)
            axis = 1 if num_tokens == 1 else ()
            tests.append(g_test(*(x.sum(axis).reshape(-1) for x in (counts, probs))))
        return combined(tests)


def draw(
    pair: Pair,
    drafter: Drafter,
    rule: AcceptanceRule,
    config: GenerationConfig,
    num: int,
    batch_size: int,
    track: Callable[[Sequence], Iterable],
) -> Drawn:
    """Makes `num` draws over all sources together: two rounds each, which emit at least two tokens."""
    tokens, emitted, calls = [], 0, 0
    for index, source in enumerate(pair.sources):
        program, inputs = pair.request(source, drafter, rule, config)
        state = decode.jitted_prefill(program, **inputs)
        drawn = []
        first_seed = (config.seed * len(pair.sources) + index) * num
        for first in track(range(0, num // len(pair.sources), batch_size)):
            seeds = jnp.asarray(first_seed + first + np.arange(batch_size), jnp.uint32)
            after = _two_rounds(program, state, seeds)
            drawn.append(np.asarray(after[0]))
            emitted, calls = emitted + int(after[1]), calls + int(after[2])
        tokens.append(np.concatenate(drawn))
    return Drawn(tokens, pair.expected(config), emitted / calls)


@jax.jit
def _two_rounds(
    program: Program, state: LoopState, seeds: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the first two tokens of one run per seed, and the total tokens and target calls."""
    state = jax.tree.map(lambda x: jnp.repeat(x, len(seeds), axis=0), state).replace(seeds=seeds)
    for _ in range(2):
        state = decode.step(program, state, sampled=True)
    generation = decode.finish(program, state)
    return generation.tokens[:, :2], generation.stats.num_emitted.sum(), generation.stats.num_rounds.sum()


def first_two_tokens(request: Request, config: GenerationConfig, chunk: int = 256) -> np.ndarray:
    """Returns the target's distribution of the first two tokens, `[V, V] float64`, by teacher forcing."""
    program, inputs = request
    network, mask = program.target, inputs["source_mask"]
    encoded = jax.jit(lambda network: network.encode(inputs["source_ids"], mask))(network)
    num_ids = network.num_ids or network.vocab_size
    start, pad_id = int(inputs["prefix"][0, 0]), network.pad_id

    @jax.jit
    def logits_after(network, tokens: jax.Array) -> jax.Array:
        """Returns `[B, V]` after decoder inputs `[B, N]`."""
        repeat = lambda x: jnp.repeat(x, tokens.shape[0], axis=0)  # noqa: E731
        cache = network.init_cache(repeat(encoded), repeat(mask), tokens.shape[1])
        return network.decode(cache, tokens)[0][:, -1, :num_ids]

    of = functools.partial(toys.distribution, config=config, eos_ids=program.eos_ids)
    first = of(np.asarray(logits_after(network, jnp.asarray([[start]])))[0], [start], num_new=0)
    probs = np.zeros((num_ids, num_ids))
    probs[:, pad_id] = first  # for first tokens without a second
    followed = np.flatnonzero(first > MIN_PROBABILITY)
    for begin in range(0, len(followed), chunk):
        ids = np.resize(followed[begin : begin + chunk], chunk)  # one shape: the last chunk wraps around
        tokens = jnp.asarray(np.stack([np.full(chunk, start), ids], axis=1))
        for token, row in zip(ids, np.asarray(logits_after(network, tokens)), strict=True):
            probs[token] = first[token] * of(row, [start, int(token)], num_new=1)
    for eos in program.eos_ids:
        probs[eos] = 0
        probs[eos, pad_id] = first[eos]
    return probs
