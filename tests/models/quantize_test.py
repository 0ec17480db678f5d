"""Weights in eight bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax.drafters.model import ModelDrafter
from specjax.models import quantize, t5
from tests.tiny_t5 import random_params

CONFIG = t5.T5Config(24, 16, 4, 32, 4, 2, 2)
SOURCE = np.array([[5, 6, 7, 1, 0], [9, 3, 8, 2, 1]])


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


def test_every_entry_is_off_by_at_most_half_a_step_of_its_channel(params):
    packed = quantize.quantize(params)
    again = quantize.dequantize(packed)
    assert packed["embedding"]["int8"].dtype == jnp.int8
    assert packed["embedding"]["scale"].shape == (24, 1)  # a row is a token's: an output of the head
    assert packed["decoder_layers_0"]["attention"]["q"]["scale"].shape == (1, 4, 4)
    assert packed["decoder_layers_0"]["attention"]["o"]["scale"].shape == (1, 1, 16)
    assert again["decoder_norm"]["scale"] is params["decoder_norm"]["scale"]
    is_pair = lambda node: isinstance(node, dict) and "int8" in node  # noqa: E731
    steps = jax.tree.map(lambda node: node["scale"] if is_pair(node) else node, packed, is_leaf=is_pair)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        node, step = again, steps
        for key in path:
            node, step = node[key.key], step[key.key]
        if leaf.ndim > 1 and path[-1].key != "table":
            assert (jnp.abs(leaf - node) <= 0.501 * jnp.broadcast_to(step, leaf.shape)).all()


def test_quantized_draft_changes_nothing_but_the_time(params):
    network = t5.T5Network(params, CONFIG)
    drafter = ModelDrafter(quantize.QuantizedNetwork.of(network), 2)
    request = dict(max_new_tokens=np.array([12, 9]), eos_ids=())
    baseline = decode.generate(network, SOURCE, SOURCE != 0, **request)
    output = decode.generate(network, SOURCE, SOURCE != 0, drafter=drafter, **request)
    np.testing.assert_array_equal(baseline.tokens, output.tokens)
    assert float(output.stats.total().alpha[0]) > 0.8


def test_quantized_target_keeps_its_own_output(params):
    """Greedy: that of autoregressive decoding with the float32 params that it stands for."""
    network = t5.T5Network(params, CONFIG)
    quantized = quantize.QuantizedNetwork.of(network)
    dequantized = network.replace(params=quantize.dequantize(quantized.params))
    request = dict(max_new_tokens=12, eos_ids=())
    baseline = decode.generate(dequantized, SOURCE, SOURCE != 0, **request)
    drafter = ModelDrafter(network, 2)
    output = decode.generate(quantized, SOURCE, SOURCE != 0, drafter=drafter, **request)
    np.testing.assert_array_equal(baseline.tokens, output.tokens)
