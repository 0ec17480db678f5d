"""Continuous batching: the same outputs in any batch, and after a kill."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.exactness import toys
from specjax import corpus, decode
from specjax.drafters import ModelDrafter

V = 40
TABLE = jnp.asarray(toys.random_table(0, V, spread=2.0))
TOY, DRAFT = toys.ToyNetwork(TABLE), toys.ToyNetwork(TABLE + jnp.asarray(toys.random_table(1, V)))
RNG = np.random.default_rng(5)
SOURCES = [RNG.integers(2, V, n) for n in (5, 3, 1, 4, 2, 5, 3, 8, 7, 2, 6)]
LIMITS = np.array([16, 1, 9, 2, 16, 3, 12, 0, 7, 16, 5])
LENGTHS = [len(source) for source in SOURCES]


def request(num_draft, temperature):
    def make(width, these):
        ids = np.array([np.pad(SOURCES[i], (0, width - LENGTHS[i])) for i in these])
        mask = np.arange(width)[None] < np.array([LENGTHS[i] for i in these])[:, None]
        return decode.prepare(
            TOY,
            ids,
            mask,
            drafter=ModelDrafter(DRAFT, num_draft) if num_draft else None,
            temperature=temperature,
            max_new_tokens=LIMITS[list(these)],
            length_bucket=16,
            seed=np.array(these, np.uint32),
            eos_ids=(1, 3),
        )

    return make


def by_source(finished):
    """Every leaf of every source's row; each source comes once."""
    rows = {}
    for indices, generation in finished:
        for row, index in enumerate(indices.tolist()):
            assert index not in rows
            rows[index] = jax.tree.map(lambda x, row=row: np.asarray(x)[row], generation)
    assert sorted(rows) == list(range(len(SOURCES)))
    return rows


@pytest.mark.parametrize(
    ("num_rows", "num_refilled", "num_draft", "temperature"),
    [(4, 1, 3, 1.0), (4, 2, 3, 0.0), (4, 4, 0, 0.0), (16, 2, 3, 1.0)],
)
def test_decode_all_equals_decoding_each_source_separately(num_rows, num_refilled, num_draft, temperature):
    make = request(num_draft, temperature)
    rows = by_source(corpus.decode_all(make, LENGTHS, (4, 8), num_rows, num_refilled))
    for index, row in rows.items():
        alone = jax.device_get(decode.jitted_generate(*make(8, [index])))
        jax.tree.map(np.testing.assert_array_equal, row, jax.tree.map(lambda x: x[0], alone))


def test_rows_are_refilled_before_the_others_have_finished():
    """With F = B a batch waits for its slowest row; with F = 1 a source comes out as soon as it can."""
    sizes = [
        [len(done.indices) for done in corpus.decode_all(request(0, 0.0), LENGTHS, (8,), 4, f)]
        for f in (4, 1)
    ]
    assert sizes[0] == [4, 4, 3]
    assert len(sizes[1]) > 3 and sum(sizes[1]) == len(SOURCES)


def test_one_program_serves_all_sources_of_a_length():
    corpus._run.clear_cache()
    decode.jitted_prefill.clear_cache()
    for _ in range(2):  # each S: a prefill and a loop
        by_source(corpus.decode_all(request(3, 1.0), LENGTHS, (4, 8), 4, 2))
    assert corpus._run._cache_size() == 2 and decode.jitted_prefill._cache_size() == 2


def test_plan_puts_the_longest_first_and_merges_what_does_not_fill_a_batch():
    assert corpus.plan([9, 1, 2, 3, 12, 3], (4, 8, 16), 2) == [(16, [4, 0]), (4, [5, 3, 2, 1])]
    assert corpus.plan([9, 1, 2, 3, 12, 3], (4, 8, 16), 5) == [(16, [4, 0, 5, 3, 2, 1])]
    assert corpus.plan([3], (4, 8), 32) == [(4, [0])]
    assert corpus.plan([], (4,), 2) == []


@pytest.mark.parametrize(("num_rows", "num_refilled"), [(4, 3), (0, 1), (4, 0)])
def test_decode_all_raises_for_an_invalid_num_refilled(num_rows, num_refilled):
    with pytest.raises(
        ValueError, match=f"`num_refilled` must.*divide num_rows={num_rows}, got {num_refilled}"
    ):
        next(corpus.decode_all(request(0, 0.0), LENGTHS, (8,), num_rows, num_refilled))


def test_a_journal_holds_what_was_added_and_forgets_a_torn_line(tmp_path):
    path = tmp_path / "deep" / "journal"
    with corpus.Journal.open(path, {"seed": 1}) as first:
        assert first.records == {}
        first.add([{"index": 2, "text": "a"}, {"index": 0, "text": "b"}])
    whole = path.read_bytes()
    third = b'{"index": 1, "text": "c"}\n'
    for torn in range(len(third)):
        path.write_bytes(whole + third[:torn])
        with corpus.Journal.open(path, {"seed": 1}) as again:
            assert again.records == first.records
            again.add([{"index": 1, "text": "c"}])
        assert path.read_bytes() == whole + third
    path.write_bytes(whole[:5])  # killed in its first line
    with corpus.Journal.open(path, {"seed": 1}) as anew:
        assert anew.records == {}


def test_journal_has_one_writer_and_a_failed_one_releases_it(tmp_path):
    path = tmp_path / "journal"
    with pytest.raises(RuntimeError), corpus.Journal.open(path, {"seed": 1}) as journal:
        journal.add([{"index": 0}])
        with pytest.raises(ValueError, match="another run is writing the journal"):
            corpus.Journal.open(path, {"seed": 1}).__enter__()
        raise RuntimeError
    with corpus.Journal.open(path, {"seed": 1}) as journal:
        assert list(journal.records) == [0]


def test_journal_raises_for_another_run_or_another_file_and_leaves_it_unchanged(tmp_path):
    path = tmp_path / "journal"
    with corpus.Journal.open(path, {"seed": 1, "sources": "abc"}) as journal:
        journal.add([{"index": 0}])
    before = path.read_bytes()
    with (
        pytest.raises(ValueError, match="belongs to another run, which differs in seed; run that"),
        corpus.Journal.open(path, {"seed": 2, "sources": "abc"}),
    ):
        pass
    assert path.read_bytes() == before
    for content in (b"my translations\n", b'["a"]\n', b"\xff\xfe\n", b'{"seed": 1}\n{"no": "index"}\n'):
        path.write_bytes(content)
        with (
            pytest.raises(ValueError, match="is not a journal of outputs"),
            corpus.Journal.open(path, {"seed": 1}),
        ):
            pass
        assert path.read_bytes() == content
