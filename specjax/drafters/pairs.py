"""The base of drafters on the target's features: they collect the pairs of each round and feed them.

A pair is (f_j, t_(j+1)): the target's feature after token j, and the token chosen there. A round that
commits n tokens adds n pairs. Before the first target call there is no feature: a row begins with the pair of
a zero feature and its last given token, as in training. The features of a decoder prefix are not kept:
drafting after a prefix proceeds as after a start token.

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
    """The interface of layers over pairs with their params, as of `models.heads.HeadsNetwork`."""

    @property
    def params(self) -> Any:
        """Its own params."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Decoder layers of the target that it reads; see `models.t5.T5Network`."""

    @property
    def num_features(self) -> int:
        """F."""

    @property
    def cache_sharding(self) -> Any:
        """Sharding of its cache on a mesh; None: one device."""

    def check(self, target: Network) -> None:
        """Raises a ValueError if it was trained for another target."""

    def init_cache(self, encoded: jax.Array, source_mask: jax.Array, num_slots: int) -> cache_lib.Cache:
        """Returns an empty cache for the target's encoder output `[B, S, M]`."""

    def hidden(self, features: jax.Array) -> jax.Array:
        """Maps features `[B, N, F]` to `[B, N, W]`."""

    def decode(
        self, cache: cache_lib.Cache, hidden: jax.Array, tokens: jax.Array, layout: Layout, num_masks: int = 0
    ) -> tuple[jax.Array, cache_lib.Cache]:
        """Feeds pairs (`hidden` `[B, N, W]`, `tokens` `[B, N]`), then masks; returns `[B, N + masks, W]`."""

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Maps `[B, N, W]` to logits `[B, N, V]`."""


class PairState(struct.PyTreeNode):
    """The state between rounds.

    Attributes:
      cache: the network's cache, which contains all pairs fed so far.
      features: `[B, D + 1, F]`, features of the pairs that were not fed yet, in order.
      num_new: `[B]`, number of these pairs: 1 before the first round; a row that has ended adds none.
    """

    cache: cache_lib.Cache
    features: jax.Array
    num_new: jax.Array


class Fed(NamedTuple):
    """The result of feeding pairs.

    Attributes:
      hidden: `[B, 1 + masks, W]` at the newest pair, then at the masks for the tokens after it.
      state: the state after it; no pair is left to feed.
      ready: `[B] bool`, False for rows without a new pair, which have nothing to draft from.
    """

    hidden: jax.Array
    state: PairState
    ready: jax.Array


class PairDrafter(Drafter):
    """The base of drafters on pairs; it keeps their state, also in rounds without a draft.

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
        """The layer's."""
        return self.network.feature_layers

    @property
    def own_params(self) -> Any:
        """The layer's own params; the embedding is the target's."""
        return self.network.params

    @property
    def num_extra_slots(self) -> int:
        """The most cache entries that a draft takes."""
        return self.num_draft

    @property
    def cache_sharding(self) -> Any:
        """The network's."""
        return self.network.cache_sharding

    def check(self, target: Network) -> None:
        """Raises a ValueError if the layer was trained for another target."""
        self.network.check(target)

    def init(self, context: Context, prefix_width: int) -> PairState:
        """Starts with one pair, whose feature is zero."""
        del prefix_width
        depth = self.max_depth
        num_slots = context.tokens.shape[1] + depth + 1 + self.num_extra_slots
        cache = self.network.init_cache(context.encoded, context.source_mask, num_slots)
        num_rows = len(context.length)
        features = jnp.zeros((num_rows, depth + 1, self.network.num_features), context.encoded.dtype)
        return PairState(cache, features, jnp.ones(num_rows, jnp.int32))

    def skip(self, state: PairState, context: Context) -> PairState:
        """Feeds the pairs if the buffer of some row is full."""
        full = (state.num_new == state.features.shape[1]).any()
        return jax.lax.cond(full, lambda state: self.feed(state, context).state, lambda state: state, state)

    def commit(self, state: PairState, round: Round) -> PairState:
        """Appends the pairs of the round to those not fed yet."""
        features = round.features
        if round.result.path is not None:
            features = jnp.take_along_axis(features, round.call_positions[..., None], axis=1)
        features = cache_lib.append(state.features, features, state.num_new, round.num_committed)
        return state.replace(features=features, num_new=state.num_new + round.num_committed)

    def feed(self, state: PairState, context: Context, num_masks: int = 0) -> Fed:
        """Feeds the pairs not fed yet, followed by masks."""
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
    """Returns the layout with masks after the last new pair; masks attend to all pairs and to each other."""
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
    """Raises a ValueError unless `heads` are of this kind and trained for at least `depth` tokens."""
    if not isinstance(heads, struct.PyTreeNode):
        raise ValueError(
            f"`heads` must be loaded heads, got {heads!r:.80}; heads = specjax.load_heads(directory, target)"
        )
    config: Any = heads.config  # type: ignore[attr-defined]
    if config.kind != kind:
        raise ValueError(f"`heads` must be of the kind {kind!r}, got {config.kind!r}")
    if depth > config.num_steps:
        raise ValueError(
            f"`heads` must be trained for at least {depth} tokens, got heads for {config.num_steps}; draft "
            "fewer"
        )


def check_whole(**values: Any) -> None:
    """Raises a ValueError that names a value that is not a whole number."""
    for name, value in values.items():
        if not isinstance(value, int):
            raise ValueError(f"`{name}` must be a whole number, got {value!r}")
