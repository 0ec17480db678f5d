"""N-gram tables: counts by hand, and drafts from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.exactness.toys import OracleNetwork
from specjax import decode, drafters
from specjax.drafters import NgramDrafter

TEXTS = [[2, 3, 2, 3, 4, 1], [3, 4, 1], [2, 2, 1]]  # 1 ends a text; 0 stands before it


def test_bigrams_are_counts_with_a_discount_backed_off_to_unigrams():
    table = drafters.learn_ngram(TEXTS, 6, max_successors=2, discount=0.5)
    unigram = (np.array([0, 3, 4, 3, 2, 0]) + 1) / 18
    np.testing.assert_allclose(np.exp(table.log_unigram), unigram, rtol=1e-6)
    q = np.exp(table.logits(jnp.arange(6)))
    np.testing.assert_allclose(q.sum(1), 1, rtol=1e-6)
    # After 2: twice 3, once 2, once 1; two of them are kept (of equals the smaller id).
    kept = {3: 1.5 / 4, 1: 0.5 / 4}
    backoff = 1 - sum(kept.values())
    np.testing.assert_allclose(q[2], [kept.get(i, 0) + backoff * unigram[i] for i in range(6)], rtol=1e-6)
    np.testing.assert_allclose(q[5], unigram, rtol=1e-6)  # nothing follows it
    np.testing.assert_allclose(q[0, 2], 1.5 / 3 + (1 - 2 / 3) * unigram[2], rtol=1e-6)  # begins two of three


def test_unigrams_do_not_look_back():
    table = drafters.learn_ngram(TEXTS, 6, order=1)
    q = np.exp(table.logits(jnp.arange(6)))
    np.testing.assert_array_equal(q, np.broadcast_to(np.exp(table.log_unigram), (6, 6)))
    assert table.successors.shape == (6, 0)


def test_table_in_a_file_is_the_same(tmp_path):
    table = drafters.learn_ngram(TEXTS, 6)
    drafters.save_ngram(tmp_path / "new" / "table.safetensors", table)
    again = drafters.ngram(tmp_path / "new" / "table.safetensors", 2).table
    jax.tree.map(np.testing.assert_array_equal, again, table)
    (tmp_path / "other").write_text("{}")
    with pytest.raises(ValueError, match="`table` must be a table from drafters.learn_ngram, or a file"):
        drafters.ngram(np.zeros(3))
    for name in ("other", "missing"):
        with pytest.raises(ValueError, match=f"{name} is not a readable n-gram table"):
            drafters.load_ngram(tmp_path / name)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(order=3), "`order` must be 1 or 2"),
        (dict(discount=1.0), "`discount` in 0..1"),
        (dict(texts=[]), "`texts` must hold at least one"),
        (dict(texts=[[6]]), r"`texts` must hold ids in 0..5, got 6"),
        (dict(texts=[[-1, 3]]), r"`texts` must hold ids in 0..5, got -1"),
        (dict(max_successors=2.5), "`max_successors` must be"),
    ],
)
def test_unusable_argument_is_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        drafters.learn_ngram(**(dict(texts=TEXTS, vocab_size=6) | options))


def test_bigrams_of_what_the_target_says_are_accepted_to_the_last():
    """The oracle's next token follows from its last; a unigram table is right sometimes."""
    oracle = OracleNetwork(jnp.asarray([3, 4, 5, 6, 2, 1, 3]))
    given = (np.array([[0, 0], [5, 1]]), np.ones((2, 2), bool))
    options = dict(prefix=np.array([[0], [2]]), max_new_tokens=20, eos_ids=())
    plain = decode.generate(oracle, *given, **options)
    rows = [row.tolist() for row in np.asarray(plain.tokens)[:, :20]]
    texts = [[*row, *row] for row in rows]
    taus = []
    for order in (2, 1):
        table = drafters.learn_ngram(texts, 7, order)
        output = decode.generate(oracle, *given, drafter=NgramDrafter(table, 3), **options)
        np.testing.assert_array_equal(output.tokens, plain.tokens)
        taus.append(np.asarray(output.stats.tau))
    assert taus[0][1] > 3 and (taus[1] < taus[0]).all()


def test_table_of_a_smaller_vocabulary_is_refused():
    oracle = OracleNetwork(jnp.arange(9))
    with pytest.raises(ValueError, match="`table` must contain the target's 9 ids, got 6"):
        NgramDrafter(drafters.learn_ngram(TEXTS, 6), 2).check(oracle)
