"""Text files and JSON lines are read exactly; what is wrong with one is named."""

import gzip
import json

import pytest

from specjax import data


def test_gzipped_and_plain_files_read_alike(tmp_path):
    (tmp_path / "a.en").write_text("Ä b\nc\n", encoding="utf-8")
    with gzip.open(tmp_path / "b.en.gz", "wt", encoding="utf-8") as stream:
        stream.write("Ä b\nc\n")
    assert data.read_lines(tmp_path / "a.en") == data.read_lines(tmp_path / "b.en") == ["Ä b", "c"]
    assert data.read_lines(tmp_path / "b.en.gz") == ["Ä b", "c"]


def test_lines_end_as_in_text_files_and_nowhere_else(tmp_path):
    """Corpora hold Unicode's line separators inside sentences; they must not shift the alignment."""
    (tmp_path / "a").write_bytes("one\u2028still one\x85\x0b\r\n\ntwo\rnext".encode())
    assert data.read_lines(tmp_path / "a") == ["one\u2028still one\x85\x0b", "", "two", "next"]


def test_an_empty_file_has_no_lines(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    assert data.read_lines(tmp_path / "a") == []


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no text file .*x\.en"):
        data.read_lines(tmp_path / "x.en")


def test_misaligned_files_are_refused_with_both_counts(tmp_path):
    (tmp_path / "a.en").write_text("1\n2\n3\n")
    (tmp_path / "a.de").write_text("1\n2\n3\n4\n")
    with pytest.raises(ValueError, match="3 lines .* 4"):
        data.read_pairs(tmp_path / "a.en", tmp_path / "a.de")


def test_json_lines_are_converted_one_by_one(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n\n{"n": 2}\n')
    assert data.read_jsonl(tmp_path / "a.jsonl", lambda example: example["n"]) == [1, 2]


@pytest.mark.parametrize("line", ['{"n": 1', "[1]", "<html>"])
def test_a_line_that_is_no_json_object_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(json.dumps({"n": 1}) + "\n" + line)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: "):
        data.read_jsonl(tmp_path / "a.jsonl", dict)
