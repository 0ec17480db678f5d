"""What `planted_bugs` plants in the rules and trees: stand-ins, each with one thing wrong.

A function named for a fault takes the original and returns what replaces it.
"""

import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from specjax import acceptance, sampling
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
    """Top-k children with the soft q beside them."""

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
