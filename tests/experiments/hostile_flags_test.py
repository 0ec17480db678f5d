"""Experiments with invalid flags: one sentence that names the flag, and nothing written."""

import re

import pytest

from tests.experiments.program import run

# experiment -> flags, words. {} is a folder with the files that are named here.
ASKED = {
    "generate": [
        ("--target=t --input={}/nowhere", "no text file .*nowhere"),
        ("--target=t", "there is no text in it"),
        ("--target={}/nowhere --input={}/file", "no directory"),
        ("--target={}/file --input={}/file", "is a file: give the directory"),
        ("--target={}/empty --input={}/file", "has no config.json"),
        ("--target=t --batch_size=0", "batch_size.*=0"),
        ("--target=t --batch_size=two", "batch_size=two"),
        ("--target=t --repeats=-1", "repeats=-1"),
        ("--target=t --dtype=float8", "dtype=float8"),
        ("--target=t --temperature=warm --input={}/file", "--temperature=warm: give numbers"),
        ("--target=t --rule=fair --input={}/file", "--rule=fair: give one of"),
        ("--target=t --num_drafts=3", "Unknown command line flag 'num_drafts'"),
        ("--target=t {}/file", "file' is no flag"),
        (
            "--target=t --input={}/file --output={}/file",
            "--output=.*file is no directory that can be written",
        ),
        ("--target=t --input={}/file --num_draft=0", "--num_draft=0: give numbers of at least 1"),
        ("--target=t --input={}/file --temperature=-1", "`temperature` must be at least 0 .*, got -1.0"),
    ],
    "train": [
        ("", "--data_dir"),
        ("--data_dir={}/empty --output={}/run --task=chess", "task=chess"),
        ("--data_dir={}/empty --output={}/run --splits=train", "--splits=train: give two"),
        ("--data_dir={}/empty --output={}/run", "empty"),
        ("--data_dir={}/empty --output={}/run --batch_size=0", "batch_size=0"),
        ("--data_dir={}/empty --output={}/run --num_steps=-1", "num_steps=-1"),
        ("--data_dir={}/empty --output={}/run --optimizer=sgd", "optimizer=sgd"),
    ],
    "walltime": [
        ("--target=huge", "'huge' is no shape"),
        ("--target=1x64 --draft=1x32 --num_draft=0", "--num_draft=0: give whole numbers"),
        ("--target=1x64 --draft=1x32 --alpha=high", "--alpha=high: give numbers"),
        ("--target=1x64 --draft=1x32 --alpha=2", "--alpha=2: give chances"),
        ("--target=1x64 --dtype=int4", "dtype=int4"),
    ],
    "peers": [
        ("--target={}/a --draft={}/b --peers=tensorrt", "--peers=tensorrt: give some of transformers"),
        ("--rule=block", "Unknown command line flag 'rule'"),
        ("--top_p=0.9", "Unknown command line flag 'top_p'"),
    ],
    "compile": [
        ("--topology=v9-8", "--topology=v9-8: give one of v4-8, "),
        ("--num_draft=0", "--num_draft=0: give numbers of at least 1"),
        ("--coordinator=auto", "Unknown command line flag 'coordinator'"),
    ],
    "throughput": [
        ("--data_dir={}/empty --rule=block", "Unknown command line flag 'rule'"),
        ("--data_dir={}/empty --buckets=8", "Unknown command line flag 'buckets'"),
        ("--data_dir={}/empty --task=chess", "task=chess"),
    ],
    "speedup": [
        ("--data_dir={}/empty", "--pair is missing"),
        ("--data_dir={}/empty --task=mbpp", "Unknown command line flag 'task'"),
        ("--data_dir={}/empty --buckets=8", "Unknown command line flag 'buckets'"),
        ("--data_dir={}/empty --truncate_sources", "Unknown command line flag 'truncate_sources'"),
    ],
    "losslessness": [
        ("--parts=guessed", "`--parts` must be some of exact, drawn, power, got guessed"),
        ("--rule=block", "Unknown command line flag 'rule'"),
        ("--num_draft=3", "Unknown command line flag 'num_draft'"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ASKED)
def test_invalid_flags_are_reported_in_a_sentence(experiment, tmp_path):
    (tmp_path / "file").write_text("mine\n")
    (tmp_path / "empty").mkdir()
    for flags, words in ASKED[experiment]:
        done = run(experiment, *flags.replace("{}", str(tmp_path)).split())
        assert done.returncode, flags
        assert re.search(words, done.stderr) and "Traceback" not in done.stderr, f"{flags}: {done.stderr}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]
    assert (tmp_path / "file").read_text() == "mine\n" and not list((tmp_path / "empty").iterdir())
