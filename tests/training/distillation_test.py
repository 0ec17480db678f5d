"""Divergences, the data they are computed on, and that training on them raises acceptance."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import data
from specjax.drafters.model import ModelDrafter
from specjax.models import t5
from specjax.training import distillation, loop, losses, state
from tests.training import tiny

DRAFT = dataclasses.replace(tiny.CONFIG, d_model=4, dropout_rate=0.0)
TARGET = dataclasses.replace(tiny.CONFIG, dropout_rate=0.0)


def network(config):
    return t5.T5Network(tiny.params(config), config)


def distributions(seed, shape=(2, 3, 6)):
    logits = np.random.default_rng(seed).normal(size=shape) * 2
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


P, Q = distributions(0), distributions(1)
BY_HAND = {
    "forward_kl": (P * np.log(P / Q)).sum(-1),
    "reverse_kl": (Q * np.log(Q / P)).sum(-1),
    "jensen_shannon": 0.5 * (P * np.log(2 * P / (P + Q)) + Q * np.log(2 * Q / (P + Q))).sum(-1),
    "total_variation": 0.5 * np.abs(P - Q).sum(-1),
}


@pytest.mark.parametrize("name", losses.DIVERGENCES)
def test_divergence_equals_its_definition(name):
    divergence = losses.DIVERGENCES[name]
    log_p, log_q = (jnp.asarray(np.log(x), jnp.float32) for x in (P, Q))
    np.testing.assert_allclose(divergence(log_p, log_q), BY_HAND[name], rtol=1e-4)
    np.testing.assert_allclose(divergence(log_p, log_p), 0, atol=1e-6)


@pytest.mark.parametrize("name", losses.DIVERGENCES)
def test_divergence_of_a_one_hot_target_is_finite(name):
    """The target's probabilities are 0 and 1 in float32: value and gradient have no 0 times infinity."""
    target = jnp.asarray([[[200.0, 0.0, 0.0]]])
    mask = jnp.ones((1, 1), bool)
    loss = lambda draft: losses.distillation(losses.DIVERGENCES[name], target, draft, mask)  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(jnp.asarray([[[0.0, 150.0, 0.0]]]))
    assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize("name", losses.DIVERGENCES)
def test_distillation_loss_is_a_mean_over_valid_tokens(name):
    """Padding changes nothing."""
    target, draft = (jnp.asarray(np.log(x), jnp.float32) for x in (P, Q))
    mask = jnp.array([[True, True, True], [True, False, False]])
    divergence = losses.DIVERGENCES[name]
    by_hand = BY_HAND[name][np.asarray(mask)].mean()
    assert losses.distillation(divergence, target, draft, mask) == pytest.approx(by_hand, rel=1e-4)
    wide = [jnp.pad(x, ((0, 1), (0, 2), (0, 0)), constant_values=7.0) for x in (target, draft)]
    padded = losses.distillation(divergence, *wide, jnp.pad(mask, ((0, 1), (0, 2))))
    assert padded == pytest.approx(by_hand, rel=1e-4)


def test_acceptance_rate_is_one_minus_the_total_variation():
    """Leviathan et al. 2023, section 3.3; at temperature 0 it is the agreement of the argmaxes."""
    target, draft = (jnp.asarray(np.log(x), jnp.float32) for x in (P, Q))
    warm, cold = losses.acceptance_chances(target, draft)
    np.testing.assert_allclose(warm, 1 - BY_HAND["total_variation"], atol=1e-5)
    np.testing.assert_array_equal(cold, P.argmax(-1) == Q.argmax(-1))


@functools.cache
def taught_batch():
    batch = dataclasses.asdict(data.make_batch(tiny.pairs()[:8], (8, 8)))
    return distillation.make_teacher(network(TARGET))(batch)


@functools.cache
def acceptance_of_draft():
    return distillation.make_acceptance(network(TARGET), network(DRAFT))


@pytest.mark.parametrize("name", losses.DIVERGENCES)
def test_training_raises_the_acceptance_rate(name):
    """Of the target's own sequences, under every divergence."""
    optimization = state.Optimization(learning_rate=0.05, warmup_steps=2, num_steps=40)
    now = state.init_state(tiny.params(DRAFT), optimization, seed=0)
    objective = distillation.divergence_from_target(t5.T5(DRAFT), losses.DIVERGENCES[name])
    step = loop.make_step(objective, optimization, now)
    acceptance = acceptance_of_draft()
    held = [data.make_batch(tiny.pairs()[:8], (8, 8))]
    before = acceptance(now.params, held)[0]
    batch, first = taught_batch(), None
    for _ in range(40):
        now, loss = step(now, batch)
        first = loss if first is None else first
    assert loss < 0.9 * first
    assert acceptance(now.params, held)[0] > before + 0.01


def test_twin_draft_is_accepted_always():
    acceptance = distillation.make_acceptance(network(TARGET), network(TARGET))
    params = tiny.params(TARGET)
    batches = [data.make_batch(tiny.pairs()[:5], (8, 8)), data.make_batch(tiny.pairs()[5:], (16, 16))]
    assert acceptance(params, batches) == (pytest.approx(1.0, abs=1e-5), 1.0)
    with pytest.raises(ValueError, match="must hold a target token"):
        acceptance(params, [])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generated_targets_are_the_models_own_whatever_the_batch(temperature):
    """At temperature 0, the same with speculative decoding."""
    target, pairs = network(TARGET), tiny.pairs()
    options = dict(temperature=temperature, seed=5, max_new_tokens=6)
    whole = distillation.generate_targets(target, pairs, **options, batch_size=16)
    parts = distillation.generate_targets(target, pairs, **options, batch_size=5)
    assert [p.source for p in whole] == [p.source for p in pairs]
    assert whole == parts
    assert all(1 <= len(p.target) <= 6 for p in whole)
    if temperature == 0:
        drafter = ModelDrafter(network(DRAFT), 2)
        assert distillation.generate_targets(target, pairs, **options, drafter=drafter) == whole


def test_on_policy_targets_are_the_drafts_own_and_change_with_the_seed():
    batch = dataclasses.asdict(data.make_batch(tiny.pairs()[:8], (8, 8)))
    sample = distillation.make_on_policy(network(DRAFT), 8)
    one, again, other = (sample(tiny.params(DRAFT), batch, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one["target_ids"], again["target_ids"])
    assert (np.asarray(one["target_ids"]) != np.asarray(other["target_ids"])).any()
    np.testing.assert_array_equal(one["source_ids"], batch["source_ids"])
    lengths = np.asarray(one["target_mask"]).sum(1)
    assert lengths.min() >= 1 and one["target_ids"].shape == (8, 8)
