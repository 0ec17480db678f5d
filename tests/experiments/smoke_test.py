"""Runs each experiment from its flags, on a tiny pair."""

import json
import subprocess
import xml.etree.ElementTree

import numpy as np
import pytest

from tests.experiments.conftest import WORDS
from tests.experiments.program import run, start

pytestmark = pytest.mark.slow


def test_generate_compares_both_arms_and_answers_each_line(pair, tmp_path):
    """Runs a separate process with optimised programs, as for a user."""
    program = start(
        "generate",
        f"--target={pair}/target",
        f"--draft={pair}/draft",
        "--num_draft=1",
        "--temperature=0,1",
        "--max_new_tokens=8",
        "--repeats=2",
        f"--output={tmp_path}",
        "--show_rounds=1",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    stdout, stderr = program.communicate("the dog\n\na man runs\n", timeout=300)
    assert program.returncode == 0, stderr
    drawn = xml.etree.ElementTree.parse(tmp_path / "rounds_t1.svg")  # a line each, below the legend
    shown = ["".join(line.itertext()) for line in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert shown[0].split() == ["before", "accepted", "rejected", "correction", "bonus"] and len(shown) > 1
    assert "identical to autoregressive decoding" in stdout
    greedy, sampled = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert greedy["identical_to_target"] == "2 of 2" and greedy["num_near_ties"] == 0
    assert sampled["identical_to_target"] == "not applicable" and sampled["speedup"] > 0
    assert len((tmp_path / "output.txt").read_text().split("\n")) == 4
    assert (tmp_path / "output.txt").read_text().split("\n")[1] == ""


def test_generate_without_a_draft_decodes_autoregressively(pair, tmp_path):
    done = run(
        "generate", f"--target={pair}/target", "--temperature=0", f"--output={tmp_path}", stdin="the dog\n"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "results.json").read_text())["rows"][0]["num_examples"] == 1


def test_generate_resumes_after_a_kill(pair, tmp_path):
    sources = "".join(f"{' '.join(WORDS[: 1 + i % 9])}\n" for i in range(60)) + "\nthe dog\n"
    (tmp_path / "sources").write_text(sources)

    def flags(name):
        paths = [f"--target={pair}/target", f"--input={tmp_path}/sources", f"--output={tmp_path}/{name}"]
        return [*paths, "--nocompare", "--batch_size=4", "--temperature=1", "--max_new_tokens=12"]

    journal = tmp_path / "killed" / "journal.jsonl"
    killed = start("generate", *flags("killed"), stdout=subprocess.DEVNULL)
    while killed.poll() is None:
        if journal.exists() and journal.read_text().count("\n") > 3:
            killed.kill()
            killed.wait()
    assert killed.returncode < 0 and not (tmp_path / "killed" / "output.txt").exists()
    for name in ("killed", "whole"):
        done = run("generate", *flags(name))
        assert done.returncode == 0, done.stderr
    texts = [(tmp_path / name / "output.txt").read_text() for name in ("killed", "whole")]
    assert texts[0] == texts[1] and texts[0].count("\n") == 62 and texts[0].split("\n")[60] == ""
    assert not journal.exists()


def test_throughput_compares_refilled_rows_with_fixed_ones(pair, tmp_path):
    done = run(
        "throughput",
        f"--target={pair}/target",
        f"--data_dir={pair}",
        "--task=multi30k_en_de",
        "--source_prefix=",
        "--num_draft=0,lookup:1",
        "--batch_size=4",
        "--max_new_tokens=8",
        "--repeats=2",
        f"--output={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    autoregressive, copies = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert autoregressive["identical_to_alone"] == copies["identical_to_alone"] == "16 of 16"
    assert autoregressive["speedup"] > 0 and (tmp_path / "throughput.png").exists()


def test_generate_raises_without_text(pair):
    done = run("generate", f"--target={pair}/target", stdin="\n")
    assert done.returncode != 0 and "must contain text" in done.stderr


def test_generate_takes_rules_trees_and_options(pair):
    done = run(
        "generate",
        f"--target={pair}/target",
        f"--draft={pair}/draft",
        "--num_draft=2x1",
        "--temperature=0,1",
        "--rule=multi_round",
        "--top_p=0.9",
        "--top_k=10",
        "--min_p=0.01",
        "--repetition_penalty=1.2",
        "--min_new_tokens=3",
        "--max_new_tokens=8",
        "--repeats=0",
        stdin="the dog\na man runs\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 of 2") == 1 and "2x1" in done.stdout


def test_generate_copies_without_a_draft_model(pair):
    flags = ["--num_draft=lookup:1", "--temperature=0", "--max_new_tokens=8", "--repeats=0"]
    done = run("generate", f"--target={pair}/target", *flags, stdin="the dog\n")
    assert done.returncode == 0, done.stderr
    assert "lookup:1" in done.stdout and "identical to autoregressive decoding" in done.stdout
    done = run("generate", f"--target={pair}/target", "--num_draft=lookup:3,2", stdin="the dog\n")
    assert done.returncode != 0 and "--num_draft=2 needs a draft model" in done.stderr


def test_generate_marks_a_lossy_rule_and_raises_for_an_unknown_one(pair):
    flags = [f"--target={pair}/target", f"--draft={pair}/draft", "--temperature=1", "--repeats=0"]
    done = run("generate", *flags, "--rule=lenient:0.5", stdin="the dog\n")
    assert "lenient:0.5 (lossy)" in done.stdout, done.stderr
    done = run("generate", *flags, "--rule=guess", stdin="the dog\n")
    assert done.returncode != 0 and "`--rule` must be one of speculative" in done.stderr


def test_losslessness_draws_tests_and_plots(pair, tmp_path):
    done = run(
        "losslessness",
        "--parts=drawn",
        f"--target={pair}/target",
        f"--draft={pair}/draft",
        "--source=the dog",
        "--source=a man runs",
        "--num_draws=4096",
        "--batch_size=512",
        f"--output={tmp_path}",
    )
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    lossless = [row for row in rows if row["lossless"]]
    assert len(lossless) == 8 and all(row["passed"] for row in lossless), done.stdout + done.stderr
    assert (tmp_path / "losslessness.png").stat().st_size > 10_000


def test_choose_draft_ranks_and_measures_candidates(pair, tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("the dog\na man runs\nblue snow in the park\n")
    done = run(
        "choose_draft",
        f"--target={pair}/target",
        f"--draft={pair}/draft",
        f"--draft={pair}/target",
        f"--input={lines}",
        "--num_draft=1,2",
        "--temperature=0",
        "--max_new_tokens=8",
        "--measure=2",
        f"--output={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert rows[0]["predicted_speedup"] >= rows[1]["predicted_speedup"]
    predicted = rows[0]["predicted_by_num_draft"]
    assert predicted.keys() == {"1", "2"} and max(predicted.values()) == rows[0]["predicted_speedup"]
    twin = next(row for row in rows if row["draft"].endswith("target"))
    assert twin["expected_alpha"] == 1 and twin["speedup"] > 0
    assert "memory at batch 1" in done.stdout


def test_speedup_fills_a_row_for_every_combination(pair, tmp_path):
    common = [
        f"--data_dir={pair}",
        "--source_prefix=",
        "--num_examples=6",
        "--num_draft=2",
        "--temperature=0",
    ]
    one = f"multi30k_en_de,{pair}/target,{pair}/draft,8"
    done = run("speedup", f"--pair={one}", *common, "--batch_size=1,3", "--repeats=2", f"--output={tmp_path}")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["batch_size"] for row in rows] == [1, 3] and (tmp_path / "speedup.png").exists()
    for row in rows:
        assert row["identical_to_target"] == "6 of 6" and row["quality"] == row["quality_autoregressive"]
        assert row["speedup"] > 0 and 0 < row["latency_p50_s"] <= row["latency_p90_s"]
        assert 0 < row["target_entropy"] < np.log(24) and 0 <= row["copied_share"] <= 1
        np.testing.assert_allclose(sum(row["accepted_by_position"]), row["accepted_per_round"], atol=1e-6)
    for name in ("alpha", "tokens_per_target_call"):
        assert rows[0][name] == rows[1][name]  # a row does not depend on the others in its batch
    again = run("speedup", f"--pair={one}", *common, "--repeats=0", f"--output={tmp_path}/again")
    assert again.returncode == 0, again.stderr
    (repeated,) = json.loads((tmp_path / "again" / "results.json").read_text())["rows"]
    same = ("alpha", "tokens_per_target_call", "num_tokens", "quality", "target_entropy")
    assert all(repeated[name] == rows[0][name] for name in same)


def test_speedup_raises_for_an_unknown_task(pair):
    done = run("speedup", "--pair=chess,a,b,8", f"--data_dir={pair}")
    assert done.returncode != 0 and "`--pair` must be TASK,TARGET,DRAFT,LIMIT, got chess,a,b,8" in done.stderr


def test_walltime_measures_shapes(tmp_path):
    done = run(
        "walltime",
        "--target=1x64",
        "--draft=1x32",
        "--alpha=0,1",
        "--num_draft=2",
        "--num_new=2",
        "--max_new_tokens=9",
        "--repeats=2",
        "--num_runs=2",
        f"--output={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["num_new"] for row in rows[:2]] == [1, 2] and rows[0]["verify_cost"] == 1
    assert [row["tokens_per_round_timed"] for row in rows[2:]] == [1, 3]
    assert (tmp_path / "walltime.png").exists()


def test_theory_recomputes_the_papers_tables(tmp_path):
    done = run("theory", f"--output={tmp_path}")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    first = [row for row in rows if row["table"].startswith("Table 1")]
    fourth = [row for row in rows if row["table"].startswith("Table 4")]
    assert len(first) == 6 and all(row["printed_tokens"] == row["tokens"] for row in first)
    assert len(fourth) == 12 and all(abs(row["printed"] - row["recomputed"]) < 0.08 for row in fourth)
    assert (tmp_path / "theory.png").exists()


def test_roofline_is_near_what_the_paper_measured_on_its_chip(tmp_path):
    done = run("roofline", f"--output={tmp_path}")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    (paper,) = (r for r in rows if "one chip" in r.get("machine", "") and r["draft"] == "t5-v1_1-small")
    assert paper["predicted_speedup"] == pytest.approx(paper["paper_measured"], rel=0.1)
    assert {row["predicted_speedup_with_launches"] < 2.5 for row in rows if "H100" in str(row)} == {True}
    assert (tmp_path / "roofline.png").exists()


def test_round_breakdown_times_parts(tmp_path):
    done = run(
        "round_breakdown",
        "--target=1x64",
        "--draft=1x64",
        "--num_draft=2",
        "--repeats=2",
        "--source_length=8",
        "--max_new_tokens=8",
        f"--output={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    greedy, sampled = json.loads((tmp_path / "results.json").read_text())["rows"]
    parts = [name for name in greedy if name.endswith("_ms") and name != "round_ms"]
    assert len(parts) == 6 and sum(greedy[part] for part in parts) == pytest.approx(greedy["round_ms"])
    assert sampled["accept_ms"] > greedy["accept_ms"] and (tmp_path / "round_breakdown.png").exists()
