"""Meshes and partition rules."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from specjax import sharding
from specjax.models import convert, t5

GATED = t5.T5Config(24, 8, 4, 16, 2, 1, 1, gated=True, tied_head=False)


@pytest.mark.parametrize("config", [GATED, t5.T5Config(24, 8, 4, 16, 2, 1, 1)], ids=["v1.1", "v1.0"])
def test_every_parameter_but_the_norms_is_divided_over_the_model_axis(config):
    placed = sharding.param_shardings(convert.shapes(config), sharding.make_mesh(1, 2))
    for path, place in jax.tree_util.tree_leaves_with_path(placed):
        assert ("model" in place.spec) == ("scale" not in str(path)), path


def test_heads_are_divided_alike_on_both_sides_of_attention():
    placed = sharding.param_shardings(convert.shapes(GATED), sharding.make_mesh(1, 2))
    attention = placed["decoder_layers_0"]["cross"]
    assert attention["q"].spec == P(None, "model", None) and attention["o"].spec == P("model", None, None)


def test_make_mesh_raises_beyond_the_devices():
    with pytest.raises(ValueError, match="`data` times `model` must be at most .*, got 2 . 8"):
        sharding.make_mesh(2, 8)
    with pytest.raises(ValueError, match="must be whole numbers of at least 1, got data=0, model=1"):
        sharding.make_mesh(0)


def test_an_axis_that_the_devices_do_not_divide_is_named():
    odd = t5.T5Config(25, 8, 4, 16, 2, 1, 1)
    with pytest.raises(ValueError, match="parameter embedding .25, 8.: axis 0 .* 2 devices .* divides 25"):
        sharding.param_shardings(convert.shapes(odd), sharding.make_mesh(1, 2))


def test_a_parameter_without_a_rule_is_named():
    with pytest.raises(ValueError, match="no partition rule matches the parameter 'new/kernel'"):
        sharding.param_shardings({"new": {"kernel": jnp.ones(2)}}, sharding.make_mesh())
