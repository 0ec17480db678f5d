"""Weights in eight bits: a quarter of the bytes, per output channel.

A target's own weights in int8 make a draft model that needs no training, and whose mistakes cost
acceptance only. As a target they are a different model: speculation is then lossless with respect to it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.models import families
from specjax.models.t5 import T5Network
from specjax.types import Params

_INNER_AXES: dict[str, int | tuple[int, ...]] = {"embedding": -1, "o": (0, 1)}  # summed over; 0 elsewhere


def quantize(params: Params) -> Params:
    """Replaces every matrix by `{"int8", "scale"}`: rounded to 127 steps of its channel's largest entry.

    Vectors (norms) and the tables of relative positions are small and stay as they are.
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
    """Returns the float32 params that quantized ones stand for."""

    def is_pair(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() == {"int8", "scale"}

    def one(node: Any) -> Any:
        if not is_pair(node):
            return node
        # Behind a barrier, or the compiler would unpack all weights once, before the loop.
        packed, scale = jax.lax.optimization_barrier((node["int8"], node["scale"]))
        return packed.astype(jnp.float32) * jnp.broadcast_to(scale, packed.shape)

    return jax.tree.map(one, params, is_leaf=is_pair)


class QuantizedNetwork(T5Network):
    """A network of any family whose params came from `quantize`; each call unpacks what it reads."""

    @property
    def module(self) -> Any:
        """The Linen module."""
        return families.module(self.config)

    @classmethod
    def of(cls, network: T5Network) -> "QuantizedNetwork":
        """Returns the network in eight bits, on the same devices."""
        params = jax.jit(quantize)(network.params)
        return cls(params, network.config, network.feature_layers, network.cache_sharding, network.vocabulary)

    def _apply(self, *args: Any, method: str, **options: Any) -> Any:
        return self.module.apply({"params": dequantize(self.params)}, *args, method=method, **options)
