"""Runs, interrupts and resumes the experiments that train, on a tiny pair."""

import contextlib
import json
import shutil

import jax
import numpy as np
import pytest

from specjax.models import convert
from specjax.training import checkpoints
from specjax.training.state import Optimization, abstract_state
from tests.experiments.program import run

pytestmark = pytest.mark.slow


TINY_TRAINING = (
    "--source_prefix=",
    "--d_model=8",
    "--d_kv=4",
    "--d_ff=16",
    "--num_heads=2",
    "--num_layers=1",
    "--num_decoder_layers=1",
    "--buckets=16",
    "--batch_size=16",
    "--report_every=2",
    "--warmup_steps=0",
)


def train(corpus, folder, *flags):
    paths = [f"--data_dir={corpus}", f"--output={folder}/run", f"--export={folder}/model"]
    return run("train", *paths, *TINY_TRAINING, *flags)


def test_train_exports_a_checkpoint_and_resumes(corpus, tmp_path):
    tokenizer = f"--tokenizer={corpus}/tokenizer"
    first = train(corpus, tmp_path, tokenizer, "--num_steps=2", "--decay=constant")
    assert first.returncode == 0, first.stderr
    second = train(corpus, tmp_path, tokenizer, "--num_steps=4", "--decay=constant")
    assert "resumed at step 2" in second.stdout and "step 4/4" in second.stdout, second.stderr
    config, _ = convert.load(tmp_path / "model")
    assert (config.d_model, config.vocab_size) == (8, 24)
    whole = train(corpus, tmp_path / "whole", tokenizer, "--num_steps=4", "--decay=constant")
    assert whole.returncode == 0, whole.stderr
    stopped, going = (
        (folder / "model" / "model.safetensors").read_bytes() for folder in (tmp_path, tmp_path / "whole")
    )
    assert stopped == going
    other = train(corpus, tmp_path, tokenizer, "--num_steps=6", "--batch_size=8")
    assert (
        other.returncode != 0
        and "batch_size=8 (saved with 16)" in other.stderr
        and "--output" in other.stderr
    )


def test_train_fine_tunes_decodes_and_exports_the_best_step(pair, tmp_path):
    """Uses a rate that ruins the model: the first report is the best, and two worse ones stop the run."""
    done = train(
        pair,
        tmp_path,
        f"--init_from={pair}/target",
        "--num_steps=40",
        "--optimizer=adamw",
        "--learning_rate=3",
        "--decay=constant",
        "--patience=2",
        "--num_decoded=4",
        "--num_accumulated=2",
        "--compute_dtype=bfloat16",
        "--export_by=loss",
        "--data_parallel=2",
        "--source_prefix=dog",
        "--buckets=32",
    )
    assert done.returncode == 0, done.stderr
    reports = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    losses = [float(line.split("validation loss multi30k_en_de ")[1].split()[0]) for line in reports]
    best = 2 * losses.index(min(losses)) + 2
    assert len(reports) == best // 2 + 2 < 20 and "validation quality multi30k_en_de" in reports[0]
    assert "stopped: " in done.stdout and f"wrote step {best} to" in done.stdout
    config, exported = convert.load(tmp_path / "model", "float32")
    assert config.d_model == 16  # of --init_from, not of --d_model
    optimization = Optimization(optimizer="adamw")
    with contextlib.closing(checkpoints.Checkpoints(tmp_path / "run")) as saved:
        kept = saved.restore(abstract_state(exported, optimization), best).state.params
    for name in ("embedding", "decoder_norm"):
        a, b = jax.tree.leaves(kept[name]), jax.tree.leaves(exported[name])
        np.testing.assert_array_equal(np.asarray(a[0].astype("bfloat16"), np.float32), b[0])


def test_distill_trains_arms_side_by_side_and_resumes(pair, tmp_path):
    flags = [
        f"--target={pair}/target",
        f"--draft={pair}/draft",
        f"--data_dir={pair}",
        "--source_prefix=",
        "--arms=likelihood:data,forward_kl:target,total_variation:draft",
        "--num_held_out=8",
        "--num_test=8",
        "--batch_size=8",
        "--buckets=16",
        "--report_every=2",
        f"--output={tmp_path}",
        f"--export={tmp_path}/best",
    ]
    first = run("distill", *flags, "--num_steps=4")
    assert "step 2/4" in first.stdout and first.returncode == 0, first.stderr
    shutil.rmtree(tmp_path / "checkpoints" / "4")  # as if interrupted before
    second = run("distill", *flags, "--num_steps=4")
    assert "resumed at step 2" in second.stdout and "step 4/4" in second.stdout, second.stderr
    other = run("distill", *flags, "--num_steps=6")
    assert other.returncode != 0 and "num_steps=6, but" in other.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["arm"] for row in rows][:2] == ["before", "likelihood:data"] and len(rows) == 4
    assert (tmp_path / "distill.png").stat().st_size > 10_000
    assert convert.load(tmp_path / "best")[0].d_model == 8
    wrong = run("distill", *flags, "--arms=hinge:data")
    assert wrong.returncode != 0 and "`--arms` must be OBJECTIVE:SEQUENCES, got hinge:data" in wrong.stderr


def test_train_heads_trains_resumes_and_its_heads_draft(pair, tmp_path):
    """Trains Medusa heads, then drafts without a draft model: their tree, int8 and lookahead."""
    flags = [
        f"--target={pair}/target",
        f"--data_dir={pair}",
        "--source_prefix=",
        "--kind=medusa",
        "--num_draft_ids=12",
        "--num_steps_ahead=2",
        "--num_held_out=8",
        "--batch_size=8",
        "--buckets=16",
        "--report_every=2",
        f"--output={tmp_path}",
        f"--export={tmp_path}/heads",
    ]
    first = run("train_heads", *flags, "--num_steps=4")
    assert "step 2/4" in first.stdout and first.returncode == 0, first.stderr
    shutil.rmtree(tmp_path / "checkpoints" / "4")  # as if interrupted before
    whole = (tmp_path / "heads" / "heads.safetensors").read_bytes()
    second = run("train_heads", *flags, "--num_steps=4")
    assert "resumed at step 2" in second.stdout, second.stderr
    assert (tmp_path / "heads" / "heads.safetensors").read_bytes() == whole
    other = run("train_heads", *flags, "--num_steps=6")
    assert other.returncode != 0 and "num_steps=6, but" in other.stderr
    done = run(
        "generate",
        f"--target={pair}/target",
        f"--heads={tmp_path}/heads",
        "--temperature=0",
        "--num_draft=medusa:2x1,int8:2,lookahead:2-3-1",
        "--max_new_tokens=8",
        "--repeats=0",
        stdin="the dog\na man runs\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 of 2") == 3
    done = run(
        "generate",
        f"--target={pair}/draft",
        f"--heads={tmp_path}/heads",
        "--num_draft=medusa:2x1",
        stdin="the dog\n",
    )
    assert done.returncode != 0 and "needs medusa heads of this target" in done.stderr


def test_train_ngram_writes_a_table_that_drafts(pair, tmp_path):
    table = tmp_path / "table.safetensors"
    done = run("train_ngram", f"--data_dir={pair}", f"--target={pair}/target", f"--export={table}")
    assert done.returncode == 0 and "counted" in done.stdout, done.stderr
    (tmp_path / "lines").write_text("a dog\nthe man\n")
    flags = [
        f"--input={tmp_path}/lines",
        f"--target={pair}/target",
        "--max_new_tokens=8",
        "--num_draft=ngram:2",
    ]
    done = run(
        "generate", *flags, "--temperature=0", f"--output={tmp_path}/out", f"--ngram={table}", "--repeats=1"
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert row["identical_to_target"] == "2 of 2" and row["num_draft"] == "ngram:2"
    done = run("generate", *flags, "--temperature=0")
    assert done.returncode == 2 and "needs an n-gram table; give --ngram=FILE" in done.stderr
