"""One round of speculative decoding: draft, verify, accept, commit.

Axes: B rows, N drafted tokens, D most of them that can be accepted (N = D = K for a chain), V
vocabulary, T token slots, S source length.

Plain decoding is the same round with K = 0: the target call takes one token, and the rule
chooses from p.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import acceptance, sampling
from specjax import cache as cache_lib
from specjax import tree as tree_lib
from specjax.types import (
    AcceptanceRule,
    Context,
    Draft,
    Drafter,
    FinishReason,
    Network,
    Options,
    Params,
    Round,
    Stats,
    Verdict,
)


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
        """N, 0 for plain decoding."""
        return 0 if self.drafter is None else self.drafter.num_draft

    @property
    def max_depth(self) -> int:
        """D, 0 for plain decoding."""
        return 0 if self.drafter is None else self.drafter.max_depth

    @property
    def widths(self) -> tuple[int, ...]:
        """Drafted tokens that a target call may have room for; a round takes the first that suffices."""
        return getattr(self.drafter, "widths", (self.num_draft,))

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
      log_probs: `[B, T, 2] float32` beside `context.tokens`: under the log softmax of the target's
        raw logits, and under the distribution sampled from.
      finish_reason: `[B]`, a `FinishReason`.
      stats: counts so far.
    """

    context: Context
    cache: Any
    drafter_state: Any
    seeds: jax.Array
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
    prefix: jax.Array, prefix_length: jax.Array, options: Options, limit: jax.Array, seeds: jax.Array,
) -> LoopState:  # fmt: skip
    """Encodes the sources, feeds the decoder prefix, and lays out the buffers.

    Args:
      program: static.
      params: of target and drafter.
      source_ids, source_mask: `[B, S]`.
      prefix: `[B, P]` decoder input so far, the start token first; P is `program.prefix_width`.
      prefix_length: `[B]` in 1..P.
      options: of each row.
      limit: `[B]`, at most `program.length_bucket`.
      seeds: `[B] uint32`.
    """
    num_rows, target = source_ids.shape[0], program.target
    encoded = target.encode(params.target, source_ids, source_mask)
    cache = target.init_cache(params.target, encoded, source_mask, program.num_slots)
    if program.prefix_width > 1:
        _, _, cache = target.decode(params.target, cache, prefix[:, :-1])
        cache = cache_lib.rollback(cache, prefix_length - 1)
    in_prefix = jnp.arange(program.prefix_width)[None, :] < prefix_length[:, None]
    tokens = jnp.full((num_rows, program.num_slots), program.pad_id, jnp.int32)
    tokens = tokens.at[:, : program.prefix_width].set(jnp.where(in_prefix, prefix, program.pad_id))
    seen = None
    if options.repetition_penalty is not None:
        seen = _see(jnp.zeros((num_rows, target.vocab_size), bool), prefix, in_prefix)
    context = Context(
        tokens, prefix_length, prefix_length, source_ids, source_mask, encoded, options, seen, limit
    )
    count = jnp.zeros(num_rows, jnp.int32)
    by_position = jnp.zeros((num_rows, program.max_depth), jnp.int32)
    drafter_state = None
    if program.drafter is not None:
        drafter_state = program.drafter.init(params.drafter, context, program.prefix_width)
    return LoopState(
        context=context,
        cache=cache,
        drafter_state=drafter_state,
        seeds=seeds,
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
    draft, drafter_state = _propose(program, params, state, draws)
    branches = [functools.partial(judge, program, width) for width in program.widths]
    inputs = (params.target, state.cache, state.context, draft, draws)
    if len(branches) == 1:
        judged = branches[0](*inputs)
    else:
        suffices = jnp.asarray(program.widths[:-1]) >= draft.num_drafted.max()
        judged = jax.lax.switch(len(branches) - 1 - suffices.sum(), branches, *inputs)
    context, verdict, emitted = state.context, judged.verdict, judged.emitted
    root = context.length - 1
    count, reason = _cut(program, state, emitted, verdict.num_accepted + 1, judged.finite)
    kept = jnp.arange(emitted.shape[1])[None, :] < count[:, None]
    context = context.replace(
        tokens=_append(context.tokens, emitted, context.length, count),
        length=context.length + count,
        seen=None if context.seen is None else _see(context.seen, emitted, kept),
        room=jnp.where(reason == FinishReason.RUNNING, context.room - count, 0),
    )
    cache = judged.cache
    if verdict.path is not None:
        cache = cache_lib.keep_path(cache, root, verdict.path)
    if program.drafter is not None:
        happened = Round(context, root, draft, verdict, judged.logits, judged.features, judged.target_probs)
        drafter_state = program.drafter.commit(params.drafter, drafter_state, happened)
    return state.replace(
        context=context,
        cache=cache_lib.rollback(cache, context.length - 1),
        drafter_state=drafter_state,
        log_probs=_append(state.log_probs, judged.log_probs, state.context.length, count),
        finish_reason=reason,
        stats=_count(state, draft, verdict.num_accepted, count),
    )


class Judged(NamedTuple):
    """What the target says to a draft. Axes N and D are the drafter's, however narrow the call was."""

    verdict: Verdict
    emitted: jax.Array  # [B, D + 1]
    log_probs: jax.Array  # [B, D + 1, 2]
    finite: jax.Array  # [B, D + 1]
    logits: jax.Array  # [B, N + 1, V]
    features: jax.Array  # [B, N + 1, F]
    target_probs: jax.Array | None  # [B, N + 1, V]
    cache: Any


def judge(
    program: Program,
    width: int,
    target_params: Params,
    cache: Any,
    context: Context,
    draft: Draft,
    draws: Any,
) -> Judged:
    """One target call on the last token and the first `width` drafts, and the rule's verdict."""
    num_draft, max_depth, is_tree = draft.tokens.shape[1], draft.max_depth, draft.tree is not None
    if width < num_draft:
        assert width == 0 or not is_tree  # a tree is drafted whole or not at all
        probs = None if draft.probs is None else draft.probs[:, :width]
        draft = draft.replace(tokens=draft.tokens[:, :width], probs=probs, tree=None)
    root = context.length - 1
    last = jnp.take_along_axis(context.tokens, root[:, None], axis=1)
    layout = None if draft.tree is None else tree_lib.layout(draft.tree, root, program.num_slots)
    logits, features, cache = program.target.decode(
        target_params, cache, jnp.concatenate([last, draft.tokens], axis=1), layout
    )
    judged, of_judged = _candidates(draft), logits[:, : (draft.num_candidates or logits.shape[1]) + 1]
    verdict, target_probs = _verify(program, context, judged, of_judged, draws)
    emitted = _emitted(judged, verdict)
    log_probs, finite = _log_probs(of_judged, target_probs, emitted, verdict)

    def widen(array: jax.Array, size: int, mode: str = "constant") -> jax.Array:
        missing = size - array.shape[1]
        return jnp.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2), mode)

    if width < num_draft:
        emitted, log_probs, finite = (widen(x, max_depth + 1, "edge") for x in (emitted, log_probs, finite))
        logits, features = (widen(x, num_draft + 1) for x in (logits, features))
        target_probs = None if target_probs is None else widen(target_probs, num_draft + 1)
        if is_tree:
            verdict = verdict._replace(path=jnp.zeros((len(root), max_depth), jnp.int32))
    return Judged(verdict, emitted, log_probs, finite, logits, features, target_probs, cache)


def _candidates(draft: Draft) -> Draft:
    """The part of a draft that is judged."""
    if draft.num_candidates is None or draft.tree is None:
        return draft
    parents, valid = (x[:, : draft.num_candidates] for x in (draft.tree.parents, draft.tree.valid))
    return draft.replace(
        tokens=draft.tokens[:, : draft.num_candidates], tree=draft.tree.replace(parents=parents, valid=valid)
    )


def _verify(
    program: Program, context: Context, draft: Draft, logits: jax.Array, draws: Any
) -> tuple[Verdict, jax.Array | None]:
    """The rule's verdict on `logits` `[B, N + 1, V]`; beside it p, None for the greedy program."""
    history = sampling.history(context, draft.tokens, tree_lib.before(draft))
    if draws is None:
        adjusted = sampling.adjust(logits, context.options, history)
        return acceptance.greedy(draft, sampling.argmax(adjusted)), None
    target_probs = sampling.process(logits, context.options, history)
    return program.rule(draws, draft, target_probs), target_probs


def _emitted(draft: Draft, verdict: Verdict) -> jax.Array:
    """`[B, D + 1]`: the accepted tokens, then `next_token` (in all places after them)."""
    tokens = draft.tokens
    if verdict.path is not None:
        tokens = jnp.take_along_axis(tokens, jnp.maximum(verdict.path - 1, 0), axis=1)
    positions = jnp.arange(draft.max_depth + 1)[None, :]
    padded = jnp.pad(tokens, ((0, 0), (0, 1)))
    return jnp.where(positions < verdict.num_accepted[:, None], padded, verdict.next_token[:, None])


def end_rows(
    program: Program, before: LoopState, after: LoopState, kept: jax.Array, ended: jax.Array
) -> LoopState:
    """Ends rows inside what they emitted in the last round, for a reason that only the host can see.

    Args:
      program: static.
      before, after: the states around that round.
      kept: `[B]`, tokens that a row keeps of all it emitted.
      ended: `[B] bool`, rows that end with reason STOP.
    """
    length = after.context.length - after.stats.num_emitted + kept
    beyond = jnp.arange(program.num_slots)[None, :] >= length[:, None]
    in_round = (kept - before.stats.num_emitted)[:, None]

    def cut(count: Callable[[Stats], jax.Array]) -> jax.Array:
        """Counts by position, those of the last round only as far as its tokens were kept."""
        earlier, added = count(before.stats), count(after.stats) - count(before.stats)
        return earlier + jnp.where(jnp.arange(added.shape[1])[None, :] < in_round, added, 0)

    return after.replace(
        context=after.context.replace(
            tokens=jnp.where(beyond, program.pad_id, after.context.tokens),
            length=length,
            room=jnp.where(ended, 0, after.context.room),
        ),
        log_probs=jnp.where(beyond[..., None], 0.0, after.log_probs),
        finish_reason=jnp.where(ended, FinishReason.STOP, after.finish_reason).astype(jnp.int32),
        stats=after.stats.replace(
            tested=cut(lambda stats: stats.tested),
            accepted=cut(lambda stats: stats.accepted),
            num_emitted=kept,
        ),
    )


def _log_probs(
    logits: jax.Array, target_probs: jax.Array | None, emitted: jax.Array, verdict: Verdict
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities `[B, D + 1, 2]` of `emitted` `[B, D + 1]`, raw and processed.

    Beside them `[B, D + 1] bool`: whether the logits at a position are numbers.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    log_normaliser = jax.nn.logsumexp(logits, axis=-1)
    at_emitted = functools.partial(jnp.take_along_axis, indices=emitted[..., None], axis=-1)
    if verdict.path is not None:  # each token was emitted after the node before it on the path
        path = jnp.pad(verdict.path, ((0, 0), (1, 0)))
        along = functools.partial(jnp.take_along_axis, indices=path[..., None], axis=1)
        logits, log_normaliser = along(logits), along(log_normaliser[..., None])[..., 0]
        target_probs = None if target_probs is None else along(target_probs)
    raw = at_emitted(logits)[..., 0] - log_normaliser
    processed = jnp.zeros_like(raw) if target_probs is None else jnp.log(at_emitted(target_probs)[..., 0])
    return jnp.stack([raw, processed], axis=-1), jnp.isfinite(log_normaliser)


def _propose(program: Program, params: AllParams, state: LoopState, draws: Any) -> tuple[Draft, Any]:
    """The drafter's proposal, cut where a row has no use for more."""
    context = state.context
    if program.drafter is None:
        return Draft(context.tokens[:, :0], jnp.zeros_like(context.length), None), None
    draft, drafter_state = program.drafter.propose(params.drafter, state.drafter_state, context, draws)
    # A round emits one token beside the drafts; nothing follows an end token, nor an id that does not exist.
    budget = jnp.maximum(context.room - 1, 0)
    is_eos = _is_eos(program, draft.tokens)
    unknown = draft.tokens >= (context.options.num_ids or program.target.vocab_size)
    if draft.tree is not None:
        return _cut_tree(draft, is_eos, unknown, budget), drafter_state
    useful = jnp.minimum(_first(is_eos) + 1, _first(unknown))
    num_drafted = jnp.minimum(jnp.minimum(draft.num_drafted, budget), useful).astype(jnp.int32)
    return draft.replace(num_drafted=num_drafted), drafter_state


def _first(found: jax.Array) -> jax.Array:
    """`[B]`, the index of the first True of `found` `[B, N]`; N where there is none."""
    return jnp.where(found.any(1), found.argmax(1), found.shape[1])


def _cut_tree(draft: Draft, is_eos: jax.Array, unknown: jax.Array, budget: jax.Array) -> Draft:
    """Takes away nodes deeper than `budget` `[B]`, those below an end token, and ids that do not exist.

    Args:
      is_eos, unknown: `[B, N] bool`.
    """
    assert draft.tree is not None
    above = tree_lib.ancestors(draft.tree)
    depth = tree_lib.depths_of(above)[:, 1:]
    itself = jnp.eye(above.shape[1], dtype=bool)[None]
    ended = ((above & ~itself)[:, 1:, 1:] & is_eos[:, None]).any(-1)
    unknown = (above[:, 1:, 1:] & unknown[:, None]).any(-1)
    valid = draft.tree.valid & (depth <= budget[:, None]) & ~ended & ~unknown
    return draft.replace(tree=draft.tree.replace(valid=valid), num_drafted=valid.sum(1, dtype=jnp.int32))


def _is_eos(program: Program, tokens: jax.Array) -> jax.Array:
    """True where `tokens` end a row."""
    return functools.reduce(jnp.logical_or, [tokens == eos for eos in program.eos_ids], tokens < 0)


def _cut(
    program: Program, state: LoopState, emitted: jax.Array, count: jax.Array, finite: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How many of the `count` `[B]` tokens of `emitted` `[B, D + 1]` a row keeps, and why it ends.

    The earliest stop decides: an end token (kept), a position whose logits are not finite
    (`finite` `[B, D + 1]`; its token is not kept), the row's limit.
    """
    big = emitted.shape[1] + 1
    is_eos = _is_eos(program, emitted)
    eos = jnp.where(is_eos.any(1), is_eos.argmax(1) + 1, big)
    nonfinite = jnp.where(finite.all(1), big, (~finite).argmax(1))
    room = state.context.room
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


def _see(seen: jax.Array, tokens: jax.Array, valid: jax.Array) -> jax.Array:
    """Adds `tokens` `[B, N]`, where `valid` `[B, N]`, to the ids `seen` `[B, V]`."""
    rows = jnp.arange(seen.shape[0])[:, None]
    return seen.at[rows, jnp.where(valid, tokens, seen.shape[1])].set(True, mode="drop")


def _count(state: LoopState, draft: Draft, num_accepted: jax.Array, count: jax.Array) -> Stats:
    """The statistics after a round that kept `count` `[B]` tokens."""
    stats, running = state.stats, state.running
    positions = jnp.arange(draft.max_depth)[None, :]
    accepted = jnp.minimum(num_accepted, count)
    # The first rejected draft was tested as well, unless the row ended before it.
    deepest = draft.num_drafted if draft.tree is None else _deepest(draft)
    tested = jnp.minimum(jnp.minimum(num_accepted + 1, deepest), count)
    return Stats(
        num_rounds=stats.num_rounds + running,
        num_drafted=stats.num_drafted + draft.num_drafted,
        tested=stats.tested + (positions < tested[:, None]),
        accepted=stats.accepted + (positions < accepted[:, None]),
        num_emitted=stats.num_emitted + count,
    )


def _deepest(draft: Draft) -> jax.Array:
    """`[B]`, depth of the deepest node that is there."""
    assert draft.tree is not None
    depths = tree_lib.depths_of(tree_lib.ancestors(draft.tree))[:, 1:]
    return jnp.where(draft.tree.valid, depths, 0).max(axis=1, initial=0)
