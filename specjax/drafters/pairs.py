"""Drafters on the target's features: the pairs that a round adds, and feeding them.

A pair is (f_j, t_(j+1)): the target's feature after token j, and the token chosen there. A round that
commits n tokens adds n pairs. Before its first target call a row has none: it drafts nothing, and its first
round is a plain step. So is that after a decoder prefix, whose features nobody keeps.

Axes: B rows, N pairs, D deepest draft, S source length, T cache slots, F width of the features, W of the
network, V vocabulary.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct

from specjax import cache as cache_lib
from specjax import tree as tree_lib
from specjax.types import Context, Draft, Layout, Params, Round


class PairNetwork(Protocol):
    """Layers over pairs, as pure functions. Hashable: static. `models.heads` has one."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """What the target is asked to give out; see `models.t5.T5Network`."""

    def init_cache(
        self, params: Params, encoded: jax.Array, source_mask: jax.Array, num_slots: int
    ) -> cache_lib.Cache:
        """An empty cache beside the target's encoder output `[B, S, M]`."""

    def hidden(self, params: Params, features: jax.Array) -> jax.Array:
        """Maps features `[B, N, F]` to `[B, N, W]`."""

    def decode(
        self, params: Params, cache: cache_lib.Cache, hidden: jax.Array, tokens: jax.Array, layout: Layout,
        num_masks: int = 0,
    ) -> tuple[jax.Array, cache_lib.Cache]:  # fmt: skip
        """Feeds pairs (`hidden` `[B, N, W]`, `tokens` `[B, N]`), then masks; returns `[B, N + masks, W]`."""

    def head(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Maps `[B, N, W]` to logits `[B, N, V]`."""


class PairState(struct.PyTreeNode):
    """What is kept between rounds.

    Attributes:
      cache: of the network; it holds the pairs of all rounds but the last.
      features: `[B, D + 1, F]`, those of the last round's pairs.
      num_new: `[B]`, how many they are: 0 before the first round, and once a row has ended.
    """

    cache: cache_lib.Cache
    features: jax.Array
    num_new: jax.Array


def init(network: PairNetwork, params: Params, context: Context, num_draft: int, max_depth: int) -> PairState:
    """No pairs yet."""
    num_slots = context.tokens.shape[1] + max_depth + 1 + num_draft
    cache = network.init_cache(params, context.encoded, context.source_mask, num_slots)
    num_rows, _, width = context.encoded.shape
    features = jnp.zeros(
        (num_rows, max_depth + 1, width * (1 + len(network.feature_layers))), context.encoded.dtype
    )
    return PairState(cache, features, jnp.zeros(num_rows, jnp.int32))


def feed(
    network: PairNetwork, params: Params, state: PairState, context: Context, num_masks: int = 0
) -> tuple[jax.Array, PairState]:
    """Feeds the pairs of the last round.

    Returns:
      `[B, 1 + num_masks, W]` after the last pair and at masks for the tokens behind it, and the state, whose
      cache holds all pairs.
    """
    cache, num_new, width = state.cache, state.num_new, state.features.shape[1]
    index = (context.length - num_new)[:, None] + jnp.arange(width)[None, :]
    tokens = jnp.take_along_axis(context.tokens, index, axis=1, mode="clip")
    layout = _with_masks(
        tree_lib.chain_layout(cache.length, width, cache.num_slots), cache.length, num_new, num_masks
    )
    hidden = network.hidden(params, state.features)
    outputs, cache = network.decode(params, cache, hidden, tokens, layout, num_masks)
    last = jnp.maximum(num_new - 1, 0)[:, None, None]
    wanted = [jnp.take_along_axis(outputs, last, axis=1), outputs[:, width:]]
    cache = cache_lib.rollback(cache, state.cache.length + num_new)
    return jnp.concatenate(wanted, axis=1), state.replace(cache=cache)


def _with_masks(pairs: Layout, start: jax.Array, num_new: jax.Array, num_masks: int) -> Layout:
    """Adds masks that stand behind the last new pair; they see all pairs and each other."""
    if not num_masks:
        return pairs
    num_rows, width = pairs.positions.shape
    end, slots = (start + num_new)[:, None], pairs.key_positions
    positions = end + jnp.arange(num_masks)[None, :]
    order = slots - start[:, None] - width  # which mask a slot holds
    is_mask = (order >= 0) & (order < num_masks)
    seen = (slots < end) | is_mask
    return Layout(
        jnp.concatenate([pairs.positions, positions], axis=1),
        jnp.where(is_mask, end + order, slots),
        jnp.concatenate(
            [pairs.visible, jnp.broadcast_to(seen[:, None], (num_rows, num_masks, slots.shape[1]))], axis=1
        ),
    )


def drafted_by_those_with_pairs(draft: Draft, state: PairState) -> Draft:
    """The chain, of no tokens where a row has no pair to begin at."""
    return draft.replace(num_drafted=jnp.where(state.num_new > 0, draft.num_drafted, 0))


def remember(state: PairState, round: Round) -> PairState:
    """Keeps the pairs that a round added; those before were fed."""
    path = round.verdict.path
    if path is None:
        path = jnp.broadcast_to(
            jnp.arange(1, state.features.shape[1])[None], (len(state.num_new), state.features.shape[1] - 1)
        )
    path = jnp.pad(path, ((0, 0), (1, 0)))
    features = jnp.take_along_axis(round.features, path[..., None], axis=1)
    num_new = round.context.length - 1 - round.root
    return state.replace(features=features.astype(state.features.dtype), num_new=num_new)
