"""A draft that is itself decoded speculatively, with a drafter that is cheaper still.

Staged speculative decoding (Spector and Re 2023). The draft's tokens have exactly the draft's law, so the
outer rule sees the q that they were drawn from. Axes: B rows, K drafts, k drafts of the inner drafter,
V vocabulary, T token slots.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax import acceptance, rounds
from specjax import cache as cache_lib
from specjax.drafters import (
    BoundDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    chain,
    check_draft,
    check_num_draft,
    model,
)
from specjax.drafters.around import Around
from specjax.drafters.wanted import draft_if_wanted
from specjax.draws import Stream
from specjax.program import AllParams, LoopState, Program
from specjax.types import Context, Draft, Draws, Network, Params, Round


class StagedParams(struct.PyTreeNode):
    """Of the draft, and of what drafts for it."""

    draft: Params
    inner: Params = None


class StagedState(struct.PyTreeNode):
    """The draft's cache, and the inner drafter's state."""

    cache: cache_lib.Cache
    inner: Any


class _RecordState(struct.PyTreeNode):
    """The inner drafter's state, and q `[B, K, V]` of the first `count` `[B]` tokens; None where greedy."""

    inner: Any
    probs: jax.Array | None
    count: jax.Array


@dataclasses.dataclass(frozen=True)
class _Recorder(Around):
    """The inner drafter, and what the draft said of each token that an inner round emitted."""

    def propose(
        self, params: Params, state: _RecordState, context: Context, draws: Draws | None
    ) -> tuple[Draft, _RecordState]:
        wanted = jnp.minimum(self.num_draft, context.draft_budget)
        draft, inner = self.inner.propose_up_to(params, state.inner, context, draws, wanted)
        return draft, state.replace(inner=inner)

    def commit(self, params: Params, state: _RecordState, round: Round) -> _RecordState:
        probs = state.probs
        if probs is not None:
            assert round.target_probs is not None
            probs = cache_lib.append(probs, round.target_probs, state.count, round.num_committed)
        inner = self.inner.commit(params, state.inner, round)
        return _RecordState(inner, probs, state.count + round.num_committed)


class _InnerDraws(struct.PyTreeNode):
    """The outer draws, by streams of their own for each inner round: those of drafted tokens."""

    outer: Any
    first: jax.Array

    def _stream(self, stream: jax.typing.ArrayLike) -> jax.Array:
        return Stream.DRAFT.at(self.first + jnp.asarray(stream, jnp.int32))

    def accept(self, stream: jax.Array, probability: jax.Array) -> jax.Array:
        return self.outer.accept(self._stream(stream), probability)

    def choose(self, stream: jax.typing.ArrayLike, weights: jax.Array) -> jax.Array:
        return self.outer.choose(self._stream(stream), weights)


@dataclasses.dataclass(frozen=True)
class StagedDrafter:
    """Drafts K tokens of a draft model by rounds with the inner drafter.

    Attributes:
      network: the draft model. Static.
      num_draft: K.
      inner: drafts chains for it: a `ModelDrafter` or a `PromptLookupDrafter`.
    """

    network: Network
    num_draft: int
    inner: Any

    @property
    def max_depth(self) -> int:
        """K."""
        return self.num_draft

    def init(self, params: StagedParams, context: Context, prefix_width: int) -> StagedState:
        """Encodes the sources for both, and feeds the decoder prefix."""
        encoded = model.encode(self.network, params.draft, context, share_encoder=False)
        num_extra = self.num_draft + self.inner.num_draft + 1
        cache = model.init_cache(self.network, params.draft, encoded, context, prefix_width, num_extra)
        inner = self.inner.init(params.inner, _lengthened(context, self.num_draft, encoded), prefix_width)
        return StagedState(cache, inner)

    def propose(
        self, params: StagedParams, state: StagedState, context: Context, draws: Draws | None
    ) -> tuple[Draft, StagedState]:
        """Inner rounds until every row has K tokens, or as many as it has room for."""
        return self._run(params, context, draws, jnp.full_like(context.length, self.num_draft), state)

    def propose_up_to(
        self,
        params: StagedParams,
        state: StagedState,
        context: Context,
        draws: Draws | None,
        wanted: jax.Array,
    ) -> tuple[Draft, StagedState]:
        """The same, cut to `wanted` `[B]`; no inner round where no row wants any."""
        run = functools.partial(self._run, params, context, draws, wanted)
        nothing = self._empty(params, state, context, draws)
        return draft_if_wanted(run, lambda state: state, nothing, state, wanted)

    def _empty(
        self, params: StagedParams, state: StagedState, context: Context, draws: Draws | None
    ) -> Draft:
        like = jax.eval_shape(lambda: model.catch_up(self.network, params.draft, state.cache, context)[0])
        return chain.empty(context, like, draws, self.num_draft, 0)

    def _run(
        self,
        params: StagedParams,
        context: Context,
        draws: Draws | None,
        wanted: jax.Array,
        state: StagedState,
    ) -> tuple[Draft, StagedState]:
        num_rows, depth = len(context.length), self.num_draft
        program = Program(self.network, _Recorder(self.inner), acceptance.speculative, depth, 1, (), 0)
        probs = self._empty(params, state, context, draws).probs
        zero = jnp.zeros(num_rows, jnp.int32)
        room = jnp.minimum(wanted, context.draft_budget)
        first = LoopState.begin(
            program,
            _lengthened(context, depth, context.encoded).replace(room=room),
            self._caught_up(params, state.cache, context),
            _RecordState(state.inner, probs, zero),
            seeds=zero.astype(jnp.uint32),
        )
        all_params = AllParams(params.draft, params.inner)
        streams = len(Stream) * (self.inner.num_draft + 1)

        def body(carry: tuple) -> tuple:
            index, inner_state = carry
            inner_draws = None if draws is None else _InnerDraws(draws, index * streams)
            return index + 1, rounds.one_round(program, all_params, inner_state, inner_draws)

        running = lambda carry: carry[1].running.any()  # noqa: E731
        _, done = jax.lax.while_loop(running, body, (jnp.asarray(0, jnp.int32), first))
        tokens = done.context.window(context.length, depth)
        recorded = done.drafter_state  # a row may have fewer: its room, or logits that are no numbers
        draft = Draft(tokens, jnp.minimum(recorded.count, depth), recorded.probs)
        return draft, state.replace(cache=done.cache, inner=recorded.inner)

    def _caught_up(self, params: StagedParams, cache: cache_lib.Cache, context: Context) -> cache_lib.Cache:
        """The cache with all committed tokens but the last: after a full acceptance it lacks one more, and
        others after rounds without a draft.
        """
        cache = model.feed_missing(self.network, params.draft, cache, context, self.num_draft + 1)

        def feed(cache: cache_lib.Cache) -> cache_lib.Cache:
            start = jnp.maximum(context.length - 2, 0)
            token = jnp.take_along_axis(context.tokens, start[:, None], axis=1)
            _, _, cache = self.network.decode(params.draft, cache_lib.rollback(cache, start), token)
            return cache

        lacks = (cache.length < context.length - 1).any()
        cache = jax.lax.cond(lacks, feed, lambda cache: cache, cache)
        return cache_lib.rollback(cache, context.length - 1)

    def commit(self, params: StagedParams, state: StagedState, round: Round) -> StagedState:
        """Forgets what the target did not accept, on both stages."""
        cache = cache_lib.trim(state.cache, round.context.length - 1)
        return state.replace(cache=cache, inner=self.inner.commit(params.inner, state.inner, round))


def from_model(draft: Any, inner: BoundDrafter, num_draft: int = 5) -> BoundDrafter:
    """A loaded model that is itself decoded speculatively, with `inner` as its drafter.

    Args:
      draft: of `specjax.load`.
      inner: of `drafters.from_model` or `drafters.prompt_lookup`.
      num_draft: K, tokens of the model a round.

    Raises:
      ValueError: an inner drafter of another kind, or one that does not fit; `num_draft` is below 1.
    """
    check_draft(draft)
    check_num_draft(num_draft)
    if not isinstance(inner, BoundDrafter):
        raise ValueError(f"inner={inner!r:.80}: give one of drafters.from_model or drafters.prompt_lookup")
    if not isinstance(inner.drafter, (ModelDrafter, PromptLookupDrafter)):
        raise ValueError(f"inner={type(inner.drafter).__name__}: give one of from_model or prompt_lookup")
    theirs: Any = getattr(inner.drafter, "network", draft.network)
    ours = draft.network
    if theirs.vocab_size != ours.vocab_size:
        raise ValueError(
            f"inner has a vocabulary of {theirs.vocab_size}, the draft {ours.vocab_size}: they must share one"
        )
    if getattr(inner.drafter, "share_encoder", False) and theirs.encoded_width != ours.encoded_width:
        raise ValueError(
            f"share_encoder=True, but inner is {theirs.encoded_width} wide and the draft's encoder output "
            f"{ours.encoded_width}: share_encoder=False gives inner an encoder of its own"
        )
    if None not in (inner.tokenizer, draft.tokenizer) and (
        inner.tokenizer.get_vocab() != draft.tokenizer.get_vocab()
    ):
        raise ValueError("inner has another tokenizer than the draft: they must share one")
    drafter = StagedDrafter(draft.network, num_draft, inner.drafter)
    return BoundDrafter(drafter, StagedParams(draft.params, inner.params), draft.tokenizer)


def _lengthened(context: Context, num_draft: int, encoded: jax.Array) -> Context:
    """The context as the draft sees it: with that encoder output, and room for a round's tokens."""
    tokens = jnp.pad(context.tokens, ((0, 0), (0, num_draft)))
    return context.replace(tokens=tokens, encoded=encoded)
