"""What `planted_bugs` plants in drafters, distributions, caches, rounds and noise; see `faults`."""

import types
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax import acceptance, cache
from specjax.draws import Stream
from specjax.types import Verdict

# ---- the drafter


class ArgmaxDraws:
    """Proposes the most likely token, whatever the q beside it says."""

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


def cache_with(**functions: Callable) -> types.SimpleNamespace:
    """The functions of `specjax.cache`, some of them others."""
    return types.SimpleNamespace(**{**vars(cache), **functions})


def rollback_by(offset: int) -> Callable:
    def rollback(value, length):
        return cache.rollback(value, jnp.maximum(length + offset, 0))

    def trim(value, length):
        return rollback(value, jnp.minimum(value.length, length))

    return lambda original: cache_with(rollback=rollback, trim=trim)


NO_ROLLBACK = cache_with(rollback=lambda value, length: value)


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
