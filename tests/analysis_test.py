"""The paper's formulas, against its printed digits."""

import numpy as np
import pytest

from specjax import analysis
from specjax.models import t5


@pytest.mark.parametrize(
    "alpha, num_draft, printed",
    [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86)],
)
def test_expected_tokens_are_those_of_table_1(alpha, num_draft, printed):
    assert round(float(analysis.expected_tokens(alpha, num_draft)), 2) == printed


def test_expected_tokens_at_the_ends():
    np.testing.assert_array_equal(analysis.expected_tokens([0.0, 1.0], 5), [1.0, 6.0])


@pytest.mark.parametrize(
    "alpha, num_draft, c, printed",
    [
        (0.75, 7, 0.02, 3.2),
        (0.80, 7, 0.04, 3.3),
        (0.82, 7, 0.11, 2.5),
        (0.62, 7, 0.02, 2.3),
        (0.55, 3, 0.04, 1.8),
    ],
)
def test_predicted_speedup_is_that_of_table_4(alpha, num_draft, c, printed):
    tau = analysis.expected_tokens(alpha, num_draft)
    assert round(float(analysis.predicted_speedup(tau, num_draft, c)), 1) == printed


def test_a_dear_verification_and_an_overhead_count():
    assert analysis.predicted_speedup(3.0, 5, c=0.1, v=1.4, o=0.1) == pytest.approx(1.5)


@pytest.mark.parametrize("num_draft", [0, 1, 3, 7])
@pytest.mark.parametrize("alpha", [0.0, 0.4, 0.8, 1.0])
def test_expected_calls_of_a_long_output_are_those_of_independent_acceptances(alpha, num_draft):
    """Equation 1 is the limit: one chance everywhere, no end in sight."""
    calls = analysis.expected_calls(np.full(3000, alpha), num_draft)
    assert 3000 / calls == pytest.approx(analysis.expected_tokens(alpha, num_draft), rel=5e-3)


def test_expected_calls_follow_certain_chances_exactly():
    """At temperature 0 a chance is 0 or 1, and rounds can be counted by hand: K = 2."""
    #   |x x .|x .|.|x x .| : a round ends at a rejected draft, or with the bonus token
    chances = np.array([1, 1, 0, 1, 0, 0, 1, 1, 1.0])
    assert analysis.expected_calls(chances, 2) == 4
    assert analysis.expected_calls(chances, 0) == 9
    assert analysis.expected_tau([chances, np.array([0.0])], 2) == 10 / 5


def test_expected_calls_equal_a_simulation():
    random = np.random.default_rng(0)
    chances, num_draft, num = random.random(12), 3, 20_000
    total = 0
    for coins in random.random((num, 12)) < chances:
        at = 0
        while at < 12:
            run = coins[at : at + min(num_draft, 12 - at - 1)]
            at += 1 + int(np.cumprod(run).sum())
            total += 1
    assert analysis.expected_calls(chances, num_draft) == pytest.approx(total / num, rel=0.01)


def test_memory_of_t5_11b_is_its_weights_and_caches():
    """Bytes by hand: bfloat16, batch 2, 100 source tokens, 50 slots, K = 4."""
    config = t5.PRESETS["t5-11b"]
    memory = analysis.memory(
        config, num_params=11_307_321_344, batch_size=2, num_source=100, num_slots=50, num_new=5,
        bytes_per_number=2,
    )  # fmt: skip
    assert memory.params == 22_614_642_688
    assert memory.cache == 2 * 2 * 24 * 128 * 128 * 50 * 2
    assert memory.cross == 2 * memory.cache
    assert memory.logits == 2 * 2 * 5 * 32128 * 4
    assert memory.total == sum(memory)
