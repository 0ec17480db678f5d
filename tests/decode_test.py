"""Rounds, the loop, and `generate`: on a toy whose greedy path is known, then on a tiny random T5."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import exact_law
from specjax import acceptance, decode, rounds
from specjax.drafters.model import ModelDrafter
from specjax.drafters.model_tree import ModelTreeDrafter
from specjax.models import t5
from specjax.sampling import Sampling
from specjax.types import FinishReason, Options

V = 40
NUM_ROWS = 7
BUCKET = 16
TOY = exact_law.ToyNetwork(V)
TABLE = exact_law.random_table(0, V, spread=2.0)
DRAFT_TABLE = TABLE + exact_law.random_table(1, V, spread=1.0)  # right about half of the time
SOURCE_LENGTHS = [5, 3, 1, 4, 2, 5, 3]
SOURCE_MASK = np.arange(5)[None] < np.array(SOURCE_LENGTHS)[:, None]
SOURCES = np.where(SOURCE_MASK, np.random.default_rng(3).integers(2, V, (NUM_ROWS, 5)), 0)
SEEDS = np.arange(NUM_ROWS, dtype=np.uint32) + 100
GREEDY = Sampling(temperature=0.0)
MIXED = np.array([0.0, 1.0, 0.7, 0.0, 1.3, 0.2, 1.0], np.float32)
LIMITS = np.array([16, 1, 9, 2, 16, 3, 12])


@functools.cache
def argmax_path(row: int, num_tokens: int = BUCKET) -> list[int]:
    """The target's greedy continuation of a row, in numpy."""
    (path,) = exact_law.target_law(TABLE, SOURCES[row, : SOURCE_LENGTHS[row]], num_tokens, GREEDY)
    return list(path)


def generate(
    drafter: int | tuple[int, ...], rows=slice(None), *, draft_table=DRAFT_TABLE, table=TABLE,
    temperature=0.0, sampling=None, **options,
):  # fmt: skip
    """`decode.generate` on some rows of the toy batch; nothing ends a row but its limit.

    `drafter`: K of a chain, or the branching of a tree.
    """
    options = dict(seed=SEEDS[rows], max_new_tokens=BUCKET, eos_ids=(), length_bucket=BUCKET) | options
    options["sampling"] = Sampling(temperature=temperature) if sampling is None else sampling
    num_draft = drafter
    if isinstance(drafter, tuple):
        drafter = ModelTreeDrafter(TOY, drafter)
    else:
        drafter = ModelDrafter(TOY, drafter) if drafter else None
    output = decode.generate(
        TOY, jnp.asarray(table), SOURCES[rows], SOURCE_MASK[rows],
        drafter=drafter, drafter_params=jnp.asarray(draft_table) if num_draft else None, **options,
    )  # fmt: skip
    return jax.tree.map(np.asarray, output)


def emitted(output, row: int) -> list[int]:
    return output.tokens[row, : output.length[row]].tolist()


def cut(path: list[int], limit: int, eos_ids=()) -> tuple[list[int], FinishReason]:
    """What is kept of a path, and why it ends."""
    for index, token in enumerate(path[:limit]):
        if token in eos_ids:
            return path[: index + 1], FinishReason.EOS
    return path[:limit], FinishReason.LENGTH


# An end token that rows reach at different places, some early.
PATHS = [argmax_path(row) for row in range(NUM_ROWS)]
EOS = max(range(V), key=lambda token: len({path.index(token) for path in PATHS if token in path}))
FAST_K = (1, 3, 5)


def each_num_draft(function):
    values = [pytest.param(k, marks=() if k in FAST_K else pytest.mark.slow) for k in range(1, 9)]
    return pytest.mark.parametrize("num_draft", values)(function)


# ---- greedy


def test_plain_greedy_is_the_targets_argmax_path():
    output = generate(0)
    for row in range(NUM_ROWS):
        assert emitted(output, row) == argmax_path(row)
    assert np.isnan(output.stats.alpha).all() and (output.stats.tau == 1).all()


def assert_greedy(drafter) -> None:
    """Rows have the target's argmax path, each cut at its own limit or end token, and counts to match."""
    end_tokens = (argmax_path(0)[2], EOS)
    output = generate(drafter, max_new_tokens=LIMITS, eos_ids=end_tokens)
    for row in range(NUM_ROWS):
        tokens, reason = cut(argmax_path(row), LIMITS[row], end_tokens)
        assert emitted(output, row) == tokens
        assert output.finish_reason[row] == reason
        assert (output.tokens[row, len(tokens) :] == 0).all()  # pad follows
        assert (output.log_probs[row, len(tokens) :] == 0).all()
    stats = output.stats
    np.testing.assert_array_equal(stats.num_emitted, output.length)
    assert (stats.accepted <= stats.tested).all()
    assert (stats.tested.sum(1) <= stats.num_drafted).all()
    assert (np.diff(stats.tested, axis=1) <= 0).all()  # a position is judged when all before passed


@each_num_draft
def test_greedy_speculative_equals_plain(num_draft):
    """B29, B30, B31, B34, B36, B47: every row its own limit, end tokens anywhere in a block."""
    assert_greedy(num_draft)


@each_num_draft
def test_twin_draft_is_always_accepted(num_draft):
    """B31, B38: K + 1 tokens a round, cut by the budget; B68: K proposals in a round."""
    end_tokens = (argmax_path(0)[2], EOS)  # the program of the test above
    output = generate(num_draft, draft_table=TABLE, max_new_tokens=LIMITS, eos_ids=end_tokens)
    np.testing.assert_array_equal(output.stats.accepted, output.stats.tested)
    for row in range(NUM_ROWS):
        tokens, _ = cut(argmax_path(row), LIMITS[row], end_tokens)
        assert emitted(output, row) == tokens
        assert output.stats.num_rounds[row] == -(-len(tokens) // (num_draft + 1))


def test_draft_that_is_always_wrong_costs_a_round_per_token():
    """B37."""
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


def test_broken_draft_leaves_the_greedy_output_alone():
    output = generate(3, draft_table=np.full_like(TABLE, np.nan))
    for row in range(NUM_ROWS):
        assert emitted(output, row) == argmax_path(row)


def test_decoder_prefix_of_each_rows_own_length_is_continued_and_not_returned():
    """B32: the prefix is what the target said itself, so the path goes on."""
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


def reference_path(row: int, options: Sampling, end_tokens=()) -> list[int]:
    """The greedy continuation of a row under its own options, in numpy."""
    own = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    own = {name: value[row] if isinstance(value, list) else value for name, value in own.items()}
    source = SOURCES[row, : SOURCE_LENGTHS[row]]
    (path,) = exact_law.target_law(TABLE, source, BUCKET, Sampling(**own), eos_ids=end_tokens)
    return list(path)


@pytest.mark.parametrize("name", EACH_OPTION)
@pytest.mark.parametrize("drafter", [0, 3, (2, 2)])
def test_greedy_output_under_each_option_is_the_references(name, drafter):
    """B22, B24: with speculation as without, every row its own value."""
    options = Sampling(temperature=0.0, **EACH_OPTION[name])
    end_tokens = (argmax_path(0)[2], EOS)
    output = generate(drafter, sampling=options, eos_ids=end_tokens)
    paths = [reference_path(row, options, end_tokens) for row in range(NUM_ROWS)]
    assert [emitted(output, row) for row in range(NUM_ROWS)] == paths
    plain = [cut(argmax_path(row), BUCKET, end_tokens)[0] for row in range(NUM_ROWS)]
    if name in ("repetition penalty", "minimum length"):
        assert paths != plain  # the option does something
    if drafter:
        assert output.stats.accepted.sum() > 0


@pytest.mark.parametrize("drafter", [3, (2, 1)])
@pytest.mark.parametrize("rule", [acceptance.speculative, acceptance.multi_round])
def test_sampled_row_with_all_options_equals_its_solo_run(rule, drafter):
    """B20, B48."""
    own = {name: np.array(values) for name, values in EACH_OPTION["all"].items()}

    def run(rows):
        options = Sampling(temperature=MIXED[rows], **{name: values[rows] for name, values in own.items()})
        return generate(drafter, rows, sampling=options, rule=rule, eos_ids=(EOS,))

    whole = run(slice(None))
    for row in range(NUM_ROWS):
        assert_rows_equal(run(slice(row, row + 1)), [0], whole, [row])
    assert np.isfinite(whole.processed_log_probs).all()  # nothing of probability zero was emitted


TREES = ((1, 1, 1, 1, 1), (2, 2, 1), (4, 1), (3,), (1, 3, 2))


@pytest.mark.parametrize("branching", TREES, ids=str)
def test_greedy_tree_equals_plain(branching):
    """B31, B46, B47: every shape; end tokens and limits anywhere."""
    assert_greedy(branching)


@pytest.mark.parametrize("branching", TREES[1:4], ids=str)
def test_twin_tree_is_accepted_to_its_leaves(branching):
    """B38: the draft's cache keeps the accepted path."""
    output = generate(branching, draft_table=TABLE, max_new_tokens=LIMITS)
    np.testing.assert_array_equal(output.stats.accepted, output.stats.tested)
    np.testing.assert_array_equal(output.stats.num_rounds, -(-LIMITS // (len(branching) + 1)))


def test_chain_drafted_as_a_tree_is_the_chain():
    """The same tokens, counts and log-probabilities, at temperature 0 and above."""
    chain = generate(3, temperature=MIXED, max_new_tokens=LIMITS)
    tree = generate((1, 1, 1), temperature=MIXED, max_new_tokens=LIMITS)
    for name in ("tokens", "finish_reason", "length", "stats"):
        jax.tree.map(np.testing.assert_array_equal, getattr(tree, name), getattr(chain, name))
    np.testing.assert_allclose(tree.log_probs, chain.log_probs, atol=1e-6)


def test_tree_accepts_more_than_its_first_branch():
    chain, tree = generate(2, temperature=1.0), generate((3, 2), temperature=1.0)
    assert tree.stats.total().tau[0] > 1.1 * chain.stats.total().tau[0]


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
    """B27: 40 entries of which 36 are real, and a draft of 36; the padding is never emitted."""
    table = TABLE.copy()
    table[:, 36:] += 100
    outputs = []
    for width in (36, 38, 40):
        output = decode.generate(
            TOY, jnp.asarray(table), SOURCES, SOURCE_MASK, seed=SEEDS, max_new_tokens=BUCKET, eos_ids=(),
            drafter=ModelDrafter(exact_law.ToyNetwork(width), 3), num_ids=36,
            drafter_params=jnp.asarray(DRAFT_TABLE[:, :width]), sampling=Sampling(temperature=temperature),
        )  # fmt: skip
        outputs.append(output)
        assert output.tokens.max() < 36
        np.testing.assert_array_equal(output.tokens, outputs[0].tokens)
        np.testing.assert_array_equal(output.stats.accepted, outputs[0].stats.accepted)


def test_stop_ends_a_row_where_it_says():
    """B30, B33: what the host sees ends the row; counts are those of the kept tokens."""
    whole = generate(3, draft_table=TABLE)
    ends = [7, None, 1, 16, 5, 8, None]

    def stop(ids, num_before):
        row = next(r for r in range(NUM_ROWS) if argmax_path(r)[: len(ids)] == ids)
        end = ends[row]
        return end if end is not None and num_before < end <= len(ids) else None

    output = generate(3, draft_table=TABLE, stop=stop)
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
    """Ids, log-probabilities, finish reasons and statistics, all of them to the last bit."""
    ours = jax.tree.map(lambda x: x[np.array(rows)], output)
    theirs = jax.tree.map(lambda x: x[np.array(reference_rows)], reference)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_row_equals_its_solo_run(num_rows):
    """B05, B48, B66: whatever its batch mates, at temperature 0 and above."""
    whole = generate(3, temperature=MIXED, max_new_tokens=LIMITS)
    for first in range(0, NUM_ROWS - num_rows + 1, num_rows):
        rows = slice(first, first + num_rows)
        part = generate(3, rows, temperature=MIXED[rows], max_new_tokens=LIMITS[rows])
        assert_rows_equal(part, range(num_rows), whole, range(first, first + num_rows))


def test_greedy_row_among_sampled_ones_equals_the_greedy_run():
    """B20."""
    mixed, greedy = generate(3, temperature=MIXED), generate(3, temperature=0.0)
    rows = np.flatnonzero(MIXED == 0)
    for row in rows:
        assert emitted(mixed, row) == emitted(greedy, row) == argmax_path(row)
    np.testing.assert_array_equal(mixed.stats.accepted[rows], greedy.stats.accepted[rows])
    assert np.isfinite(mixed.log_probs).all() and (mixed.stats.accepted >= 0).all()
    assert (mixed.processed_log_probs[rows] == 0).all()


def test_seed_decides_the_sample():
    """B66."""
    one, again, other = (generate(3, temperature=1.0, seed=s) for s in (SEEDS, SEEDS, SEEDS + 1000))
    np.testing.assert_array_equal(one.tokens, again.tokens)
    assert (one.tokens != other.tokens).any(1).all()


def test_equal_seeds_and_prompts_give_equal_rows_and_one_seed_gives_different_rows():
    """B66, and the rows of one seed differ."""
    rows = np.zeros(NUM_ROWS, int)
    same = generate(3, rows, temperature=1.0, seed=np.full(NUM_ROWS, 5))
    assert (same.tokens == same.tokens[0]).all()
    split = generate(3, rows, temperature=1.0, seed=5)
    assert len({tuple(row) for row in split.tokens.tolist()}) == NUM_ROWS


def test_generate_is_pure():
    """B68: two equal calls agree in everything, with a drafter built anew."""
    one, again = (generate(5, temperature=MIXED) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, again)


def test_first_round_proposes_all_drafts():
    """B68: five proposals in the first round of K = 5; fewer only where the budget is smaller."""
    output = generate(5, max_new_tokens=np.array([1, 2, 3, 4, 5, 6, 6]), draft_table=TABLE)
    assert output.stats.num_drafted.tolist() == [0, 1, 2, 3, 4, 5, 5]


def test_samples_do_not_depend_on_the_default_generator():
    """B67."""
    with jax.default_prng_impl("rbg"):
        other = generate(3, temperature=1.0)
    np.testing.assert_array_equal(other.tokens, generate(3, temperature=1.0).tokens)


FILTERS = dict(top_k=20, top_p=0.9, min_p=0.01)


@pytest.mark.parametrize("options", [{}, FILTERS], ids=["", "filters"])
@pytest.mark.parametrize("drafter", [3, (2, 1)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_end_their_row_only(bad, temperature, drafter, options):
    """B16: the token is not kept, the row says so, its neighbours do not notice."""
    sampling = Sampling(temperature=temperature, **options)
    good = generate(drafter, sampling=sampling)
    prefix = emitted(good, 4)[:6]
    table = TABLE.copy()
    table[exact_law.context_key(SOURCES[4, : SOURCE_LENGTHS[4]], [0, *prefix]), 7] = bad
    output = generate(drafter, sampling=sampling, table=table)
    assert emitted(output, 4) == prefix
    assert output.finish_reason[4] == FinishReason.NONFINITE
    assert np.isfinite(output.log_probs).all()
    others = [0, 1, 2, 3, 5, 6]
    assert_rows_equal(output, others, good, others)


@pytest.mark.parametrize("num_draft", [0, 3])
def test_log_probs_are_those_of_the_target(num_draft):
    """B25: raw and processed, for accepted, resampled and bonus tokens alike."""
    output = generate(num_draft, temperature=MIXED)
    for row in range(NUM_ROWS):
        source, tokens = SOURCES[row, : SOURCE_LENGTHS[row]], emitted(output, row)
        for column, temperature in (("log_probs", 1.0), ("processed_log_probs", MIXED[row])):
            options = Sampling(temperature=temperature)
            expected = [
                np.log(exact_law.conditional(TABLE, source, [0, *tokens[:i]], options)[token])
                for i, token in enumerate(tokens)
            ]
            np.testing.assert_allclose(getattr(output, column)[row], expected, atol=1e-5)


def test_works_under_the_users_own_jit():
    @jax.jit
    def run(table, sources, mask, limit, temperature, seed):
        return decode.generate(
            TOY, table, sources, mask, max_new_tokens=limit, sampling=Sampling(temperature=temperature),
            seed=seed, length_bucket=BUCKET, eos_ids=(),
        )  # fmt: skip

    output = run(jnp.asarray(TABLE), SOURCES, SOURCE_MASK, jnp.asarray(LIMITS), 0.0, 0)
    for row in range(NUM_ROWS):
        assert emitted(jax.tree.map(np.asarray, output), row) == argmax_path(row)[: LIMITS[row]]


# ---- compilation


def test_one_compilation_serves_all_prompts_seeds_temperatures_and_lengths():
    """B63: and an equal drafter built anew compiles nothing."""
    before = decode.jitted_generate._cache_size()
    rng = np.random.default_rng(0)
    for call in range(5):
        decode.generate(
            exact_law.ToyNetwork(V), jnp.asarray(TABLE), rng.integers(0, V, (3, 6)), np.ones((3, 6), bool),
            drafter=ModelDrafter(exact_law.ToyNetwork(V), 2), drafter_params=jnp.asarray(DRAFT_TABLE),
            sampling=Sampling(temperature=call / 4), max_new_tokens=[4 + call, 16, 9], seed=call,
        )  # fmt: skip
    assert decode.jitted_generate._cache_size() == before + 1


def test_params_stay_usable():
    """B65: nothing of them is donated."""
    table = jnp.asarray(TABLE)
    for _ in range(2):
        decode.generate(TOY, table, SOURCES, SOURCE_MASK, seed=0, max_new_tokens=16, eos_ids=())
    assert not table.is_deleted()


CONFIG = t5.T5Config(
    vocab_size=V, d_model=16, d_kv=4, d_ff=32, num_heads=4, num_layers=1, num_decoder_layers=2,
    gated=True, tied_head=False, scale_logits=False,
)  # fmt: skip
DRAFT_CONFIG = dataclasses.replace(CONFIG, d_model=8, num_decoder_layers=1)


def abstract(config=CONFIG, draft_config=DRAFT_CONFIG, num_draft=3, bucket=16, num_source=11):
    """A program, its params and its first state, as shapes."""
    target, drafter = t5.T5Network(config), None
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    source, mask = shape((2, num_source)), jax.ShapeDtypeStruct((2, num_source), bool)

    def params_of(config):
        init = lambda *x: t5.T5(config).init(jax.random.key(0), *x)["params"]  # noqa: E731
        return jax.eval_shape(init, source, mask, shape((2, 3)))

    if num_draft:
        drafter = ModelDrafter(t5.T5Network(draft_config), num_draft)
    program = rounds.Program(target, drafter, acceptance.speculative, bucket, 1, (1,), 0)
    params = rounds.AllParams(params_of(config), params_of(draft_config) if num_draft else None)
    inputs = dict(
        source_ids=source, source_mask=mask, prefix=shape((2, 1)), prefix_length=shape((2,)),
        options=Options(jax.ShapeDtypeStruct((2,), jnp.float32)), limit=shape((2,)),
        seeds=jax.ShapeDtypeStruct((2,), jnp.uint32),
    )  # fmt: skip
    state = jax.eval_shape(functools.partial(rounds.prefill, program), params, **inputs)
    return program, params, state


def test_program_does_not_grow_with_the_length():
    """B64: a loop, not an unrolled sequence of rounds."""
    short, long = (len(decode.jitted_run.lower(*abstract(bucket=n)).as_text()) for n in (16, 128))
    assert abs(long / short - 1) < 0.05


def test_traces_with_64_bit_types_enabled():
    """Counts and positions stay int32, so that a loop's state keeps its types."""
    with jax.enable_x64(True):
        program, params, state = abstract()
        jax.eval_shape(functools.partial(decode.run, program), params, state)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("what", ["run", "step"])
def test_lowers_for_accelerators(platform, what):
    program, params, state = abstract()
    if what == "run":
        traced = decode.jitted_run.trace(program, params, state)
    else:
        traced = decode.jitted_step.trace(program, params, state, sampled=True)
    assert "stablehlo" in traced.lower(lowering_platforms=(platform,)).as_text()


def _matmul_operands(jaxpr, found):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found.extend(tuple(v.aval.shape) for v in eqn.invars)
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                _matmul_operands(inner, found)
    return found


def test_loop_computes_no_cross_attention_keys():
    """B71: the encoder output `[B, S, M]` enters no product after the prefill."""
    program, params, state = abstract(num_source=11)
    jaxpr = jax.make_jaxpr(functools.partial(decode.run, program))(params, state).jaxpr
    operands = _matmul_operands(jaxpr, [])
    assert (2, 4, 11, 4) in operands  # the cached cross keys are read: the walk goes inside the loop
    widths = (CONFIG.d_model, DRAFT_CONFIG.d_model)
    assert not [shape for shape in operands if len(shape) == 3 and 11 in shape and shape[-1] in widths]


def test_step_without_drafts_costs_what_plain_decoding_costs():
    """B71: FLOPs within 2 % of a hand-written step with its log-probabilities."""
    config = dataclasses.replace(CONFIG, vocab_size=1000, d_model=64, d_ff=128, d_kv=16)
    program, params, state = abstract(config, num_draft=0)

    def plain(params, cache, token):
        logits, _, cache = program.target.decode(params, cache, token)
        token = logits.argmax(-1).astype(jnp.int32)
        log_prob = jnp.take_along_axis(logits, token[..., None], -1)[..., 0]
        return token, log_prob - jax.nn.logsumexp(logits, axis=-1), cache

    token = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    by_hand = jax.jit(plain).lower(params.target, state.cache, token).cost_analysis()["flops"]
    ours = decode.jitted_step.lower(program, params, state, sampled=False).cost_analysis()["flops"]
    assert ours <= 1.02 * by_hand


# ---- a tiny random T5


def random_params(config: t5.T5Config, seed: int):
    """Params drawn in numpy: nothing to compile. Target and draft share the large part of a bigram."""
    rng, shared = np.random.default_rng(seed), np.random.default_rng(9)
    ids = jnp.zeros((1, 1), jnp.int32)
    shapes = jax.eval_shape(lambda: t5.T5(config).init(jax.random.key(0), ids, ids > 0, ids)["params"])

    def draw(path, leaf):
        name = path[-1].key
        if name == "scale":
            return jnp.ones(leaf.shape)
        width = {"table": 1, "embedding": 1, "o": config.num_heads * config.d_kv}.get(name, leaf.shape[0])
        return jnp.asarray(rng.normal(size=leaf.shape) * width**-0.5, jnp.float32)

    params = jax.tree_util.tree_map_with_path(draw, shapes)
    embedding, head = shared.normal(size=(V, 8)), shared.normal(size=(8, V))
    params["embedding"] = params["embedding"].at[:, :8].set(3 * embedding)
    params["head"] = params["head"].at[:8].set(head)
    return params


@pytest.fixture(scope="module")
def pair():
    return random_params(CONFIG, 0), random_params(DRAFT_CONFIG, 1)


def t5_generate(pair, num_draft, rows=slice(None), temperature=0.0, **options):
    target, draft = pair
    options = dict(sampling=Sampling(temperature=temperature)) | options
    options = dict(seed=SEEDS[rows], max_new_tokens=LIMITS[rows], length_bucket=BUCKET) | options
    if num_draft:
        options |= dict(drafter=ModelDrafter(t5.T5Network(DRAFT_CONFIG), num_draft), drafter_params=draft)
    output = decode.generate(t5.T5Network(CONFIG), target, SOURCES[rows], SOURCE_MASK[rows], **options)
    return jax.tree.map(np.asarray, output)


def test_t5_greedy_with_a_draft_of_another_width_equals_plain(pair):
    """B47, B50."""
    plain, speculative = t5_generate(pair, 0), t5_generate(pair, 3)
    np.testing.assert_array_equal(speculative.tokens, plain.tokens)
    np.testing.assert_array_equal(speculative.finish_reason, plain.finish_reason)
    np.testing.assert_allclose(speculative.log_probs, plain.log_probs, atol=1e-5)
    assert len(np.unique(plain.tokens)) > 6  # the pair says something
    accepted, tested = speculative.stats.accepted.sum(), speculative.stats.tested.sum()
    assert 0 < accepted < tested


def test_shared_encoder_output_gives_the_same_as_an_encoder_of_its_own(pair):
    """B50: the target as its own draft; every draft is accepted, and the encoder runs once."""
    target, _ = pair
    runs = []
    for share in (False, True):
        drafter = ModelDrafter(t5.T5Network(CONFIG), 3, share_encoder=share)
        runs.append(t5_generate(pair, 0, drafter=drafter, drafter_params=target))
    np.testing.assert_array_equal(runs[0].tokens, runs[1].tokens)
    np.testing.assert_array_equal(runs[1].stats.accepted, runs[1].stats.tested)

    def num_products(share):
        program, params, _ = abstract(draft_config=CONFIG)
        drafter = dataclasses.replace(program.drafter, share_encoder=share)
        program = dataclasses.replace(program, drafter=drafter)
        inputs = decode.prepare(t5.T5Network(CONFIG), None, SOURCES, SOURCE_MASK, seed=0).inputs
        jaxpr = jax.make_jaxpr(functools.partial(rounds.prefill, program))(params, **inputs).jaxpr
        return len(_matmul_operands(jaxpr, []))

    # q, k, v, two of attention, o, and three of the feed-forward layer; two operands each
    assert num_products(False) - num_products(True) == 2 * 9


def test_temperature_near_zero_gives_the_greedy_ids_where_margins_are_wide(pair):
    """B15: at temperature .01, up to the first step whose two best logits are within .5."""
    cold, greedy = t5_generate(pair, 3, temperature=0.01), t5_generate(pair, 3)
    decoder_input = np.pad(greedy.tokens[:, :-1], ((0, 0), (1, 0)))
    apply = jax.jit(lambda params, *x: t5.T5(CONFIG).apply({"params": params}, *x))
    logits = apply(pair[0], jnp.asarray(SOURCES), jnp.asarray(SOURCE_MASK), jnp.asarray(decoder_input))
    best = np.sort(logits)[..., -2:]
    wide = np.cumprod(best[..., 1] - best[..., 0] >= 0.5, axis=1).astype(bool)
    wide &= np.arange(BUCKET)[None] < greedy.length[:, None]
    assert wide.sum() > 10
    np.testing.assert_array_equal(cold.tokens[wide], greedy.tokens[wide])


def test_t5_tree_equals_plain(pair):
    """B46, B47: with the relative bias of depths, in a draft of another width too."""
    plain = t5_generate(pair, 0)
    for branching in ((2, 2), (3, 1, 1)):
        drafter = ModelTreeDrafter(t5.T5Network(DRAFT_CONFIG), branching)
        tree = t5_generate(pair, 0, drafter=drafter, drafter_params=pair[1])
        np.testing.assert_array_equal(tree.tokens, plain.tokens)
        assert tree.stats.accepted.sum() > 0


def test_t5_row_equals_its_solo_run(pair):
    """B48: ids and statistics; log-probabilities to rounding."""
    whole = t5_generate(pair, 3, temperature=MIXED)
    for row in range(NUM_ROWS):
        solo = t5_generate(pair, 3, slice(row, row + 1), temperature=MIXED[row : row + 1])
        np.testing.assert_array_equal(solo.tokens[0], whole.tokens[row])
        np.testing.assert_allclose(solo.log_probs[0], whole.log_probs[row], atol=1e-5)
        jax.tree.map(lambda a, b, r=row: np.testing.assert_array_equal(a[0], b[r]), solo.stats, whole.stats)


def test_t5_log_probs_equal_a_teacher_forced_pass(pair):
    """B25."""
    output = t5_generate(pair, 3, temperature=MIXED)
    decoder_input = np.pad(output.tokens[:, :-1], ((0, 0), (1, 0)))
    apply = jax.jit(lambda params, *x: t5.T5(CONFIG).apply({"params": params}, *x))
    logits = apply(pair[0], jnp.asarray(SOURCES), jnp.asarray(SOURCE_MASK), jnp.asarray(decoder_input))
    log_softmax = np.asarray(jax.nn.log_softmax(logits))
    expected = np.take_along_axis(log_softmax, output.tokens[..., None], -1)[..., 0]
    kept = np.arange(BUCKET)[None] < output.length[:, None]
    np.testing.assert_allclose(output.log_probs[kept], expected[kept], atol=1e-5)


# ---- what is refused


IDS, MASK = np.ones((2, 3), np.int32), np.ones((2, 3), bool)
REFUSED = {
    "empty batch": (dict(source_ids=IDS[:0], source_mask=MASK[:0]), "source_ids has shape"),
    "flat source": (dict(source_ids=IDS[0], source_mask=MASK[0]), "source_ids has shape"),
    "mask of another shape": (dict(source_mask=MASK[:, :2]), "source_mask has shape"),
    "negative temperature": (dict(sampling=Sampling(temperature=-0.1)), "temperature=-0.1"),
    "temperature that is no number": (dict(sampling=Sampling(temperature=float("nan"))), "temperature=nan"),
    "temperature of too many rows": (dict(sampling=Sampling(temperature=[1.0] * 3)), "temperature has shape"),
    "negative max_new_tokens": (dict(max_new_tokens=-1), "max_new_tokens=-1"),
    "max_new_tokens of too many rows": (dict(max_new_tokens=[1, 2, 3]), "max_new_tokens has shape"),
    "max_new_tokens over the bucket": (dict(max_new_tokens=9, length_bucket=8), "length_bucket=8"),
    "seeds of too many rows": (dict(seed=[1, 2, 3]), "seed has shape"),
    "K of 0": (dict(drafter=ModelDrafter(TOY, 0)), "num_draft=0"),
    "negative K": (dict(drafter=ModelDrafter(TOY, -2)), "num_draft=-2"),
    "another vocabulary": (dict(drafter=ModelDrafter(exact_law.ToyNetwork(32), 2)), "32.*40"),
    "greedy rule with temperature": (
        dict(rule=acceptance.greedy, sampling=Sampling(temperature=0.5)),
        "rule=greedy",
    ),
    "end token outside the vocabulary": (dict(eos_ids=(40,)), r"eos_ids=\(40,\): give a list"),
    "more ids than the vocabulary": (dict(num_ids=41), "num_ids"),
    "chain rule for a tree": (
        dict(
            drafter=ModelTreeDrafter(TOY, (2, 1)), drafter_params=DRAFT_TABLE, rule=acceptance.block,
            sampling=Sampling(),
        ),
        "use rule=multi_round",
    ),
    "shared encoder of another width": (
        dict(drafter=ModelDrafter(t5.T5Network(DRAFT_CONFIG), 2, share_encoder=True)),
        "share_encoder=True.*8.*1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_argument_is_refused_by_name(name):
    """B27, B80."""
    options, words = REFUSED[name]
    options = dict(source_ids=IDS, source_mask=MASK, seed=0) | options
    with pytest.raises(ValueError, match=words):
        decode.generate(TOY, TABLE, **options)
