"""Tokenised pairs, padding and the order of training batches."""

import itertools

import numpy as np
import pytest

from specjax import data


def pairs_of(lengths):
    return [data.Pair([3] * n, [4] * (n + 1)) for n in lengths]


def test_empty_and_long_pairs_are_dropped():
    encode = lambda texts: [[7] * len(t.split()) + [1] for t in texts]  # noqa: E731
    kept = data.tokenize([("a b", "c"), ("", "c"), ("a", "b c d e")], encode, (4, 4))
    assert kept == [data.Pair([7, 7, 1], [7, 1])]


def test_padding_is_masked():
    ids, mask = data.pad([[5, 6], [7]], 3)
    np.testing.assert_array_equal(ids, [[5, 6, 0], [7, 0, 0]])
    np.testing.assert_array_equal(mask, [[True, True, False], [True, False, False]])


def test_the_smallest_bucket_that_fits_is_chosen():
    assert [data.bucket(n, (8, 4, 16)) for n in (1, 4, 5, 16)] == [4, 4, 8, 16]
    with pytest.raises(ValueError, match="`length` must be at most the largest bucket, 16, got 17"):
        data.bucket(17, (8, 4, 16))


SHAPES = [(4, 5), (10, 10)]


def test_the_first_shape_that_holds_source_and_target_is_chosen():
    assert data.shape_for([data.Pair([1] * 3, [1] * 5)], SHAPES) == (4, 5)
    assert data.shape_for([data.Pair([1] * 3, [1] * 5), data.Pair([1], [1] * 6)], SHAPES) == (10, 10)
    with pytest.raises(ValueError, match=r"the largest shape, \(10, 10\), got 11 source and 2 target ids"):
        data.shape_for([data.Pair([1] * 11, [1] * 2)], SHAPES)


def test_long_sources_are_dropped_or_cut_before_their_end_token():
    encode = lambda texts: [[*range(2, 2 + len(text.split())), 1] for text in texts]  # noqa: E731
    texts = [("a b c d", "a b"), ("a", "b"), ("a", "a b c")]
    assert data.tokenize(texts, encode, (3, 3)) == [data.Pair([2, 1], [2, 1])]
    cut = data.tokenize(texts, encode, (3, 3), truncate_sources=True)
    assert cut == [data.Pair([2, 3, 1], [2, 3, 1]), data.Pair([2, 1], [2, 1])]


def test_an_epoch_uses_each_pair_once_and_differs_from_the_next():
    pairs = pairs_of([1 + n % 9 for n in range(40)])
    first, second = (data.epoch(pairs, 4, SHAPES, seed=1, number=n) for n in (0, 1))
    assert sorted(i for rows in first for i in rows) == list(range(40)) and first != second


def test_rows_of_a_batch_are_alike():
    pairs = pairs_of([1 + n % 9 for n in range(36)])
    spread = [np.ptp([pairs[i].length for i in rows]) for rows in data.epoch(pairs, 4, SHAPES, 1, 0)]
    assert max(spread) == 0


def test_batches_continue_where_a_run_stopped():
    pairs = pairs_of([1 + n % 9 for n in range(24)])
    whole = list(itertools.islice(data.training_rows(pairs, 4, SHAPES, seed=3), 15))
    assert list(itertools.islice(data.training_rows(pairs, 4, SHAPES, seed=3, start_step=8), 7)) == whole[8:]


def test_training_rows_raises_for_fewer_pairs_than_a_batch():
    with pytest.raises(ValueError, match="`batch_size` must be at most the number of pairs, 3, got 4"):
        next(data.training_rows(pairs_of([1, 2, 3]), 4, [(8, 8)], seed=0))


def test_the_tokenizer_of_bytes_keeps_code_as_it_is(tmp_path):
    tokenizer = data.load_or_train_tokenizer(tmp_path / "bytes", [], vocab_size=None)
    code = "def f(x):\n    return {x: [x]}\n"
    assert tokenizer.decode(tokenizer(code).input_ids, skip_special_tokens=True) == code
    assert tokenizer("a").input_ids == [ord("a") + 3, 1]


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


def test_trained_tokenizer_with_byte_fallback_keeps_every_text(tmp_path):
    """Including characters missing from its training text, newlines and repeated spaces."""
    random = np.random.default_rng(0)
    letters = list("abcdefghijklmnopqrstuvwxyzäöüß")
    lines = [" ".join("".join(random.choice(letters, 5)) for _ in range(8)) for _ in range(2000)]
    tokenizer = data.load_or_train_tokenizer(tmp_path / "tokenizer", lines, vocab_size=1100)
    unseen = ["Ärger Öl Übung", "def f(x):\n    return {1: '\\\\'} ~ ^ ` § < >", "😀 ñ", "a\n\nb  c", ""]
    for text in [*unseen, lines[0]]:
        ids = tokenizer(text).input_ids
        assert tokenizer.unk_token_id not in ids and ids[-1] == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
