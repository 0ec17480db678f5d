"""The loss, the loop, and that a stopped run continues as if it had not stopped."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import data
from specjax.models import t5
from specjax.training import checkpoints, loop, losses

CONFIG = t5.T5Config(24, 8, 4, 16, 2, 1, 1, dropout_rate=0.2)
OPTIMIZATION = loop.Optimization(learning_rate=0.05, warmup_steps=2, num_steps=40)


@pytest.fixture(scope="module")
def pairs():
    random = np.random.default_rng(0)
    sources = [[*random.integers(2, 24, size=3 + i % 4).tolist(), 1] for i in range(16)]
    return [data.Pair(s, s) for s in sources]  # a copying task


@pytest.fixture(scope="module")
def step():
    return loop.make_step(t5.T5(CONFIG), OPTIMIZATION, seed=0)


def fresh_state():
    ids = np.zeros((1, 4), np.int32)
    params = t5.T5(CONFIG).init(jax.random.key(0), ids, ids == 0, ids)["params"]
    return loop.init_state(params, OPTIMIZATION)


def train(step, state, pairs, num_steps):
    batches = data.training_batches(pairs, 8, (8,), seed=0, start_step=int(state.step))
    return loop.run(state, step, batches, num_steps, 10, lambda state, progress: True)


def test_the_loss_is_a_mean_over_valid_tokens_so_padding_changes_nothing():
    """B62."""
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


def test_training_lowers_the_loss(step, pairs):
    evaluate = loop.make_evaluate(t5.T5(CONFIG))
    batches = [data.make_batch(pairs[:8], 8), data.make_batch(pairs[8:], 8)]
    before = evaluate(fresh_state().params, batches)
    after = evaluate(train(step, fresh_state(), pairs, 40).params, batches)
    assert after < before - 0.1


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(step, pairs, tmp_path):
    whole = train(step, fresh_state(), pairs, 8)
    half = train(step, fresh_state(), pairs, 4)
    saved = checkpoints.Checkpoints(tmp_path / "run")
    saved.save(4, half)
    saved.close()
    again = checkpoints.Checkpoints(tmp_path / "run")
    assert again.latest_step == 4
    restored = again.restore(fresh_state())
    again.close()
    resumed = train(step, restored, pairs, 8)
    assert jax.tree.structure(resumed) == jax.tree.structure(whole)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)


def test_a_relative_checkpoint_path_works(tmp_path, monkeypatch):
    """B78."""
    monkeypatch.chdir(tmp_path)
    saved = checkpoints.Checkpoints("here")
    saved.save(1, {"x": jnp.arange(3)})
    saved.close()
    again = checkpoints.Checkpoints("here")
    np.testing.assert_array_equal(again.restore({"x": jnp.zeros(3, jnp.int32)})["x"], [0, 1, 2])
    again.close()


def test_reports_come_at_the_interval_and_may_stop_the_run(step, pairs):
    seen = []

    def on_report(state, progress):
        seen.append(progress.step)
        return len(seen) < 2

    batches = data.training_batches(pairs, 8, (8,), seed=0)
    state = loop.run(fresh_state(), step, batches, 100, 3, on_report)
    assert seen == [3, 6] and int(state.step) == 6


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match="optimizer='sgd': use 'adafactor' or 'adamw'"):
        dataclasses.replace(OPTIMIZATION, optimizer="sgd").build()


def test_dropout_noise_is_a_function_of_the_step(step, pairs):
    batch = dataclasses.asdict(next(itertools.islice(data.training_batches(pairs, 8, (8,), 0), 1)))
    (_, a), (_, b) = step(fresh_state(), batch), step(fresh_state(), batch)
    _, other = step(dataclasses.replace(fresh_state(), step=jnp.int32(5)), batch)
    assert a == b and a != other
