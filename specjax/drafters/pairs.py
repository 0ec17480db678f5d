"""Drafters on the target's features: the pairs that a round adds, and feeding them.

A pair is (f_j, t_(j+1)): the target's feature after token j, and the token chosen there. A round that
commits n tokens adds n pairs. Before the first target call there is no feature: a row begins with the pair of
zeros and its last given token, which networks are trained to begin with. Nobody keeps the features of a
decoder prefix: what is drafted behind one is drafted as behind a start token.

Axes: B rows, N pairs, D deepest draft, S source length, T cache slots, F width of the features, W of the
network, V vocabulary.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from specjax import cache as cache_lib
from specjax import tree as tree_lib
from specjax.drafters import chain
from specjax.drafters import wanted as wanted_lib
from specjax.types import Context, Draft, Draws, Layout, Params, Round


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
        self,
        params: Params,
        cache: cache_lib.Cache,
        hidden: jax.Array,
        tokens: jax.Array,
        layout: Layout,
        num_masks: int = 0,
    ) -> tuple[jax.Array, cache_lib.Cache]:
        """Feeds pairs (`hidden` `[B, N, W]`, `tokens` `[B, N]`), then masks; returns `[B, N + masks, W]`."""

    def head(self, params: Params, hidden: jax.Array) -> jax.Array:
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


def init(network: PairNetwork, params: Params, context: Context, max_depth: int, num_extra: int) -> PairState:
    """One pair, of no feature; the cache has room for `num_extra` entries of a draft."""
    num_slots = context.tokens.shape[1] + max_depth + 1 + num_extra
    cache = network.init_cache(params, context.encoded, context.source_mask, num_slots)
    num_rows, _, width = context.encoded.shape
    features = jnp.zeros(
        (num_rows, max_depth + 1, width * (1 + len(network.feature_layers))), context.encoded.dtype
    )
    return PairState(cache, features, jnp.ones(num_rows, jnp.int32))


def feed(network: PairNetwork, params: Params, state: PairState, context: Context, num_masks: int = 0) -> Fed:
    """Feeds the pairs that are left to feed, and masks behind them."""
    cache, num_new, width = state.cache, state.num_new, state.features.shape[1]
    tokens = context.window(context.length - num_new, width)
    layout = _with_masks(
        tree_lib.chain_layout(cache.length, width, cache.num_slots), cache.length, num_new, num_masks
    )
    hidden = network.hidden(params, state.features)
    outputs, cache = network.decode(params, cache, hidden, tokens, layout, num_masks)
    last = jnp.maximum(num_new - 1, 0)[:, None, None]
    wanted = [jnp.take_along_axis(outputs, last, axis=1), outputs[:, width:]]
    cache = cache_lib.rollback(cache, state.cache.length + num_new)
    state = PairState(cache, state.features, jnp.zeros_like(num_new))
    return Fed(jnp.concatenate(wanted, axis=1), state, num_new > 0)


def draft_if_wanted(
    run: Callable[[PairState], tuple[Draft, PairState]],
    feed_only: Callable[[PairState], PairState],
    nothing: Draft,
    state: PairState,
    wanted: jax.Array,
) -> tuple[Draft, PairState]:
    """Drafts where some row wants to; else feeds only when no room is left for another round's pair.

    Args:
      run, nothing, wanted: see `wanted.draft_if_wanted`.
      feed_only: feeds all pairs.
    """

    def skip(state: PairState) -> PairState:
        full = (state.num_new == state.features.shape[1]).any()
        return jax.lax.cond(full, feed_only, lambda state: state, state)

    return wanted_lib.draft_if_wanted(run, skip, nothing, state, wanted)


@dataclasses.dataclass(frozen=True)
class PairChain(abc.ABC):
    """What drafters of chains on pairs have in common; each says how it `run`s.

    Attributes:
      network: the layer. Static.
      num_draft: K.
    """

    network: PairNetwork
    num_draft: int

    @property
    def max_depth(self) -> int:
        """K."""
        return self.num_draft

    @property
    def widths(self) -> tuple[int, ...]:
        """A round in which no row drafts is a plain step."""
        return (0, self.num_draft)

    @abc.abstractmethod
    def run(
        self, params: Params, state: PairState, context: Context, draws: Draws | None, wanted: jax.Array
    ) -> tuple[Draft, PairState]:
        """Feeds the pairs and drafts: for rows that want less, more than they want will do."""

    def init(self, params: Params, context: Context, prefix_width: int) -> PairState:
        """See `init` of the file."""
        del prefix_width
        return init(self.network, params, context, self.num_draft, self.num_draft)

    def propose(
        self, params: Params, state: PairState, context: Context, draws: Draws | None
    ) -> tuple[Draft, PairState]:
        """K tokens for every row that has a pair."""
        return self.run(params, state, context, draws, jnp.full_like(context.length, self.num_draft))

    def propose_up_to(
        self, params: Params, state: PairState, context: Context, draws: Draws | None, wanted: jax.Array
    ) -> tuple[Draft, PairState]:
        """Up to `wanted` `[B]`; no call where no row wants any. See `ModelDrafter.propose_up_to`."""
        run = lambda state: self.run(params, state, context, draws, wanted)  # noqa: E731
        feed_only = lambda state: feed(self.network, params, state, context).state  # noqa: E731
        nothing = self.empty(params, state, context, draws)
        return draft_if_wanted(run, feed_only, nothing, state, wanted)

    def empty(self, params: Params, state: PairState, context: Context, draws: Draws | None) -> Draft:
        """A draft of no tokens yet."""
        logits = lambda: self.network.head(params, self.network.hidden(params, state.features[:, :1]))  # noqa: E731
        return chain.empty(context, jax.eval_shape(logits), draws, self.num_draft, 0)

    def commit(self, params: Params, state: PairState, round: Round) -> PairState:
        """Keeps the pairs that the round added."""
        del params
        return remember(state, round)


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


def remember(state: PairState, round: Round) -> PairState:
    """Adds the pairs of a round to those that are left to feed."""
    features = round.features
    if round.verdict.path is not None:
        features = jnp.take_along_axis(features, round.verdict.call_positions[..., None], axis=1)
    features = cache_lib.append(state.features, features, state.num_new, round.num_committed)
    return state.replace(features=features, num_new=state.num_new + round.num_committed)
