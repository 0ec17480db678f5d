"""What `planted_bugs` plants: stand-ins for parts of the library, each with one thing wrong.

A function named for a fault takes the original and returns what replaces it.
"""

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax import acceptance, cache, sampling
from specjax.drafters import model
from specjax.draws import Stream
from specjax.types import Verdict


def by(replacement: Any) -> Callable[[Any], Any]:
    return lambda original: replacement


# ---- the token-wise rule


def accepts(ratio: Callable) -> Callable:
    """The rule with another probability of acceptance."""

    def rule(draws, draft, target_probs, lenience):
        del lenience
        p, q = acceptance._at_drafts(draft, target_probs)
        accepted = draws.accept(Stream.ACCEPT.at(jnp.arange(p.shape[1])), ratio(p, q))
        num_accepted = acceptance.leading_run(accepted, draft.num_drafted)
        weights = acceptance._next_weights(draft, target_probs, num_accepted)
        return Verdict(num_accepted, draws.choose(Stream.NEXT.at(0), weights))

    return by(rule)


def residual_of(position: Callable, first_target: bool = False) -> Callable:
    """The residual with the draft's q, or the target's p, of another position."""

    def next_weights(draft, target_probs, num_accepted, ratio=None):
        at = num_accepted * 0 if first_target else num_accepted
        target = acceptance._at_position(target_probs, at)
        index = jnp.clip(position(num_accepted), 0, draft.tokens.shape[1] - 1)
        rejected = (num_accepted < draft.num_drafted)[:, None]
        q = jnp.where(rejected, acceptance._at_position(draft.probs, index), 0.0)
        return sampling.residual(target, q, ratio)

    return by(next_weights)


def bonus_from_draft(next_weights):
    def fault(draft, target_probs, num_accepted, ratio=None):
        weights = next_weights(draft, target_probs, num_accepted, ratio)
        return jnp.where((num_accepted == draft.num_drafted)[:, None], draft.probs[:, -1], weights)

    return fault


def residual_although_cut(next_weights):
    """A draft cut short (limit, end token) is taken for a rejection."""

    def fault(draft, target_probs, num_accepted, ratio=None):
        whole = jnp.full_like(draft.num_drafted, draft.tokens.shape[1])
        return next_weights(draft.replace(num_drafted=whole), target_probs, num_accepted, ratio)

    return fault


def judge_by_shifted_logits(rule):
    """Draft i is judged by the logits that judge draft i - 1."""

    def fault(draws, draft, target_probs, lenience):
        shifted = jnp.concatenate([target_probs[:, :1], target_probs[:, :-1]], axis=1)
        return rule(draws, draft, shifted, lenience)

    return fault


def count_all_matches(accepted, num_drafted):
    proposed = jnp.arange(accepted.shape[1])[None, :] < num_drafted[:, None]
    return (accepted & proposed).sum(1, dtype=jnp.int32)


SHARED_STREAM = types.SimpleNamespace(ACCEPT=Stream.ACCEPT, NEXT=Stream.ACCEPT, DRAFT=Stream.DRAFT)


# ---- block verification


def block_stops_at_first_failure(rule):
    def fault(draws, draft, target_probs):
        first = types.SimpleNamespace(
            accept=lambda stream, chance: jnp.cumprod(draws.accept(stream, chance), axis=1) > 0,
            choose=draws.choose,
        )
        return rule(first, draft, target_probs)

    return fault


def block_with_token_wise_chances(chances):
    def fault(draft, target_probs, b):
        del b
        p, q = acceptance._at_drafts(draft, target_probs)
        return p / q

    return fault


def block_without_the_cap(chances):
    """The joint ratio is that of the last draft alone."""

    def fault(draft, target_probs, b):
        p, q = acceptance._at_drafts(draft, target_probs)
        alone = jnp.concatenate([b[:, :1], jnp.minimum(1.0, p / q)], axis=1)
        return chances(draft, target_probs, alone)

    return fault


# ---- trees


def never_loses_mass(residual):
    return lambda p, q, ratio=None: p


def skips_duplicates(rule):
    """The second of two equal siblings is not tried again."""

    def fault(draws, draft, target_probs):
        earlier = jnp.tril(jnp.ones((draft.tokens.shape[1],) * 2, bool), -1)[None]
        same = draft.tokens[:, :, None] == draft.tokens[:, None, :]
        siblings = draft.tree.parents[:, :, None] == draft.tree.parents[:, None, :]
        valid = draft.tree.valid & ~(earlier & same & siblings).any(-1)
        return rule(draws, draft.replace(tree=draft.tree.replace(valid=valid)), target_probs)

    return fault


def sorts_siblings(rule):
    """The likelier sibling is tried first, whichever was drawn first."""

    def fault(draws, draft, target_probs):
        q = jnp.take_along_axis(draft.probs[:, 0], draft.tokens, axis=1)
        order = jnp.argsort(-q, axis=1)
        return rule(draws, draft.replace(tokens=jnp.take_along_axis(draft.tokens, order, 1)), target_probs)

    return fault


def claims(with_replacement: bool) -> Callable:
    """Says that siblings were drawn in the other way."""
    return lambda rule: (
        lambda draws, draft, target_probs: rule(
            draws, draft.replace(with_replacement=with_replacement), target_probs
        )
    )


def soft_q_for_top_children(propose):
    """Top-k children with the soft q beside them (B13)."""

    def fault(self, params, state, context, draws):
        draft, after = propose(self, params, state, context, draws)
        logits, _ = model.catch_up(self.network, params, state, context)
        history = sampling.history(context, draft.tokens[:, :0], jnp.zeros((1, 1, 0), bool))
        return draft.replace(probs=sampling.process(logits, context.options, history)), after

    return fault


def sees_all_nodes(ancestors):
    return lambda tree: jnp.tril(jnp.ones_like(ancestors(tree)))


def position_by_slot(layout):
    def fault(tree, start, num_slots, first=0, last=None):
        right = layout(tree, start, num_slots, first, last)
        last = tree.parents.shape[1] + 1 if last is None else last
        slots = jnp.arange(num_slots)[None, :]
        return right._replace(positions=start[:, None] + jnp.arange(first, last)[None], key_positions=slots)

    return fault


def keeps_first_nodes(keep_path):
    return lambda cache, root, path: cache


# ---- the drafter


class ArgmaxDraws:
    """Proposes the most likely token, whatever the q beside it says (B01)."""

    def __init__(self, draws):
        self._draws = draws

    def choose(self, stream, weights):
        hot = jax.nn.one_hot(weights.argmax(-1), weights.shape[-1], dtype=weights.dtype)
        return self._draws.choose(stream, hot)


def argmax_proposal(propose):
    return lambda self, params, state, context, draws: propose(
        self, params, state, context, draws and ArgmaxDraws(draws)
    )


def q_without_temperature(propose):
    def fault(self, params, state, context, draws):
        draft, state = propose(self, params, state, context, draws)
        q = draft.probs ** context.options.temperature[:, None, None].astype(draft.probs.dtype)
        return draft.replace(probs=q / q.sum(-1, keepdims=True)), state

    return fault


def drops_unsure_tokens(propose):
    """Drafting stops before a drawn token that its own model finds unlikely."""

    def fault(self, params, state, context, draws):
        draft, state = propose(self, params, state, context, draws)
        sure = acceptance._at_tokens(draft.probs, draft.tokens) > 0.4
        return draft.replace(num_drafted=acceptance.leading_run(sure, draft.num_drafted)), state

    return fault


# ---- distributions


def adjust_skips(option: str) -> Callable:
    """The target's distribution, several positions at once, ignores an option that the draft obeys."""

    def change(adjust):
        def fault(logits, options, history):
            if logits.shape[1] > 1:
                options = options.replace(**{option: None})
            return adjust(logits, options, history)

        return fault

    return change


def confidence_of_the_token(put):
    """A row stops where the token drawn, and not q at its best, is unlikely."""

    def fault(draft, logits, context, draws, position):
        drawn, _ = put(draft, logits, context, draws, position)
        q = jax.nn.softmax(logits[:, 0])
        return drawn, jnp.take_along_axis(q, drawn.tokens[:, position][:, None], axis=1)[:, 0]

    return fault


def q_of_the_step_before(put):
    """The q that is kept beside a draft is that of the one before it."""

    def fault(draft, logits, context, draws, position):
        drawn, confidence = put(draft, logits, context, draws, position)
        before = drawn.probs[:, max(int(position) - 1, 0)]
        return drawn.replace(probs=drawn.probs.at[:, position].set(before)), confidence

    return fault


def soft_q_of_heads(propose):
    """Medusa's children, which were not drawn, are judged by the head's distribution."""

    def fault(self, params, state, context, draws):
        draft, state = propose(self, params, state, context, draws)
        return draft.replace(probs=jax.nn.softmax(self.network.ahead(params, state.feature, 1))), state

    return fault


def q_of_another_token(commit):
    """A staged draft is judged by what its model said of the token after it."""

    def fault(self, params, state, round):
        shifted = jnp.roll(round.target_probs, -1, axis=1)
        return commit(self, params, state, round._replace(target_probs=shifted))

    return fault


def residual_of_target(next_weights):
    """After a rejected copy the token comes from p with the copy still in it."""
    return lambda draft, p, num_accepted, ratio=None: acceptance._at_position(p, num_accepted)


def penalty_forgets_drafts(history):
    def fault(context, drafted, before):
        return history(context, drafted, before)._replace(
            seen=history(context, drafted, jnp.zeros_like(before)).seen
        )

    return fault


def minimum_length_forgets_drafts(history):
    def fault(context, drafted, before):
        right = history(context, drafted, before)
        return right._replace(num_new=jnp.broadcast_to(right.num_new[:, :1], right.num_new.shape))

    return fault


def filter_of_draft_only(filter_):
    return lambda probs, options: filter_(probs, options) if probs.shape[1] == 1 else probs


def threshold_keeps_one_less(threshold_above):
    return lambda values, weights, limit: threshold_above(
        values, weights, limit - 1 if weights.dtype == jnp.int32 else limit
    )


def temperature_one(process):
    def fault(logits, options, history):
        if logits.shape[1] > 1:
            options = options.replace(temperature=jnp.ones_like(options.temperature))
        return process(logits, options, history)

    return fault


# ---- caches


def rollback_by(offset: int) -> Callable:
    def change(original):
        return types.SimpleNamespace(
            rollback=lambda value, length: cache.rollback(value, jnp.maximum(length + offset, 0)),
            keep_path=cache.keep_path,
        )

    return change


NO_ROLLBACK = types.SimpleNamespace(rollback=lambda value, length: value, keep_path=cache.keep_path)


def write_at_first_rows_start(write):
    return lambda buffer, new, start, slots_last=False: write(
        buffer, new, jnp.broadcast_to(start.min(), start.shape), slots_last
    )


# ---- the round


def limit_too_high(cut):

    def fault(program, state, *rest):
        context = state.context.replace(room=state.context.room + 1)
        return cut(program, state.replace(context=context), *rest)

    return fault


def compare_one_late(draft, target_ids):
    num_accepted = acceptance.leading_run(draft.tokens == target_ids[:, 1:], draft.num_drafted)
    return Verdict(num_accepted, acceptance._at_position(target_ids, num_accepted))


def next_from_first(greedy):
    return lambda draft, target_ids: greedy(draft, target_ids)._replace(next_token=target_ids[:, 0])


def compare_with_root(greedy):
    """Nodes of a tree are all compared with the target's first id."""

    def fault(draft, target_ids):
        flat = jnp.concatenate(
            [jnp.broadcast_to(target_ids[:, :1], target_ids[:, :-1].shape), target_ids[:, -1:]], 1
        )
        return greedy(draft, flat)

    return fault


# ---- the noise


def one_stream(uniform):
    return lambda key, stream, shape: uniform(key, 0, shape)


def draft_stream_is_accept_stream(uniform):
    return lambda key, stream, shape: uniform(key, stream // len(Stream) * len(Stream), shape)


def positions_share_noise(uniform):
    return lambda key, stream, shape: uniform(key, stream % len(Stream), shape)


def same_noise_every_round(of_round):
    return classmethod(lambda cls, seeds, num_rounds: of_round.__func__(cls, seeds, num_rounds * 0))


def fixed_seed(of_round):
    return classmethod(lambda cls, seeds, num_rounds: of_round.__func__(cls, seeds * 0, num_rounds))


def half_uniform(uniform):
    return lambda key, stream, shape: uniform(key, stream, shape) * 0.9
