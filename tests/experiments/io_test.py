"""`generate` with several formats of input, its output files, closed pipes, and interrupts."""

import csv
import gzip
import io
import json
import os
import re
import signal
import subprocess
import time

import pytest

from tests.experiments.program import run, start

pytestmark = pytest.mark.slow
ARTICLES = [
    {"id": "a-1", "article": "the dog runs", "meta": {"en": "a man"}},
    {"id": "ä", "article": "", "meta": {"en": ""}},
    {"id": 3, "article": "a man sits in the\nblue park", "meta": {"en": "the dog sits"}},
]
SHORT = ["--temperature=0", "--max_new_tokens=6", "--batch_size=2"]


@pytest.fixture(scope="module")
def articles(tmp_path_factory):
    """Returns gzipped JSON lines with a blank line after the first."""
    path = tmp_path_factory.mktemp("articles") / "news.jsonl.gz"
    first, *others = (json.dumps(article) for article in ARTICLES)
    path.write_bytes(gzip.compress("\n".join([first, "", *others]).encode()))
    return path


def json_lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_generate_answers_json_lines_with_json_lines(pair, articles, tmp_path):
    flags = [f"--target={pair}/target", "--nocompare", "--input_field=article", *SHORT]
    done = run("generate", *flags, f"--input={articles}", f"--output={tmp_path}/out")
    assert done.returncode == 0, done.stderr
    found = json_lines((tmp_path / "out" / "output.jsonl").read_text(encoding="utf-8"))
    assert [(row["line"], row.get("id")) for row in found] == [(1, "a-1"), (2, None), (3, "ä"), (4, 3)]
    assert [bool(row["text"]) for row in found] == [True, False, False, True]
    for row in (found[0], found[3]):
        assert len(row["token_ids"]) == len(row["log_probs"]) <= 6
        assert row["finish_reason"] in ("eos", "length") and row["tokens_per_target_call"] == 1
        assert max(row["log_probs"]) <= 0
    assert found[1]["token_ids"] == [] and found[1]["finish_reason"] is None
    texts = (tmp_path / "out" / "output.txt").read_text(encoding="utf-8").split("\n")
    assert texts == [*(row["text"] for row in found), ""]
    # The same with pipes: outputs on standard output, everything else on standard error.
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    stdin = gzip.decompress(articles.read_bytes()).decode()
    done = run("generate", *flags, "--output_format=jsonl", stdin=stdin, stdout=ascii_only)
    assert done.returncode == 0 and "each source decoded once" in done.stderr
    assert json_lines(ascii_only.buffer.getvalue().decode("ascii")) == found
    done = run("generate", *flags, stdin=stdin)
    assert done.stdout.split("\n") == texts


def test_generate_reads_fields_and_references_of_tables(pair, tmp_path):
    rows = [["name", "en", "de"], ["1", 'the "dog",\nruns', "the dog"], [], ["2", "a man", "a man"]]
    for name, dialect in (("a.csv", "excel"), ("a.tsv", "excel-tab")):
        with (tmp_path / name).open("w", encoding="utf-8-sig", newline="") as file:
            csv.writer(file, dialect).writerows(rows)
        done = run(
            "generate",
            *(
                f"--target={pair}/target",
                "--nocompare",
                f"--input={tmp_path}/{name}",
                f"--output={tmp_path}/o",
            ),
            *("--input_field=en", "--id_field=name", "--reference_field=de", *SHORT),
        )
        assert done.returncode == 0, done.stderr
        found = json_lines((tmp_path / "o" / "output.jsonl").read_text())
        assert [(row["line"], row.get("id")) for row in found] == [(2, "1"), (4, None), (5, "2")]
        assert "BLEU" in json.loads((tmp_path / "o" / "results.json").read_text())["rows"][0]["metric"]
        assert "1 of 3 sources are blank; so are their outputs, which do not count" in done.stdout


# Name and content of --input, flags, pattern of the error. The target is missing, so nothing is loaded.
INVALID = [
    ("a.jsonl", b'{"text": "a"}\n{"text"\n', "", r"a.jsonl, line 2: must be JSON"),
    ("a.jsonl", b'"text"\n', "", r"a.jsonl, line 1: must be a JSON object, got '\"text\"'"),
    (
        "a.jsonl",
        b'\n{"body": "b"}',
        "",
        r"line 2: the field 'text' \(--input_field\) is not in the record, which has the fields body",
    ),
    ("a.jsonl", b'{"text": 3}', "", r"line 1: the field 'text' \(--input_field\) must be a string, got 3"),
    (
        "a.jsonl",
        b'{"a": {"b": "x"}}',
        "--input_field=a.c",
        r"the field 'a.c' \(--input_field\) is not in the record, which has the fields a",
    ),
    ("a.csv", b"x,text\n1,a\n\n1,b,c\n", "", r"a.csv, line 4: must have 2 fields, as the header has, got 3"),
    ("a.csv", b'text\n"never ended\n', "", r"a.csv, line 2: must be a row of the table"),
    (
        "a.csv",
        b"text,text\na,b\n",
        "",
        r"a.csv, line 1: fields of the header must be distinct, got text, text",
    ),
    (
        "a.txt",
        b"a\n",
        "--input_field=text",
        r"`--input_field` must not be given for lines of text, got text for .*; give --input_format",
    ),
    ("a.txt", b"a\nb\xe4r\n", "", r"a.txt, line 2: must be UTF-8, got byte 0xe4"),
    ("a.txt", "a\n".encode("utf-16"), "", r"a.txt, line 1: must be UTF-8, got UTF-16"),
    ("a.txt.gz", gzip.compress(b"a\n" * 999, mtime=0)[:-6], "", r"a.txt.gz is cut off or damaged"),
    ("a.txt.gz", b"a\n", "", r"a.txt.gz must be a gzip file"),
    ("a.txt", b"a\n", "--seed=-1", r"--seed=-1"),
    ("a.txt", b"a\n", "--suppress_tokens=a", r"`--suppress_tokens` must be ids, .*, got a"),
    ("a.txt", b"a\n", "--logit_bias=5", r"`--logit_bias` must be ID:NUMBER, .*, got 5"),
    ("a.txt", b"a\n", "--bad_words_ids=5,x", r"`--bad_words_ids` must be ids, .*, got 5,x"),
    ("a.txt", b"a\n", "--heads=/nowhere", r"/nowhere"),
]


def test_generate_reports_invalid_input_in_a_sentence(tmp_path):
    for name, content, flags, words in INVALID:
        (tmp_path / name).write_bytes(content)
        done = run("generate", "--target=/nowhere/target", f"--input={tmp_path}/{name}", *flags.split())
        assert done.returncode, (name, flags)
        lines = done.stderr.strip().split("\n")
        if "--seed" not in flags:  # absl reports these, with a hint
            assert len(lines) == 1 and "--traceback" in lines[0], done.stderr
        assert re.search(words, done.stderr) and "Traceback" not in done.stderr, (words, done.stderr)
        (tmp_path / name).unlink()


def test_generate_lists_long_lines_and_reads_them_with_the_flag(pair, tmp_path):
    """Tests lines of up to 1,500 tokens; blank lines count."""
    words = "the dog runs in the park a man sits in blue snow"
    lines = ["the dog", "", " ".join([words] * 20), "a man", " ".join([words] * 38)]
    (tmp_path / "long.txt").write_text("\n".join(lines))
    flags = [f"--target={pair}/target", "--nocompare", f"--input={tmp_path}/long.txt", *SHORT]
    done = run("generate", *flags)
    listed = r"long.txt: sources must have at most 512 tokens, got line \(tokens\) 3 \((\d+)\), 5 \((\d+)\)"
    found = re.search(listed + r"; give --max_source_length=(\d+), or --truncate", done.stderr)
    assert done.returncode == 2 and found, done.stderr
    assert found[2] == found[3] and int(found[3]) > 1500
    done = run("generate", *flags, f"--max_source_length={found[3]}", f"--output={tmp_path}/o")
    assert done.returncode == 0, done.stderr
    assert "sources of up to 2048 tokens: " in done.stdout
    found = json_lines((tmp_path / "o" / "output.jsonl").read_text())
    assert [row["token_ids"] != [] for row in found] == [True, False, True, True, True]
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(pair / "target")
    tokenizer = transformers.AutoTokenizer.from_pretrained(pair / "target")
    for line, row in zip(lines, found, strict=True):
        if line:
            ids = tokenizer(line, return_tensors="pt", verbose=False).input_ids
            with torch.no_grad():
                expected = theirs.generate(ids, max_new_tokens=6, do_sample=False, num_beams=1)
            assert expected[0, 1:].tolist() == row["token_ids"]


def test_generate_checks_memory_before_loading(pair):
    flags = [f"--target={pair}/target", "--nocompare"]
    done = run("generate", *flags, "--max_new_tokens=1000000000", stdin="the dog\n")
    assert done.returncode == 2 and "the cache of 1 rows would take" in done.stderr, done.stderr
    assert "to load" not in done.stdout + done.stderr


def test_generate_overrides_a_generation_config_with_flags(pair, tmp_path):
    stated = {"max_new_tokens": 3, "suppress_tokens": [5], "no_repeat_ngram_size": 2, "num_beams": 4}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    flags = [f"--target={pair}/target", "--nocompare", "--output_format=jsonl"]
    flags += [f"--generation_config={tmp_path}", "--suppress_tokens=1"]
    with pytest.warns(UserWarning, match="num_beams=4"):
        done = run("generate", *flags, stdin="the dog\na man runs\n")
    assert done.returncode == 0, done.stderr
    for row in json_lines(done.stdout):
        assert len(row["token_ids"]) == 3 and 1 not in row["token_ids"]
    with pytest.warns(UserWarning, match="num_beams=4"):
        done = run("generate", *flags, "--max_new_tokens=5", stdin="the dog\na man runs\n")
    for row in json_lines(done.stdout):
        pairs = list(zip(row["token_ids"], row["token_ids"][1:], strict=False))
        assert len(row["token_ids"]) == 5 and len(set(pairs)) == len(pairs)


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def test_generate_ends_quietly_on_a_closed_pipe(pair, tmp_path):
    flags = [f"--target={pair}/target", "--nocompare", *SHORT]
    with closed_pipe() as pipe:
        done = run("generate", *flags, f"--output={tmp_path}", stdin="the dog\na man\n", stdout=pipe)
    assert done == (0, "", "")
    assert (tmp_path / "output.txt").read_text().count("\n") == 2
    with closed_pipe() as pipe:
        done = run("generate", *flags, stdin="the dog\na man\n", stdout=pipe)
    assert done.returncode == 141 and "Traceback" not in done.stderr


def test_generate_escapes_characters_that_a_console_lacks(pair, tmp_path):
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    flags = [f"--target={pair}/target", "--repeats=0", *SHORT, f"--output={tmp_path}"]
    done = run("generate", *flags, stdin="the dög \U0001f415\n", stdout=console)
    assert done.returncode == 0, done.stderr
    assert "the d\\xf6g \\U0001f415" in console.buffer.getvalue().decode("ascii")


def test_generate_locks_output_and_reports_what_is_kept_on_ctrl_c(pair, tmp_path):
    """Runs a separate process, which is stopped while the second starts."""
    sources, out = tmp_path / "sources", tmp_path / "out"
    sources.write_text("the dog runs in the park\n" * 4000)
    flags = [f"--target={pair}/target", f"--input={sources}", f"--output={out}", "--nocompare"]
    flags += ["--batch_size=4", "--temperature=1", "--max_new_tokens=12"]
    program = start("generate", *flags, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    journal = out / "journal.jsonl"
    while program.poll() is None and not (journal.exists() and journal.read_text().count("\n") > 3):
        time.sleep(0.05)
    program.send_signal(signal.SIGSTOP)
    second = run("generate", *flags)
    assert second.returncode == 2 and "out, where another run is writing" in second.stderr, second.stderr
    program.send_signal(signal.SIGCONT)
    program.send_signal(signal.SIGINT)
    _, stderr = program.communicate(timeout=100)
    assert program.returncode == 130, stderr
    (line,) = stderr.strip().split("\n")
    assert "of 4000 outputs are kept in" in line and "run the same command to resume" in line
    assert [path.name for path in out.iterdir()] == ["journal.jsonl"]
