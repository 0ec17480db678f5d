"""Each task finds its pairs: prepared by tensorflow-datasets, in text files, in JSON lines."""

import dataclasses
import gzip
import json
import re
import sys

import numpy as np
import pytest

from specjax import data
from tests import prepared_datasets


@pytest.fixture(scope="module")
def prepared_dir(tmp_path_factory):
    """A data directory with both datasets as tensorflow-datasets writes them."""
    folder = tmp_path_factory.mktemp("prepared")
    for name, splits in (
        ("wmt14_en_de", prepared_datasets.WMT14),
        ("cnn_dailymail", prepared_datasets.CNN_DAILYMAIL),
    ):
        dataset = dataclasses.replace(data.TASKS[name].dataset, needs=())
        with prepared_datasets.source(dataset, splits):
            data.load(dataclasses.replace(data.TASKS[name], dataset=dataset), "test", folder, download=True)
    return folder


def write_jsonl(path, examples):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps(example) + "\n" for example in examples)


def test_wmt14_is_read_in_both_directions(prepared_dir):
    there = data.load(data.TASKS["wmt14_en_de"], "train", prepared_dir)
    back = data.load(data.TASKS["wmt14_de_en"], "train", prepared_dir)
    assert set(there.pairs) == {
        (f"translate English to German: sentence {i}", f"Satz {i}, Straße") for i in range(5)
    }
    assert set(back.pairs) == {
        (f"translate German to English: Satz {i}, Straße", f"sentence {i}") for i in range(5)
    }
    assert there.origin == "wmt14_translate/de-en:1.0.0 train, prepared by tensorflow-datasets"
    assert there.pairs[1:3] == [there.pairs[1], there.pairs[2]]


def test_cnn_dailymail_is_read_with_the_newlines_of_its_highlights(prepared_dir):
    examples = data.load(data.TASKS["cnn_dailymail"], "test", prepared_dir)
    assert set(examples.pairs) == {(f"summarize: article {i}", "One .\nTwo .") for i in range(3)}


def test_a_prepared_dataset_is_streamed(prepared_dir):
    pairs = data.load(data.TASKS["wmt14_en_de"], "train", prepared_dir).pairs
    encode = lambda texts: [[int(re.search("[0-9]+", text)[0]), 1] for text in texts]  # noqa: E731
    batch = next(data.stream(pairs, encode, batch_size=5, shapes=[(2, 2)], seed=0))
    assert sorted(batch.source_ids[:, 0]) == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(batch.source_ids, batch.target_ids)


def test_load_prefers_a_prepared_dataset_to_files(prepared_dir, tmp_path):
    write_jsonl(tmp_path / "cnn_dm" / "test.jsonl.gz", [{"article": "a", "highlights": "b"}])
    (tmp_path / "cnn_dailymail").symlink_to(prepared_dir / "cnn_dailymail")
    assert len(data.load(data.TASKS["cnn_dailymail"], "test", tmp_path).pairs) == 3
    (tmp_path / "cnn_dailymail").unlink()
    assert data.load(data.TASKS["cnn_dailymail"], "test", tmp_path).pairs == [("summarize: a", "b")]


def test_text_files_are_joined_and_cut(tmp_path):
    (tmp_path / "wmt").mkdir()
    for name, texts in (
        ("train_a.en", "1\n2\n"),
        ("train_a.de", "eins\nzwei\n"),
        ("train_b.en", "3\n"),
        ("train_b.de", "drei\n"),
        ("newstest2013.en", "4\n5\n6\n"),
        ("newstest2013.de", "vier\nfünf\nsechs\n"),
    ):
        (tmp_path / "wmt" / name).write_text(texts, encoding="utf-8")
    task = dataclasses.replace(data.TASKS["wmt14_de_en"], prefix="")
    examples = data.load(task, "train[1:]+validation[-1:]", tmp_path)
    assert examples.pairs == [("zwei", "2"), ("drei", "3"), ("sechs", "6")]
    assert examples.origin == "train[1:]+validation[-1:]: wmt/train_a.de, wmt/train_b.de, wmt/newstest2013.de"


def test_load_raises_for_misaligned_files_with_both_counts(tmp_path):
    (tmp_path / "train.source").write_text("1\n2\n3\n")
    (tmp_path / "train.target").write_text("1\n2\n3\n4\n")
    with pytest.raises(ValueError, match="3 lines .* 4"):
        data.load(data.TASKS["text"], "train", tmp_path)


def test_a_dialogue_gives_each_next_turn_with_the_turns_before(tmp_path):
    write_jsonl(
        tmp_path / "dialog" / "dev.jsonl.gz", [{"en": list("abcdef"), "de": []}, {"en": ["x"], "de": ["y"]}]
    )
    pairs = data.load(data.TASKS["dialogue"], "validation", tmp_path).pairs
    assert pairs[0] == ("reply: a", "b") and pairs[-1] == ("reply: b | c | d | e", "f") and len(pairs) == 5


def test_the_splits_of_mbpp_are_ranges_of_its_one_file(tmp_path):
    rows = [{"text": f"task {i}", "code": f"def f():\n    return {i}"} for i in range(1, 975)]
    write_jsonl(tmp_path / "prompts" / "mbpp.jsonl.gz", rows)
    splits = {
        name: data.load(data.TASKS["mbpp"], name, tmp_path).pairs for name in ("train", "validation", "test")
    }
    assert {name: len(pairs) for name, pairs in splits.items()} == {
        "train": 374,
        "validation": 90,
        "test": 500,
    }
    assert splits["test"][0] == ("python: task 11", "def f():\n    return 11")


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"source": "c"}, r"train\.jsonl, line 2: field 'target' is missing; the fields are 'source'"),
        ({"source": "c", "target": 3}, r"train\.jsonl, line 2: field 'target' must be str, got int"),
    ],
)
def test_a_wrong_field_of_json_lines_is_named_with_its_line(tmp_path, second, message):
    write_jsonl(tmp_path / "train.jsonl.gz", [{"source": "a", "target": "b"}, second])
    with pytest.raises(ValueError, match=message):
        data.load(data.TASKS["jsonl"], "train", tmp_path)


def test_load_raises_without_data_with_each_way_to_supply_it(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"en and de: .*wmt/train\*\.\{\}.* or prepare wmt14_translate/de-en:1\.0\.0"
    ):
        data.load(data.TASKS["wmt14_en_de"], "train", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"'article' and 'highlights'.*Hugging Face.*cnn_dm/train"):
        data.load(data.TASKS["cnn_dailymail"], "train", tmp_path)


def test_load_raises_for_an_unknown_split_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"`split` must be one of train, .*, got 'train\[:50%\]'"):
        data.load(data.TASKS["text"], "train[:50%]", tmp_path)


def test_load_raises_for_the_download_of_a_task_without_a_dataset(tmp_path):
    with pytest.raises(ValueError, match="`download` must be False for a task without a dataset, got True"):
        data.load(data.TASKS["mbpp"], "train", tmp_path, download=True)


def test_json_lines_need_neither_tensorflow_datasets_nor_tensorflow(tmp_path, monkeypatch):
    for package in ("tensorflow", "tensorflow_datasets", "grain"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    write_jsonl(tmp_path / "train.jsonl.gz", [{"source": "a", "target": "b"}])
    assert data.load(data.TASKS["jsonl"], "train", tmp_path).pairs == [("a", "b")]


def test_the_first_of_two_sentences_is_copied(tmp_path):
    write_jsonl(tmp_path / "cnn_dm" / "test.jsonl.gz", [{"article": "A a. B? C! D d. E.", "highlights": "x"}])
    pairs = data.load(data.TASKS["cnn_dailymail_lead"], "test", tmp_path).pairs
    assert pairs == [("A a. B?", "A a."), ("C! D d.", "C!")]
