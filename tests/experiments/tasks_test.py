"""Training on several tasks."""

import pytest

from experiments.lib import tasks
from tests.experiments import program


def test_parse_mixture_returns_tasks_and_their_multiples():
    assert tasks.parse_mixture(["multi30k_en_de:2", "scitldr"]) == {"multi30k_en_de": 2, "scitldr": 1}
    for parts, message in {
        ("chess",): "`--task` must be some of cnn_dailymail.*, got chess",
        ("mbpp", "mbpp"): "`--task` must be .*, each once, got mbpp",
        ("mbpp:0",): "`--task` must have a whole number of at least 1 after the colon, got mbpp:0",
        ("mbpp:often",): "`--task` must have a whole number .*, got mbpp:often",
    }.items():
        with pytest.raises(ValueError, match=message):
            tasks.parse_mixture(parts)


def test_train_mixes_tasks_and_validates_each(corpus, tmp_path):
    """The second task has no validation pairs; the tokenizer is trained on both."""
    folder = corpus / "en_de_more"
    folder.mkdir(exist_ok=True)
    for language in ("en", "de"):
        lines = (corpus / "multi30k" / f"train.{language}").read_text()
        (folder / f"mlqe_pe.train.{language}").write_text(lines)
    done = program.run(
        "train",
        f"--data_dir={corpus}",
        "--task=multi30k_en_de:2,wikipedia_en_de",
        f"--tokenizer={tmp_path}/tokenizer",
        "--tokenizer_task=multi30k_en_de,wikipedia_en_de",
        "--vocab_size=36",
        "--d_model=16",
        "--d_kv=8",
        "--d_ff=16",
        "--num_heads=2",
        "--num_layers=1",
        "--num_decoder_layers=1",
        "--num_steps=2",
        "--warmup_steps=1",
        "--batch_size=8",
        "--buckets=64",
        "--report_every=2",
        f"--output={tmp_path}/run",
    )
    assert done.returncode == 0, done.stderr
    assert "240 training pairs" in done.stdout  # 2 x 80 + 80
    (report,) = [line for line in done.stdout.splitlines() if line.startswith("step 2/2")]
    assert "validation loss multi30k_en_de " in report and "wikipedia_en_de" not in report
