"""The paper's formulas, against its printed digits."""

import numpy as np
import pytest

from specjax import analysis


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
