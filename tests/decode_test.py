"""The loop and `generate`, on a toy whose greedy path is known."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.exactness import toys
from specjax import acceptance, decode
from specjax.drafters import ModelDrafter
from specjax.generation_config import GenerationConfig
from specjax.round import FinishReason
from tests.toy_batch import (
    BUCKET,
    DRAFT_TABLE,
    EOS,
    LIMITS,
    MIXED,
    NUM_ROWS,
    SEEDS,
    SOURCE_LENGTHS,
    SOURCE_MASK,
    SOURCES,
    TABLE,
    TOY,
    argmax_path,
    cut,
    emitted,
    generate,
)

END_TOKENS = (argmax_path(0)[2], EOS)  # the same in all tests, since they are compiled in
each_num_draft = pytest.mark.parametrize("num_draft", [1, 3, 8])


# ---- greedy


def test_autoregressive_greedy_is_the_targets_argmax_path():
    output = generate(0)
    for row in range(NUM_ROWS):
        assert emitted(output, row) == argmax_path(row)
    assert np.isnan(output.stats.alpha).all() and (output.stats.tau == 1).all()


def assert_greedy(drafter) -> None:
    """Rows have the target's argmax path, each cut at its own limit or end token, and counts to match."""
    output = generate(drafter, max_new_tokens=LIMITS, eos_ids=END_TOKENS)
    for row in range(NUM_ROWS):
        tokens, reason = cut(argmax_path(row), LIMITS[row], END_TOKENS)
        assert emitted(output, row) == tokens
        assert output.finish_reason[row] == reason
        assert (output.tokens[row, len(tokens) :] == 0).all()  # pad follows
        assert (output.log_probs[row, len(tokens) :] == 0).all()
    stats = output.stats
    np.testing.assert_array_equal(stats.num_emitted, output.length)
    assert (stats.accepted <= stats.tested).all()
    assert (stats.tested.sum(1) <= stats.num_drafted).all()
    assert (np.diff(stats.tested, axis=1) <= 0).all()  # a position is verified when all before passed


@each_num_draft
def test_greedy_speculative_equals_autoregressive(num_draft):
    """Every row its own limit, end tokens anywhere in a block."""
    assert_greedy(num_draft)


@each_num_draft
def test_twin_draft_is_always_accepted(num_draft):
    """K proposals and K + 1 tokens a round, cut by the budget."""
    assert_twin_is_accepted(num_draft, num_draft)


def assert_twin_is_accepted(drafter, depth: int) -> None:
    """All drafts of the target itself are accepted: `depth + 1` tokens a round."""
    output = generate(drafter, draft_table=TABLE, max_new_tokens=LIMITS, eos_ids=END_TOKENS)
    np.testing.assert_array_equal(output.stats.accepted, output.stats.tested)
    for row in range(NUM_ROWS):
        tokens, _ = cut(argmax_path(row), LIMITS[row], END_TOKENS)
        assert emitted(output, row) == tokens
        assert output.stats.num_rounds[row] == -(-len(tokens) // (depth + 1))


def test_draft_that_is_always_wrong_costs_a_round_per_token():
    wrong = np.full_like(TABLE, -1.0)
    wrong[np.arange(len(TABLE)), TABLE.argmin(1)] = 1.0
    output = generate(3, draft_table=wrong)
    for row in range(NUM_ROWS):
        assert emitted(output, row) == argmax_path(row)
    np.testing.assert_array_equal(output.stats.num_rounds, output.length)
    assert output.stats.accepted.sum() == 0
    np.testing.assert_array_equal(output.stats.alpha, 0)
    # the last round of a row has no use for a draft
    np.testing.assert_array_equal(output.stats.tested[:, 0], output.length - 1)


def test_limit_of_zero_emits_nothing():
    output = generate(3, max_new_tokens=np.array([0, 4] + [0] * 5))
    assert output.length.tolist() == [0, 4] + [0] * 5
    assert emitted(output, 1) == argmax_path(1)[:4]
    assert (output.finish_reason == FinishReason.LENGTH).all()
    assert output.stats.num_rounds[0] == 0 and np.isnan(output.stats.tau[0])


def test_draft_of_nan_keeps_the_greedy_output():
    output = generate(3, draft_table=np.full_like(TABLE, np.nan))
    for row in range(NUM_ROWS):
        assert emitted(output, row) == argmax_path(row)


def test_decoder_prefix_of_each_rows_own_length_is_continued_and_not_returned():
    """The prefix is the target's own output, so the path continues."""
    lengths = np.array([1, 4, 2, 3, 4, 1, 2])
    prefix = np.zeros((NUM_ROWS, 4), np.int32)
    for row, length in enumerate(lengths):
        prefix[row, 1:length] = argmax_path(row)[: length - 1]
    output = generate(3, prefix=prefix, prefix_length=lengths, max_new_tokens=10)
    for row, length in enumerate(lengths):
        assert emitted(output, row) == argmax_path(row)[length - 1 :][:10]


def test_rounds_shown_are_the_output():
    rounds = []
    output = generate(3, max_new_tokens=LIMITS, on_round=rounds.append)
    silent = generate(3, max_new_tokens=LIMITS)
    assert len(rounds) == output.stats.num_rounds.max()
    for row in range(NUM_ROWS):
        tokens = [token for shown in rounds for token in shown[row]]
        assert tokens == emitted(output, row) == emitted(silent, row)


# ---- options


EACH_OPTION = {
    "repetition penalty": dict(repetition_penalty=[1.0, 1.5, 3.0, 0.7, 2.0, 1.2, 5.0]),
    "minimum length": dict(min_new_tokens=[0, 1, 6, 16, 3, 9, 12]),
    "top-k": dict(top_k=[1, 2, 3, 10, 39, 40, 50]),
    "top-p": dict(top_p=[0.1, 0.5, 0.9, 0.95, 0.99, 1.0, 1e-8]),
    "min-p": dict(min_p=[0.0, 0.1, 0.5, 1.0, 0.3, 0.2, 0.05]),
}
EACH_OPTION["all"] = {name: values for option in EACH_OPTION.values() for name, values in option.items()}
# For options that are not tried: which of them are given is compiled in, and what they are is not.
NEUTRAL = dict(repetition_penalty=1.0, min_new_tokens=0, top_k=50, top_p=1.0, min_p=0.0)


def reference_path(row: int, config: GenerationConfig, end_tokens=()) -> list[int]:
    """The greedy continuation of a row under its own options, in numpy."""
    own = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    own = {name: value[row] if isinstance(value, list) else value for name, value in own.items()}
    source = SOURCES[row, : SOURCE_LENGTHS[row]]
    own["eos_ids"] = end_tokens
    (path,) = toys.target_distribution(TOY, source, BUCKET, GenerationConfig(**own))
    return list(path)


@pytest.mark.parametrize("name", EACH_OPTION)
@pytest.mark.parametrize("drafter", [0, 3, (2, 2)])
def test_greedy_output_under_each_option_is_the_references(name, drafter):
    """With speculation as without, every row its own value."""
    neutral = {option: [value] * NUM_ROWS for option, value in NEUTRAL.items()}
    options = GenerationConfig(temperature=0.0, **neutral | EACH_OPTION[name])
    output = generate(drafter, config=options, eos_ids=END_TOKENS)
    paths = [reference_path(row, options, END_TOKENS) for row in range(NUM_ROWS)]
    assert [emitted(output, row) for row in range(NUM_ROWS)] == paths
    plain = [cut(argmax_path(row), BUCKET, END_TOKENS)[0] for row in range(NUM_ROWS)]
    if name in ("repetition penalty", "minimum length"):
        assert paths != plain  # the option does something
    if drafter:
        assert output.stats.accepted.sum() > 0


RULES = [(acceptance.speculative, 2), (acceptance.multi_round, (2, 1))]


@pytest.mark.parametrize(("rule", "drafter"), RULES, ids=["chain", "tree"])
def test_sampled_row_with_all_options_equals_its_solo_run(rule, drafter):
    own = {name: np.array(values) for name, values in EACH_OPTION["all"].items()}

    def run(rows):
        options = {name: values[rows] for name, values in own.items()}
        return generate(drafter, rows, temperature=MIXED[rows], rule=rule, eos_ids=END_TOKENS, **options)

    whole = run(slice(None))
    for row in range(NUM_ROWS):
        assert_rows_equal(run(slice(row, row + 1)), [0], whole, [row])
    assert np.isfinite(whole.processed_log_probs).all()  # nothing of probability zero was emitted


TREES = ((1, 1, 1), (2, 2, 1), (3,), (1, 3))


@pytest.mark.parametrize("branching", TREES, ids=str)
def test_greedy_tree_equals_autoregressive(branching):
    """Every shape; end tokens and limits anywhere."""
    assert_greedy(branching)


@pytest.mark.parametrize("branching", TREES[1:], ids=str)
def test_twin_tree_is_accepted_to_its_leaves(branching):
    """The draft's cache keeps the accepted path."""
    assert_twin_is_accepted(branching, len(branching))


def test_chain_drafted_as_a_tree_is_the_chain():
    """The same tokens, counts and log-probabilities, at temperature 0 and above."""
    options = dict(temperature=MIXED, max_new_tokens=LIMITS, eos_ids=END_TOKENS)
    chain, tree = generate(3, **options), generate((1, 1, 1), **options)
    for name in ("tokens", "finish_reason", "length", "stats"):
        jax.tree.map(np.testing.assert_array_equal, getattr(tree, name), getattr(chain, name))
    np.testing.assert_allclose(tree.log_probs, chain.log_probs, atol=1e-6)


def test_tree_accepts_more_than_its_first_branch():
    chain, tree = (generate(d, temperature=1.0, eos_ids=END_TOKENS) for d in (1, (3,)))
    accepted_per_round = [output.stats.total().tau[0] - 1 for output in (chain, tree)]
    assert accepted_per_round[1] > 1.1 * accepted_per_round[0]


@pytest.mark.parametrize("rule", [acceptance.block, acceptance.multi_round])
def test_every_rule_is_greedy_at_temperature_zero(rule):
    """In a batch with a sampled row, whose program makes distributions and draws."""
    temperature = np.array([0, 0, 0, 0, 0, 0, 1.0])
    mixed, greedy = generate(3, temperature=temperature, rule=rule), generate(3)
    rows = range(6)
    for row in rows:
        assert emitted(mixed, row) == argmax_path(row)
    np.testing.assert_array_equal(mixed.stats.accepted[:6], greedy.stats.accepted[:6])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_padded_to_another_vocabulary_runs(temperature):
    """40 entries of which 36 are real, and a draft of 36; the padding is never emitted."""
    table = TABLE.copy()
    table[:, 36:] += 100
    outputs = []
    for width in (36, 40):
        output = decode.generate(
            toys.ToyNetwork(jnp.asarray(table), num_ids=36),
            SOURCES,
            SOURCE_MASK,
            seed=SEEDS,
            max_new_tokens=BUCKET,
            eos_ids=(),
            drafter=ModelDrafter(toys.ToyNetwork(jnp.asarray(DRAFT_TABLE[:, :width])), 3),
            temperature=temperature,
        )
        outputs.append(output)
        assert output.tokens.max() < 36
        np.testing.assert_array_equal(output.tokens, outputs[0].tokens)
        np.testing.assert_array_equal(output.stats.accepted, outputs[0].stats.accepted)


def test_stop_at_ends_a_row_at_the_returned_length():
    """Counts are those of the kept tokens."""
    whole = generate(3, draft_table=TABLE)
    ends = [7, None, 1, 16, 5, 8, None]

    def stop(ids, num_before):
        row = next(r for r in range(NUM_ROWS) if argmax_path(r)[: len(ids)] == ids)
        end = ends[row]
        return end if end is not None and num_before < end <= len(ids) else None

    output = generate(3, draft_table=TABLE, stop_at=stop)
    for row, end in enumerate(ends):
        assert emitted(output, row) == emitted(whole, row)[:end]
        assert output.finish_reason[row] == (FinishReason.LENGTH if end is None else FinishReason.STOP)
        assert (output.tokens[row, output.length[row] :] == 0).all()
        assert (output.log_probs[row, output.length[row] :] == 0).all()
        limited = generate(3, slice(row, row + 1), draft_table=TABLE, max_new_tokens=end or BUCKET)
        assert output.stats.num_rounds[row] == limited.stats.num_rounds[0]
        assert output.stats.accepted[row].sum() + output.stats.num_rounds[row] >= output.length[row]


# ---- rows


def assert_rows_equal(output, rows, reference, reference_rows):
    """Ids, log-probabilities, finish reasons and statistics are bit-exact."""
    ours = jax.tree.map(lambda x: x[np.array(rows)], output)
    theirs = jax.tree.map(lambda x: x[np.array(reference_rows)], reference)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_row_equals_its_solo_run(num_rows):
    """Whatever the other rows are, at temperature 0 and above."""
    whole = generate(3, temperature=MIXED, max_new_tokens=LIMITS)
    for first in range(0, NUM_ROWS - num_rows + 1, num_rows):
        rows = slice(first, first + num_rows)
        part = generate(3, rows, temperature=MIXED[rows], max_new_tokens=LIMITS[rows])
        assert_rows_equal(part, range(num_rows), whole, range(first, first + num_rows))


def test_greedy_row_among_sampled_ones_equals_the_greedy_run():
    mixed, greedy = generate(3, temperature=MIXED), generate(3, temperature=0.0)
    rows = np.flatnonzero(MIXED == 0)
    for row in rows:
        assert emitted(mixed, row) == emitted(greedy, row) == argmax_path(row)
    np.testing.assert_array_equal(mixed.stats.accepted[rows], greedy.stats.accepted[rows])
    assert np.isfinite(mixed.log_probs).all() and (mixed.stats.accepted >= 0).all()
    assert (mixed.processed_log_probs[rows] == 0).all()


def test_seed_decides_the_sample():
    one, again, other = (generate(3, temperature=1.0, seed=s) for s in (SEEDS, SEEDS, SEEDS + 1000))
    np.testing.assert_array_equal(one.tokens, again.tokens)
    assert (one.tokens != other.tokens).any(1).all()


def test_equal_seeds_and_prompts_give_equal_rows_and_one_seed_gives_different_rows():
    rows = np.zeros(NUM_ROWS, int)
    same = generate(3, rows, temperature=1.0, seed=np.full(NUM_ROWS, 5))
    assert (same.tokens == same.tokens[0]).all()
    split = generate(3, rows, temperature=1.0, seed=5)
    assert len({tuple(row) for row in split.tokens.tolist()}) == NUM_ROWS


def test_generate_is_pure():
    """Two equal calls agree in everything, with a drafter built anew."""
    one, again = (generate(3, temperature=MIXED) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, again)


def test_first_round_proposes_all_drafts():
    """Three proposals in the first round of K = 3; fewer only where the budget is smaller."""
    output = generate(3, max_new_tokens=np.array([1, 2, 3, 4, 4, 3, 2]), draft_table=TABLE)
    assert output.stats.num_drafted.tolist() == [0, 1, 2, 3, 3, 2, 1]
    assert (output.stats.num_rounds == 1).all()


def test_samples_do_not_depend_on_the_default_generator():
    with jax.default_prng_impl("rbg"):
        other = generate(3, temperature=1.0)
    np.testing.assert_array_equal(other.tokens, generate(3, temperature=1.0).tokens)


FILTERS = dict(top_k=20, top_p=0.9, min_p=0.01)


@pytest.mark.parametrize(("drafter", "options"), [(3, {}), ((2, 1), FILTERS)], ids=["chain", "filtered tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_logits_end_only_their_row(bad, temperature, drafter, options):
    """The token is dropped, the row ends with `NONFINITE`, other rows are unchanged."""
    options = dict(temperature=temperature, **options)
    good = generate(drafter, **options)
    prefix = emitted(good, 4)[:6]
    table = TABLE.copy()
    table[toys.context_key(SOURCES[4, : SOURCE_LENGTHS[4]], [0, *prefix]), 7] = bad
    output = generate(drafter, table=table, **options)
    assert emitted(output, 4) == prefix
    assert output.finish_reason[4] == FinishReason.NONFINITE
    assert np.isfinite(output.log_probs).all()
    others = [0, 1, 2, 3, 5, 6]
    assert_rows_equal(output, others, good, others)


@pytest.mark.parametrize("num_draft", [0, 3])
def test_log_probs_are_those_of_the_target(num_draft):
    """Raw and processed, for accepted, resampled and bonus tokens alike."""
    output = generate(num_draft, temperature=MIXED)
    for row in range(NUM_ROWS):
        source, tokens = SOURCES[row, : SOURCE_LENGTHS[row]], emitted(output, row)
        for column, temperature in (("log_probs", 1.0), ("processed_log_probs", MIXED[row])):
            options = GenerationConfig(temperature=temperature)
            expected = [
                np.log(toys.conditional(TOY, source, [0, *tokens[:i]], options)[token])
                for i, token in enumerate(tokens)
            ]
            np.testing.assert_allclose(getattr(output, column)[row], expected, atol=1e-5)
