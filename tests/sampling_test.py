"""From logits to distributions: temperature, filters, penalties, and the history that they read."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling
from specjax.generation_config import GenerationConfig
from specjax.sampling import History

V_T5 = 32128


def process(logits, *, num_new=None, seen=None, eos_ids=(), num_ids=None, **options):
    """`sampling.distribution` on logits `[B, V]` or `[B, N, V]`, as options of so many rows."""
    logits = jnp.asarray(logits)
    flat = logits.ndim == 2
    logits = logits[:, None] if flat else logits
    num_rows, num_positions, _ = logits.shape
    num_new = jnp.zeros((num_rows, num_positions), jnp.int32) if num_new is None else jnp.asarray(num_new)
    history = History(num_new) if seen is None else of_seen(seen)._replace(num_new=num_new)
    options = dict(temperature=1.0) | options
    options = GenerationConfig(**options).to_options(num_rows, eos_ids, num_ids)
    probs = jax.jit(sampling.distribution)(logits, options, history)
    return probs[:, 0] if flat else probs


def of_seen(seen):
    """The history in which the ids of a table `[B, N, V]` occur, each once, all of them given."""
    seen = np.asarray(seen)
    ids = np.where(seen, np.arange(seen.shape[-1]), seen.shape[-1])
    ids = np.sort(ids, axis=-1)
    tokens = np.where(ids < seen.shape[-1], ids, -1)
    return of_tokens(tokens, seen.sum(-1), np.zeros(seen.shape[:2], np.int32))


def of_tokens(tokens, length, num_new):
    """A history of arrays."""
    return History(*(jnp.asarray(x, jnp.int32) for x in (num_new, tokens, length)))


# ---- process


def test_process_is_the_softmax_at_each_rows_temperature():
    """Temperature belongs to the row, whatever axes lie between."""
    logits = jax.random.normal(jax.random.key(0), (3, 2, 5))
    probs = process(logits, temperature=[1.0, 0.5, 0.0])
    np.testing.assert_allclose(probs[0], jax.nn.softmax(logits[0], axis=-1), atol=1e-6)
    np.testing.assert_allclose(probs[1], jax.nn.softmax(logits[1] / 0.5, axis=-1), atol=1e-6)
    np.testing.assert_array_equal(probs[2], jax.nn.one_hot(logits[2].argmax(-1), 5))


@pytest.mark.parametrize(
    "dtype, temperature",
    [(jnp.float32, 0.0), (jnp.float32, 1e-38), (jnp.float16, 1e-3), (jnp.bfloat16, 2e-5)],
)
def test_temperature_near_zero_is_the_argmax_without_nan(dtype, temperature):
    probs = process(jnp.asarray([[79, 80, -80]], dtype), temperature=temperature)
    np.testing.assert_array_equal(probs, [[0, 1, 0]])


def test_temperature_just_above_the_threshold_does_not_overflow():
    """Float32 logits of any size."""
    logits = jnp.asarray([[3e37, -3e37, 0.0], [0.1, 0.0, -0.1]])
    probs = process(logits, temperature=1.001e-5)
    assert np.isfinite(probs).all()
    np.testing.assert_array_equal(probs, [[1, 0, 0], [1, 0, 0]])


def test_very_high_temperature_is_uniform():
    probs = process([[80.0, 79.0, -80.0]], temperature=1e9)
    np.testing.assert_allclose(probs, np.full((1, 3), 1 / 3), atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_tie_goes_to_the_lowest_id(temperature):
    probs = process([[1.0, 3.0, 3.0, 3.0]], temperature=temperature)
    np.testing.assert_array_equal(probs, [[0, 1, 0, 0]])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_probabilities_are_float32_in_any_model(dtype):
    probs = process(jnp.ones((1, 2, 3), dtype))
    assert probs.dtype == jnp.float32
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6)


def test_masked_entries_have_probability_zero():
    probs = process(jnp.asarray([[0.0, -jnp.inf, 0.0]]))
    np.testing.assert_array_equal(probs, [[0.5, 0, 0.5]])


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_distribution_of_broken_logits_is_one_hot(bad):
    """A broken draft must not break exactness: its q stays a distribution."""
    probs = process(jnp.asarray([[0.0, bad, 1.0], [0.0, 0.0, 0.0]]))
    assert np.isfinite(probs).all()
    np.testing.assert_array_equal(jnp.sort(probs[0]), [0, 0, 1])
    np.testing.assert_allclose(probs[1], 1 / 3, atol=1e-6)


# ---- filters


def log(probs):
    return np.log(np.asarray(probs, np.float64)).astype(np.float32)


def reference(logits, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """One row of the filters, by sorting, in float64. Keeps ties with the last token that is kept."""
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    probs = weights / weights.sum()
    if top_k is not None:
        probs = np.where(probs >= np.sort(probs)[-min(top_k, len(probs))], probs, 0)
    if top_p is not None and top_p < 1:
        above = np.array([probs[probs > p].sum() for p in probs])
        probs = np.where(above < top_p * probs.sum(), probs, 0)
    if min_p is not None:
        probs = np.where(probs >= min_p * probs.max(), probs, 0)
    return probs / probs.sum()


@pytest.mark.parametrize("top_k", [1, 2, 5, 39, 40, 1000])
@pytest.mark.parametrize("top_p", [None, 1e-8, 0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("min_p", [None, 0.0, 0.2, 1.0])
def test_filters_keep_what_a_sort_keeps(top_k, top_p, min_p):
    logits = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32) * 2
    probs = process(logits, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    for row in range(3):
        expected = reference(logits[row], np.float32(0.8), top_k, top_p, min_p)
        np.testing.assert_allclose(probs[row], expected, atol=1e-6)


def test_top_p_keeps_the_token_that_crosses():
    """The mass before a token decides."""
    np.testing.assert_allclose(
        process(log([[0.4, 0.3, 0.2, 0.1]]), top_p=0.8)[0], [4 / 9, 3 / 9, 2 / 9, 0], atol=1e-6
    )


def test_top_p_drops_ties_together():
    """On exact probabilities, so that no rounding decides."""
    values = jnp.asarray([[[0.25, 0.125, 0.125, 0.5]]])
    threshold = sampling.threshold_above(values, values, jnp.full((1, 1, 1), 0.75))
    np.testing.assert_array_equal(values >= threshold, [[[True, False, False, True]]])


def test_top_p_of_one_changes_nothing():
    """Bit-exact; so do top-k of the vocabulary size and min-p of 0."""
    logits = np.random.default_rng(1).normal(size=(2, 500)).astype(np.float32)
    plain = process(logits)
    for options in (
        dict(top_p=1.0),
        dict(top_k=500),
        dict(min_p=0.0),
        dict(top_p=1.0, top_k=9999, min_p=0.0),
    ):
        np.testing.assert_array_equal(process(logits, **options), plain)


def test_tiny_top_p_keeps_the_most_likely_token():
    logits = np.random.default_rng(2).normal(size=(100, 4096)).astype(np.float32)
    probs = process(logits, top_p=1e-8)
    np.testing.assert_array_equal(probs.argmax(-1), logits.argmax(-1))
    np.testing.assert_allclose(probs.max(-1), 1, atol=1e-6)
    assert ((probs > 0).sum(-1) == 1).all()


def test_filters_apply_after_the_temperature():
    """Top-p of .7 of [.5, .3, .15, .05] keeps two; a hotter row keeps more."""
    logits = log([[0.5, 0.3, 0.15, 0.05]] * 2)
    probs = process(logits, top_p=0.7, temperature=[1.0, 3.0])
    np.testing.assert_allclose(probs[0], [0.625, 0.375, 0, 0], atol=1e-6)
    assert (probs[1] > 0).sum() == 3


def test_every_option_belongs_to_its_row():
    """Each row of a mixed batch equals the same row in a batch of one."""
    logits = np.random.default_rng(3).normal(size=(4, 2, 50)).astype(np.float32)
    seen = np.random.default_rng(4).random((4, 2, 50)) < 0.3
    num_new = np.array([[0, 1], [2, 3], [4, 5], [1, 1]])
    options = dict(
        temperature=[1.0, 0.0, 0.7, 2.0],
        top_k=[3, 50, 10, 1],
        top_p=[0.9, 0.5, 1.0, 0.2],
        min_p=[0.0, 0.1, 0.3, 0.0],
        repetition_penalty=[1.0, 2.0, 0.5, 1.3],
        min_new_tokens=[0, 3, 5, 9],
    )
    batch = process(logits, seen=seen, num_new=num_new, eos_ids=(1, 7), **options)
    for row in range(4):
        alone = process(
            logits[row : row + 1],
            seen=seen[row : row + 1],
            num_new=num_new[row : row + 1],
            eos_ids=(1, 7),
            **{name: values[row] for name, values in options.items()},
        )
        np.testing.assert_array_equal(batch[row], alone[0])


@pytest.mark.parametrize("k", [1, 6, 100])
def test_threshold_is_the_kth_largest_of_32128(k):
    """Exact, with many ties; no sort."""
    values = np.random.default_rng(5).integers(0, 1000, (2, 3, V_T5)).astype(np.float32) / 1000
    limit = jnp.full((2, 1, 1), k, jnp.int32)
    threshold = jax.jit(sampling.threshold_above)(
        jnp.asarray(values), jnp.ones(values.shape, jnp.int32), limit
    )
    np.testing.assert_array_equal(threshold[..., 0], np.sort(values)[..., -k])


def test_no_sort_of_the_vocabulary():
    options = GenerationConfig(top_k=50, top_p=0.9, min_p=0.1).to_options(2)
    history = History(jnp.zeros((2, 6), jnp.int32))
    text = jax.jit(sampling.distribution).lower(jnp.zeros((2, 6, V_T5)), options, history).as_text()
    assert "sort" not in text and "top_k" not in text


# ---- penalties and masks


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    options = GenerationConfig(repetition_penalty=2.0).to_options(1)
    history = of_seen([[[True, True, False]]])
    np.testing.assert_array_equal(
        sampling.adjust_logits(jnp.asarray([[[2.0, -2.0, 3.0]]]), options, history), [[[1.0, -4.0, 3.0]]]
    )


def test_greedy_row_decides_by_adjusted_logits():
    probs = process([[3.0, 2.0, 1.0]], temperature=0.0, repetition_penalty=2.0, seen=[[[True, False, False]]])
    np.testing.assert_array_equal(probs, [[0, 1, 0]])
    probs = process([[3.0, 2.0, 1.0]], temperature=0.0, min_new_tokens=1, eos_ids=(0,))
    np.testing.assert_array_equal(probs, [[0, 1, 0]])


def test_end_tokens_are_masked_up_to_the_minimum_length():
    """All of them, at each position by its own count."""
    probs = process(np.zeros((1, 3, 4)), num_new=[[1, 2, 3]], min_new_tokens=3, eos_ids=(1, 3))
    np.testing.assert_allclose(probs[0], [[0.5, 0, 0.5, 0], [0.5, 0, 0.5, 0], [0.25] * 4], atol=1e-6)


def test_padding_ids_are_cut_off():
    """Whatever their logits are."""
    logits = np.zeros((1, 40), np.float32)
    logits[:, 36:] = 100
    probs = process(logits, num_ids=36)
    np.testing.assert_allclose(probs, np.full((1, 36), 1 / 36), atol=1e-7)


# ---- history


def context(rows, prefix_lengths, num_slots=8, **options):
    """A context of committed ids, as far as `history` looks."""
    tokens = np.full((len(rows), num_slots), 7)  # garbage beyond
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    values = dict(
        tokens=jnp.asarray(tokens),
        length=jnp.asarray(list(map(len, rows))),
        prefix_length=jnp.asarray(prefix_lengths),
        options=GenerationConfig(**options).to_options(len(rows)),
    )
    names = [field.name for field in dataclasses.fields(sampling.Context)]
    return sampling.Context(**dict.fromkeys(names) | values)


def test_history_holds_what_precedes_a_position_in_its_order():
    """The prefix, the drafted path before the position, and no other branch."""
    drafted = jnp.asarray([[5, 6, 7], [1, 1, 2]])
    before = jnp.asarray([[[0, 0, 0], [1, 0, 0], [1, 0, 1]], [[0, 0, 0], [1, 1, 0], [0, 0, 1]]], bool)
    history = sampling.history(context([[0, 3], [0, 4, 4]], [1, 1], no_repeat_ngram_size=2), drafted, before)
    np.testing.assert_array_equal(history.num_new, [[1, 2, 3], [2, 4, 3]])
    np.testing.assert_array_equal(history.length, [[2, 3, 4], [3, 5, 4]])
    expected = [[[0, 3], [0, 3, 5], [0, 3, 5, 7]], [[0, 4, 4], [0, 4, 4, 1, 1], [0, 4, 4, 2]]]
    for row, position in itertools.product(range(2), range(3)):
        ids = expected[row][position]
        assert history.tokens[row, position].tolist() == ids + [-1] * (8 - len(ids))


def test_history_without_an_option_that_reads_tokens_keeps_none():
    history = sampling.history(
        context([[0, 3]], [1], min_new_tokens=2), jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 1, 2), bool)
    )
    assert history.tokens is None and history.length is None


# ---- options that read tokens: against direct implementations

TEXTS = [  # start token first; the last is what a prefix of 3 ids and drafts make of a row
    [0, 3, 4, 3, 4, 5],
    [0, 3, 4],
    [0],
    [0, 5, 5, 5],
    [0, 2, 1, 2, 1, 2, 1, 2],
]


def adjusted(texts, num_new, num_ids=6, **options):
    """Logits of zero after each text, `num_new` of its ids generated; one position, then all in one call."""
    width = max(map(len, texts)) + 2
    tokens = [[*ids, *[-1] * (width - len(ids))] for ids in texts]
    options = GenerationConfig(**options).to_options(len(texts), (1,), num_ids)
    history = of_tokens(np.asarray(tokens)[:, None], [[len(ids)] for ids in texts], [[n] for n in num_new])
    logits = jnp.zeros((len(texts), 1, num_ids))
    return np.asarray(jax.jit(sampling.adjust_logits)(logits, options, history))[:, 0]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_no_ngram_is_completed_twice(size):
    found = adjusted(TEXTS, [0] * 5, no_repeat_ngram_size=size)
    num_banned = 0
    for ids, row in zip(TEXTS, found, strict=True):
        ngrams = {tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)}
        last = ids[len(ids) - size + 1 :]
        banned = {i for i in range(6) if len(last) == size - 1 and (*last, i) in ngrams}
        assert set(np.flatnonzero(row == -np.inf)) == banned
        num_banned += len(banned)
    assert num_banned


@pytest.mark.parametrize("size", [9, 10, 11, 10**9])
def test_ngrams_longer_than_the_text_ban_nothing(size):
    assert (adjusted(TEXTS, [0] * 5, no_repeat_ngram_size=size) == 0).all()  # of ten slots


def test_bad_words_are_not_completed():
    words = [[4, 3], [3, 4, 5], [2], [1], [0, 3, 4, 3, 4, 5, 5], [5, 5, 5, 5, 5, 5, 5, 5, 2, 4]]
    found = adjusted(TEXTS, [0] * 5, bad_words_ids=words)
    expected = [{5}, {3, 5}, set(), set(), set()]
    assert [set(np.flatnonzero(row == -np.inf)) for row in found] == [ids | {2} for ids in expected]
    # [1] alone is the end token: left out, as transformers does; [2] never occurs.


def test_presence_and_frequency_penalties_count_generated_ids():
    found = adjusted(TEXTS, [4, 1, 0, 3, 2], presence_penalty=[1, 1, 1, 0, 2], frequency_penalty=0.5)
    for row, ids, num_new, weight in zip(found, TEXTS, [4, 1, 0, 3, 2], [1, 1, 1, 0, 2], strict=True):
        new = ids[len(ids) - num_new :]
        counts = np.bincount(new, minlength=6)
        np.testing.assert_allclose(row, -0.5 * counts - weight * (counts > 0))


def test_bias_and_suppressed_ids_add_up_at_every_position():
    options = dict(logit_bias={2: 1.5, 4: -3}, suppress_tokens=[5, 70], begin_suppress_tokens=[3])
    options = GenerationConfig(**options).to_options(2, (), 6, 80)
    history = History(jnp.asarray([[0, 1], [2, 0]]))
    found = sampling.adjust_logits(jnp.ones((2, 2, 8)), options, history)
    later = np.asarray([1, 1, 2.5, 1, -2, -np.inf])
    first = np.where(np.arange(6) == 3, -np.inf, later)
    np.testing.assert_allclose(found, [[first, later], [later, first]])


def test_logits_processor_gets_logits_and_history():
    def raised_after_four(logits, history):
        last = jnp.take_along_axis(history.tokens, history.length[..., None] - 1, axis=-1)
        return jnp.where(last == 4, logits + 1, logits)

    found = adjusted(TEXTS, [0] * 5, logits_processor=raised_after_four)
    assert found[:, 0].tolist() == [0, 1, 0, 0, 0]
    with pytest.raises(ValueError, match="`logits_processor` must return the shape"):
        adjusted(TEXTS, [0] * 5, logits_processor=lambda logits, history: logits[..., :2])


# ---- what raises


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(top_p=0.0), "`top_p` must be above 0 and at most 1, got 0.0"),
        (dict(top_p=1.5), "`top_p` must be.*got 1.5"),
        (dict(top_p=float("nan")), "`top_p` must be.*got nan"),
        (dict(top_k=0), "`top_k` must be at least 1.*got 0"),
        (dict(top_k=2.5), "`top_k` must be a whole number, got 2.5"),
        (dict(min_p=-0.1), "`min_p` must be.*got -0.1"),
        (dict(repetition_penalty=0.0), "`repetition_penalty` must be above 0"),
        (dict(repetition_penalty=float("inf")), "`repetition_penalty` must be.*got inf"),
        (dict(min_new_tokens=-1), "`min_new_tokens` must be.*got -1"),
        (dict(top_p=[0.5, 0.6, 0.7]), r"`top_p` must be one number or one per row \(2\), got shape \(3,\)"),
        (dict(temperature="hot"), "`temperature` must be a number, got 'hot'"),
    ],
)
def test_option_out_of_range_raises_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        GenerationConfig(**options).to_options(2)


def test_unknown_options_are_named_all_at_once():
    with pytest.raises(ValueError, match="`num_beams` is not supported.*`sequence_bias` is not supported"):
        GenerationConfig().updated(dict(num_beams=4, top_p=0.9, sequence_bias=[]))


def test_unset_temperature_is_one_where_a_filter_is_given_and_greedy_elsewhere():
    logits = log([[0.2, 0.4, 0.3, 0.1]])
    unset = process(logits, top_k=50, temperature=None)
    np.testing.assert_allclose(unset[0], [0.2, 0.4, 0.3, 0.1], atol=1e-6)
    np.testing.assert_array_equal(process(logits, temperature=None)[0], [0, 1, 0, 0])
