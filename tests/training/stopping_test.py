"""Early stopping, alone and with the loop and the checkpoints."""

import contextlib
import dataclasses
import functools
import json
import math

import jax
import numpy as np
import pytest

from specjax.models import t5
from specjax.training import checkpoints, loop, stopping
from tests.training import tiny


def after(values, larger_is_better=False):
    results = enumerate(values, 1)
    return functools.reduce(lambda b, r: b.update(*r), results, stopping.Best(larger_is_better))


@pytest.mark.parametrize(("larger", "step"), [(False, 2), (True, 3)])
def test_the_best_is_the_least_loss_or_the_largest_bleu(larger, step):
    best = after([2.0, 1.0, 3.0, 1.0], larger)
    assert (best.step, best.num_worse) == (step, 4 - step)


def test_nan_is_never_the_best():
    assert after([math.nan, 2.0, math.nan]) == stopping.Best(False, 2, 2.0, 1)
    assert after([math.nan]) == stopping.Best(False, None, None, 1)


def test_patience_counts_results_in_a_row_that_are_not_better():
    assert [after([2.0, 1.0, 1.5, 1.0][:n]).should_stop(2) for n in range(1, 5)] == [
        False,
        False,
        False,
        True,
    ]
    assert not after([1.0, *[2.0] * 50]).should_stop(0)


def test_a_stopped_run_has_kept_the_best_params(tmp_path):
    """Validation is best at step 4; with a patience of 3 the run ends at step 10, not at 40."""
    scripted = dict(zip(range(2, 12, 2), [3.0, 1.0, 2.0, 2.5, 2.0], strict=True))
    best, seen = stopping.Best(larger_is_better=False), {}
    with contextlib.closing(checkpoints.Checkpoints(tmp_path)) as saved:

        def report(state, progress):
            nonlocal best
            best = best.update(progress.step, scripted[progress.step])
            seen[progress.step] = jax.tree.map(np.array, state.params)
            saved.save(progress.step, state, dataclasses.asdict(best), keep=(best.step,))
            return not best.should_stop(3)

        step = loop.make_step(loop.likelihood(t5.T5(tiny.CONFIG), 0.1), tiny.OPTIMIZATION, tiny.fresh_state())
        last = tiny.train(step, tiny.fresh_state(), 40, report, report_every=2)
        assert int(last.step) == 10 and best.step == 4
        kept = saved.restore(last, best.step).state
        assert saved.steps == [4, 8, 10] and int(kept.step) == 4
        jax.tree.map(np.testing.assert_array_equal, kept.params, seen[4])
        assert stopping.Best(**saved.restore(last).note) == best  # a resumed run goes on counting
        assert json.loads((tmp_path / "10" / "note.json").read_text())["num_worse"] == 3
