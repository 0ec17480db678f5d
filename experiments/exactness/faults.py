"""Planted faults that the tests must detect: the library's own round with one error.

A fault is a round like `round.one_round`. It calls that with a wrong rule, drafter, draws or state, or with
a public function replaced while it is traced. `FAULTS` has the case on which each fault shows, and how:

- "distribution": the enumerated distribution differs from the target's;
- "raises": the enumeration raises (a stream drawn from twice, shapes that do not fit);
- "twin": the distribution stays exact, but a draft equal to the target is no longer always accepted;
- "greedy": the greedy program's output differs from the target's argmax;
- "drawn": drawn samples differ; the enumeration, whose draws are scripted, cannot detect it.

The classes of faults are those reported for such systems (wrong distribution, position or random numbers),
caches and stops, and errors in block and tree verification. Axes: B rows, K drafts, N nodes, V vocabulary.
"""

import dataclasses
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from experiments.exactness import cases, drawn
from experiments.exactness.cases import Case, options
from experiments.exactness.enumeration import OneRound, Rounds, largest_error
from specjax import acceptance, cache, sampling, tree
from specjax import draws as draws_lib
from specjax import round as round_lib
from specjax.drafters import DrafterWrapper, MedusaDrafter, chain, model
from specjax.draws import KeyDraws, Stream
from specjax.round import LoopState, Program
from specjax.types import AcceptanceResult, AcceptanceRule, Context, Draft, Draws, Round, State

# ---- ways to make a faulty round


def with_function(owner: Any, name: str, change: Callable[[Any], Any]) -> OneRound:
    """Returns a round with a function replaced; `change` maps the function to its replacement."""

    def one_round(program: Program, state: LoopState, draws: Draws | None) -> LoopState:
        with mock.patch.object(owner, name, change(getattr(owner, name))):
            return round_lib.one_round(program, state, draws)

    return one_round


@dataclasses.dataclass(frozen=True)
class WrongRule(AcceptanceRule):
    """A rule replaced by `call`, which takes the rule and its arguments."""

    rule: AcceptanceRule
    call: Callable[..., AcceptanceResult]

    def __call__(self, draws: Draws, draft: Draft, target_probs: jax.Array) -> AcceptanceResult:
        return self.call(self.rule, draws, draft, target_probs)


def with_rule(call: Callable[..., AcceptanceResult]) -> OneRound:
    """Returns a round with a `WrongRule`."""
    return lambda program, state, draws: round_lib.one_round(
        program.replace(rule=WrongRule(program.rule, call)), state, draws
    )


class WrongDrafter(DrafterWrapper):
    """A drafter with other functions, which take the drafter and the arguments of `propose` or `commit`."""

    propose_by: Callable = struct.field(pytree_node=False, default=lambda inner, *args: inner.propose(*args))
    commit_by: Callable = struct.field(pytree_node=False, default=lambda inner, *args: inner.commit(*args))

    def propose(self, *args: Any) -> tuple[Draft, State]:
        return self.propose_by(self.inner, *args)

    def commit(self, state: State, round: Round) -> State:
        return self.commit_by(self.inner, state, round)


def with_drafter(**functions: Callable) -> OneRound:
    """Returns a round with a `WrongDrafter`."""
    return lambda program, state, draws: round_lib.one_round(
        program.replace(drafter=WrongDrafter(program.drafter, **functions)), state, draws
    )


def with_draft(change: Callable[..., Draft]) -> OneRound:
    """Returns a round with a changed draft; `change` takes the draft, drafter, its state and the context."""

    def propose_by(inner: Any, state: State, context: Context, *rest: Any) -> tuple[Draft, State]:
        draft, after = inner.propose(state, context, *rest)
        return change(draft, inner, state, context), after

    return with_drafter(propose_by=propose_by)


def with_draws(change: Callable[[LoopState, Any], Any]) -> OneRound:
    """Returns a round with other draws; `change` takes the state before the round and its draws."""
    return lambda program, state, draws: round_lib.one_round(program, state, change(state, draws))


def then(change: Callable[[LoopState, LoopState], LoopState]) -> OneRound:
    """Returns a round with a changed result; `change` takes the states before and after the round."""
    return lambda program, state, draws: change(state, round_lib.one_round(program, state, draws))


# ---- parts of faults


def draws_like(draws: Any, **functions: Callable) -> Any:
    """Returns draws with another `accept` or `choose`."""
    return types.SimpleNamespace(**{"accept": draws.accept, "choose": draws.choose, **functions})


def on_streams(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that makes draws use other streams."""
    return lambda draws: draws_like(
        draws,
        accept=lambda stream, chance: draws.accept(change(stream), chance),
        choose=lambda stream, weights: draws.choose(change(stream), weights),
    )


def at(values: jax.Array, position: jax.Array) -> jax.Array:
    """Returns `[B, V]`, the entries of `values` `[B, N, V]` at `position` `[B]`."""
    return jnp.take_along_axis(values, position[:, None, None], axis=1)[:, 0]


def of_drafts(probs: jax.Array, draft: Draft) -> jax.Array:
    """Returns `[B, K]`, the probabilities of a chain's tokens."""
    probs = probs[:, : draft.tokens.shape[1]]
    return jnp.take_along_axis(probs, draft.tokens[..., None], axis=-1)[..., 0]


def with_chances(change: Callable[..., jax.Array]) -> OneRound:
    """Changes probabilities of acceptance; `change` takes them `[B, K]`, and p and q of the drafts."""

    def call(rule: Any, draws: Any, draft: Draft, target_probs: jax.Array) -> AcceptanceResult:
        p, q = of_drafts(target_probs, draft), of_drafts(draft.probs, draft)
        accept = lambda stream, chance: draws.accept(stream, change(chance, p, q))  # noqa: E731
        return rule(draws_like(draws, accept=accept), draft, target_probs)

    return with_rule(call)


def with_next_weights(change: Callable[..., jax.Array]) -> OneRound:
    """Changes the weights of the next token; `change` takes them `[B, V]`, draft, p and number accepted."""

    def call(rule: Any, draws: Any, draft: Draft, target_probs: jax.Array) -> AcceptanceResult:
        asked = []

        def choose(stream: Any, weights: jax.Array) -> jax.Array:
            asked.append((stream, weights))
            return jnp.zeros(len(weights), jnp.int32)

        result = rule(draws_like(draws, choose=choose), draft, target_probs)
        ((stream, weights),) = asked
        weights = change(weights, draft, target_probs, result.num_accepted)
        return result._replace(next_token=draws.choose(stream, weights))

    return with_rule(call)


def residual_at(q_at: Callable = lambda n: n, p_at: Callable = lambda n: n, cut: bool = True) -> OneRound:
    """Takes the residual of other p and q; without `cut` a truncated draft counts as rejected."""

    def change(weights: Any, draft: Draft, target_probs: jax.Array, num_accepted: jax.Array) -> jax.Array:
        num_draft = draft.tokens.shape[1]
        rejected = num_accepted < (draft.num_drafted if cut else num_draft)
        q = at(draft.probs, jnp.clip(q_at(num_accepted), 0, num_draft - 1))
        return sampling.residual(at(target_probs, p_at(num_accepted)), jnp.where(rejected[:, None], q, 0.0))

    return with_next_weights(change)


def target_without(**changed: Any) -> OneRound:
    """Makes the target's distribution of several positions ignore an option that the draft follows."""

    def change(distribution: Callable) -> Callable:
        def fault(logits: jax.Array, options: Any, history: Any) -> jax.Array:
            if logits.shape[1] > 1:
                options = options.replace(**{name: make(options) for name, make in changed.items()})
            return distribution(logits, options, history)

        return fault

    return with_function(sampling, "distribution", change)


def history_with(change: Callable[[Any, Any], Any]) -> OneRound:
    """Changes the history; `change` takes the right one, and one without drafts."""
    return with_function(
        sampling,
        "history",
        lambda history: (
            lambda context, drafted, before: change(
                history(context, drafted, before), history(context, drafted, jnp.zeros_like(before))
            )
        ),
    )


def while_proposing(owner: Any, name: str, change: Callable) -> OneRound:
    """Replaces a function while the drafter proposes."""

    def propose_by(inner: Any, *args: Any) -> tuple[Draft, State]:
        with mock.patch.object(owner, name, change(getattr(owner, name))):
            return inner.propose(*args)

    return with_drafter(propose_by=propose_by)


def rollback_by(offset: int) -> Callable:
    """Returns a change of `rollback` to another length."""
    return lambda rollback: lambda value, length: rollback(value, jnp.maximum(length + offset, 0))


def cache_length(change: Callable[[LoopState, LoopState], jax.Array]) -> OneRound:
    """Rolls the target's cache back to another length."""
    return then(lambda before, after: after.replace(cache=cache.rollback(after.cache, change(before, after))))


# ---- wrong rules


def shifted_logits(rule: Any, draws: Any, draft: Draft, target_probs: jax.Array) -> AcceptanceResult:
    """Verifies draft i with the logits for draft i - 1."""
    return rule(draws, draft, jnp.concatenate([target_probs[:, :1], target_probs[:, :-1]], axis=1))


def shared_stream(rule: Any, draws: Any, draft: Draft, target_probs: jax.Array) -> AcceptanceResult:
    """Draws the next token from the stream of the first acceptance."""
    choose = lambda stream, weights: draws.choose(Stream.ACCEPT.at(0), weights)  # noqa: E731
    return rule(draws_like(draws, choose=choose), draft, target_probs)


def stops_at_first_failure(rule: Any, draws: Any, draft: Draft, target_probs: jax.Array) -> AcceptanceResult:
    """Stops block verification at the first draw that rejects."""
    accept = lambda stream, chance: jnp.cumprod(draws.accept(stream, chance), axis=1) > 0  # noqa: E731
    return rule(draws_like(draws, accept=accept), draft, target_probs)


def skips_duplicates(rule: Any, draws: Any, draft: Draft, target_probs: jax.Array) -> AcceptanceResult:
    """Skips the second of two equal siblings."""
    earlier = jnp.tril(jnp.ones((draft.tokens.shape[1],) * 2, bool), -1)[None]
    same = draft.tokens[:, :, None] == draft.tokens[:, None, :]
    siblings = draft.tree.parents[:, :, None] == draft.tree.parents[:, None, :]
    valid = draft.tree.valid & ~(earlier & same & siblings).any(-1)
    return rule(draws, draft.replace(tree=draft.tree.replace(valid=valid)), target_probs)


def sorts_siblings(rule: Any, draws: Any, draft: Draft, target_probs: jax.Array) -> AcceptanceResult:
    """Tries the likelier sibling first, in whichever order they were drawn."""
    q = jnp.take_along_axis(draft.probs[:, 0], draft.tokens, axis=1)
    order = jnp.argsort(-q, axis=1)
    return rule(draws, draft.replace(tokens=jnp.take_along_axis(draft.tokens, order, 1)), target_probs)


def claims(with_replacement: bool) -> Callable:
    """Returns a rule that is told the wrong way in which siblings were drawn."""
    return lambda rule, draws, draft, target_probs: rule(
        draws, draft.replace(with_replacement=with_replacement), target_probs
    )


# ---- wrong drafters


def argmax_proposal(inner: Any, state: State, context: Context, draws: Any, max_length: Any) -> Any:
    """Proposes the most likely token, but keeps a soft q."""

    def choose(stream: Any, weights: jax.Array) -> jax.Array:
        return draws.choose(
            stream, jax.nn.one_hot(weights.argmax(-1), weights.shape[-1], dtype=weights.dtype)
        )

    return inner.propose(state, context, draws_like(draws, choose=choose), max_length)


def q_without_temperature(draft: Draft, inner: Any, state: State, context: Context) -> Draft:
    """Reports the q of temperature 1."""
    q = draft.probs ** context.options.temperature[:, None, None].astype(draft.probs.dtype)
    return draft.replace(probs=q / q.sum(-1, keepdims=True))


def drops_unsure_tokens(draft: Draft, inner: Any, state: State, context: Context) -> Draft:
    """Stops drafting before a drawn token that is unlikely under q."""
    sure = of_drafts(draft.probs, draft) > 0.4
    return draft.replace(num_drafted=acceptance.leading_run(sure, draft.num_drafted))


def q_of_the_step_before(draft: Draft, inner: Any, state: State, context: Context) -> Draft:
    """Reports the q of the draft before."""
    return draft.replace(probs=jnp.concatenate([draft.probs[:, :1], draft.probs[:, :-1]], axis=1))


def soft_q_of_heads(draft: Draft, inner: Any, state: State, context: Context) -> Draft:
    """Reports the distribution of a Medusa head for children that were not drawn from it."""
    return draft.replace(probs=jax.nn.softmax(inner.network.ahead(state.feature, 1)))


def soft_q_of_top_children(draft: Draft, inner: Any, state: State, context: Context) -> Draft:
    """Reports a soft q for top-k children."""
    logits, _ = model.catch_up(inner.inner.network, state, context)
    history = sampling.history(context, draft.tokens[:, :0], jnp.zeros((1, 1, 0), bool))
    return draft.replace(probs=sampling.distribution(logits, context.options, history))


def confidence_of_the_token(append: Callable) -> Callable:
    """Stops a row where the drawn token is unlikely, instead of where q has no likely token."""

    def fault(draft: Draft, logits: jax.Array, context: Context, draws: Any, position: Any) -> Any:
        drafted, _ = append(draft, logits, context, draws, position)
        q = jax.nn.softmax(logits[:, 0])
        return drafted, jnp.take_along_axis(q, drafted.tokens[:, position][:, None], axis=1)[:, 0]

    return fault


# ---- wrong trees, caches, stops


def sees_all_nodes(ancestors: Callable) -> Callable:
    return lambda tree: jnp.tril(jnp.ones_like(ancestors(tree)))


def position_by_slot(layout: Callable) -> Callable:
    def fault(tree: Any, start: jax.Array, num_slots: int, first: int = 0, last: int | None = None) -> Any:
        right = layout(tree, start, num_slots, first, last)
        last = tree.parents.shape[1] + 1 if last is None else last
        slots = jnp.arange(num_slots)[None, :]
        return right._replace(positions=start[:, None] + jnp.arange(first, last)[None], key_positions=slots)

    return fault


def keeps_first_nodes(keep_path: Callable) -> Callable:
    return lambda cache, root, path: cache


def commits_first_nodes(inner: Any, state: State, round: Round) -> State:
    with mock.patch.object(cache, "keep_path", keeps_first_nodes(cache.keep_path)):
        return inner.commit(state, round)


def write_at_first_rows_start(write: Callable) -> Callable:
    return lambda buffer, new, start, slots_last=False: write(
        buffer, new, jnp.broadcast_to(start.min(), start.shape), slots_last
    )


def limit_too_high(program: Program, state: LoopState, draws: Draws | None) -> LoopState:
    """Lets a row emit one token more than its limit."""
    more = state.context.replace(remaining=state.context.remaining + 1)
    after = round_lib.one_round(program, state.replace(context=more), draws)
    remaining = jnp.maximum(after.context.remaining - 1, 0)
    return after.replace(context=after.context.replace(remaining=remaining))


def no_end_tokens(program: Program, state: LoopState, draws: Draws | None) -> LoopState:
    """Does not stop at an end token."""
    return round_lib.one_round(program.replace(eos_ids=()), state, draws)


# ---- wrong greedy programs: replacements of `acceptance.match_argmax`


def one_late(match_argmax: Callable) -> Callable:
    """Compares draft i with the id after it."""

    def fault(draft: Draft, target_ids: jax.Array) -> AcceptanceResult:
        num_accepted = acceptance.leading_run(draft.tokens == target_ids[:, 1:], draft.num_drafted)
        return AcceptanceResult(num_accepted, at(target_ids[..., None], num_accepted)[:, 0])

    return fault


def next_from_first(match_argmax: Callable) -> Callable:
    return lambda draft, ids: match_argmax(draft, ids)._replace(next_token=ids[:, 0])


def compare_with_root(match_argmax: Callable) -> Callable:
    """Compares all nodes of a tree with the target's first id."""

    def fault(draft: Draft, target_ids: jax.Array) -> AcceptanceResult:
        first = jnp.broadcast_to(target_ids[:, :1], target_ids[:, :-1].shape)
        return match_argmax(draft, jnp.concatenate([first, target_ids[:, -1:]], axis=1))

    return fault


# ---- wrong random numbers


def noise_short_of_one(program: Program, state: LoopState, draws: Any) -> LoopState:
    """Makes all uniform draws less than .9."""
    shorter = draws_like(draws, accept=lambda stream, chance: draws.accept(stream, chance / 0.9))
    by_inverse = draws_lib.choose_by_inverse
    with mock.patch.object(draws_lib, "choose_by_inverse", lambda weights, u: by_inverse(weights, 0.9 * u)):
        return round_lib.one_round(program, state, shorter)


def rekeyed(change: Callable[[LoopState], tuple[jax.Array, jax.Array]]) -> OneRound:
    """Makes keys from other seeds and round counts; `change` maps the state to both."""
    return with_draws(lambda state, draws: KeyDraws.of_round(*change(state)))


# ---- all faults

CHAIN = Case(
    config=options(eos_ids=(2,), max_new_tokens=3)
)  # a cut at the limit, an end token, full acceptance
WARM = Case()
BLOCK = Case(rule=acceptance.block)
WITH = cases.all_cases()["multi_round", "tree 2, with replacement", "temperature 0.6"]
WITHOUT = cases.all_cases()["multi_round", "tree 2, without replacement", "temperature 0.6"]
DEEP = cases.all_cases()["multi_round", "tree 1x2, without replacement", "its own"]
TOP_CHILDREN = cases.all_cases()["multi_round", "tree 2, top-k children", "its own"]
COPIES = cases.all_cases()["speculative", "lookup", "end token"]
UNSURE = cases.all_cases()["speculative", "0 to 2 drafts by history and confidence", "its own"]
EAGLE = cases.all_cases()["speculative", "eagle", "end token"]
ONE_PASS = cases.all_cases()["speculative", "one pass", "end token"]
STAGED = cases.all_cases()["speculative", "staged", "end token"]
MEDUSA = Case(lambda toys: MedusaDrafter(toys.heads, (2,)))
DEEP_TREE = Case(cases.WAYS["without replacement"](2, 1, 1), vocab_size=2, num_tokens=5)
GREEDY = Case(num_tokens=8, dtype=np.float32)
GREEDY_TREE = dataclasses.replace(GREEDY, make=cases.WAYS["without replacement"](2, 2))
PENALTY = cases.all_cases()["speculative", "chain of 2", "repetition penalty"]
MINIMUM = cases.all_cases()["speculative", "chain of 2", "minimum length"]
TOP_P = cases.all_cases()["speculative", "chain of 2", "top-p"]
TOP_K = cases.all_cases()["speculative", "chain of 2", "top-k"]
PADDED = Case(vocab_size=4, num_ids=3)
PRESENCE = cases.all_cases()["speculative", "chain of 2", "presence and frequency"]
NGRAM = cases.all_cases()["speculative", "chain of 2", "no repeated 2-gram"]
BAD_WORDS = cases.all_cases()["speculative", "chain of 2", "bad words"]
BIAS = cases.all_cases()["speculative", "chain of 2", "bias, suppressed ids"]
OWN = cases.all_cases()["speculative", "chain of 2", "logits processor"]
FORGETS_DRAFTS = history_with(
    lambda right, undrafted: right._replace(tokens=undrafted.tokens, length=undrafted.length)
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A faulty round, the case on which it shows, and how it shows."""

    one_round: OneRound
    case: Case = CHAIN
    shows: str = "distribution"


def everything_accepted(leading_run: Callable) -> Callable:
    return lambda accepted, num_drafted: num_drafted


def all_matches_counted(leading_run: Callable) -> Callable:
    return lambda accepted, num_drafted: (
        accepted & (jnp.arange(accepted.shape[1])[None] < num_drafted[:, None])
    ).sum(1, dtype=jnp.int32)


NEVER_LOSES_MASS = with_function(sampling, "residual", lambda residual: lambda p, q, ratio=None: p)
ACCEPTS_EVERYTHING = with_function(acceptance, "leading_run", everything_accepted)
SORTS_SIBLINGS = with_rule(sorts_siblings)
WRONG_Q = with_draft(q_of_the_step_before)
FIRST_NODES = with_function(cache, "keep_path", keeps_first_nodes)

FAULTS = {
    # the token-wise rule
    "resample_from_target": Fault(NEVER_LOSES_MASS),
    "residual_uses_first_q": Fault(residual_at(q_at=lambda n: n * 0)),
    "residual_uses_next_q": Fault(residual_at(q_at=lambda n: n + 1)),
    "residual_uses_first_p": Fault(residual_at(p_at=lambda n: n * 0)),
    "residual_although_cut": Fault(residual_at(cut=False)),
    "bonus_from_draft": Fault(
        with_next_weights(
            lambda weights, draft, p, n: jnp.where(
                (n == draft.num_drafted)[:, None], draft.probs[:, -1], weights
            )
        )
    ),
    "accept_with_q_over_p": Fault(with_chances(lambda chance, p, q: q / p)),
    "accept_if_p_above_q": Fault(with_chances(lambda chance, p, q: (p >= q).astype(p.dtype))),
    "accept_with_p": Fault(with_chances(lambda chance, p, q: p)),
    "accept_everything": Fault(ACCEPTS_EVERYTHING),
    "count_matches_after_a_mismatch": Fault(with_function(acceptance, "leading_run", all_matches_counted)),
    "verify_by_shifted_logits": Fault(with_rule(shifted_logits)),
    "shared_stream": Fault(with_rule(shared_stream), shows="raises"),
    # block verification
    "block_stops_at_first_failure": Fault(with_rule(stops_at_first_failure), BLOCK),
    "block_with_token_wise_chances": Fault(with_chances(lambda chance, p, q: p / q), BLOCK),
    "block_without_joint_ratio": Fault(
        with_chances(lambda chance, p, q: chance.at[:, -1].set((p / q)[:, -1])), BLOCK
    ),
    "block_with_token_wise_residual": Fault(
        with_function(sampling, "residual", lambda residual: lambda p, q, ratio=None: residual(p, q)), BLOCK
    ),
    # trees
    "tree_p_not_updated": Fault(NEVER_LOSES_MASS, WITHOUT),
    "tree_skips_duplicates": Fault(with_rule(skips_duplicates), WITH),
    "tree_sorts_siblings": Fault(SORTS_SIBLINGS, WITHOUT),
    "tree_sorts_siblings_with_replacement": Fault(SORTS_SIBLINGS, WITH),
    "tree_q_not_updated": Fault(with_rule(claims(True)), WITHOUT),
    "tree_q_updated_although_replaced": Fault(with_rule(claims(False)), WITH),
    "top_children_with_soft_q": Fault(with_draft(soft_q_of_top_children), TOP_CHILDREN),
    "tree_sees_all_nodes": Fault(with_function(tree, "ancestors", sees_all_nodes), DEEP),
    "tree_position_by_slot": Fault(with_function(tree, "layout", position_by_slot), DEEP),
    "tree_path_not_kept": Fault(FIRST_NODES, DEEP),
    # drafters
    "argmax_proposal_with_soft_q": Fault(with_drafter(propose_by=argmax_proposal)),
    "q_without_temperature": Fault(with_draft(q_without_temperature)),
    "unsure_tokens_dropped": Fault(with_draft(drops_unsure_tokens)),
    "unsure_tokens_thrown_away": Fault(with_function(chain, "append", confidence_of_the_token), UNSURE),
    "eagle_q_of_the_step_before": Fault(WRONG_Q, EAGLE),
    "one_pass_q_of_the_step_before": Fault(WRONG_Q, ONE_PASS),
    "staged_q_of_the_step_before": Fault(WRONG_Q, STAGED),
    "medusa_with_soft_q": Fault(with_draft(soft_q_of_heads), MEDUSA),
    "copies_kept": Fault(ACCEPTS_EVERYTHING, COPIES),
    "copies_with_soft_residual": Fault(NEVER_LOSES_MASS, COPIES),
    # distributions
    "p_without_temperature": Fault(
        target_without(temperature=lambda options: jnp.ones_like(options.temperature))
    ),
    "penalty_not_in_p": Fault(target_without(repetition_penalty=lambda options: None), PENALTY),
    "penalty_forgets_drafts": Fault(FORGETS_DRAFTS, PENALTY),
    "presence_not_in_p": Fault(target_without(presence_penalty=lambda options: None), PRESENCE),
    "frequency_not_in_p": Fault(target_without(frequency_penalty=lambda options: None), PRESENCE),
    "ngram_block_not_in_p": Fault(target_without(no_repeat_ngram_size=lambda options: 0), NGRAM),
    "ngram_block_forgets_drafts": Fault(FORGETS_DRAFTS, NGRAM),
    "bad_words_not_in_p": Fault(target_without(bad_words=lambda options: None), BAD_WORDS),
    "bad_words_forget_drafts": Fault(FORGETS_DRAFTS, BAD_WORDS),
    "bias_not_in_p": Fault(target_without(bias=lambda options: None), BIAS),
    "own_function_not_in_p": Fault(target_without(logits_processor=lambda options: None), OWN),
    "own_function_forgets_drafts": Fault(FORGETS_DRAFTS, OWN),
    "minimum_length_not_in_p": Fault(target_without(min_new_tokens=lambda options: None), MINIMUM),
    "minimum_length_forgets_drafts": Fault(
        history_with(lambda right, undrafted: right._replace(num_new=undrafted.num_new)), MINIMUM
    ),
    "filters_of_draft_only": Fault(target_without(top_p=lambda options: None), TOP_P),
    "top_k_keeps_one_less": Fault(
        with_function(
            sampling,
            "threshold_above",
            lambda threshold: lambda values, weights, limit: threshold(values, weights, limit - 1),
        ),
        TOP_K,
    ),
    "padding_ids_not_cut": Fault(target_without(num_ids=lambda options: None), PADDED, "raises"),
    # caches and stops
    "target_cache_one_too_long": Fault(cache_length(lambda before, after: after.cache.length + 1)),
    "target_cache_one_too_short": Fault(
        cache_length(lambda before, after: jnp.maximum(after.cache.length - 1, 0))
    ),
    "target_cache_keeps_rejected": Fault(cache_length(lambda before, after: before.cache.length + 3)),
    "write_at_batch_minimum": Fault(with_function(cache, "write", write_at_first_rows_start)),
    "draft_cache_one_too_long": Fault(while_proposing(cache, "rollback", rollback_by(1)), WARM, "twin"),
    "draft_cache_one_too_short": Fault(while_proposing(cache, "rollback", rollback_by(-1)), WARM, "twin"),
    "draft_cache_not_caught_up": Fault(
        with_function(Context, "last_tokens", lambda last_tokens: lambda self, count: last_tokens(self, 1)),
        WARM,
        "twin",
    ),
    "draft_tree_path_not_kept": Fault(with_drafter(commit_by=commits_first_nodes), DEEP_TREE, "twin"),
    "limit_off_by_one": Fault(limit_too_high),
    "no_cut_at_end_token": Fault(no_end_tokens),
    # the greedy program
    "greedy_compares_one_late": Fault(with_function(acceptance, "match_argmax", one_late), GREEDY, "greedy"),
    "greedy_next_from_first": Fault(
        with_function(acceptance, "match_argmax", next_from_first), GREEDY, "greedy"
    ),
    "greedy_tree_compares_with_root": Fault(
        with_function(acceptance, "match_argmax", compare_with_root), GREEDY_TREE, "greedy"
    ),
    "greedy_tree_path_not_kept": Fault(FIRST_NODES, GREEDY_TREE, "greedy"),
    # random numbers
    "all_streams_share_noise": Fault(
        with_draws(lambda state, draws: on_streams(lambda stream: stream * 0)(draws)), WARM, "drawn"
    ),
    "draft_and_accept_share_noise": Fault(
        with_draws(lambda state, draws: on_streams(lambda stream: stream // 3 * 3)(draws)), WARM, "drawn"
    ),
    "positions_share_noise": Fault(
        with_draws(lambda state, draws: on_streams(lambda stream: stream % 3)(draws)), WARM, "drawn"
    ),
    "same_noise_every_round": Fault(
        rekeyed(lambda state: (state.seeds, state.stats.num_rounds * 0)), WARM, "drawn"
    ),
    "fixed_seed": Fault(rekeyed(lambda state: (state.seeds * 0, state.stats.num_rounds)), WARM, "drawn"),
    "noise_short_of_one": Fault(noise_short_of_one, WARM, "drawn"),
}


DISTRIBUTION_DIFFERS = "distribution differs"


def check(case: Case, shows: str, one_round: OneRound | None = None) -> tuple[bool, float | None, str]:
    """Runs a check on a case.

    Args:
      case: the case.
      shows: the check; see the module's docstring.
      one_round: a faulty round; None: the library's own.

    Returns:
      whether the check fails, the value that decides, and the failure in words.
    """
    rounds = None if one_round is None else Rounds(one_round)
    if shows == "greedy":
        num_wrong = case.num_wrong_greedy(rounds)
        return num_wrong > 0, float(num_wrong), "greedy output differs"
    if shows == "drawn":
        p_value = drawn.toy_test(case, rounds).p_value
        return p_value < drawn.REJECT_BELOW, p_value, "drawn samples differ"
    try:
        outputs = case.outputs(rounds, twin=shows == "twin")
    except (ValueError, TypeError) as error:
        return True, None, f"raises {str(error).splitlines()[0]:.60}"
    error = largest_error(outputs.probability, case.expected())
    if shows == "twin" and error < case.bar:
        rejected = 1 - outputs.num_accepted / outputs.num_tested
        return rejected > 1e-3, rejected, "draft equal to the target is rejected"
    return error > case.bar, error, DISTRIBUTION_DIFFERS
