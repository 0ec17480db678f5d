"""Update rules and schedules of the training state."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from specjax.training.state import Optimization

BASE = Optimization(learning_rate=0.5, warmup_steps=4, num_steps=20)


@pytest.mark.parametrize(
    ("decay", "half_way", "end"),
    [
        ("constant", 0.5, 0.5),
        ("cosine", 0.25, 0.0),
        ("linear", 0.25, 0.0),
        ("rsqrt", 0.5 / 3**0.5, 0.5 / 5**0.5),
    ],
)
def test_the_rate_rises_to_its_peak_and_then_decays(decay, half_way, end):
    rate = dataclasses.replace(BASE, decay=decay).schedule()
    assert [float(rate(n)) for n in (0, 2, 4)] == pytest.approx([0, 0.25, 0.5])
    assert [float(rate(n)) for n in (12, 20)] == pytest.approx([half_way, end], abs=1e-6)


def test_without_warm_up_the_first_rate_is_the_peak():
    for decay in ("constant", "cosine", "linear", "rsqrt"):
        assert float(Optimization(learning_rate=0.5, warmup_steps=0, decay=decay).schedule()(0)) == 0.5


def test_weight_decay_excludes_norms():
    rule = dataclasses.replace(BASE, optimizer="adamw", weight_decay=1.0, warmup_steps=0).build()
    params = {"scale": jnp.ones(3), "wi": jnp.ones((3, 2))}
    updates, _ = rule.update(jax.tree.map(jnp.zeros_like, params), rule.init(params), params)
    assert (updates["scale"] == 0).all() and (updates["wi"] == -0.5).all()


def test_gradients_are_clipped_by_their_global_norm():
    rule = dataclasses.replace(BASE, optimizer="adamw", max_grad_norm=1.0).build()
    params = {"a": jnp.ones(3), "b": jnp.ones(4)}
    big = {"a": jnp.full(3, 30.0), "b": jnp.full(4, 40.0)}
    small = jax.tree.map(lambda x: x / jnp.sqrt(3 * 30.0**2 + 4 * 40.0**2), big)
    first, second = (rule.update(grads, rule.init(params), params)[1][1][0].mu for grads in (big, small))
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: bool(jnp.allclose(x, y)), first, second)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "sgd"}, "`optimizer` must be one of adafactor, adamw, got 'sgd'"),
        ({"decay": "step"}, "`decay` must be one of constant, rsqrt, cosine, linear, got 'step'"),
        ({"num_accumulated": 0}, "`num_accumulated` must be at least 1, got 0"),
    ],
)
def test_optimization_raises_on_unknown_values(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **change)
