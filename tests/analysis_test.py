"""The paper's formulas, against its printed digits."""

import dataclasses

import jax
import numpy as np
import pytest

from specjax import analysis
from specjax.models import convert, t5


@pytest.mark.parametrize(
    "alpha, num_draft, printed",
    [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86)],
)
def test_expected_tokens_are_those_of_table_1(alpha, num_draft, printed):
    assert round(float(analysis.expected_tokens(alpha, num_draft)), 2) == printed


def test_expected_tokens_at_the_ends():
    np.testing.assert_array_equal(analysis.expected_tokens([0.0, 1.0], 5), [1.0, 6.0])


@pytest.mark.parametrize(
    "alpha, num_draft, printed",
    [(0.6, 2, 1.53), (0.7, 3, 1.58), (0.8, 2, 1.23), (0.8, 5, 1.63), (0.9, 2, 1.11), (0.9, 10, 1.60)],
)
def test_operations_are_those_of_table_1(alpha, num_draft, printed):
    assert round(float(analysis.operations_factor(alpha, num_draft)), 2) == printed


TABLE_4 = [
    (0.75, 7, 0.02, 3.2),
    (0.80, 7, 0.04, 3.3),
    (0.82, 7, 0.11, 2.5),
    (0.62, 7, 0.02, 2.3),
    (0.68, 5, 0.04, 2.4),
    (0.71, 3, 0.11, 2.0),
    (0.65, 5, 0.02, 2.4),
    (0.73, 5, 0.04, 2.6),
    (0.74, 3, 0.11, 2.0),
    (0.53, 5, 0.02, 1.9),
    (0.55, 3, 0.04, 1.8),
    (0.56, 3, 0.11, 1.6),
]
# Their printed alpha and c are rounded too coarsely to give the printed speed-up.
COARSE = [(0.68, 5, 0.04, 2.4), (0.71, 3, 0.11, 2.0), (0.56, 3, 0.11, 1.6)]


def theorem_3_8(alpha, num_draft, c):
    tau = analysis.expected_tokens(alpha, num_draft)
    return round(float(analysis.predicted_speedup(tau, num_draft, c)), 1)


@pytest.mark.parametrize("alpha, num_draft, c, printed", [row for row in TABLE_4 if row not in COARSE])
def test_predicted_speedup_is_that_of_table_4(alpha, num_draft, c, printed):
    assert theorem_3_8(alpha, num_draft, c) == printed


@pytest.mark.parametrize("alpha, num_draft, c, printed", COARSE)
def test_the_rest_of_table_4_lies_within_the_rounding_of_its_alpha_and_c(alpha, num_draft, c, printed):
    assert theorem_3_8(alpha, num_draft, c) == pytest.approx(printed - 0.1)
    assert theorem_3_8(alpha + 0.005, num_draft, c - 0.005) == printed


def test_predicted_speedup_includes_verification_and_overhead():
    assert analysis.predicted_speedup(3.0, 5, c=0.1, v=1.4, o=0.1) == pytest.approx(1.5)


@pytest.mark.parametrize("num_draft", [0, 1, 3, 7])
@pytest.mark.parametrize("alpha", [0.0, 0.4, 0.8, 1.0])
def test_expected_calls_of_a_long_output_are_those_of_independent_acceptances(alpha, num_draft):
    """Equation 1 is the limit of long outputs with one acceptance rate."""
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
    for accepts in random.random((num, 12)) < chances:
        at = 0
        while at < 12:
            run = accepts[at : at + min(num_draft, 12 - at - 1)]
            at += 1 + int(np.cumprod(run).sum())
            total += 1
    assert analysis.expected_calls(chances, num_draft) == pytest.approx(total / num, rel=0.01)


def test_memory_of_t5_11b_is_its_weights_and_caches():
    """Bytes by hand: bfloat16, batch 2, 100 source tokens, 50 slots, K = 4."""
    config = t5.PRESETS["t5-11b"]
    memory = analysis.memory(
        config,
        num_params=11_307_321_344,
        batch_size=2,
        num_source=100,
        num_slots=50,
        num_new=5,
        bytes_per_number=2,
    )
    assert memory.params == 22_614_642_688
    assert memory.cache == 2 * 2 * 24 * 128 * 128 * 50 * 2
    assert memory.cross == 2 * memory.cache
    assert memory.logits == 2 * 2 * 5 * 32128 * 4
    assert memory.total == sum(memory)


@pytest.mark.parametrize(
    "alpha, c, num_draft, speedup",
    [
        (0.5, 0.01, 5, 1.88),
        (0.5, 0.2, 1, 1.25),
        (0.6, 0.02, 6, 2.17),
        (0.65, 0.05, 5, 2.11),
        (0.7, 0.1, 4, 1.98),
        (0.7, 0.2, 3, 1.58),
        (0.75, 0.02, 9, 3.20),
        (0.8, 0.05, 8, 3.09),
        (0.85, 0.1, 7, 2.85),
        (0.9, 0.1, 10, 3.43),
        (0.9, 0.2, 7, 2.37),
        (0.95, 0.01, 40, 12.5),
    ],
)
def test_the_best_length_is_that_of_an_exhaustive_search(alpha, c, num_draft, speedup):
    """Values computed independently of this code."""
    best = analysis.best_num_draft(alpha, c)
    assert best.num_draft == num_draft and float(best.speedup) == pytest.approx(speedup, abs=0.006 * speedup)


def test_best_num_draft_is_zero_where_no_draft_pays_off():
    best = analysis.best_num_draft([0.1, 0.9], 0.5, slope=[0.0, 1.0])
    np.testing.assert_array_equal(best.num_draft, [0, 0])
    np.testing.assert_array_equal(best.speedup, [1, 1])


def test_an_unknown_alpha_gives_no_number():
    assert np.isnan(analysis.expected_tokens(np.nan, 5))


def test_positions_that_are_alike_give_equation_1():
    tested = 1000 * 0.8 ** np.arange(5)
    found = analysis.expected_tokens_by_position(0.8 * tested, tested)
    assert found == pytest.approx(analysis.expected_tokens(0.8, 5))


def test_positions_that_differ_are_multiplied():
    assert analysis.expected_tokens_by_position([50, 10, 0], [100, 40, 0]) == pytest.approx(1.625)


def test_decoder_call_reads_the_parameters_of_a_t5():
    """Against the parameters themselves: all of decoder and head except what is read once per source."""
    config = dataclasses.replace(t5.PRESETS["t5-v1_1-small"], num_decoder_layers=3)
    leaves = jax.tree_util.tree_leaves_with_path(convert.shapes(config))
    sizes = {jax.tree_util.keystr(path): x.size for path, x in leaves}
    read = sum(
        size
        for name, size in sizes.items()
        if ("decoder_layers" in name or "head" in name)
        and not any(part in name for part in ("scale", "['cross']['k']", "['cross']['v']"))
    )
    one, eight = (
        analysis.decoder_call(config, num_new=n, batch_size=2, num_source=5, num_cached=7, bytes_per_number=2)
        for n in (1, 8)
    )
    assert one.weights == eight.weights == 2 * read
    assert one.cross / one.cache == 5 / 7 and one.cache == 2 * 2 * 2 * 3 * 6 * 64 * 7
    assert eight.operations == 8 * one.operations
    assert one.seconds(1e9, 1e30) == pytest.approx((one.weights + one.cache + one.cross) / 1e9)
    assert one.seconds(1e30, 1e9) == pytest.approx(one.operations / 1e9)
