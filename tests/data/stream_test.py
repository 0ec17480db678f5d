"""The stream of batches: its order, the shares of processes, and resumption."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from specjax import data


def texts_of(count):
    """Pair i has i in both texts; lengths differ."""
    return [(f"{i} " + "s " * (i % 5), f"{i} " + "t " * (i % 7)) for i in range(count)]


def encode(texts):
    """First word + 10, then one id a word, then the end token 1."""
    return [[int(text.split()[0]) + 10, *[2] * (len(text.split()) - 1), 1] if text else [1] for text in texts]


def make(texts, seed=0, **options):
    return data.stream(texts, encode, **{"batch_size": 4, "shapes": [(4, 4), (8, 9)], "seed": seed} | options)


def indices(batches):
    """The pairs that the batches hold, in order."""
    return [int(i) - 10 for batch in batches for i in batch.source_ids[:, 0]]


def take(stream, count):
    return list(itertools.islice(stream, count))


def assert_equal(batches, others):
    for batch, other in zip(batches, others, strict=True):
        for a, b in zip(dataclasses.astuple(batch), dataclasses.astuple(other), strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_order_is_fixed_by_the_seed():
    texts = texts_of(40)
    assert_equal(take(make(texts), 25), take(make(texts), 25))
    assert indices(take(make(texts), 10)) != indices(take(make(texts, seed=1), 10))


def test_each_epoch_holds_every_pair_once_in_another_order():
    stream = make(texts_of(40))
    first, second = indices(take(stream, 10)), indices(take(stream, 10))
    assert sorted(first) == sorted(second) == list(range(40)) and first != second


def test_large_sets_are_windowed_and_still_hold_every_pair_once():
    epoch = indices(take(make(texts_of(512)), 128))
    assert sorted(epoch) == list(range(512))


def test_source_and_target_of_a_pair_stay_together_in_a_bucket_that_fits():
    for batch in take(make(texts_of(40)), 20):
        np.testing.assert_array_equal(batch.source_ids[:, 0], batch.target_ids[:, 0])
        shape = (batch.source_ids.shape[1], batch.target_ids.shape[1])
        assert shape in [(4, 4), (8, 9)]
        lengths = (batch.source_mask.sum(1).max(), batch.target_mask.sum(1).max())
        assert shape == ((4, 4) if max(lengths) <= 4 else (8, 9))


def test_processes_have_disjoint_shares_that_cover_all():
    texts, shapes = texts_of(42), [(8, 9)]
    shares = [
        indices(take(make(texts, batch_size=2, shapes=shapes, process_index=i, process_count=3), 7))
        for i in range(3)
    ]
    assert sorted(itertools.chain(*shares)) == list(range(42))


@pytest.mark.parametrize("num_done", [0, 1, 9, 10, 31])
def test_a_saved_position_continues_the_same(num_done):
    texts = texts_of(40)
    stream = make(texts)
    take(stream, num_done)
    state = stream.get_state()
    rest = take(stream, 23)
    resumed = make(texts)
    take(resumed, 3)  # wherever it stands
    resumed.set_state(state)
    assert isinstance(state, bytes) and resumed.get_state() == state
    assert_equal(take(resumed, 23), rest)


def test_a_position_inside_a_large_epoch_continues_the_same():
    texts = texts_of(512)
    stream = make(texts)
    take(stream, 70)
    resumed = make(texts)
    resumed.set_state(stream.get_state())
    assert_equal(take(resumed, 70), take(stream, 70))


def test_set_state_raises_for_a_stream_with_other_arguments():
    state = make(texts_of(40)).get_state()
    with pytest.raises(ValueError, match=r"num_pairs=41 \(saved with 40\), seed=1 \(saved with 0\)"):
        make(texts_of(41), seed=1).set_state(state)
    assert json.loads(state)["settings"]["batch_size"] == 4


def test_long_and_empty_pairs_are_dropped():
    texts = [*texts_of(8), ("9 " + "s " * 9, "9"), ("10", "10 " + "t " * 9), ("", "11"), ("12", "")]
    assert sorted(indices(take(make(texts), 2))) == list(range(8))


def test_long_sources_can_be_cut_and_keep_their_end_token():
    texts = [(f"{i} " + "s " * 9, f"{i}") for i in range(4)]
    (batch,) = take(make(texts, truncate_sources=True), 1)
    assert batch.source_ids.shape == (4, 8) and (batch.source_ids[:, -1] == 1).all()
    assert sorted(indices([batch])) == [0, 1, 2, 3]


def test_texts_are_read_as_they_are_needed():
    class Counting:
        num_read = 0

        def __len__(self):
            return 100_000

        def __getitem__(self, index):
            self.num_read += 1
            return (f"{index}", f"{index}")

    texts = Counting()
    take(make(texts), 1)
    assert texts.num_read <= 3 * 32 * 4


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (3, {}, "`batch_size` must be at most 3, one process's share of 3 pairs, got 4"),
        (7, {"process_count": 2, "shapes": [(8, 9)]}, "at most 3, one process's share of 7 pairs, got 4"),
        (40, {"process_index": 1}, "`process_index` must be in 0..0, got 1"),
        (40, {"process_count": 2}, r"`shapes` must be one shape for 2 processes, .*, got \[\(4, 4\)"),
        (40, {"shapes": []}, r"`shapes` must be .*, got \[\]"),
        (40, {"shapes": [(8, 4), (4, 8)]}, "grow in both"),
    ],
)
def test_stream_raises_for_invalid_arguments_before_the_first_batch(count, options, message):
    with pytest.raises(ValueError, match=message):
        make(texts_of(count), **options)


def test_stream_raises_if_too_few_pairs_fit():
    with pytest.raises(ValueError, match=r"only 0 of 40 pairs fit shapes=\[\(1, 1\)\]"):
        next(make(texts_of(40), shapes=[(1, 1)]))
