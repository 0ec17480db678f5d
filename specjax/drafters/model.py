"""A smaller model as drafter: K steps of it in a scan, with its own cache and encoder.

Leviathan et al. 2023, section 2. Axes: B rows, K drafts, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax.drafters import chain
from specjax.drafters.wanted import draft_if_wanted
from specjax.types import Context, Draft, Draws, Network, Params, Round


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """Draws K tokens from a draft model. Its state is that model's cache.

    Invariant: between rounds the cache holds all committed tokens but the last one, or the last
    two after a fully accepted round (the last draft was never fed). So a round's first call takes
    the last two tokens; a row that lacks only one has the other written again, unchanged.

    Attributes:
      network: the draft model. Static.
      num_draft: K.
      share_encoder: use the target's encoder output in place of the draft's own; widths must agree.
      min_confidence: a row stops early by it; see `chain.draw_up_to`.
    """

    network: Network
    num_draft: int
    share_encoder: bool = False
    min_confidence: float = 0.0

    @property
    def max_depth(self) -> int:
        """K."""
        return self.num_draft

    def init(self, params: Params, context: Context, prefix_width: int) -> cache_lib.Cache:
        """Encodes the sources, unless the target's encoder is shared, and feeds the decoder prefix."""
        encoded = encode(self.network, params, context, self.share_encoder)
        return init_cache(self.network, params, encoded, context, prefix_width, self.num_draft)

    def propose(
        self, params: Params, cache: cache_lib.Cache, context: Context, draws: Draws | None
    ) -> tuple[Draft, cache_lib.Cache]:
        """K steps of the draft model; every row drafts K tokens, unless `min_confidence` stops it."""
        if self.min_confidence:
            wanted = jnp.full_like(context.length, self.num_draft)
            return self.propose_up_to(params, cache, context, draws, wanted)
        logits, cache = catch_up(self.network, params, cache, context)

        def step(carry: tuple, position: jax.Array) -> tuple[tuple, None]:
            draft, cache = carry
            logits, cache = self._feed(params, cache, chain.last(draft, position))
            return (chain.put(draft, logits, context, draws, position)[0], cache), None

        draft = chain.empty(context, logits, draws, self.num_draft, self.num_draft)
        draft, _ = chain.put(draft, logits, context, draws, 0)
        if self.num_draft > 1:  # a scan of no steps does not run under `jax.disable_jit`
            (draft, cache), _ = jax.lax.scan(step, (draft, cache), jnp.arange(1, self.num_draft))
        return draft, cache

    def propose_up_to(
        self, params: Params, cache: cache_lib.Cache, context: Context, draws: Draws | None, wanted: jax.Array
    ) -> tuple[Draft, cache_lib.Cache]:
        """As many steps as some row still has use for; none, and no call, where no row wants any.

        Rounds without a draft leave the cache behind; it catches up here.

        Args:
          wanted: `[B]`, the most tokens that each row is to draft.
        """

        def run(cache: cache_lib.Cache) -> tuple[Draft, cache_lib.Cache]:
            cache = feed_missing(self.network, params, cache, context, self.num_draft + 1)
            logits, cache = catch_up(self.network, params, cache, context)
            empty = chain.empty(context, logits, draws, self.num_draft, 0)
            feed = functools.partial(self._feed, params)
            return chain.draw_up_to(empty, logits, cache, feed, context, draws, wanted, self.min_confidence)

        logits = jax.eval_shape(lambda: catch_up(self.network, params, cache, context)[0])
        nothing = chain.empty(context, logits, draws, self.num_draft, 0)
        return draft_if_wanted(run, lambda cache: cache, nothing, cache, wanted)

    def _feed(
        self, params: Params, cache: cache_lib.Cache, token: jax.Array
    ) -> tuple[jax.Array, cache_lib.Cache]:
        """Logits `[B, 1, V]` after one more token `[B, 1]`."""
        logits, _, cache = self.network.decode(params, cache, token)
        return logits, cache

    def commit(self, params: Params, cache: cache_lib.Cache, round: Round) -> cache_lib.Cache:
        """Forgets what was not committed; the last committed token was not fed yet."""
        del params
        return cache_lib.trim(cache, round.context.length - 1)


def encode(network: Network, params: Params, context: Context, share_encoder: bool) -> jax.Array:
    """The encoder output `[B, S, M]` that a draft model reads: its own, or the target's."""
    if share_encoder:
        return context.encoded
    return network.encode(params, context.source_ids, context.source_mask)


def init_cache(
    network: Network, params: Params, encoded: jax.Array, context: Context, prefix_width: int, num_extra: int
) -> cache_lib.Cache:
    """A draft model's cache after the decoder prefix, all but its last token.

    It has a slot per committed id and `num_extra` for what a round adds: no write can fall outside.
    """
    num_slots = context.tokens.shape[1] + num_extra
    cache = network.init_cache(params, encoded, context.source_mask, num_slots)
    if prefix_width > 1:
        _, _, cache = network.decode(params, cache, context.tokens[:, : prefix_width - 1])
    return cache_lib.trim(cache, context.length - 1)


def feed_missing(
    network: Network, params: Params, cache: cache_lib.Cache, context: Context, width: int
) -> cache_lib.Cache:
    """Feeds committed tokens, `width` a call, until no row lacks more than the last two."""

    def lags(cache: cache_lib.Cache) -> jax.Array:
        return (context.length - cache.length).max() > 2

    def chunk(cache: cache_lib.Cache) -> cache_lib.Cache:
        start = jnp.minimum(cache.length, context.length - 1)
        _, _, cache = network.decode(params, cache_lib.rollback(cache, start), context.window(start, width))
        return cache_lib.trim(cache, context.length - 1)

    return jax.lax.while_loop(lags, chunk, cache)


def catch_up(
    network: Network, params: Params, cache: cache_lib.Cache, context: Context
) -> tuple[jax.Array, cache_lib.Cache]:
    """Feeds the last two committed tokens; returns logits `[B, 1, V]` after the last, and the cache."""
    window, start = context.last_tokens(2)
    cache = cache_lib.rollback(cache, start)
    _, features, cache = network.decode(params, cache, window)
    cache = cache_lib.rollback(cache, context.length)
    last = (context.length - 1 - start)[:, None, None]
    return network.head(params, jnp.take_along_axis(features, last, axis=1)), cache
