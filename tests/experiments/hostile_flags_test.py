"""Experiments with invalid flags: one sentence with the flag, and nothing written."""

import re

import pytest

from tests.experiments.program import run

# experiment -> (flags, pattern of the error); {} is a folder with `file` and `empty`.
ASKED = {
    "generate": [
        ("--target=t --input={}/nowhere", "no text file .*nowhere"),
        ("--target=t", "standard input must contain text"),
        ("--target={}/nowhere --input={}/file", "no directory"),
        ("--target={}/file --input={}/file", "is a file: give the directory"),
        ("--target={}/empty --input={}/file", "has no config.json"),
        ("--target=t --batch_size=0", "batch_size.*=0"),
        ("--target=t --batch_size=two", "batch_size=two"),
        ("--target=t --repeats=-1", "repeats=-1"),
        ("--target=t --dtype=float8", "dtype=float8"),
        (
            "--target=t --temperature=warm --input={}/file",
            "`--temperature` must be numbers, as in 0,1, got warm",
        ),
        ("--target=t --rule=fair --input={}/file", "`--rule` must be one of .*, got fair"),
        ("--target=t --num_drafts=3", "Unknown command line flag 'num_drafts'"),
        ("--target=t {}/file", "flags must begin with --, .*, got .*file'"),
        (
            "--target=t --input={}/file --output={}/file",
            "`--output` must be in a writable directory, got .*file",
        ),
        ("--target=t --input={}/file --num_draft=0", "`--num_draft` must be at least 1, got 0"),
        ("--target=t --input={}/file --temperature=-1", "`temperature` must be at least 0 .*, got -1.0"),
    ],
    "train": [
        ("", "--data_dir"),
        ("--data_dir={}/empty --output={}/run --task=chess", "`--task` must be some of .*, got chess"),
        ("--data_dir={}/empty --output={}/run --splits=train", "`--splits` must be two, .*, got train"),
        ("--data_dir={}/empty --output={}/run", "empty"),
        ("--data_dir={}/empty --output={}/run --batch_size=0", "batch_size=0"),
        ("--data_dir={}/empty --output={}/run --num_steps=-1", "num_steps=-1"),
        ("--data_dir={}/empty --output={}/run --optimizer=sgd", "optimizer=sgd"),
    ],
    "walltime": [
        ("--target=huge", "a shape must be one of .*, got 'huge'"),
        (
            "--target=1x64 --draft=1x32 --num_draft=0",
            "`--num_draft` must be whole numbers of at least 1, .*, got 0",
        ),
        ("--target=1x64 --draft=1x32 --alpha=high", "`--alpha` must be numbers, .*, got high"),
        ("--target=1x64 --draft=1x32 --alpha=2", "`--alpha` must be probabilities in .0, 1., got 2"),
        ("--target=1x64 --dtype=int4", "dtype=int4"),
    ],
    "peers": [
        (
            "--target={}/a --draft={}/b --peers=tensorrt",
            "`--peers` must be some of transformers.*, got tensorrt",
        ),
        ("--rule=block", "Unknown command line flag 'rule'"),
        ("--top_p=0.9", "Unknown command line flag 'top_p'"),
    ],
    "compile": [
        ("--topology=v9-8", "`--topology` must be one of v4-8, .*, got v9-8"),
        ("--num_draft=0", "`--num_draft` must be at least 1, got 0"),
        ("--coordinator=auto", "Unknown command line flag 'coordinator'"),
    ],
    "throughput": [
        ("--data_dir={}/empty --rule=block", "Unknown command line flag 'rule'"),
        ("--data_dir={}/empty --buckets=8", "Unknown command line flag 'buckets'"),
        ("--data_dir={}/empty --task=chess", "task=chess"),
    ],
    "speedup": [
        ("--data_dir={}/empty", "`--pair` must be given"),
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
def test_experiments_report_invalid_flags_in_a_sentence(experiment, tmp_path):
    (tmp_path / "file").write_text("mine\n")
    (tmp_path / "empty").mkdir()
    for flags, words in ASKED[experiment]:
        done = run(experiment, *flags.replace("{}", str(tmp_path)).split())
        assert done.returncode, flags
        assert re.search(words, done.stderr) and "Traceback" not in done.stderr, f"{flags}: {done.stderr}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]
    assert (tmp_path / "file").read_text() == "mine\n" and not list((tmp_path / "empty").iterdir())
