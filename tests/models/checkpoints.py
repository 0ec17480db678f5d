"""Tiny T5s of every kind of head, and the paths of those that torch wrote."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import t5

HERE = pathlib.Path(__file__).parent
GOLDEN = HERE / "golden"
NAMES = ["v1_0", "v1_1", "byt5", "umt5"]
TINY = t5.T5Config(24, 8, 4, 12, 3, 2, 1, num_buckets=8, max_distance=20)
TIED_HEADS = {
    "tied, scaled": {"tied_head": True, "scale_logits": True},
    "tied, unscaled": {"tied_head": True, "scale_logits": False},
    "untied, unscaled": {"tied_head": False, "scale_logits": False},
    "untied, scaled": {"tied_head": False, "scale_logits": True},
}


def random_params(config: t5.T5Config, seed: int = 0):
    """Params of order one, norms included, in the structure of `init`."""
    ids, mask = jnp.zeros((1, 2), int), jnp.ones((1, 2), bool)
    shapes = jax.eval_shape(lambda key: t5.T5(config).init(key, ids, mask, ids), jax.random.key(0))
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape) / np.sqrt(x.shape[0]), jnp.float32), shapes["params"]
    )


def assert_same_model(one, other):
    assert one[0] == other[0]
    jax.tree.map(np.testing.assert_array_equal, one[1], other[1])
