"""The loss, the loop, early stopping, and exact resumption."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import data
from specjax.models import t5
from specjax.training import checkpoints, loop, losses, state
from tests.training import tiny
from tests.training.tiny import CONFIG, OPTIMIZATION, fresh_state, train

NO_DROPOUT = dataclasses.replace(CONFIG, dropout_rate=0.0)


@pytest.fixture(scope="module")
def step():
    return loop.make_step(loop.likelihood(t5.T5(CONFIG), 0.1), OPTIMIZATION, fresh_state())


def test_the_loss_is_a_mean_over_valid_tokens_so_padding_changes_nothing():
    random = np.random.default_rng(0)
    logits = jnp.asarray(random.normal(size=(2, 3, 5)), jnp.float32)
    targets = jnp.asarray(random.integers(0, 5, (2, 3)))
    mask = jnp.array([[True, True, True], [True, False, False]])
    padded = jnp.pad(logits, ((0, 1), (0, 2), (0, 0)), constant_values=50.0)
    more = losses.cross_entropy(
        padded, jnp.pad(targets, ((0, 1), (0, 2))), jnp.pad(mask, ((0, 1), (0, 2))), 0.1
    )
    np.testing.assert_allclose(losses.cross_entropy(logits, targets, mask, 0.1), more, rtol=1e-6)
    log_probs = jax.nn.log_softmax(logits)
    by_hand = -np.mean([log_probs[b, n, targets[b, n]] for b, n in [(0, 0), (0, 1), (0, 2), (1, 0)]])
    assert losses.cross_entropy(logits, targets, mask)[1] == pytest.approx(by_hand, rel=1e-6)


def test_training_lowers_the_loss(step):
    evaluate = loop.make_evaluate(t5.T5(CONFIG))
    batches = [data.make_batch(tiny.pairs()[:8], (8, 8)), data.make_batch(tiny.pairs()[8:], (8, 8))]
    before = evaluate(fresh_state().params, batches)
    after = evaluate(train(step, fresh_state(), 40).params, batches)
    assert after < before - 0.1


def uneven_batch(width=8):
    """Eight rows of 2 to 7 target tokens, so that parts of a batch hold unequal numbers of them."""
    rows = [[*range(2, 3 + i % 6), 1] for i in range(8)]
    return dataclasses.asdict(data.make_batch([data.Pair(row, row) for row in rows], (width, width)))


def gradients(num_parts, batch, config=NO_DROPOUT):
    optimization = dataclasses.replace(OPTIMIZATION, num_accumulated=num_parts)
    compute = jax.jit(loop.make_gradients(loop.likelihood(t5.T5(config), 0.1), optimization))
    return compute(tiny.params(), batch, jax.random.key(0))


@pytest.mark.parametrize("num_parts", [2, 8])
def test_accumulated_gradients_are_those_of_the_whole_batch(num_parts):
    (loss, grads), (whole_loss, whole) = gradients(num_parts, uneven_batch()), gradients(1, uneven_batch())
    assert float(loss) == pytest.approx(float(whole_loss), rel=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), grads, whole)


def test_mean_of_the_parts_means_is_a_different_gradient():
    """So the test above detects an unweighted mean."""
    batch = uneven_batch()
    halves = [gradients(1, {k: v[i::2] for k, v in batch.items()})[1]["embedding"] for i in (0, 1)]
    whole = gradients(1, batch)[1]["embedding"]
    assert np.abs(sum(halves) / 2 - whole).max() > 1e-3 * np.abs(whole).max()


def test_padding_changes_no_gradient():
    """More columns, and more rows."""
    loss, grads = gradients(1, uneven_batch())
    wider = uneven_batch(12)
    taller = {name: np.pad(array, ((0, 4), (0, 0))) for name, array in wider.items()}
    for batch in (wider, taller):
        more_loss, more = gradients(1, batch)
        assert float(more_loss) == pytest.approx(float(loss), rel=1e-5)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), more, grads)


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw"])
def test_training_computes_in_bfloat16_and_keeps_float32_state(optimizer):
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    optimization = dataclasses.replace(OPTIMIZATION, optimizer=optimizer)
    before = fresh_state(optimization, config)
    step = loop.make_step(loop.likelihood(t5.T5(config), 0.1), optimization, before)
    batch = dataclasses.asdict(next(tiny.batches()))
    jaxpr = str(jax.make_jaxpr(lambda p: loop.teacher_forced_logits(t5.T5(config), p, batch))(before.params))
    assert "bf16" in jaxpr
    after = train(step, before, 3)
    for leaf in jax.tree.leaves((after.params, after.opt_state)):
        assert leaf.dtype in (jnp.float32, jnp.int32)
    # An update below bfloat16's resolution is not lost.
    change = np.asarray(after.params["embedding"]) - np.asarray(tiny.params()["embedding"])
    assert np.any((change != 0) & (np.abs(change) < 2**-9 * np.abs(np.asarray(after.params["embedding"]))))


def test_params_that_are_not_float32_raise():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.params())
    with pytest.raises(ValueError, match="decoder_bias.*must be float32, got bfloat16; load float32 params"):
        state.init_state(half, OPTIMIZATION, seed=0)


def test_the_callers_params_stay_usable(step):
    """The state is donated; the params that it was made from are not."""
    params = tiny.params()
    before = jax.tree.map(np.array, params)
    first = state.init_state(params, OPTIMIZATION, seed=0)
    train(step, first, 1)
    assert first.params["embedding"].is_deleted()
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(step, tmp_path):
    whole = train(step, fresh_state(), 8)
    with contextlib.closing(checkpoints.Checkpoints(tmp_path / "run")) as saved:
        saved.save(4, train(step, fresh_state(), 4))
    with contextlib.closing(checkpoints.Checkpoints(tmp_path / "run")) as again:
        assert again.latest_step == 4
        resumed = train(step, again.restore(fresh_state()).state, 8)
    assert jax.tree.structure(resumed) == jax.tree.structure(whole)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)


def test_the_noise_comes_from_the_checkpoint_not_from_the_new_seed(step, tmp_path):
    with contextlib.closing(checkpoints.Checkpoints(tmp_path)) as saved:
        saved.save(2, train(step, fresh_state(), 2))
        other = state.init_state(tiny.params(), OPTIMIZATION, seed=1)
        resumed = train(step, saved.restore(other).state, 4)
    jax.tree.map(np.testing.assert_array_equal, resumed, train(step, fresh_state(), 4))


def test_reports_come_at_the_interval_and_may_stop_the_run(step):
    seen = []

    def on_report(state, progress):
        seen.append(progress.step)
        return len(seen) < 2

    final = train(step, fresh_state(), 100, on_report, report_every=3)
    assert seen == [3, 6] and int(final.step) == 6


def test_loss_that_is_not_finite_ends_the_run(step):
    broken = fresh_state()
    broken = broken.replace(params=jax.tree.map(lambda x: x * jnp.nan, broken.params))
    with pytest.raises(FloatingPointError, match="loss is nan at step 1: lower the learning rate"):
        train(step, broken, 3)


def test_dropout_noise_is_a_function_of_the_step(step):
    batch = dataclasses.asdict(next(itertools.islice(tiny.batches(), 1)))
    (_, a), (_, b) = step(fresh_state(), batch), step(fresh_state(), batch)
    _, other = step(dataclasses.replace(fresh_state(), step=jnp.int32(5)), batch)
    assert a == b and a != other


def test_validation_without_a_token_raises():
    with pytest.raises(ValueError, match="must hold a target token"):
        loop.make_evaluate(t5.T5(CONFIG))(tiny.params(), [])


# ---- early stopping


def after(values, larger_is_better=False):
    results = enumerate(values, 1)
    return functools.reduce(lambda b, r: b.update(*r), results, loop.Best(larger_is_better))


@pytest.mark.parametrize(("larger", "step"), [(False, 2), (True, 3)])
def test_the_best_is_the_least_loss_or_the_largest_bleu(larger, step):
    best = after([2.0, 1.0, 3.0, 1.0], larger)
    assert (best.step, best.num_worse) == (step, 4 - step)


def test_nan_is_never_the_best():
    assert after([math.nan, 2.0, math.nan]) == loop.Best(False, 2, 2.0, 1)
    assert after([math.nan]) == loop.Best(False, None, None, 1)


def test_patience_counts_results_in_a_row_that_are_not_better():
    stops = [after([2.0, 1.0, 1.5, 1.0][:n]).should_stop(2) for n in range(1, 5)]
    assert stops == [False, False, False, True]
    assert not after([1.0, *[2.0] * 50]).should_stop(0)


def test_a_stopped_run_has_kept_the_best_params(step, tmp_path):
    """Validation is best at step 4; with a patience of 3 the run ends at step 10, not at 40."""
    scripted = dict(zip(range(2, 12, 2), [3.0, 1.0, 2.0, 2.5, 2.0], strict=True))
    best, seen = loop.Best(larger_is_better=False), {}
    with contextlib.closing(checkpoints.Checkpoints(tmp_path)) as saved:

        def report(state, progress):
            nonlocal best
            best = best.update(progress.step, scripted[progress.step])
            seen[progress.step] = jax.tree.map(np.array, state.params)
            saved.save(progress.step, state, dataclasses.asdict(best), keep=(best.step,))
            return not best.should_stop(3)

        last = train(step, fresh_state(), 40, report, report_every=2)
        assert int(last.step) == 10 and best.step == 4
        kept = saved.restore(last, best.step).state
        assert saved.steps == [4, 8, 10] and int(kept.step) == 4
        jax.tree.map(np.testing.assert_array_equal, kept.params, seen[4])
        assert loop.Best(**saved.restore(last).note) == best  # a resumed run goes on counting
        assert json.loads((tmp_path / "10" / "note.json").read_text())["num_worse"] == 3
