"""Faults that the proof of exactness must catch: the real code with one thing wrong.

`BUGS[name]` says what is replaced, where the fault shows, and on which case:

- "law": the enumerated output law differs from the target's;
- "raises": the enumeration is refused (a draw made twice, a distribution that is none);
- "twin": the law stays exact, but a draft equal to the target is no longer always accepted;
- "greedy": the greedy program's output differs from the target's argmax;
- "sampled": the enumeration, whose draws are scripted, cannot see it: drawn samples must.

Classes: group 1 of what is reported against such systems (which distribution, which position, which
noise), caches and stops, and the traps of block and tree verification.
"""

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.law_cases import Case
from specjax import acceptance, cache, draws, rounds, sampling, tree
from specjax.drafters import model, model_tree
from specjax.draws import Stream
from specjax.sampling import Sampling
from specjax.types import Context, Verdict

CHAIN = Case(eos_ids=(2,), limit=3)  # a cut at the limit, an end token, full acceptance
BLOCK = Case(rule=lambda: acceptance.block)
WITH = Case(branching=(2,), with_replacement=True)
WITHOUT = Case(branching=(2,))
DEEP = Case(branching=(1, 2), num_tokens=4)
TOP_CHILDREN = Case(branching=(2,), deterministic=True)
TWIN = Case()
GREEDY = Case(num_tokens=8, dtype=np.float32)
GREEDY_TREE = dataclasses.replace(GREEDY, branching=(2, 2))
PENALTY = Case(options=Sampling(repetition_penalty=2.0), prefix=(0, 2))


@dataclasses.dataclass(frozen=True)
class Bug:
    """A fault: `change(original)` takes the place of `where.name`."""

    where: Any
    name: str
    change: Callable[[Any], Any]
    shows: str = "law"
    case: Case = CHAIN


@contextlib.contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The code with `bug` in it."""
    original = vars(bug.where)[bug.name]
    setattr(bug.where, bug.name, bug.change(original))
    try:
        yield
    finally:
        setattr(bug.where, bug.name, original)


def _by(replacement: Any) -> Callable[[Any], Any]:
    return lambda original: replacement


# ---- the token-wise rule


def _accepts(ratio: Callable) -> Callable:
    """The rule with another probability of acceptance."""

    def rule(draws, draft, target_probs, lenience):
        del lenience
        p, q = acceptance._at_drafts(draft, target_probs)
        accepted = draws.accept(Stream.ACCEPT.at(jnp.arange(p.shape[1])), ratio(p, q))
        num_accepted = acceptance.leading_run(accepted, draft.num_drafted)
        weights = acceptance._next_weights(draft, target_probs, num_accepted)
        return Verdict(num_accepted, draws.choose(Stream.NEXT.at(0), weights))

    return _by(rule)


def _residual_of(position: Callable, first_target: bool = False) -> Callable:
    """The residual with the draft's q, or the target's p, of another position."""

    def next_weights(draft, target_probs, num_accepted, ratio=None):
        at = num_accepted * 0 if first_target else num_accepted
        target = acceptance._at_position(target_probs, at)
        index = jnp.clip(position(num_accepted), 0, draft.tokens.shape[1] - 1)
        rejected = (num_accepted < draft.num_drafted)[:, None]
        q = jnp.where(rejected, acceptance._at_position(draft.probs, index), 0.0)
        return sampling.residual(target, q, ratio)

    return _by(next_weights)


def _bonus_from_draft(next_weights):
    def fault(draft, target_probs, num_accepted, ratio=None):
        weights = next_weights(draft, target_probs, num_accepted, ratio)
        return jnp.where((num_accepted == draft.num_drafted)[:, None], draft.probs[:, -1], weights)

    return fault


def _residual_although_cut(next_weights):
    """A draft cut short (limit, end token) is taken for a rejection."""

    def fault(draft, target_probs, num_accepted, ratio=None):
        whole = jnp.full_like(draft.num_drafted, draft.tokens.shape[1])
        return next_weights(draft.replace(num_drafted=whole), target_probs, num_accepted, ratio)

    return fault


def _judge_by_shifted_logits(rule):
    """Draft i is judged by the logits that judge draft i - 1."""

    def fault(draws, draft, target_probs, lenience):
        shifted = jnp.concatenate([target_probs[:, :1], target_probs[:, :-1]], axis=1)
        return rule(draws, draft, shifted, lenience)

    return fault


def _count_all_matches(accepted, num_drafted):
    proposed = jnp.arange(accepted.shape[1])[None, :] < num_drafted[:, None]
    return (accepted & proposed).sum(1, dtype=jnp.int32)


_SHARED_STREAM = types.SimpleNamespace(ACCEPT=Stream.ACCEPT, NEXT=Stream.ACCEPT, DRAFT=Stream.DRAFT)


# ---- block verification


def _block_stops_at_first_failure(rule):
    def fault(draws, draft, target_probs):
        first = types.SimpleNamespace(
            accept=lambda stream, chance: jnp.cumprod(draws.accept(stream, chance), axis=1) > 0,
            choose=draws.choose,
        )
        return rule(first, draft, target_probs)

    return fault


def _block_with_token_wise_chances(chances):
    def fault(draft, target_probs, b):
        del b
        p, q = acceptance._at_drafts(draft, target_probs)
        return p / q

    return fault


def _block_without_the_cap(chances):
    """The joint ratio is that of the last draft alone."""

    def fault(draft, target_probs, b):
        p, q = acceptance._at_drafts(draft, target_probs)
        alone = jnp.concatenate([b[:, :1], jnp.minimum(1.0, p / q)], axis=1)
        return chances(draft, target_probs, alone)

    return fault


# ---- trees


def _never_loses_mass(residual):
    return lambda p, q, ratio=None: p


def _skips_duplicates(rule):
    """The second of two equal siblings is not tried again."""

    def fault(draws, draft, target_probs):
        earlier = jnp.tril(jnp.ones((draft.tokens.shape[1],) * 2, bool), -1)[None]
        same = draft.tokens[:, :, None] == draft.tokens[:, None, :]
        siblings = draft.tree.parents[:, :, None] == draft.tree.parents[:, None, :]
        valid = draft.tree.valid & ~(earlier & same & siblings).any(-1)
        return rule(draws, draft.replace(tree=draft.tree.replace(valid=valid)), target_probs)

    return fault


def _sorts_siblings(rule):
    """The likelier sibling is tried first, whichever was drawn first."""

    def fault(draws, draft, target_probs):
        q = jnp.take_along_axis(draft.probs[:, 0], draft.tokens, axis=1)
        order = jnp.argsort(-q, axis=1)
        return rule(draws, draft.replace(tokens=jnp.take_along_axis(draft.tokens, order, 1)), target_probs)

    return fault


def _claims(with_replacement: bool) -> Callable:
    """Says that siblings were drawn in the other way."""
    return lambda rule: (
        lambda draws, draft, target_probs: rule(
            draws, draft.replace(with_replacement=with_replacement), target_probs
        )
    )


def _soft_q_for_top_children(propose):
    """Top-k children with the soft q beside them (B13)."""

    def fault(self, params, state, context, draws):
        draft, after = propose(self, params, state, context, draws)
        logits, _ = model.catch_up(self.network, params, state, context)
        history = sampling.history(context, draft.tokens[:, :0], jnp.zeros((1, 1, 0), bool))
        return draft.replace(probs=sampling.process(logits, context.options, history)), after

    return fault


def _sees_all_nodes(ancestors):
    return lambda tree: jnp.tril(jnp.ones_like(ancestors(tree)))


def _position_by_slot(layout):
    def fault(tree, start, num_slots, first=0, last=None):
        right = layout(tree, start, num_slots, first, last)
        last = tree.parents.shape[1] + 1 if last is None else last
        slots = jnp.arange(num_slots)[None, :]
        return right._replace(positions=start[:, None] + jnp.arange(first, last)[None], key_positions=slots)

    return fault


def _keeps_first_nodes(keep_path):
    return lambda cache, root, path: cache


# ---- the drafter


class _ArgmaxDraws:
    """Proposes the most likely token, whatever the q beside it says (B01)."""

    def __init__(self, draws):
        self._draws = draws

    def choose(self, stream, weights):
        hot = jax.nn.one_hot(weights.argmax(-1), weights.shape[-1], dtype=weights.dtype)
        return self._draws.choose(stream, hot)


def _argmax_proposal(propose):
    return lambda self, params, state, context, draws: propose(
        self, params, state, context, draws and _ArgmaxDraws(draws)
    )


def _q_without_temperature(propose):
    def fault(self, params, state, context, draws):
        draft, state = propose(self, params, state, context, draws)
        q = draft.probs ** context.options.temperature[:, None, None].astype(draft.probs.dtype)
        return draft.replace(probs=q / q.sum(-1, keepdims=True)), state

    return fault


def _drops_unsure_tokens(propose):
    """Drafting stops before a drawn token that its own model finds unlikely."""

    def fault(self, params, state, context, draws):
        draft, state = propose(self, params, state, context, draws)
        sure = acceptance._at_tokens(draft.probs, draft.tokens) > 0.4
        return draft.replace(num_drafted=acceptance.leading_run(sure, draft.num_drafted)), state

    return fault


# ---- distributions


def _adjust_skips(option: str) -> Callable:
    """The target's distribution, several positions at once, ignores an option that the draft obeys."""

    def change(adjust):
        def fault(logits, options, history):
            if logits.shape[1] > 1:
                options = options.replace(**{option: None})
            return adjust(logits, options, history)

        return fault

    return change


def _penalty_forgets_drafts(history):
    def fault(context, drafted, before):
        return history(context, drafted, before)._replace(
            seen=history(context, drafted, jnp.zeros_like(before)).seen
        )

    return fault


def _minimum_length_forgets_drafts(history):
    def fault(context, drafted, before):
        right = history(context, drafted, before)
        return right._replace(num_new=jnp.broadcast_to(right.num_new[:, :1], right.num_new.shape))

    return fault


def _filter_of_draft_only(filter_):
    return lambda probs, options: filter_(probs, options) if probs.shape[1] == 1 else probs


def _threshold_keeps_one_less(threshold_above):
    return lambda values, weights, limit: threshold_above(
        values, weights, limit - 1 if weights.dtype == jnp.int32 else limit
    )


def _temperature_one(process):
    def fault(logits, options, history):
        if logits.shape[1] > 1:
            options = options.replace(temperature=jnp.ones_like(options.temperature))
        return process(logits, options, history)

    return fault


# ---- caches


def _rollback_by(offset: int) -> Callable:
    def change(original):
        return types.SimpleNamespace(
            rollback=lambda value, length: cache.rollback(value, jnp.maximum(length + offset, 0)),
            keep_path=cache.keep_path,
        )

    return change


_NO_ROLLBACK = types.SimpleNamespace(rollback=lambda value, length: value, keep_path=cache.keep_path)


def _write_at_first_rows_start(write):
    return lambda buffer, new, start, slots_last=False: write(
        buffer, new, jnp.broadcast_to(start.min(), start.shape), slots_last
    )


# ---- the round


def _limit_too_high(cut):
    return lambda program, state, *rest: cut(program, state.replace(limit=state.limit + 1), *rest)


def _compare_one_late(draft, target_ids):
    num_accepted = acceptance.leading_run(draft.tokens == target_ids[:, 1:], draft.num_drafted)
    return Verdict(num_accepted, acceptance._at_position(target_ids, num_accepted))


def _next_from_first(greedy):
    return lambda draft, target_ids: greedy(draft, target_ids)._replace(next_token=target_ids[:, 0])


def _compare_with_root(greedy):
    """Nodes of a tree are all compared with the target's first id."""

    def fault(draft, target_ids):
        flat = jnp.concatenate(
            [jnp.broadcast_to(target_ids[:, :1], target_ids[:, :-1].shape), target_ids[:, -1:]], 1
        )
        return greedy(draft, flat)

    return fault


# ---- the noise


def _one_stream(uniform):
    return lambda key, stream, shape: uniform(key, 0, shape)


def _draft_stream_is_accept_stream(uniform):
    return lambda key, stream, shape: uniform(key, stream // len(Stream) * len(Stream), shape)


def _positions_share_noise(uniform):
    return lambda key, stream, shape: uniform(key, stream % len(Stream), shape)


def _same_noise_every_round(of_round):
    return classmethod(lambda cls, seeds, num_rounds: of_round.__func__(cls, seeds, num_rounds * 0))


def _fixed_seed(of_round):
    return classmethod(lambda cls, seeds, num_rounds: of_round.__func__(cls, seeds * 0, num_rounds))


def _half_uniform(uniform):
    return lambda key, stream, shape: uniform(key, stream, shape) * 0.9


BUGS: dict[str, Bug] = {
    "resample_from_target": Bug(sampling, "residual", _never_loses_mass),
    "residual_uses_first_q": Bug(acceptance, "_next_weights", _residual_of(lambda n: n * 0)),
    "residual_uses_next_q": Bug(acceptance, "_next_weights", _residual_of(lambda n: n + 1)),
    "residual_uses_first_p": Bug(acceptance, "_next_weights", _residual_of(lambda n: n, first_target=True)),
    "bonus_from_draft": Bug(acceptance, "_next_weights", _bonus_from_draft),
    "residual_although_cut": Bug(acceptance, "_next_weights", _residual_although_cut),
    "accept_with_q_over_p": Bug(acceptance, "_token_wise", _accepts(lambda p, q: q / p)),
    "accept_if_p_above_q": Bug(acceptance, "_token_wise", _accepts(lambda p, q: (p >= q).astype(p.dtype))),
    "accept_with_p": Bug(acceptance, "_token_wise", _accepts(lambda p, q: p)),
    "accept_everything": Bug(acceptance, "leading_run", _by(lambda accepted, num_drafted: num_drafted)),
    "count_matches_after_a_mismatch": Bug(acceptance, "leading_run", _by(_count_all_matches)),
    "judge_by_shifted_logits": Bug(acceptance, "_token_wise", _judge_by_shifted_logits),
    "shared_stream": Bug(acceptance, "Stream", _by(_SHARED_STREAM), "raises"),
    "block_stops_at_first_failure": Bug(acceptance, "block", _block_stops_at_first_failure, case=BLOCK),
    "block_with_token_wise_chances": Bug(
        acceptance, "_block_chances", _block_with_token_wise_chances, case=BLOCK
    ),
    "block_without_joint_ratio": Bug(acceptance, "_block_chances", _block_without_the_cap, case=BLOCK),
    "block_with_token_wise_residual": Bug(
        acceptance,
        "_next_weights",
        lambda next_weights: lambda draft, p, num_accepted, ratio=None: next_weights(draft, p, num_accepted),
        case=BLOCK,
    ),
    "tree_p_not_updated": Bug(sampling, "residual", _never_loses_mass, case=WITHOUT),
    "tree_skips_duplicates": Bug(acceptance, "multi_round", _skips_duplicates, case=WITH),
    "tree_sorts_siblings": Bug(acceptance, "multi_round", _sorts_siblings, case=WITHOUT),
    "tree_sorts_siblings_with_replacement": Bug(acceptance, "multi_round", _sorts_siblings, case=WITH),
    "tree_q_not_updated": Bug(acceptance, "multi_round", _claims(True), case=WITHOUT),
    "tree_q_updated_although_replaced": Bug(acceptance, "multi_round", _claims(False), case=WITH),
    "top_children_with_soft_q": Bug(
        model_tree.ModelTreeDrafter, "propose", _soft_q_for_top_children, case=TOP_CHILDREN
    ),
    "tree_sees_all_nodes": Bug(tree, "ancestors", _sees_all_nodes, case=DEEP),
    "tree_position_by_slot": Bug(tree, "layout", _position_by_slot, case=DEEP),
    "tree_path_not_kept": Bug(cache, "keep_path", _keeps_first_nodes, case=DEEP),
    "argmax_proposal_with_soft_q": Bug(model.ModelDrafter, "propose", _argmax_proposal),
    "q_without_temperature": Bug(model.ModelDrafter, "propose", _q_without_temperature),
    "unsure_tokens_dropped": Bug(model.ModelDrafter, "propose", _drops_unsure_tokens),
    "p_without_temperature": Bug(sampling, "process", _temperature_one),
    "penalty_not_in_p": Bug(sampling, "adjust", _adjust_skips("repetition_penalty"), case=PENALTY),
    "penalty_forgets_drafts": Bug(sampling, "history", _penalty_forgets_drafts, case=PENALTY),
    "minimum_length_not_in_p": Bug(
        sampling, "adjust", _adjust_skips("min_new_tokens"),
        case=Case(options=Sampling(min_new_tokens=2), eos_ids=(2,)),
    ),
    "minimum_length_forgets_drafts": Bug(
        sampling, "history", _minimum_length_forgets_drafts,
        case=Case(options=Sampling(min_new_tokens=2), eos_ids=(2,)),
    ),
    "filters_of_draft_only": Bug(
        sampling, "_filter", _filter_of_draft_only, case=Case(options=Sampling(top_p=0.7))
    ),
    "top_k_keeps_one_less": Bug(
        sampling, "threshold_above", _threshold_keeps_one_less, case=Case(options=Sampling(top_k=2))
    ),
    "padding_ids_not_cut": Bug(
        sampling, "adjust", _adjust_skips("num_ids"), "raises", Case(vocab_size=4, num_ids=3)
    ),
    "target_cache_one_too_long": Bug(rounds, "cache_lib", _rollback_by(1)),
    "target_cache_one_too_short": Bug(rounds, "cache_lib", _rollback_by(-1)),
    "target_cache_keeps_rejected": Bug(rounds, "cache_lib", _by(_NO_ROLLBACK)),
    "write_at_batch_minimum": Bug(cache, "write", _write_at_first_rows_start),
    "draft_cache_one_too_long": Bug(model, "cache_lib", _rollback_by(1), "twin", TWIN),
    "draft_cache_one_too_short": Bug(model, "cache_lib", _rollback_by(-1), "twin", TWIN),
    "draft_cache_not_caught_up": Bug(
        Context, "last_tokens", lambda last_tokens: lambda self, count: last_tokens(self, 1), "twin", TWIN
    ),
    "draft_tree_path_not_kept": Bug(
        model_tree, "cache_lib", _by(types.SimpleNamespace(keep_path=lambda cache, root, path: cache)),
        "twin", Case(vocab_size=2, branching=(2, 1, 1), num_tokens=6),
    ),
    "limit_off_by_one": Bug(rounds, "_cut", _limit_too_high),
    "no_cut_at_end_token": Bug(rounds, "_is_eos", _by(lambda program, tokens: tokens < 0)),
    "greedy_compares_one_late": Bug(acceptance, "greedy", _by(_compare_one_late), "greedy", GREEDY),
    "greedy_next_from_first": Bug(acceptance, "greedy", _next_from_first, "greedy", GREEDY),
    "greedy_tree_compares_with_root": Bug(acceptance, "greedy", _compare_with_root, "greedy", GREEDY_TREE),
    "greedy_tree_path_not_kept": Bug(cache, "keep_path", _keeps_first_nodes, "greedy", GREEDY_TREE),
    "all_streams_share_noise": Bug(draws, "_uniform", _one_stream, "sampled", TWIN),
    "draft_and_accept_share_noise": Bug(draws, "_uniform", _draft_stream_is_accept_stream, "sampled", TWIN),
    "positions_share_noise": Bug(draws, "_uniform", _positions_share_noise, "sampled", TWIN),
    "same_noise_every_round": Bug(draws.KeyDraws, "of_round", _same_noise_every_round, "sampled", TWIN),
    "fixed_seed": Bug(draws.KeyDraws, "of_round", _fixed_seed, "sampled", TWIN),
    "noise_short_of_one": Bug(draws, "_uniform", _half_uniform, "sampled", TWIN),
}  # fmt: skip
