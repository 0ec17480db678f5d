"""Heads for the enumeration: tables in place of networks, so that q follows from all that a head may see.

Axes: B rows, N pairs, D positions ahead, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp

from experiments.exact_law import NUM_CONTEXTS, token_weights, toy_cache
from specjax import cache as cache_lib
from specjax.types import Layout


@dataclasses.dataclass(frozen=True)
class ToyHeads:
    """Implements what Medusa, EAGLE and one-pass drafters ask for; params: see `exact_law.random_table`.

    A feature is the number of a table row, as `ToyNetwork` gives it.
    """

    vocab_size: int
    num_steps: int = 3
    feature_layers: tuple[int, ...] = ()

    def ahead(self, params: jax.Array, features: jax.Array, depth: int) -> jax.Array:
        """Logits `[B, depth, V]`: another row for each position."""
        steps = 31 * (1 + jnp.arange(depth))[None, :]
        return params[(features.astype(jnp.int32) + steps) % NUM_CONTEXTS]

    def init_cache(
        self, params: jax.Array, encoded: jax.Array, source_mask: jax.Array, num_slots: int
    ) -> cache_lib.Cache:
        """That of the toy network."""
        return toy_cache(params, encoded, source_mask, num_slots)

    def hidden(self, params: jax.Array, features: jax.Array) -> jax.Array:
        """As they are: `[B, N, 1]`."""
        del params
        return features

    def decode(
        self,
        params: jax.Array,
        cache: cache_lib.Cache,
        hidden: jax.Array,
        tokens: jax.Array,
        layout: Layout,
        num_masks: int = 0,
    ) -> tuple[jax.Array, cache_lib.Cache]:
        """Writes a number for each pair and mask, then adds up those that each sees, by their places."""
        pairs = (17 * hidden[..., 0].astype(jnp.int32) + tokens + 1) % NUM_CONTEXTS
        masks = jnp.broadcast_to(
            500 + jnp.arange(num_masks, dtype=pairs.dtype)[None], (len(pairs), num_masks)
        )
        new = jnp.concatenate([pairs, masks], axis=1).astype(params.dtype)
        keys = cache_lib.write(cache.keys[0], new[:, :, None, None], cache.length, slots_last=True)
        weights = jnp.asarray(token_weights(cache.num_slots, 7))[layout.key_positions]
        seen = jnp.where(layout.visible, (keys[:, 0, 0].astype(jnp.int32) * weights)[:, None], 0).sum(-1)
        source = cache.cross_keys[0].sum((1, 2, 3)).astype(jnp.int32)[:, None]
        outputs = (seen + 13 * layout.positions + source) % NUM_CONTEXTS
        cache = cache.replace(keys=(keys,), values=(keys.swapaxes(2, 3),), length=cache.length + new.shape[1])
        return outputs.astype(params.dtype)[..., None], cache

    def head(self, params: jax.Array, hidden: jax.Array) -> jax.Array:
        """The table's rows, `[B, N, V]`."""
        return params[hidden[..., 0].astype(jnp.int32)]
