"""One round of speculative decoding: draft, verify, accept, truncate, commit.

`one_round` and `verify_and_commit` below it are algorithm 1 of Leviathan et al. 2023 for a batch whose rows
advance independently; K is the paper's gamma.

| algorithm 1 | here |
| --- | --- |
| sample gamma guesses from Mq | `_propose`: `ModelDrafter.propose`, a scan in `chain.draft_chain` |
| run Mp in parallel | `program.target.decode` on the last committed token and all drafts |
| n, the guesses before the first rejection | `acceptance.Speculative`, `acceptance.leading_run` |
| p' = norm(max(0, p - q)) at a rejection | `acceptance.next_weights`, `sampling.residual` |
| return prefix + guesses 1..n + one token from p' | `_truncate`, then the commit |

Autoregressive decoding is the same round with K = 0: the target call has one token, and the next token is
drawn from p.

Axes: B rows, N drafted tokens, D the most that can be accepted (N = D = K for a chain), V vocabulary, T token
slots, S source length, P width of the decoder prefix.
"""

import enum
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import acceptance, sampling, sharding
from specjax import cache as cache_lib
from specjax import tree as tree_lib
from specjax.types import (
    AcceptanceResult,
    AcceptanceRule,
    Context,
    Draft,
    Drafter,
    Draws,
    Network,
    Options,
    Round,
)


class Program(struct.PyTreeNode):
    """A decoding program: networks, rule and sizes. Params are leaves; everything else is static.

    Programs with equal static parts share compiled code.

    Attributes:
      target: the target network.
      drafter: None for autoregressive decoding.
      rule: the acceptance rule where a row's temperature is above zero.
      length_bucket: the most tokens that a row may emit.
      prefix_width: P, start token included.
      eos_ids: tokens that end a row.
      sampled: whether the loop draws tokens. False serves greedy rows only; True serves both kinds; None
        compiles both loops and chooses when it runs.
    """

    target: Network
    drafter: Drafter | None
    rule: AcceptanceRule = struct.field(pytree_node=False)
    length_bucket: int = struct.field(pytree_node=False)
    prefix_width: int = struct.field(pytree_node=False, default=1)
    eos_ids: tuple[int, ...] = struct.field(pytree_node=False, default=())
    sampled: bool | None = struct.field(pytree_node=False, default=None)

    @property
    def num_draft(self) -> int:
        """N, 0 for autoregressive decoding."""
        return 0 if self.drafter is None else self.drafter.num_draft

    @property
    def max_depth(self) -> int:
        """D, 0 for autoregressive decoding."""
        return 0 if self.drafter is None else self.drafter.max_depth

    @property
    def call_widths(self) -> tuple[int, ...]:
        """See `types.Drafter.call_widths`."""
        return (0,) if self.drafter is None else self.drafter.call_widths

    @property
    def num_slots(self) -> int:
        """T: the prefix, the longest output, and one round more, so that no write is out of bounds."""
        return self.prefix_width + self.length_bucket + self.num_draft + 1


class FinishReason(enum.IntEnum):
    """Why a row ended; RUNNING while it has not."""

    RUNNING = 0
    EOS = 1
    LENGTH = 2
    NONFINITE = 3
    STOP = 4


class Stats(struct.PyTreeNode):
    """Counts per row. Nothing after a row's end is counted.

    Attributes:
      num_rounds: `[B]`, target calls.
      num_drafted: `[B]`, proposed tokens.
      tested: `[B, D]`, rounds in which a draft at this position (depth in a tree) was verified.
      accepted: `[B, D]`, rounds in which one was accepted and committed.
      num_emitted: `[B]`, committed tokens.
    """

    num_rounds: jax.Array
    num_drafted: jax.Array
    tested: jax.Array
    accepted: jax.Array
    num_emitted: jax.Array

    @property
    def tau(self) -> jax.Array | np.ndarray:
        """Mean tokens per target call (block efficiency), `[B]`; nan without calls."""
        return _mean(self.num_emitted, self.num_rounds)

    @property
    def accepted_per_round(self) -> jax.Array | np.ndarray:
        """Accepted drafts per target call, `[B]`; nan without calls. For every rule and for trees."""
        return _mean(self.accepted.sum(-1), self.num_rounds)

    @property
    def alpha(self) -> jax.Array | np.ndarray:
        """Accepted over tested drafts (those up to the first rejection), `[B]`; nan if none was tested.

        It estimates the mean of sum min(p, q) only for chains under the token-wise rule.
        """
        return _mean(self.accepted.sum(-1), self.tested.sum(-1))

    def total(self) -> "Stats":
        """Returns the sums over rows, as one row."""
        return jax.tree.map(lambda x: x.sum(0, keepdims=True), self)


def _mean(total: jax.Array, count: jax.Array) -> jax.Array | np.ndarray:
    """Returns total / count, nan where count is 0; by NumPy, since `jax_debug_nans` forbids nan."""
    if isinstance(total, jax.core.Tracer) or isinstance(count, jax.core.Tracer):
        return total / jnp.where(count > 0, count, jnp.nan)
    total, count = (x.astype(np.float32) for x in sharding.fetch((total, count)))
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


class LoopState(struct.PyTreeNode):
    """The state between rounds.

    A row that has ended is still decoded until the loop ends, but its length is fixed: all later writes are
    at or beyond its root.

    Attributes:
      context: committed ids and the source; see `types.Context`.
      cache: the target's cache, which contains all committed ids but the last.
      drafter_state: the drafter's state.
      seeds: `[B] uint32`.
      log_probs: `[B, T, 2] float32` for `context.tokens`: the log softmax of the target's raw logits, and
        the log of the distribution sampled from.
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

    @classmethod
    def begin(
        cls, program: Program, context: Context, cache: Any, drafter_state: Any, seeds: jax.Array
    ) -> "LoopState":
        """Returns the state before the first round; a row without remaining tokens has ended."""
        zero = jnp.zeros_like(context.length)
        by_position = jnp.zeros((len(zero), program.max_depth), jnp.int32)
        reason = jnp.where(context.remaining > 0, FinishReason.RUNNING, FinishReason.LENGTH)
        return cls(
            context=context,
            cache=cache,
            drafter_state=drafter_state,
            seeds=seeds,
            log_probs=jnp.zeros((*context.tokens.shape, 2), jnp.float32),
            finish_reason=reason.astype(jnp.int32),
            stats=Stats(zero, zero, by_position, by_position, zero),
        )

    @property
    def running(self) -> jax.Array:
        """`[B] bool`."""
        return self.finish_reason == FinishReason.RUNNING


def prefill(
    program: Program,
    source_ids: jax.Array,
    source_mask: jax.Array,
    prefix: jax.Array,
    prefix_length: jax.Array,
    options: Options,
    limit: jax.Array,
    seeds: jax.Array,
) -> LoopState:
    """Encodes the sources, feeds the decoder prefix, and allocates the buffers.

    Args:
      program: the networks, the rule and the sizes.
      source_ids, source_mask: `[B, S]`.
      prefix: `[B, P]` decoder input so far, the start token first.
      prefix_length: `[B]` in 1..P.
      options: the options of each row.
      limit: `[B]`, the most new tokens of each row, at most `program.length_bucket`.
      seeds: `[B] uint32`.
    """
    target, pad_id = program.target, program.target.pad_id
    encoded = target.encode(source_ids, source_mask)
    cache = target.init_cache(encoded, source_mask, program.num_slots)
    if program.prefix_width > 1:
        _, _, cache = target.decode(cache, prefix[:, :-1])
        cache = cache_lib.rollback(cache, prefix_length - 1)
    in_prefix = jnp.arange(program.prefix_width)[None, :] < prefix_length[:, None]
    tokens = jnp.full((len(source_ids), program.num_slots), pad_id, jnp.int32)
    tokens = tokens.at[:, : program.prefix_width].set(jnp.where(in_prefix, prefix, pad_id))
    context = Context(tokens, prefix_length, prefix_length, source_ids, source_mask, encoded, options, limit)
    drafter_state = None if program.drafter is None else program.drafter.init(context, program.prefix_width)
    return LoopState.begin(program, context, cache, drafter_state, seeds)


def one_round(program: Program, state: LoopState, draws: Draws | None) -> LoopState:
    """Runs one round: draft, verify, accept, truncate, commit. Returns the state after it.

    Args:
      program: the networks, the rule and the sizes.
      state: the state before the round.
      draws: this round's randomness, or None for the greedy program.
    """
    # 1. Draft: the drafter proposes up to N tokens for every row, at most as many as the row can use.
    with jax.named_scope("draft"):
        draft, drafter_state = _propose(program, state, draws)
    state = state.replace(drafter_state=drafter_state)
    # 2. to 5. The target call is as narrow as the longest draft allows; the program has a branch per width.
    rest = [functools.partial(verify_and_commit, program, width, draws) for width in program.call_widths]
    if len(rest) == 1:
        return rest[0](state, draft)
    too_narrow = jnp.asarray(program.call_widths[:-1]) < draft.num_drafted.max()
    return jax.lax.switch(too_narrow.sum(), rest, state, draft)


def verify_and_commit(
    program: Program, width: int, draws: Draws | None, state: LoopState, draft: Draft
) -> LoopState:
    """Runs stages 2 to 5 with a target call of `width` drafts (static)."""
    context = state.context
    root = context.length - 1  # slot and position of the last committed token

    # 2. Verify: the target scores the last committed token and all drafts in one call.
    with jax.named_scope("verify"):
        draft = draft.narrow(width)
        new_tokens = jnp.concatenate([context.window(root, 1), draft.tokens], axis=1)
        layout = None if draft.tree is None else tree_lib.layout(draft.tree, root, program.num_slots)
        logits, features, cache = program.target.decode(state.cache, new_tokens, layout)

    # 3. Accept: the rule keeps a path of the drafts and chooses the token after it.
    with jax.named_scope("accept"):
        candidates = draft.candidates
        scores = logits[:, : candidates.tokens.shape[1] + 1]
        history = sampling.history(context, candidates.tokens, tree_lib.before(candidates))
        if draws is None:
            target_probs = None
            target_ids = sampling.argmax(sampling.adjust_logits(scores, context.options, history))
            result = acceptance.match_argmax(candidates, target_ids)
        else:
            target_probs = sampling.distribution(scores, context.options, history)
            result = program.rule(draws, candidates, target_probs)

    # 4. Truncate: at an end token, at the row's limit, or before logits that are not finite.
    with jax.named_scope("truncate"):
        emitted = _emitted(candidates, result)
        log_probs, is_finite = _log_probs(scores, target_probs, emitted, result)
        if context.options.can_forbid_all:
            adjusted = sampling.adjust_logits(scores, context.options, history)
            is_finite &= _along_path(sampling.has_choice(adjusted), result)
        count, reason = _truncate(program, state, emitted, result.num_accepted + 1, is_finite)

    # 5. Commit: append the remaining tokens, roll back both caches, count.
    with jax.named_scope("commit"):
        after = context.replace(
            tokens=cache_lib.append(context.tokens, emitted, context.length, count),
            length=context.length + count,
            remaining=jnp.where(reason == FinishReason.RUNNING, context.remaining - count, 0),
        )
        if result.path is not None:
            cache = cache_lib.keep_path(cache, root, result.path)
        drafter_state = None
        if program.drafter is not None:
            record = Round(after, root, draft, result, logits, features, target_probs)
            drafter_state = program.drafter.commit(state.drafter_state, record)
        return state.replace(
            context=after,
            cache=cache_lib.rollback(cache, after.length - 1),
            drafter_state=drafter_state,
            log_probs=cache_lib.append(state.log_probs, log_probs, context.length, count),
            finish_reason=reason,
            stats=_count(state, draft, result.num_accepted, count),
        )


def end_rows(
    program: Program, before: LoopState, after: LoopState, kept: jax.Array, ended: jax.Array
) -> LoopState:
    """Ends rows within the tokens of the last round, for a reason that only the host can see.

    Args:
      program: the networks, the rule and the sizes.
      before, after: the states around that round.
      kept: `[B]`, number of tokens that a row keeps of all it emitted.
      ended: `[B] bool`, rows that end with reason STOP.
    """
    length = after.context.length - after.stats.num_emitted + kept
    beyond = jnp.arange(program.num_slots)[None, :] >= length[:, None]
    in_round = (kept - before.stats.num_emitted)[:, None]

    def cut(count: Callable[[Stats], jax.Array]) -> jax.Array:
        """Returns counts by position; the last round counts only where its tokens are kept."""
        earlier, added = count(before.stats), count(after.stats) - count(before.stats)
        return earlier + jnp.where(jnp.arange(added.shape[1])[None, :] < in_round, added, 0)

    return after.replace(
        context=after.context.replace(
            tokens=jnp.where(beyond, program.target.pad_id, after.context.tokens),
            length=length,
            remaining=jnp.where(ended, 0, after.context.remaining),
        ),
        log_probs=jnp.where(beyond[..., None], 0.0, after.log_probs),
        finish_reason=jnp.where(ended, FinishReason.STOP, after.finish_reason).astype(jnp.int32),
        stats=after.stats.replace(
            tested=cut(lambda stats: stats.tested),
            accepted=cut(lambda stats: stats.accepted),
            num_emitted=kept,
        ),
    )


# ---- stage 1: draft


def _propose(program: Program, state: LoopState, draws: Draws | None) -> tuple[Draft, Any]:
    """Returns the drafter's proposal, cut to what each row can use, and the drafter's state."""
    drafter, context = program.drafter, state.context
    if drafter is None:
        return Draft(context.tokens[:, :0], jnp.zeros_like(context.length), None), None
    budget = context.draft_budget
    max_length = drafter.choose_length(state.drafter_state, context)
    if max_length is None:
        draft, drafter_state = drafter.propose(state.drafter_state, context, draws, None)
    else:
        max_length = jnp.minimum(max_length, budget)
        draft, drafter_state = _propose_or_skip(drafter, state, draws, max_length)
        # A tree is never cut by length: it is drafted whole or not at all.
        budget = max_length if draft.tree is None else jnp.where(max_length > 0, budget, 0)
    num_ids = context.options.num_ids or program.target.vocab_size
    _check_draft(drafter, draft, len(context.length), num_ids)
    draft = sharding.keep_whole(draft, drafter.cache_sharding)
    # No draft may follow an end token or an unknown id.
    is_eos, unknown = _is_eos(program, draft.tokens), draft.tokens >= num_ids
    cut = _cut_chain if draft.tree is None else _cut_tree
    return cut(draft, is_eos, unknown, budget), drafter_state


def _propose_or_skip(
    drafter: Drafter, state: LoopState, draws: Draws | None, max_length: jax.Array
) -> tuple[Draft, Any]:
    """Calls `propose`, or `skip` if no row drafts in this round."""
    propose = lambda drafter_state: drafter.propose(drafter_state, state.context, draws, max_length)  # noqa: E731
    shapes, _ = jax.eval_shape(propose, state.drafter_state)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    skip = lambda drafter_state: (nothing, drafter.skip(drafter_state, state.context))  # noqa: E731
    return jax.lax.cond(max_length.max() > 0, propose, skip, state.drafter_state)


def _cut_chain(draft: Draft, is_eos: jax.Array, unknown: jax.Array, budget: jax.Array) -> Draft:
    """Keeps at most `budget` `[B]` drafts, up to and including an end token, and up to an unknown id.

    Args:
      is_eos, unknown: `[B, N] bool`.
    """
    useful = jnp.minimum(_first(is_eos) + 1, _first(unknown))
    num_drafted = jnp.minimum(jnp.minimum(draft.num_drafted, budget), useful)
    return draft.replace(num_drafted=num_drafted.astype(jnp.int32))


def _cut_tree(draft: Draft, is_eos: jax.Array, unknown: jax.Array, budget: jax.Array) -> Draft:
    """Removes nodes deeper than `budget` `[B]`, nodes below an end token, and unknown ids.

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


def _check_draft(drafter: Drafter, draft: Draft, num_rows: int, num_ids: int) -> None:
    """Raises a ValueError if shapes differ from those that `types.Draft` states; runs while tracing."""
    found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "tokens": (draft.tokens.shape, (num_rows, drafter.num_draft)),
        "num_drafted": (draft.num_drafted.shape, (num_rows,)),
    }
    if draft.probs is not None:
        found["probs"] = (draft.probs.shape, (num_rows, draft.probs.shape[1], num_ids))
    if draft.tree is not None:
        found["tree.parents"] = (draft.tree.parents.shape, draft.tokens.shape)
        found["tree.valid"] = (draft.tree.valid.shape, draft.tokens.shape)
    for name, (shape, expected) in found.items():
        if shape != expected:
            raise ValueError(
                f"`{name}` drafted by {type(drafter).__name__} must have shape {expected}, got {shape}; see "
                "`specjax.types.Draft`"
            )


# ---- stage 4: truncate


def _emitted(draft: Draft, result: AcceptanceResult) -> jax.Array:
    """Returns `[B, D + 1]`: the accepted tokens, then `next_token` at all later positions."""
    tokens = draft.tokens
    if result.path is not None:
        tokens = jnp.take_along_axis(tokens, jnp.maximum(result.path - 1, 0), axis=1)
    positions = jnp.arange(draft.max_depth + 1)[None, :]
    padded = jnp.pad(tokens, ((0, 0), (0, 1)))
    return jnp.where(positions < result.num_accepted[:, None], padded, result.next_token[:, None])


def _log_probs(
    logits: jax.Array, target_probs: jax.Array | None, emitted: jax.Array, result: AcceptanceResult
) -> tuple[jax.Array, jax.Array]:
    """Returns log-probabilities `[B, D + 1, 2]` of `emitted` `[B, D + 1]`, raw and processed.

    The second result, `[B, D + 1] bool`, is True where the logits are finite.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    log_normaliser = jax.nn.logsumexp(logits, axis=-1)
    at_emitted = functools.partial(jnp.take_along_axis, indices=emitted[..., None], axis=-1)
    logits, log_normaliser = _along_path(logits, result), _along_path(log_normaliser, result)
    target_probs = None if target_probs is None else _along_path(target_probs, result)
    raw = at_emitted(logits)[..., 0] - log_normaliser
    processed = jnp.zeros_like(raw) if target_probs is None else jnp.log(at_emitted(target_probs)[..., 0])
    return jnp.stack([raw, processed], axis=-1), jnp.isfinite(log_normaliser)


def _along_path(values: jax.Array, result: AcceptanceResult) -> jax.Array:
    """Gathers `values` along the accepted path: returns `[B, D + 1, ...]`, one entry per emitted token.

    Args:
      values: `[B, N + 1, ...]` by call position; for a chain N = D, and they are returned as they are.
      result: contains the path of a tree.
    """
    if result.path is None:
        return values
    positions = jnp.pad(result.path, ((0, 0), (1, 0)))
    positions = positions.reshape(*positions.shape, *[1] * (values.ndim - 2))
    return jnp.take_along_axis(values, positions, axis=1)


def _truncate(
    program: Program, state: LoopState, emitted: jax.Array, count: jax.Array, is_finite: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns how many of `count` `[B]` tokens of `emitted` `[B, D + 1]` a row keeps, and why it ends.

    The earliest stop decides: an end token, which is kept; a position where `is_finite` `[B, D + 1]` is False
    (logits that are not finite or allow no token), whose token is dropped; or the row's limit.
    """
    eos, nonfinite = _first(_is_eos(program, emitted)) + 1, _first(~is_finite)
    remaining = state.context.remaining
    count = jnp.where(state.running, count, 0)
    kept = jnp.minimum(jnp.minimum(count, remaining), jnp.minimum(eos, nonfinite)).astype(jnp.int32)
    reason = jnp.where((kept == nonfinite) & (kept < count), FinishReason.NONFINITE, state.finish_reason)
    reason = jnp.where(kept == remaining, FinishReason.LENGTH, reason)
    reason = jnp.where(kept == eos, FinishReason.EOS, reason)
    return kept, jnp.where(state.running, reason, state.finish_reason).astype(jnp.int32)


def _is_eos(program: Program, tokens: jax.Array) -> jax.Array:
    """Returns True where `tokens` are end tokens."""
    return functools.reduce(jnp.logical_or, [tokens == eos for eos in program.eos_ids], tokens < 0)


def _first(found: jax.Array) -> jax.Array:
    """Returns `[B]`, the index of the first True in `found` `[B, N]`; N if there is none."""
    return jnp.where(found.any(1), found.argmax(1), found.shape[1])


# ---- stage 5: commit


def _count(state: LoopState, draft: Draft, num_accepted: jax.Array, count: jax.Array) -> Stats:
    """Returns the statistics after a round that kept `count` `[B]` tokens."""
    stats, running = state.stats, state.running
    positions = jnp.arange(stats.tested.shape[1])[None, :]
    accepted = jnp.minimum(num_accepted, count)
    # The first rejected draft was tested as well, unless the row ended before it.
    deepest = draft.num_drafted
    if draft.tree is not None:
        depths = tree_lib.depths_of(tree_lib.ancestors(draft.tree))[:, 1:]
        deepest = jnp.where(draft.tree.valid, depths, 0).max(axis=1, initial=0)
    tested = jnp.minimum(jnp.minimum(num_accepted + 1, deepest), count)
    return Stats(
        num_rounds=stats.num_rounds + running,
        num_drafted=stats.num_drafted + draft.num_drafted,
        tested=stats.tested + (positions < tested[:, None]),
        accepted=stats.accepted + (positions < accepted[:, None]),
        num_emitted=stats.num_emitted + count,
    )
