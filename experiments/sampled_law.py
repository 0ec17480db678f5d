"""The output law by drawing: the compiled program with its own noise, and the G-test of what it gave.

A perfect sampler's p-value is uniform: it is below 1e-3 once in a thousand tests, and above .99 once
in a hundred. So a test rejects small p only, and says nothing by a large one.
"""

import collections
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from experiments.exact_law import prefill_inputs
from experiments.law_cases import SOURCE, Case
from specjax import decode, rounds

MIN_EXPECTED = 5.0  # cells expected to hold less are pooled


class GTest(NamedTuple):
    """A likelihood-ratio test of counts against a law.

    Attributes:
      statistic: G = 2 sum observed ln(observed / expected).
      num_cells: after pooling.
      num_free: degrees of freedom: one less than the cells, for each law that was tested.
      p_value: of a chi-square with that many degrees; 0 where something impossible was drawn.
    """

    statistic: float
    num_cells: int
    num_free: int
    p_value: float


def combined(tests: Sequence[GTest]) -> GTest:
    """Independent tests as one: statistics and degrees of freedom add up."""
    statistic, num_cells, num_free, _ = (sum(values) for values in zip(*tests, strict=True))
    return GTest(statistic, num_cells, num_free, float(scipy.stats.chi2.sf(statistic, num_free)))


def g_test(observed: np.ndarray, law: np.ndarray) -> GTest:
    """Tests counts `[C]` against probabilities `[C]`; cells too rare for the test are pooled."""
    expected = law / law.sum() * observed.sum()
    if observed[law == 0].any():
        return GTest(float("inf"), len(law), len(law) - 1, 0.0)
    rare = expected < MIN_EXPECTED
    if 0 < expected[rare].sum() < MIN_EXPECTED:  # too little even together: the rarest of the others joins
        rare |= expected == expected[~rare].min()
    observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (observed, expected))
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(observed) == 1:
        return GTest(0.0, 1, 0, 1.0)  # one outcome: nothing to test
    statistic, p_value = scipy.stats.power_divergence(observed, expected, lambda_="log-likelihood")
    return GTest(float(statistic), len(observed), len(observed) - 1, float(p_value))


def g_test_of_laws(
    observed: dict[tuple[int, ...], int], law: dict[tuple[int, ...], float], num: int
) -> GTest:
    """The same for laws of sequences; `num` drawn in all."""
    keys = sorted(law.keys() | observed.keys())
    counts, probs = ([d.get(key, 0) for key in keys] for d in (observed, law))
    assert sum(counts) == num
    return g_test(np.array(counts, float), np.array(probs))


def draw(
    program: rounds.Program, params: rounds.AllParams, state: rounds.LoopState, seeds: np.ndarray
) -> np.ndarray:
    """Emitted ids `[num, bucket]` of as many runs of a one-row state as there are `seeds`."""

    @jax.jit
    def run(params: rounds.AllParams, state: rounds.LoopState, seeds: jax.Array) -> jax.Array:
        return decode.finish(program, decode.run(program, params, repeated(state, seeds))).tokens

    return np.asarray(run(params, state, jnp.asarray(seeds, jnp.uint32)))


def repeated(state: rounds.LoopState, seeds: jax.Array) -> rounds.LoopState:
    """The row of a one-row state, once for each seed."""
    return jax.tree.map(lambda x: jnp.repeat(x, len(seeds), axis=0), state).replace(seeds=seeds)


def sampled_test(case: Case, num: int = 2**17, seed: int = 0) -> GTest:
    """The G-test of `num` runs of a case against its target's law. Float32."""
    program = case.program()
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), case.params())
    inputs = prefill_inputs(
        program,
        SOURCE[None],
        case.options,
        np.array([case.prefix]),
        num_ids=case.num_ids,
        limit=min(case.num_tokens, case.limit or case.num_tokens),
    )
    state = jax.jit(functools.partial(rounds.prefill, program))(params, **inputs)
    tokens = draw(program, params, state, np.arange(num) + seed * num)[:, : case.num_tokens]
    law = case.target_law()
    whole = {(*key, *[0] * (case.num_tokens - len(key))): p for key, p in law.items()}  # padded as rows are
    return g_test_of_laws(collections.Counter(map(tuple, tokens.tolist())), whole, num)
