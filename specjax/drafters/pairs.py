"""Drafters on the target's features: the pairs that a round adds, and feeding them.

A pair is (f_j, t_(j+1)): the target's feature after token j, and the token chosen there. A round that
commits n tokens adds n pairs. Before the first target call there is no feature: a row begins with the pair of
zeros and its last given token, which networks are trained to begin with. Nobody keeps the features of a
decoder prefix: what is drafted behind one is drafted as behind a start token.

Axes: B rows, N pairs, D deepest draft, S source length, T cache slots, F width of the features, W of the
network, V vocabulary.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from specjax import cache as cache_lib
from specjax import tree as tree_lib
from specjax.types import Context, Drafter, Layout, Network, Round


class PairNetwork(Protocol):
    """Layers over pairs, with their params. `models.heads` has one."""

    @property
    def params(self) -> Any:
        """Their own arrays."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Decoder layers of the target that it reads; see `models.t5.T5Network`."""

    @property
    def num_features(self) -> int:
        """F."""

    @property
    def cache_sharding(self) -> Any:
        """Where its cache lies on a mesh; None: one device."""

    def check(self, target: Network) -> None:
        """Raises a ValueError if it was made for another target."""

    def init_cache(self, encoded: jax.Array, source_mask: jax.Array, num_slots: int) -> cache_lib.Cache:
        """An empty cache beside the target's encoder output `[B, S, M]`."""

    def hidden(self, features: jax.Array) -> jax.Array:
        """Maps features `[B, N, F]` to `[B, N, W]`."""

    def decode(
        self, cache: cache_lib.Cache, hidden: jax.Array, tokens: jax.Array, layout: Layout, num_masks: int = 0
    ) -> tuple[jax.Array, cache_lib.Cache]:
        """Feeds pairs (`hidden` `[B, N, W]`, `tokens` `[B, N]`), then masks; returns `[B, N + masks, W]`."""

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Maps `[B, N, W]` to logits `[B, N, V]`."""


class PairState(struct.PyTreeNode):
    """What is kept between rounds.

    Attributes:
      cache: of the network; it holds all pairs but the newest.
      features: `[B, D + 1, F]`, those of pairs that were not fed yet, in order.
      num_new: `[B]`, how many they are: before the first round 1; a row that has ended adds none.
    """

    cache: cache_lib.Cache
    features: jax.Array
    num_new: jax.Array


class Fed(NamedTuple):
    """What feeding gives.

    Attributes:
      hidden: `[B, 1 + masks, W]` after the newest pair, and at masks for the tokens behind it.
      state: no pair is left to feed.
      ready: `[B] bool`, False for rows without a new pair, which have nothing to draft from.
    """

    hidden: jax.Array
    state: PairState
    ready: jax.Array


class PairDrafter(Drafter):
    """What drafters on pairs have in common: their state, and that rounds may go by without a draft.

    Attributes:
      network: the layer.
    """

    network: PairNetwork

    @property
    def call_widths(self) -> tuple[int, ...]:
        """A round in which no row drafts is a decoding step."""
        return (0, self.num_draft)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Of the layer."""
        return self.network.feature_layers

    @property
    def own_params(self) -> Any:
        """Those of the layer; the embedding is the target's."""
        return self.network.params

    @property
    def num_extra_slots(self) -> int:
        """Cache entries that a draft takes at most."""
        return self.num_draft

    @property
    def cache_sharding(self) -> Any:
        """Of the network."""
        return self.network.cache_sharding

    def check(self, target: Network) -> None:
        """Raises a ValueError if the layer was made for another target."""
        self.network.check(target)

    def init(self, context: Context, prefix_width: int) -> PairState:
        """One pair, of no feature."""
        del prefix_width
        depth = self.max_depth
        num_slots = context.tokens.shape[1] + depth + 1 + self.num_extra_slots
        cache = self.network.init_cache(context.encoded, context.source_mask, num_slots)
        num_rows = len(context.length)
        features = jnp.zeros((num_rows, depth + 1, self.network.num_features), context.encoded.dtype)
        return PairState(cache, features, jnp.ones(num_rows, jnp.int32))

    def skip(self, state: PairState, context: Context) -> PairState:
        """Feeds the pairs when no room is left for another round's."""
        full = (state.num_new == state.features.shape[1]).any()
        return jax.lax.cond(full, lambda state: self.feed(state, context).state, lambda state: state, state)

    def commit(self, state: PairState, round: Round) -> PairState:
        """Adds the pairs of the round to those that are left to feed."""
        features = round.features
        if round.result.path is not None:
            features = jnp.take_along_axis(features, round.call_positions[..., None], axis=1)
        features = cache_lib.append(state.features, features, state.num_new, round.num_committed)
        return state.replace(features=features, num_new=state.num_new + round.num_committed)

    def feed(self, state: PairState, context: Context, num_masks: int = 0) -> Fed:
        """Feeds the pairs that are left to feed, and masks behind them."""
        cache, num_new, width = state.cache, state.num_new, state.features.shape[1]
        tokens = context.window(context.length - num_new, width)
        layout = _with_masks(
            tree_lib.chain_layout(cache.length, width, cache.num_slots), cache.length, num_new, num_masks
        )
        hidden = self.network.hidden(state.features)
        outputs, cache = self.network.decode(cache, hidden, tokens, layout, num_masks)
        last = jnp.maximum(num_new - 1, 0)[:, None, None]
        newest = [jnp.take_along_axis(outputs, last, axis=1), outputs[:, width:]]
        cache = cache_lib.rollback(cache, state.cache.length + num_new)
        state = PairState(cache, state.features, jnp.zeros_like(num_new))
        return Fed(jnp.concatenate(newest, axis=1), state, num_new > 0)


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


def check_heads(heads: Any, kind: str, depth: int) -> None:
    """Raises a ValueError where `heads` are no heads of a kind that draft so deep."""
    if not isinstance(heads, struct.PyTreeNode):
        raise ValueError(
            f"`heads` must be loaded heads, got {heads!r:.80}; heads = specjax.load_heads(directory, target)"
        )
    config: Any = heads.config  # type: ignore[attr-defined]
    if config.kind != kind:
        raise ValueError(f"`heads` must be of the kind {kind!r}, got {config.kind!r}")
    if depth > config.num_steps:
        raise ValueError(
            f"`num_draft` must be at most {config.num_steps}, the depth that the heads were trained for, got "
            f"{depth}"
        )


def check_whole(**values: Any) -> None:
    """Raises a ValueError that names a value that is no whole number."""
    for name, value in values.items():
        if not isinstance(value, int):
            raise ValueError(f"`{name}` must be a whole number, got {value!r}")
