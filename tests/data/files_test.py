"""Text files and JSON lines: exact reading, and errors that name file and line."""

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


def test_read_lines_splits_only_at_line_feeds_and_carriage_returns(tmp_path):
    """Corpora hold Unicode's line separators inside sentences; they must not shift the alignment."""
    (tmp_path / "a").write_bytes("one\u2028still one\x85\x0b\r\n\ntwo\rnext".encode())
    assert data.read_lines(tmp_path / "a") == ["one\u2028still one\x85\x0b", "", "two", "next"]


def test_an_empty_file_has_no_lines(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    assert data.read_lines(tmp_path / "a") == []


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no text file .*x\.en"):
        data.read_lines(tmp_path / "x.en")


def test_read_pairs_raises_for_misaligned_files_with_both_counts(tmp_path):
    (tmp_path / "a.en").write_text("1\n2\n3\n")
    (tmp_path / "a.de").write_text("1\n2\n3\n4\n")
    with pytest.raises(ValueError, match="3 lines .* 4"):
        data.read_pairs(tmp_path / "a.en", tmp_path / "a.de")


def test_json_lines_are_converted_one_by_one(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n\n{"n": 2}\n')
    assert data.read_jsonl(tmp_path / "a.jsonl", lambda example: example["n"]) == [1, 2]


@pytest.mark.parametrize("line", ['{"n": 1', "[1]", "<html>"])
def test_read_jsonl_raises_with_the_invalid_line(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(json.dumps({"n": 1}) + "\n" + line)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: "):
        data.read_jsonl(tmp_path / "a.jsonl", dict)


def test_read_lines_drops_a_byte_order_mark_and_detects_gzip_by_content(tmp_path):
    (tmp_path / "a").write_bytes("\ufeffÄ b\nc\n".encode())
    (tmp_path / "b").write_bytes(gzip.compress((tmp_path / "a").read_bytes()))
    assert data.read_lines(tmp_path / "a") == data.read_lines(tmp_path / "b") == ["Ä b", "c"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "a",
            b"one\r\ntwo\rcaf\xe9\n",
            r"a, line 3: must be UTF-8, got byte 0xe9 .*; convert it, as in `iconv",
        ),
        ("a", "one\n".encode("utf-16"), r"a, line 1: must be UTF-8, got UTF-16; .*-f utf-16"),
        ("a", "one\ntwo\n".encode("utf-16-le"), r"a, line 1: must be UTF-8, got UTF-16"),
        ("a.gz", gzip.compress(b"one\n" * 1000, mtime=0)[:-9], r"a.gz is cut off or damaged"),
        (
            "a.gz",
            gzip.compress(bytes(range(256)), mtime=0)[:40] + b"\xff" * 40,
            r"a.gz is cut off or damaged",
        ),
        ("a.gz", b"<html>", r"a.gz must be a gzip file, got b'<html>'"),
    ],
)
def test_read_lines_raises_for_invalid_text(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        data.read_lines(tmp_path / name)
