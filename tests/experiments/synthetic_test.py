"""Forced acceptance: Bernoulli draws set the length, and the rule everything else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lib import parse
from experiments.lib.synthetic import Forced
from specjax import acceptance
from specjax.draws import KeyDraws
from specjax.types import Draft


def verified(rule, num_rows=2000, num_draft=3):
    """Returns results on drafts that have probability 0 under the target."""
    probs = jnp.zeros((num_rows, num_draft + 1, 4)).at[:, :, 0].set(1.0)
    draft = Draft(
        tokens=jnp.full((num_rows, num_draft), 3, jnp.int32),
        num_drafted=jnp.full(num_rows, num_draft, jnp.int32),
        probs=jnp.full((num_rows, num_draft, 4), 0.25),
    )
    draws = KeyDraws.of_round(jnp.arange(num_rows, dtype=jnp.uint32), jnp.zeros(num_rows, jnp.int32))
    return jax.jit(lambda: rule(draws, draft, probs))()


def test_forced_replaces_the_length_of_the_rule():
    assert int(verified(acceptance.speculative).num_accepted.max()) == 0
    result = verified(Forced(acceptance.speculative, 0.6))
    np.testing.assert_array_equal(result.next_token, verified(acceptance.speculative).next_token)
    expected = np.array([0.4, 0.6 * 0.4, 0.36 * 0.4, 0.216])
    found = np.bincount(np.asarray(result.num_accepted), minlength=4) / 2000
    error = np.sqrt(expected * (1 - expected) / 2000)
    assert (abs(found - expected) < 4 * error).all()


def test_forced_is_lossy_and_has_no_name():
    with pytest.raises(ValueError, match="`--rule` must be one of .*, got forced"):
        parse.rule("forced:0.8")
    assert not Forced(acceptance.speculative, 0.8).is_lossless
