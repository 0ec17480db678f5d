"""Weights in eight bits: a quarter of the bytes, per output channel.

A target's own weights in int8 make a draft that needs no training, and whose mistakes cost
acceptance only. As a target they are another model: speculation is then lossless with respect to that one.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.types import Layout, Network, Params

_INNER_AXES: dict[str, int | tuple[int, ...]] = {
    "embedding": -1,
    "o": (0, 1),
}  # what a product sums over; 0 elsewhere


def quantize(params: Params) -> Params:
    """Replaces every matrix by `{"int8", "scale"}`: rounded to 127 steps of its channel's largest entry.

    Vectors stay as they are. Norms and the tables of relative positions are small; the latter stay too.
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
    """The float32 params that `quantize` stands for."""

    def is_pair(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() == {"int8", "scale"}

    def one(node: Any) -> Any:
        if not is_pair(node):
            return node
        # Behind a barrier, or the compiler would unpack all weights once, before the loop.
        packed, scale = jax.lax.optimization_barrier((node["int8"], node["scale"]))
        return packed.astype(jnp.float32) * jnp.broadcast_to(scale, packed.shape)

    return jax.tree.map(one, params, is_leaf=is_pair)


@dataclasses.dataclass(frozen=True)
class QuantizedNetwork:
    """A network whose params came from `quantize`; each call unpacks what it reads."""

    network: Network

    def with_features(self, layers: tuple[int, ...]) -> "QuantizedNetwork":
        """The same network, which gives out features of these layers too; see `t5.T5Network`."""
        return QuantizedNetwork(self.network.with_features(layers))  # type: ignore[attr-defined]

    @property
    def config(self) -> Any:
        """Of the network."""
        return self.network.config  # type: ignore[attr-defined]

    @property
    def cache_sharding(self) -> Any:
        """Of the network."""
        return getattr(self.network, "cache_sharding", None)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.network.vocab_size

    @property
    def encoded_width(self) -> int:
        """M."""
        return self.network.encoded_width

    def encode(self, params: Params, source_ids: jax.Array, source_mask: jax.Array) -> jax.Array:
        """See `types.Network`."""
        return self.network.encode(dequantize(params), source_ids, source_mask)

    def init_cache(self, params: Params, encoded: jax.Array, source_mask: jax.Array, num_slots: int) -> Any:
        """See `types.Network`."""
        return self.network.init_cache(dequantize(params), encoded, source_mask, num_slots)

    def decode(
        self, params: Params, cache: Any, tokens: jax.Array, layout: Layout | None = None
    ) -> tuple[jax.Array, jax.Array, Any]:
        """See `types.Network`."""
        return self.network.decode(dequantize(params), cache, tokens, layout)

    def head(self, params: Params, features: jax.Array) -> jax.Array:
        """See `types.Network`."""
        return self.network.head(dequantize(params), features)
