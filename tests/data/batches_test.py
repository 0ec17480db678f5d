"""Tokenised pairs, padding and the order of training batches."""

import itertools

import numpy as np
import pytest

from specjax import data


def pairs_of(lengths):
    return [data.Pair([3] * n, [4] * (n + 1)) for n in lengths]


def test_empty_and_long_pairs_are_dropped():
    encode = lambda texts: [[7] * len(t.split()) + [1] for t in texts]  # noqa: E731
    kept = data.tokenize([("a b", "c"), ("", "c"), ("a", "b c d e")], encode, max_length=4)
    assert kept == [data.Pair([7, 7, 1], [7, 1])]


def test_padding_is_masked():
    ids, mask = data.pad([[5, 6], [7]], 3)
    np.testing.assert_array_equal(ids, [[5, 6, 0], [7, 0, 0]])
    np.testing.assert_array_equal(mask, [[True, True, False], [True, False, False]])


def test_the_smallest_bucket_that_fits_is_chosen():
    assert [data.bucket(n, (8, 4, 16)) for n in (1, 4, 5, 16)] == [4, 4, 8, 16]
    with pytest.raises(ValueError, match="length 17 is over the largest bucket 16"):
        data.bucket(17, (8, 4, 16))


def test_an_epoch_uses_each_pair_once_and_differs_from_the_next():
    pairs = pairs_of([1 + n % 9 for n in range(40)])
    first, second = (data.epoch(pairs, 4, (4, 10), seed=1, number=n) for n in (0, 1))
    assert sorted(np.concatenate([rows for rows, _ in first])) == list(range(40))
    assert [tuple(rows) for rows, _ in first] != [tuple(rows) for rows, _ in second]
    assert all(max(pairs[i].length for i in rows) <= width for rows, width in first)


def test_batches_continue_where_a_run_stopped():
    pairs = pairs_of([1 + n % 9 for n in range(24)])
    whole = list(itertools.islice(data.training_batches(pairs, 4, (4, 10), seed=3), 15))
    rest = list(itertools.islice(data.training_batches(pairs, 4, (4, 10), seed=3, start_step=8), 7))
    for a, b in zip(whole[8:], rest, strict=True):
        np.testing.assert_array_equal(a.source_ids, b.source_ids)
        np.testing.assert_array_equal(a.target_mask, b.target_mask)


def test_too_few_pairs_for_a_batch_is_an_error():
    with pytest.raises(ValueError, match="batch_size=4, but there are only 3 pairs"):
        next(data.training_batches(pairs_of([1, 2, 3]), 4, (8,), seed=0))


def test_a_trained_tokenizer_has_the_conventions_of_t5_and_is_read_back(tmp_path):
    words = ["man", "dog", "runs", "sits", "blue", "shirt", "Straße", "Hund", "läuft", "Mann"]
    random = np.random.default_rng(0)
    lines = [" ".join(random.choice(words, 6)) for _ in range(300)]
    tokenizer = data.load_or_train_tokenizer(tmp_path / "tokenizer", lines, vocab_size=30)
    again = data.load_or_train_tokenizer(tmp_path / "tokenizer", [], vocab_size=30)
    ids = tokenizer("man läuft").input_ids
    assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, ids[-1]) == (30, 0, 1, 1)
    assert again("man läuft").input_ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "man läuft"
