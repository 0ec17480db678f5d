"""Faults that the tests of the law, of the caches and of greedy decoding must catch.

Each is planted in the real code by a monkeypatch. `BUGS[name]` says where it shows:

- "law": the enumerated output law differs from the target's;
- "raises": the scripted draws refuse it;
- "twin": the law stays exact, but a draft equal to the target is no longer always accepted;
- "greedy": the greedy program's output differs from the target's argmax.
"""

import types
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import acceptance, cache, rounds, sampling
from specjax.drafters import model
from specjax.sampling import Stream
from specjax.types import Context, Verdict

Plant = Callable[["pytest.MonkeyPatch"], None]  # noqa: F821


class Bug(NamedTuple):
    """A fault: how it is planted and where it must show."""

    plant: Plant
    shows: str


def _replace(where: object, name: str, fault: object) -> Plant:
    return lambda monkeypatch: monkeypatch.setattr(where, name, fault)


def _wrap(where: object, name: str, wrapper: Callable) -> Plant:
    """Replaces a function by `wrapper(function)`."""
    return _replace(where, name, wrapper(getattr(where, name)))


# ---- the rule


def _accepts(ratio: Callable) -> Callable:
    """`acceptance.speculative` with another probability of acceptance."""

    def rule(draws, draft, target_probs):
        num_draft = draft.tokens.shape[1]
        p = acceptance._at_tokens(target_probs[:, :num_draft], draft.tokens)
        q = acceptance._at_tokens(draft.probs, draft.tokens)
        accepted = draws.accept(Stream.ACCEPT.at(jnp.arange(num_draft)), ratio(p, q))
        num_accepted = acceptance.leading_run(accepted, draft.num_drafted)
        weights = acceptance._next_weights(draft, target_probs, num_accepted)
        return Verdict(num_accepted, draws.choose(Stream.NEXT.at(0), weights))

    return rule


def _residual_of(position: Callable) -> Callable:
    """`acceptance._next_weights` with the draft's q taken at another position."""

    def next_weights(draft, target_probs, num_accepted):
        target = acceptance._at_position(target_probs, num_accepted)
        index = jnp.clip(position(num_accepted), 0, draft.tokens.shape[1] - 1)
        rejected = (num_accepted < draft.num_drafted)[:, None]
        return sampling.residual(
            target, jnp.where(rejected, acceptance._at_position(draft.probs, index), 0.0)
        )

    return next_weights


def _residual_of_first_target(draft, target_probs, num_accepted):
    rejected = (num_accepted < draft.num_drafted)[:, None]
    index = jnp.minimum(num_accepted, draft.tokens.shape[1] - 1)
    q = jnp.where(rejected, acceptance._at_position(draft.probs, index), 0.0)
    return sampling.residual(target_probs[:, 0], q)


def _bonus_from_draft(next_weights):
    def fault(draft, target_probs, num_accepted):
        weights = next_weights(draft, target_probs, num_accepted)
        return jnp.where((num_accepted == draft.num_drafted)[:, None], draft.probs[:, -1], weights)

    return fault


def _residual_although_cut(next_weights):
    """A draft cut short (limit, end token) is taken for a rejection."""

    def fault(draft, target_probs, num_accepted):
        whole = jnp.full_like(draft.num_drafted, draft.tokens.shape[1])
        return next_weights(draft.replace(num_drafted=whole), target_probs, num_accepted)

    return fault


def _judge_by_shifted_logits(rule):
    """Draft i is judged by the logits that judge draft i - 1."""

    def fault(draws, draft, target_probs):
        first = target_probs[:, :1]
        return rule(draws, draft, jnp.concatenate([first, target_probs[:, :-1]], axis=1))

    return fault


def _count_all_matches(accepted, num_drafted):
    proposed = jnp.arange(accepted.shape[1])[None, :] < num_drafted[:, None]
    return (accepted & proposed).sum(1, dtype=jnp.int32)


def _accept_all(accepted, num_drafted):
    del accepted
    return num_drafted


def _p_above_q(p, q):
    return (p >= q).astype(p.dtype)


_SHARED_STREAM = types.SimpleNamespace(ACCEPT=Stream.ACCEPT, NEXT=Stream.ACCEPT, DRAFT=Stream.DRAFT)


# ---- the drafter


class _ArgmaxDraws:
    """Proposes the most likely token, whatever the q beside it says (B01)."""

    def __init__(self, draws):
        self._draws = draws

    def choose(self, stream, weights):
        hot = jax.nn.one_hot(weights.argmax(-1), weights.shape[-1], dtype=weights.dtype)
        return self._draws.choose(stream, hot)


def _argmax_proposal(propose):
    def fault(self, params, state, context, draws):
        return propose(self, params, state, context, draws and _ArgmaxDraws(draws))

    return fault


def _q_without_temperature(propose):
    def fault(self, params, state, context, draws):
        draft, state = propose(self, params, state, context, draws)
        q = draft.probs ** context.temperature[:, None, None].astype(draft.probs.dtype)
        return draft.replace(probs=q / q.sum(-1, keepdims=True)), state

    return fault


def _window_of_one(last_tokens):
    return lambda self, count: last_tokens(self, 1)


# ---- caches


def _rollback_by(offset: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        rollback=lambda value, length: cache.rollback(value, jnp.maximum(length + offset, 0))
    )


_NO_ROLLBACK = types.SimpleNamespace(rollback=lambda value, length: value)


def _write_at_first_rows_start(write):
    return lambda buffer, new, start: write(buffer, new, jnp.broadcast_to(start.min(), start.shape))


# ---- the round


def _limit_too_high(cut):
    return lambda program, state, *rest: cut(program, state.replace(limit=state.limit + 1), *rest)


def _never_eos(program, tokens):
    del program
    return tokens < 0


def _compare_one_late(draft, target_ids):
    num_accepted = acceptance.leading_run(draft.tokens == target_ids[:, 1:], draft.num_drafted)
    return Verdict(num_accepted, acceptance._at_position(target_ids, num_accepted))


def _next_from_first(draft, target_ids):
    num_accepted = acceptance.leading_run(draft.tokens == target_ids[:, :-1], draft.num_drafted)
    return Verdict(num_accepted, target_ids[:, 0])


BUGS: dict[str, Bug] = {
    "resample_from_target": Bug(_replace(sampling, "residual", lambda p, q: p), "law"),
    "residual_uses_first_q": Bug(_replace(acceptance, "_next_weights", _residual_of(lambda n: n * 0)), "law"),
    "residual_uses_next_q": Bug(_replace(acceptance, "_next_weights", _residual_of(lambda n: n + 1)), "law"),
    "residual_uses_first_p": Bug(_replace(acceptance, "_next_weights", _residual_of_first_target), "law"),
    "bonus_from_draft": Bug(_wrap(acceptance, "_next_weights", _bonus_from_draft), "law"),
    "residual_although_cut": Bug(_wrap(acceptance, "_next_weights", _residual_although_cut), "law"),
    "accept_with_q_over_p": Bug(_replace(acceptance, "speculative", _accepts(lambda p, q: q / p)), "law"),
    "accept_if_p_above_q": Bug(_replace(acceptance, "speculative", _accepts(_p_above_q)), "law"),
    "accept_everything": Bug(_replace(acceptance, "leading_run", _accept_all), "law"),
    "count_matches_after_a_mismatch": Bug(_replace(acceptance, "leading_run", _count_all_matches), "law"),
    "judge_by_shifted_logits": Bug(_wrap(acceptance, "speculative", _judge_by_shifted_logits), "law"),
    "argmax_proposal_with_soft_q": Bug(_wrap(model.ModelDrafter, "propose", _argmax_proposal), "law"),
    "q_without_temperature": Bug(_wrap(model.ModelDrafter, "propose", _q_without_temperature), "law"),
    "shared_stream": Bug(_replace(acceptance, "Stream", _SHARED_STREAM), "raises"),
    "target_cache_one_too_long": Bug(_replace(rounds, "cache_lib", _rollback_by(1)), "law"),
    "target_cache_one_too_short": Bug(_replace(rounds, "cache_lib", _rollback_by(-1)), "law"),
    "target_cache_keeps_rejected": Bug(_replace(rounds, "cache_lib", _NO_ROLLBACK), "law"),
    "write_at_batch_minimum": Bug(_wrap(cache, "write", _write_at_first_rows_start), "law"),
    "draft_cache_one_too_long": Bug(_replace(model, "cache_lib", _rollback_by(1)), "twin"),
    "draft_cache_one_too_short": Bug(_replace(model, "cache_lib", _rollback_by(-1)), "twin"),
    "draft_cache_not_caught_up": Bug(_wrap(Context, "last_tokens", _window_of_one), "twin"),
    "limit_off_by_one": Bug(_wrap(rounds, "_cut", _limit_too_high), "law"),
    "no_cut_at_end_token": Bug(_replace(rounds, "_is_eos", _never_eos), "law"),
    "greedy_compares_one_late": Bug(_replace(acceptance, "greedy", _compare_one_late), "greedy"),
    "greedy_next_from_first": Bug(_replace(acceptance, "greedy", _next_from_first), "greedy"),
}
