"""Staged speculative decoding: the draft model is decoded speculatively too, with a cheaper drafter.

Spector and Re 2023. The draft's tokens have exactly the draft's distribution,
so the outer rule sees the q that they were drawn from. Axes: B rows, K drafts, k drafts of the inner
drafter, V vocabulary, T token slots.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax import acceptance
from specjax import cache as cache_lib
from specjax import round as round_lib
from specjax.drafters import chain, model
from specjax.drafters.base import DrafterWrapper
from specjax.draws import Stream
from specjax.types import Context, Draft, Drafter, Draws, Network, Round


class StagedState(struct.PyTreeNode):
    """The draft's cache, and the inner drafter's state."""

    cache: cache_lib.Cache
    inner: Any


class RecorderState(struct.PyTreeNode):
    """The inner drafter's state, and q `[B, K, V]` of the first `count` `[B]` tokens; None where greedy."""

    inner: Any
    probs: jax.Array | None
    count: jax.Array


class Recorder(DrafterWrapper):
    """A wrapper of the inner drafter that records q of each token that an inner round emitted."""

    def choose_length(self, state: RecorderState, context: Context) -> jax.Array:
        """Returns `[B]`, the most drafts that each row can use."""
        return jnp.minimum(self.num_draft, context.draft_budget)

    def propose(self, state: RecorderState, *args: Any) -> tuple[Draft, RecorderState]:
        """Delegates to the inner drafter."""
        draft, inner = self.inner.propose(state.inner, *args)
        return draft, state.replace(inner=inner)

    def skip(self, state: RecorderState, context: Context) -> RecorderState:
        """Delegates to the inner drafter."""
        return state.replace(inner=self.inner.skip(state.inner, context))

    def commit(self, state: RecorderState, round: Round) -> RecorderState:
        """Records q of what was committed."""
        probs = state.probs
        if probs is not None:
            assert round.target_probs is not None
            probs = cache_lib.append(probs, round.target_probs, state.count, round.num_committed)
        inner = self.inner.commit(state.inner, round)
        return RecorderState(inner, probs, state.count + round.num_committed)


class _InnerDraws(struct.PyTreeNode):
    """The outer draws; each inner round has its own streams, among those of drafted tokens."""

    outer: Any
    first: jax.Array

    def _stream(self, stream: jax.typing.ArrayLike) -> jax.Array:
        return Stream.DRAFT.at(self.first + jnp.asarray(stream, jnp.int32))

    def accept(self, stream: jax.Array, probability: jax.Array) -> jax.Array:
        return self.outer.accept(self._stream(stream), probability)

    def choose(self, stream: jax.typing.ArrayLike, weights: jax.Array) -> jax.Array:
        return self.outer.choose(self._stream(stream), weights)


class StagedDrafter(Drafter):
    """A drafter of K tokens from a draft model, which is decoded in rounds with the inner drafter.

    Attributes:
      network: the draft model.
      inner: the draft model's drafter of chains: a `ModelDrafter` or a `PromptLookupDrafter`.
      num_draft: K.
    """

    network: Network
    inner: Drafter
    num_draft: int = struct.field(pytree_node=False)

    @property
    def vocabulary(self) -> Any:
        """The draft model's."""
        return self.network.vocabulary

    @property
    def cache_sharding(self) -> Any:
        """The network's."""
        return self.network.cache_sharding

    def check(self, target: Network) -> None:
        """Raises a ValueError if the draft model does not fit `target`, or `inner` the draft model."""
        model.check_network(self.network, target, share_encoder=False)
        self.inner.check(self.network)

    def init(self, context: Context, prefix_width: int) -> StagedState:
        """Encodes the sources for both stages, and feeds the decoder prefix."""
        encoded = model.encode(self.network, context)
        num_extra = self.num_draft + self.inner.num_draft + 1
        cache = model.prefilled_cache(self.network, encoded, context, prefix_width, num_extra)
        inner = self.inner.init(_lengthened(context, self.num_draft, encoded), prefix_width)
        return StagedState(cache, inner)

    def propose(
        self, state: StagedState, context: Context, draws: Draws | None, max_length: jax.Array | None
    ) -> tuple[Draft, StagedState]:
        """Runs inner rounds until every row has K tokens, or as many as it can use."""
        num_rows, depth = len(context.length), self.num_draft
        limit = jnp.full_like(context.length, depth) if max_length is None else max_length
        program = round_lib.Program(self.network, Recorder(self.inner), acceptance.speculative, depth)
        logits = jax.eval_shape(lambda: model.catch_up(self.network, state.cache, context)[0])
        probs = chain.empty(context, logits, draws, depth).probs
        zero = jnp.zeros(num_rows, jnp.int32)
        remaining = jnp.minimum(limit, context.draft_budget)
        first = round_lib.LoopState.begin(
            program,
            _lengthened(context, depth, context.encoded).replace(remaining=remaining),
            self._caught_up(state.cache, context),
            RecorderState(state.inner, probs, zero),
            seeds=zero.astype(jnp.uint32),
        )
        streams = len(Stream) * (self.inner.num_draft + 1)

        def body(carry: tuple) -> tuple:
            index, inner_state = carry
            inner_draws = None if draws is None else _InnerDraws(draws, index * streams)
            return index + 1, round_lib.one_round(program, inner_state, inner_draws)

        running = lambda carry: carry[1].running.any()  # noqa: E731
        _, done = jax.lax.while_loop(running, body, (jnp.asarray(0, jnp.int32), first))
        tokens = done.context.window(context.length, depth)
        recorded = done.drafter_state  # a row may have fewer, by its limit or non-finite logits
        draft = Draft(tokens, jnp.minimum(recorded.count, depth), recorded.probs)
        return draft, state.replace(cache=done.cache, inner=recorded.inner)

    def _caught_up(self, cache: cache_lib.Cache, context: Context) -> cache_lib.Cache:
        """Returns the cache with all committed tokens but the last.

        Before, it may lack one more after full acceptance, and several after rounds without a draft.
        """
        cache = model.feed_missing(self.network, cache, context, self.num_draft + 1)

        def feed(cache: cache_lib.Cache) -> cache_lib.Cache:
            start = jnp.maximum(context.length - 2, 0)
            _, _, cache = self.network.decode(cache_lib.rollback(cache, start), context.window(start, 1))
            return cache

        lacks = (cache.length < context.length - 1).any()
        cache = jax.lax.cond(lacks, feed, lambda cache: cache, cache)
        return cache_lib.rollback(cache, context.length - 1)

    def commit(self, state: StagedState, round: Round) -> StagedState:
        """Removes the tokens that the target did not accept, in both stages."""
        cache = cache_lib.trim(state.cache, round.context.length - 1)
        return state.replace(cache=cache, inner=self.inner.commit(state.inner, round))


def _lengthened(context: Context, num_draft: int, encoded: jax.Array) -> Context:
    """Returns the context as the draft model sees it: with `encoded`, and slots for a round's tokens."""
    tokens = jnp.pad(context.tokens, ((0, 0), (0, num_draft)))
    return context.replace(tokens=tokens, encoded=encoded)


def staged(draft: Any, inner: Drafter, num_draft: int = 5) -> StagedDrafter:
    """Returns a drafter from a loaded model that is itself decoded speculatively, with `inner` as drafter.

    Args:
      draft: a model from `specjax.load`.
      inner: a drafter from `drafters.from_model` or `drafters.prompt_lookup`.
      num_draft: K, tokens of the model per round.

    Raises:
      ValueError: `inner` is of another kind, or does not fit; `num_draft` is below 1.
    """
    network = model.network_of(draft)
    model.check_num_draft(num_draft)
    if not isinstance(inner, Drafter) or inner.drafts_trees or inner.own_params is not inner:
        raise ValueError(
            f"`inner` must be from drafters.from_model or drafters.prompt_lookup, got {inner!r:.80}"
        )
    if None not in (inner.vocabulary, network.vocabulary) and inner.vocabulary != network.vocabulary:
        raise ValueError("`inner` must have the draft's tokenizer, got another")
    inner.check(network)
    return StagedDrafter(network, inner, num_draft)
