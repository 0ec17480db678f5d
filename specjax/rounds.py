"""One round of speculative decoding: draft, verify, accept, commit.

Axes: B rows, N drafted tokens, D most of them that can be accepted (N = D = K for a chain), V
vocabulary, T token slots, S source length.

Plain decoding is the same round with K = 0: the target call takes one token, and the rule
chooses from p.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax import tree as tree_lib
from specjax.judge import judge
from specjax.program import AllParams, LoopState, Program
from specjax.types import Context, Draft, FinishReason, Options, Round, Stats


def prefill(
    program: Program,
    params: AllParams,
    source_ids: jax.Array,
    source_mask: jax.Array,
    prefix: jax.Array,
    prefix_length: jax.Array,
    options: Options,
    limit: jax.Array,
    seeds: jax.Array,
) -> LoopState:
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
    drafter_state = None
    if program.drafter is not None:
        drafter_state = program.drafter.init(params.drafter, context, program.prefix_width)
    return LoopState.begin(program, context, cache, drafter_state, seeds)


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
        tokens=cache_lib.append(context.tokens, emitted, context.length, count),
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
        log_probs=cache_lib.append(state.log_probs, judged.log_probs, state.context.length, count),
        finish_reason=reason,
        stats=_count(state, draft, verdict.num_accepted, count),
    )


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


def _propose(program: Program, params: AllParams, state: LoopState, draws: Any) -> tuple[Draft, Any]:
    """The drafter's proposal, cut where a row has no use for more."""
    context = state.context
    if program.drafter is None:
        return Draft(context.tokens[:, :0], jnp.zeros_like(context.length), None), None
    draft, drafter_state = program.drafter.propose(params.drafter, state.drafter_state, context, draws)
    num_ids = context.options.num_ids or program.target.vocab_size
    _check_draft(program, draft, len(context.length), num_ids)
    # Nothing follows an end token, nor an id that does not exist.
    is_eos = _is_eos(program, draft.tokens)
    unknown = draft.tokens >= num_ids
    if draft.tree is not None:
        return _cut_tree(draft, is_eos, unknown, context.draft_budget), drafter_state
    useful = jnp.minimum(_first(is_eos) + 1, _first(unknown))
    num_drafted = jnp.minimum(jnp.minimum(draft.num_drafted, context.draft_budget), useful).astype(jnp.int32)
    return draft.replace(num_drafted=num_drafted), drafter_state


def _check_draft(program: Program, draft: Draft, num_rows: int, num_ids: int) -> None:
    """Refuses arrays of other shapes than `types.Draft` says; seen while tracing, so it costs nothing.

    Raises:
      ValueError: the field is named.
    """
    found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    found["tokens"] = (draft.tokens.shape, (num_rows, program.num_draft))
    found["num_drafted"] = (draft.num_drafted.shape, (num_rows,))
    if draft.probs is not None:
        found["probs"] = (draft.probs.shape, (num_rows, draft.probs.shape[1], num_ids))
    if draft.tree is not None:
        found["tree.parents"] = (draft.tree.parents.shape, draft.tokens.shape)
        found["tree.valid"] = (draft.tree.valid.shape, draft.tokens.shape)
    for name, (shape, wanted) in found.items():
        if shape != wanted:
            name = f"{type(program.drafter).__name__} drafted {name}"
            raise ValueError(f"{name} of shape {shape}: give {wanted}, see `specjax.types.Draft`")


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
    known = tree_lib.whole(above, ~unknown)
    return tree_lib.keep_nodes(draft, (depth <= budget[:, None]) & ~ended & known)


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
    eos, nonfinite = _first(_is_eos(program, emitted)) + 1, _first(~finite)
    room = state.context.room
    count = jnp.where(state.running, count, 0)
    kept = jnp.minimum(jnp.minimum(count, room), jnp.minimum(eos, nonfinite)).astype(jnp.int32)
    reason = jnp.where((kept == nonfinite) & (kept < count), FinishReason.NONFINITE, state.finish_reason)
    reason = jnp.where(kept == room, FinishReason.LENGTH, reason)
    reason = jnp.where(kept == eos, FinishReason.EOS, reason)
    return kept, jnp.where(state.running, reason, state.finish_reason).astype(jnp.int32)


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
