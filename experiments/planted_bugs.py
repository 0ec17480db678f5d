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
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from experiments import faults, round_faults
from experiments.law_cases import Case
from specjax import acceptance, cache, draws, rounds, sampling, tree
from specjax.drafters import chain, model, model_tree
from specjax.drafters.medusa import MedusaDrafter
from specjax.sampling import Sampling
from specjax.staged import _Recorder
from specjax.types import Context

CHAIN = Case(eos_ids=(2,), limit=3)  # a cut at the limit, an end token, full acceptance
BLOCK = Case(rule=lambda: acceptance.block)
WITH = Case(branching=(2,), with_replacement=True)
WITHOUT = Case(branching=(2,))
DEEP = Case(branching=(1, 2), num_tokens=4)
TOP_CHILDREN = Case(branching=(2,), deterministic=True)
COPIES = Case(kind="lookup")
UNSURE = Case(adaptive=True, min_confidence=0.45)
EAGLE = Case(kind="eagle")
ONE_PASS = Case(kind="one_pass")
MEDUSA = Case(kind="medusa", branching=(2,))
STAGED = Case(kind="staged", vocab_size=2)
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


BUGS: dict[str, Bug] = {
    "resample_from_target": Bug(sampling, "residual", faults.never_loses_mass),
    "residual_uses_first_q": Bug(acceptance, "_next_weights", faults.residual_of(lambda n: n * 0)),
    "residual_uses_next_q": Bug(acceptance, "_next_weights", faults.residual_of(lambda n: n + 1)),
    "residual_uses_first_p": Bug(
        acceptance, "_next_weights", faults.residual_of(lambda n: n, first_target=True)
    ),
    "bonus_from_draft": Bug(acceptance, "_next_weights", faults.bonus_from_draft),
    "residual_although_cut": Bug(acceptance, "_next_weights", faults.residual_although_cut),
    "accept_with_q_over_p": Bug(acceptance, "_token_wise", faults.accepts(lambda p, q: q / p)),
    "accept_if_p_above_q": Bug(
        acceptance, "_token_wise", faults.accepts(lambda p, q: (p >= q).astype(p.dtype))
    ),
    "accept_with_p": Bug(acceptance, "_token_wise", faults.accepts(lambda p, q: p)),
    "accept_everything": Bug(acceptance, "leading_run", faults.by(lambda accepted, num_drafted: num_drafted)),
    "count_matches_after_a_mismatch": Bug(acceptance, "leading_run", faults.by(faults.count_all_matches)),
    "judge_by_shifted_logits": Bug(acceptance, "_token_wise", faults.judge_by_shifted_logits),
    "shared_stream": Bug(acceptance, "Stream", faults.by(faults.SHARED_STREAM), "raises"),
    "block_stops_at_first_failure": Bug(acceptance, "block", faults.block_stops_at_first_failure, case=BLOCK),
    "block_with_token_wise_chances": Bug(
        acceptance, "_block_chances", faults.block_with_token_wise_chances, case=BLOCK
    ),
    "block_without_joint_ratio": Bug(acceptance, "_block_chances", faults.block_without_the_cap, case=BLOCK),
    "block_with_token_wise_residual": Bug(
        acceptance,
        "_next_weights",
        lambda next_weights: lambda draft, p, num_accepted, ratio=None: next_weights(draft, p, num_accepted),
        case=BLOCK,
    ),
    "tree_p_not_updated": Bug(sampling, "residual", faults.never_loses_mass, case=WITHOUT),
    "tree_skips_duplicates": Bug(acceptance, "multi_round", faults.skips_duplicates, case=WITH),
    "tree_sorts_siblings": Bug(acceptance, "multi_round", faults.sorts_siblings, case=WITHOUT),
    "tree_sorts_siblings_with_replacement": Bug(acceptance, "multi_round", faults.sorts_siblings, case=WITH),
    "tree_q_not_updated": Bug(acceptance, "multi_round", faults.claims(True), case=WITHOUT),
    "tree_q_updated_although_replaced": Bug(acceptance, "multi_round", faults.claims(False), case=WITH),
    "top_children_with_soft_q": Bug(
        model_tree.ModelTreeDrafter, "propose", faults.soft_q_for_top_children, case=TOP_CHILDREN
    ),
    "tree_sees_all_nodes": Bug(tree, "ancestors", faults.sees_all_nodes, case=DEEP),
    "tree_position_by_slot": Bug(tree, "layout", faults.position_by_slot, case=DEEP),
    "tree_path_not_kept": Bug(cache, "keep_path", faults.keeps_first_nodes, case=DEEP),
    "argmax_proposal_with_soft_q": Bug(model.ModelDrafter, "propose", round_faults.argmax_proposal),
    "q_without_temperature": Bug(model.ModelDrafter, "propose", round_faults.q_without_temperature),
    "unsure_tokens_dropped": Bug(model.ModelDrafter, "propose", round_faults.drops_unsure_tokens),
    "unsure_tokens_thrown_away": Bug(chain, "put", round_faults.confidence_of_the_token, case=UNSURE),
    "eagle_q_of_the_step_before": Bug(chain, "put", round_faults.q_of_the_step_before, case=EAGLE),
    "one_pass_q_of_the_step_before": Bug(chain, "put", round_faults.q_of_the_step_before, case=ONE_PASS),
    "medusa_with_soft_q": Bug(MedusaDrafter, "propose", round_faults.soft_q_of_heads, case=MEDUSA),
    "staged_q_of_another_token": Bug(_Recorder, "commit", round_faults.q_of_another_token, case=STAGED),
    "copies_kept": Bug(
        acceptance, "leading_run", faults.by(lambda accepted, num_drafted: num_drafted), case=COPIES
    ),
    "copies_with_soft_residual": Bug(
        acceptance, "_next_weights", round_faults.residual_of_target, case=COPIES
    ),
    "p_without_temperature": Bug(sampling, "process", round_faults.temperature_one),
    "penalty_not_in_p": Bug(
        sampling, "adjust", round_faults.adjust_skips("repetition_penalty"), case=PENALTY
    ),
    "penalty_forgets_drafts": Bug(sampling, "history", round_faults.penalty_forgets_drafts, case=PENALTY),
    "minimum_length_not_in_p": Bug(
        sampling,
        "adjust",
        round_faults.adjust_skips("min_new_tokens"),
        case=Case(options=Sampling(min_new_tokens=2), eos_ids=(2,)),
    ),
    "minimum_length_forgets_drafts": Bug(
        sampling,
        "history",
        round_faults.minimum_length_forgets_drafts,
        case=Case(options=Sampling(min_new_tokens=2), eos_ids=(2,)),
    ),
    "filters_of_draft_only": Bug(
        sampling, "_filter", round_faults.filter_of_draft_only, case=Case(options=Sampling(top_p=0.7))
    ),
    "top_k_keeps_one_less": Bug(
        sampling,
        "threshold_above",
        round_faults.threshold_keeps_one_less,
        case=Case(options=Sampling(top_k=2)),
    ),
    "padding_ids_not_cut": Bug(
        sampling, "adjust", round_faults.adjust_skips("num_ids"), "raises", Case(vocab_size=4, num_ids=3)
    ),
    "target_cache_one_too_long": Bug(rounds, "cache_lib", round_faults.rollback_by(1)),
    "target_cache_one_too_short": Bug(rounds, "cache_lib", round_faults.rollback_by(-1)),
    "target_cache_keeps_rejected": Bug(rounds, "cache_lib", faults.by(round_faults.NO_ROLLBACK)),
    "write_at_batch_minimum": Bug(cache, "write", round_faults.write_at_first_rows_start),
    "draft_cache_one_too_long": Bug(model, "cache_lib", round_faults.rollback_by(1), "twin", TWIN),
    "draft_cache_one_too_short": Bug(model, "cache_lib", round_faults.rollback_by(-1), "twin", TWIN),
    "draft_cache_not_caught_up": Bug(
        Context, "last_tokens", lambda last_tokens: lambda self, count: last_tokens(self, 1), "twin", TWIN
    ),
    "draft_tree_path_not_kept": Bug(
        model_tree,
        "cache_lib",
        faults.by(round_faults.cache_with(keep_path=lambda cache, root, path: cache)),
        "twin",
        Case(vocab_size=2, branching=(2, 1, 1), num_tokens=6),
    ),
    "limit_off_by_one": Bug(rounds, "_cut", round_faults.limit_too_high),
    "no_cut_at_end_token": Bug(rounds, "_is_eos", faults.by(lambda program, tokens: tokens < 0)),
    "greedy_compares_one_late": Bug(
        acceptance, "greedy", faults.by(round_faults.compare_one_late), "greedy", GREEDY
    ),
    "greedy_next_from_first": Bug(acceptance, "greedy", round_faults.next_from_first, "greedy", GREEDY),
    "greedy_tree_compares_with_root": Bug(
        acceptance, "greedy", round_faults.compare_with_root, "greedy", GREEDY_TREE
    ),
    "greedy_tree_path_not_kept": Bug(cache, "keep_path", faults.keeps_first_nodes, "greedy", GREEDY_TREE),
    "all_streams_share_noise": Bug(draws, "_uniform", round_faults.one_stream, "sampled", TWIN),
    "draft_and_accept_share_noise": Bug(
        draws, "_uniform", round_faults.draft_stream_is_accept_stream, "sampled", TWIN
    ),
    "positions_share_noise": Bug(draws, "_uniform", round_faults.positions_share_noise, "sampled", TWIN),
    "same_noise_every_round": Bug(
        draws.KeyDraws, "of_round", round_faults.same_noise_every_round, "sampled", TWIN
    ),
    "fixed_seed": Bug(draws.KeyDraws, "of_round", round_faults.fixed_seed, "sampled", TWIN),
    "noise_short_of_one": Bug(draws, "_uniform", round_faults.half_uniform, "sampled", TWIN),
}
