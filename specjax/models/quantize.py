"""Int8 weights, quantized symmetrically per output channel: a quarter of the float32 bytes.

A target's own weights in int8 make a draft model that needs no training; quantization errors only lower its
acceptance. As a target they are a different model: decoding is then lossless with respect to that model.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.models import families
from specjax.models.t5 import T5Network
from specjax.types import Params

_INNER_AXES: dict[str, int | tuple[int, ...]] = {"embedding": -1, "o": (0, 1)}  # contracted axes; else 0


def quantize(params: Params) -> Params:
    """Replaces every matrix by `{"int8", "scale"}`; the scale is the channel's largest magnitude over 127.

    Vectors (norms) and relative-position tables are small and stay unquantized.
    """

    def one(path: tuple, leaf: jax.Array) -> Any:
        name = path[-1].key
        if leaf.ndim < 2 or name == "table":
            return leaf
        largest = jnp.abs(leaf).max(axis=_INNER_AXES.get(name, 0), keepdims=True)
        scale = jnp.where(largest > 0, largest, 1.0).astype(jnp.float32) / 127
        return {"int8": jnp.round(leaf / scale).astype(jnp.int8), "scale": scale}

    return jax.tree_util.tree_map_with_path(one, params)


def dequantize(params: Params) -> Params:
    """Returns the float32 values of quantized params."""

    def is_pair(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() == {"int8", "scale"}

    def one(node: Any) -> Any:
        if not is_pair(node):
            return node
        # Without the barrier the compiler would dequantize all weights once, before the decoding loop.
        packed, scale = jax.lax.optimization_barrier((node["int8"], node["scale"]))
        return packed.astype(jnp.float32) * jnp.broadcast_to(scale, packed.shape)

    return jax.tree.map(one, params, is_leaf=is_pair)


class QuantizedNetwork(T5Network):
    """A network of any family whose params came from `quantize`; each call dequantizes what it reads."""

    @property
    def module(self) -> Any:
        """The Linen module."""
        return families.module(self.config)

    @classmethod
    def of(cls, network: T5Network) -> "QuantizedNetwork":
        """Returns the network in int8, on the same devices."""
        params = jax.jit(quantize)(network.params)
        return cls(params, network.config, network.feature_layers, network.cache_sharding, network.vocabulary)

    def _apply(self, *args: Any, method: str, **options: Any) -> Any:
        return self.module.apply({"params": dequantize(self.params)}, *args, method=method, **options)
