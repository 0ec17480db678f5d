"""The layers of a T5 against torch (golden activations)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import layers
from tests.models.golden_model import TOLERANCE, Golden


@pytest.fixture(scope="module", params=["v1_0", "v1_1"])
def golden(request) -> Golden:
    return Golden(request.param)


def test_norm_equals_torch(golden):
    params = golden.params["encoder_layers_0"]["attention_norm"]
    out = layers.RMSNorm(golden.config).apply({"params": params}, golden["norm_in"])
    np.testing.assert_allclose(out, golden["norm_out"], **TOLERANCE)


def _bias(golden, stack, num):
    module = layers.RelativeBias(golden.config, two_sided=stack == "encoder")
    apply = jax.jit(
        lambda params: module.apply({"params": params}, jnp.arange(num)[None], jnp.arange(num)[None])
    )
    return apply(golden.params[f"{stack}_bias"])


def _attention(golden, params, x, keys_from, bias, visible):
    def run(module):
        keys, values = module.keys_values(keys_from)
        return module(x, keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2), bias, visible)

    module = layers.Attention(golden.config)
    return jax.jit(lambda params: module.apply({"params": params}, method=run))(params)


def test_self_attention_with_two_sided_bias_equals_torch(golden):
    x, mask = golden["self_attention_in"], golden["source_mask"]
    params = golden.params["encoder_layers_0"]["attention"]
    out = _attention(golden, params, x, x, _bias(golden, "encoder", x.shape[1]), mask[:, None])
    np.testing.assert_allclose(out, golden["self_attention_out"], **TOLERANCE)


def test_causal_attention_with_one_sided_bias_equals_torch(golden):
    x = golden["causal_attention_in"]
    num = x.shape[1]
    params = golden.params["decoder_layers_0"]["attention"]
    visible = jnp.tril(jnp.ones((1, num, num), bool))
    out = _attention(golden, params, x, x, _bias(golden, "decoder", num), visible)
    np.testing.assert_allclose(out, golden["causal_attention_out"], **TOLERANCE)


def test_cross_attention_without_bias_equals_torch(golden):
    params = golden.params["decoder_layers_0"]["cross"]
    visible = golden["source_mask"][:, None]
    out = _attention(golden, params, golden["cross_attention_in"], golden["encoded"], None, visible)
    np.testing.assert_allclose(out, golden["cross_attention_out"], **TOLERANCE)


def test_feed_forward_equals_torch(golden):
    params = golden.params["encoder_layers_0"]["feed_forward"]
    out = layers.FeedForward(golden.config).apply({"params": params}, golden["feed_forward_in"], True)
    np.testing.assert_allclose(out, golden["feed_forward_out"], **TOLERANCE)


def test_encoder_layer_equals_torch(golden):
    x = golden["encoder_layer_in"]
    bias = _bias(golden, "encoder", x.shape[1])
    module, params = layers.EncoderLayer(golden.config), golden.params["encoder_layers_0"]
    out = module.apply({"params": params}, x, bias, golden["source_mask"][:, None], True)
    np.testing.assert_allclose(out, golden["encoder_layer_out"], **TOLERANCE)


def test_decoder_layer_equals_torch(golden):
    x = golden["decoder_layer_in"]
    num = x.shape[1]
    cache = golden.model.apply(
        {"params": golden.params}, golden["encoded"], golden["source_mask"], 0, method="init_cache"
    )
    visible = jnp.tril(jnp.ones((1, num, num), bool))
    module, params = layers.DecoderLayer(golden.config), golden.params["decoder_layers_0"]
    out, _, _ = module.apply({"params": params}, x, cache, 0, _bias(golden, "decoder", num), visible, True)
    np.testing.assert_allclose(out, golden["decoder_layer_out"], **TOLERANCE)


@pytest.mark.parametrize(
    ("two_sided", "expected"),
    [
        (True, {0: 0, -1: 1, 1: 17, -7: 7, 8: 24, -20: 10, 64: 30, -1000: 15, 1000: 31}),
        (False, {0: 0, -15: 15, -17: 16, -20: 17, -64: 26, -128: 31, 5: 0}),
    ],
)
def test_relative_buckets_are_those_of_the_paper(two_sided, expected):
    bucket = jax.jit(
        lambda distance: layers.relative_bucket(
            distance, two_sided=two_sided, num_buckets=32, max_distance=128
        )
    )
    found = bucket(jnp.array(list(expected)))
    assert found.tolist() == list(expected.values())


@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (16, 64)])
def test_relative_buckets_equal_torch_at_every_distance(two_sided, num_buckets, max_distance):
    torch = pytest.importorskip("torch")
    from transformers.models.t5.modeling_t5 import T5Attention

    expected = T5Attention._relative_position_bucket(
        torch.arange(-1200, 1201), two_sided, num_buckets, max_distance
    )
    settings = {"two_sided": two_sided, "num_buckets": num_buckets, "max_distance": max_distance}
    found = jax.jit(lambda distance: layers.relative_bucket(distance, **settings))(jnp.arange(-1200, 1201))
    np.testing.assert_array_equal(found, expected.numpy())


def test_bias_of_any_size_does_not_overflow_a_float16_score():
    """A hidden position at the end of the range, with a bias of -16 on top, is only hidden."""
    keys = jnp.full((1, 1, 4, 2), 100.0, jnp.float16)
    values = jnp.arange(8, dtype=jnp.float16).reshape(1, 1, 2, 4)
    bias = jnp.full((1, 1, 1, 2), -16.0)
    visible = jnp.array([[[True, False]]])
    queries = jnp.full((1, 1, 1, 4), -500.0, jnp.float16)
    out = layers.attend(queries, keys, values, bias, visible, None)
    np.testing.assert_array_equal(out[0, 0, 0], values[0, 0, 0])
