"""One round of speculative decoding: draft, verify, accept, commit.

Axes: B rows, K drafts, V vocabulary, T token slots, S source length.

Plain decoding is the same round with K = 0: the target call takes one token, and the rule
chooses from p.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax import acceptance, sampling
from specjax import cache as cache_lib
from specjax.types import AcceptanceRule, Context, Draft, Drafter, FinishReason, Network, Params, Round, Stats


@dataclasses.dataclass(frozen=True)
class Program:
    """What is static: another value compiles anew, an equal one does not.

    Attributes:
      target: the target network.
      drafter: None for plain decoding.
      rule: how drafts are judged where a row's temperature is above zero.
      length_bucket: the most tokens that any row may ask for.
      prefix_width: width of the decoder prefix, start token included.
      eos_ids: tokens that end a row.
      pad_id: what fills a row after its end.
    """

    target: Network
    drafter: Drafter | None
    rule: AcceptanceRule
    length_bucket: int
    prefix_width: int
    eos_ids: tuple[int, ...]
    pad_id: int

    @property
    def num_draft(self) -> int:
        """K, 0 for plain decoding."""
        return 0 if self.drafter is None else self.drafter.num_draft

    @property
    def num_slots(self) -> int:
        """T: prefix, the longest output, and a round beyond it, so that no write falls outside."""
        return self.prefix_width + self.length_bucket + self.num_draft + 1


class LoopState(struct.PyTreeNode):
    """What the next round needs.

    Attributes:
      context: committed ids and the source; see `types.Context`.
      cache: the target's cache, which holds all committed ids but the last.
      drafter_state: the drafter's own.
      seeds: `[B] uint32`.
      limit: `[B]`, the most tokens each row may emit.
      log_probs: `[B, T, 2] float32` beside `context.tokens`: under the log softmax of the target's
        raw logits, and under the distribution sampled from.
      finish_reason: `[B]`, a `FinishReason`.
      stats: counts so far.
    """

    context: Context
    cache: Any
    drafter_state: Any
    seeds: jax.Array
    limit: jax.Array
    log_probs: jax.Array
    finish_reason: jax.Array
    stats: Stats

    @property
    def running(self) -> jax.Array:
        """`[B] bool`."""
        return self.finish_reason == FinishReason.RUNNING


class AllParams(struct.PyTreeNode):
    """The arrays of a program: the target's and the drafter's."""

    target: Params
    drafter: Params = None


def prefill(
    program: Program, params: AllParams, source_ids: jax.Array, source_mask: jax.Array,
    prefix: jax.Array, prefix_length: jax.Array, temperature: jax.Array, limit: jax.Array,
    seeds: jax.Array,
) -> LoopState:  # fmt: skip
    """Encodes the sources, feeds the decoder prefix, and lays out the buffers.

    Args:
      program: static.
      params: of target and drafter.
      source_ids, source_mask: `[B, S]`.
      prefix: `[B, P]` decoder input so far, the start token first; P is `program.prefix_width`.
      prefix_length: `[B]` in 1..P.
      temperature: `[B] float32`.
      limit: `[B]`, at most `program.length_bucket`.
      seeds: `[B] uint32`.
    """
    num_rows, num_draft = source_ids.shape[0], program.num_draft
    target = program.target
    encoded = target.encode(params.target, source_ids, source_mask)
    cache = target.init_cache(params.target, encoded, source_mask, program.num_slots)
    if program.prefix_width > 1:
        _, _, cache = target.decode(params.target, cache, prefix[:, :-1])
        cache = cache_lib.rollback(cache, prefix_length - 1)
    in_prefix = jnp.arange(program.prefix_width)[None, :] < prefix_length[:, None]
    tokens = jnp.full((num_rows, program.num_slots), program.pad_id, jnp.int32)
    tokens = tokens.at[:, : program.prefix_width].set(jnp.where(in_prefix, prefix, program.pad_id))
    context = Context(tokens, prefix_length, source_ids, source_mask, encoded, temperature)
    count = jnp.zeros(num_rows, jnp.int32)
    by_position = jnp.zeros((num_rows, num_draft), jnp.int32)
    drafter_state = None
    if program.drafter is not None:
        drafter_state = program.drafter.init(params.drafter, context, program.prefix_width)
    return LoopState(
        context=context,
        cache=cache,
        drafter_state=drafter_state,
        seeds=seeds,
        limit=limit,
        log_probs=jnp.zeros((*tokens.shape, 2), jnp.float32),
        finish_reason=jnp.where(limit > 0, FinishReason.RUNNING, FinishReason.LENGTH).astype(jnp.int32),
        stats=Stats(count, count, by_position, by_position, count),
    )


def one_round(program: Program, params: AllParams, state: LoopState, draws: Any) -> LoopState:
    """Draft, verify, accept, commit: the unit that everything else repeats.

    Args:
      program: static.
      params: of target and drafter.
      state: the state before the round.
      draws: this round's randomness (`types.Draws`), or None for the greedy program.
    """
    context = state.context
    draft, drafter_state = _propose(program, params, state, draws)
    last = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
    chain = jnp.concatenate([last, draft.tokens], axis=1)
    logits, features, cache = program.target.decode(params.target, state.cache, chain)
    if draws is None:
        target_probs = None
        verdict = acceptance.greedy(draft, sampling.argmax(logits))
    else:
        target_probs = sampling.process(logits, context.temperature)
        verdict = program.rule(draws, draft, target_probs)
    positions = jnp.arange(program.num_draft + 1)[None, :]
    padded = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    emitted = jnp.where(positions < verdict.num_accepted[:, None], padded, verdict.next_token[:, None])
    log_probs, finite = _log_probs(logits, target_probs, emitted)
    count, reason = _cut(program, state, emitted, verdict.num_accepted + 1, finite)
    context = context.replace(
        tokens=_append(context.tokens, emitted, context.length, count),
        length=context.length + count,
    )
    if program.drafter is not None:
        happened = Round(context, draft, verdict, logits, features)
        drafter_state = program.drafter.commit(params.drafter, drafter_state, happened)
    return state.replace(
        context=context,
        cache=cache_lib.rollback(cache, context.length - 1),
        drafter_state=drafter_state,
        log_probs=_append(state.log_probs, log_probs, state.context.length, count),
        finish_reason=reason,
        stats=_count(state, draft, verdict.num_accepted, count),
    )


def _log_probs(
    logits: jax.Array, target_probs: jax.Array | None, emitted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities `[B, K + 1, 2]` of `emitted` `[B, K + 1]`, raw and processed.

    Beside them `[B, K + 1] bool`: whether the logits at a position are numbers.
    """
    at_emitted = functools.partial(jnp.take_along_axis, indices=emitted[..., None], axis=-1)
    log_normaliser = jax.nn.logsumexp(logits, axis=-1)
    raw = at_emitted(logits)[..., 0] - log_normaliser
    processed = jnp.zeros_like(raw) if target_probs is None else jnp.log(at_emitted(target_probs)[..., 0])
    return jnp.stack([raw, processed], axis=-1), jnp.isfinite(log_normaliser)


def _propose(program: Program, params: AllParams, state: LoopState, draws: Any) -> tuple[Draft, Any]:
    """The drafter's proposal, cut where a row has no use for more."""
    context = state.context
    if program.drafter is None:
        return Draft(context.tokens[:, :0], jnp.zeros_like(context.length), None), None
    draft, drafter_state = program.drafter.propose(params.drafter, state.drafter_state, context, draws)
    # A round emits one token beside the drafts; and nothing follows an end token.
    budget = state.limit - state.stats.num_emitted - 1
    is_eos = _is_eos(program, draft.tokens)
    useful = jnp.where(is_eos.any(1), is_eos.argmax(1) + 1, program.num_draft)
    num_drafted = jnp.minimum(jnp.minimum(draft.num_drafted, budget), useful).astype(jnp.int32)
    return draft.replace(num_drafted=jnp.where(state.running, num_drafted, 0)), drafter_state


def _is_eos(program: Program, tokens: jax.Array) -> jax.Array:
    """True where `tokens` end a row."""
    return functools.reduce(jnp.logical_or, [tokens == eos for eos in program.eos_ids], tokens < 0)


def _cut(
    program: Program, state: LoopState, emitted: jax.Array, count: jax.Array, finite: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How many of the `count` `[B]` tokens of `emitted` `[B, K + 1]` a row keeps, and why it ends.

    The earliest stop decides: an end token (kept), a position whose logits are not finite
    (`finite` `[B, K + 1]`; its token is not kept), the row's limit.
    """
    big = emitted.shape[1] + 1
    is_eos = _is_eos(program, emitted)
    eos = jnp.where(is_eos.any(1), is_eos.argmax(1) + 1, big)
    nonfinite = jnp.where(finite.all(1), big, (~finite).argmax(1))
    room = state.limit - state.stats.num_emitted
    count = jnp.where(state.running, count, 0)
    kept = jnp.minimum(jnp.minimum(count, room), jnp.minimum(eos, nonfinite)).astype(jnp.int32)
    reason = jnp.where((kept == nonfinite) & (kept < count), FinishReason.NONFINITE, state.finish_reason)
    reason = jnp.where(kept == room, FinishReason.LENGTH, reason)
    reason = jnp.where(kept == eos, FinishReason.EOS, reason)
    return kept, jnp.where(state.running, reason, state.finish_reason).astype(jnp.int32)


def _append(buffer: jax.Array, new: jax.Array, length: jax.Array, count: jax.Array) -> jax.Array:
    """Writes each row's first `count` entries of `new` `[B, N]` at its `length`, nothing else."""
    offsets = jnp.arange(new.shape[1])[None, :]
    slots = jnp.where(offsets < count[:, None], length[:, None] + offsets, buffer.shape[1])
    rows = jnp.arange(buffer.shape[0])[:, None]
    return buffer.at[rows, slots].set(new.astype(buffer.dtype), mode="drop")


def _count(state: LoopState, draft: Draft, num_accepted: jax.Array, count: jax.Array) -> Stats:
    """The statistics after a round that kept `count` `[B]` tokens."""
    stats, running = state.stats, state.running
    positions = jnp.arange(draft.tokens.shape[1])[None, :]
    accepted = jnp.minimum(num_accepted, count)
    # The first rejected draft was tested as well, unless the row ended before it.
    tested = jnp.minimum(jnp.minimum(num_accepted + 1, draft.num_drafted), count)
    return Stats(
        num_rounds=stats.num_rounds + running,
        num_drafted=stats.num_drafted + draft.num_drafted,
        tested=stats.tested + (positions < tested[:, None]),
        accepted=stats.accepted + (positions < accepted[:, None]),
        num_emitted=stats.num_emitted + count,
    )
