"""Trains a T5 from scratch, or further from a Hugging Face directory.

  python -m experiments.train --flagfile=configs/train_captions_target.flags --data_dir=DATA

Prints loss and target tokens per second, checkpoints every `--report_every` steps, resumes from
the newest checkpoint in `--output`, and exports a Hugging Face directory at the end.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from rich.console import Console

from specjax import data
from specjax.models import convert, t5
from specjax.training import checkpoints, loop

_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder that holds TASK/train.en, .de, val.en, .de (or .gz)."
)
_TASK = flags.DEFINE_string("task", "multi30k", "Folder below --data_dir.")
_TARGETS = flags.DEFINE_list("train_targets", None, "Files of other targets for the training sources.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Tokenizer directory; trained into it when it has none.")
_VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 4000, "Pieces of a tokenizer trained here.")
_INIT_FROM = flags.DEFINE_string("init_from", None, "Hugging Face directory to start from, shape included.")
_OUTPUT = flags.DEFINE_string("output", None, "Where checkpoints go.")
_EXPORT = flags.DEFINE_string("export", None, "Hugging Face directory to write at the end (bfloat16).")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Pairs a step.")
_BUCKETS = flags.DEFINE_list(
    "buckets", ["12", "16", "20", "24", "28", "32", "40", "48"], "Padded lengths, tokens."
)
_STEPS = flags.DEFINE_integer("num_steps", 2600, "Steps in all.")
_WARMUP = flags.DEFINE_integer("warmup_steps", 300, "Steps of linear warm-up.")
_RATE = flags.DEFINE_float(
    "learning_rate", 2e-2, "Peak rate; of Adafactor relative to each parameter's size."
)
_OPTIMIZER = flags.DEFINE_enum("optimizer", "adafactor", ["adafactor", "adamw"], "Update rule.")
_SMOOTHING = flags.DEFINE_float("label_smoothing", 0.1, "Mass spread over the vocabulary.")
_DROPOUT = flags.DEFINE_float("dropout_rate", 0.1, "Dropout in training.")
_REPORT = flags.DEFINE_integer("report_every", 100, "Steps between reports; each validates and checkpoints.")
_SEED = flags.DEFINE_integer("seed", 0, "Of initial params, dropout and shuffling.")
_SHAPE = {
    name: flags.DEFINE_integer(name, default, f"Model shape: {name}.")
    for name, default in {
        "d_model": 384, "d_kv": 64, "d_ff": 1536, "num_heads": 6, "num_layers": 3, "num_decoder_layers": 6,
    }.items()
}  # fmt: skip


def read_split(encode: data.Encode, split: str, targets: Sequence[str] = ()) -> list[data.Pair]:
    """Tokenised pairs of one split, those over the largest bucket dropped.

    `targets` are files to take the place of the split's own targets, each for all sources.
    """
    folder = pathlib.Path(_DATA_DIR.value) / _TASK.value
    files = targets or [folder / f"{split}.de"]
    pairs = [pair for file in files for pair in data.read_pairs(folder / f"{split}.en", file)]
    return data.tokenize(pairs, encode, max(map(int, _BUCKETS.value)))


def initial_model(vocab_size: int) -> tuple[t5.T5Config, Any]:
    """Config and params before the first step."""
    if _INIT_FROM.value:
        config, params = convert.load(_INIT_FROM.value, "float32")
        return dataclasses.replace(config, dropout_rate=_DROPOUT.value), params
    shape = {name: flag.value for name, flag in _SHAPE.items()}
    config = t5.T5Config(vocab_size=vocab_size, dropout_rate=_DROPOUT.value, **shape)
    ids = np.zeros((1, 8), np.int32)
    params = jax.jit(t5.T5(config).init)(jax.random.key(_SEED.value), ids, ids == 0, ids)["params"]
    return config, params


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    console = Console()
    corpus = pathlib.Path(_DATA_DIR.value) / _TASK.value
    with console.status("reading and tokenising"):
        tokenizer = data.load_or_train_tokenizer(_TOKENIZER.value, corpus, _VOCAB_SIZE.value)
        encode: data.Encode = lambda texts: tokenizer(list(texts)).input_ids  # noqa: E731
        train, valid = read_split(encode, "train", _TARGETS.value or ()), read_split(encode, "val")
    config, params = initial_model(len(tokenizer))
    num_params = sum(x.size for x in jax.tree.leaves(params))
    console.print(
        f"{num_params / 1e6:.2f} M parameters, {len(train)} training and {len(valid)} validation pairs"
    )
    optimization = loop.Optimization(
        _OPTIMIZER.value, _RATE.value, _WARMUP.value, _STEPS.value, label_smoothing=_SMOOTHING.value
    )
    state = loop.init_state(params, optimization)
    saved = checkpoints.Checkpoints(_OUTPUT.value)
    if saved.latest_step is not None:
        state = saved.restore(state)
        console.print(f"resumed at step {int(state.step)} from {_OUTPUT.value}")
    module = t5.T5(config)
    buckets = [int(size) for size in _BUCKETS.value]
    evaluate = loop.make_evaluate(module)
    valid_batches = [
        data.make_batch([valid[i] for i in rows], width)
        for rows, width in data.epoch(valid, min(64, len(valid)), buckets, 0, 0)
    ]

    def report(state: loop.TrainState, progress: loop.Progress) -> bool:
        valid_loss = evaluate(state.params, valid_batches)
        console.print(
            f"step {progress.step}/{_STEPS.value}  loss {progress.loss:.3f}  validation {valid_loss:.3f}  "
            f"{progress.tokens_per_s:.0f} tokens/s",
        )
        saved.save(progress.step, state)
        return True

    batches = data.training_batches(train, _BATCH_SIZE.value, buckets, _SEED.value, int(state.step))
    step = loop.make_step(module, optimization, _SEED.value)
    console.print("first steps compile, one program a bucket")
    state = loop.run(state, step, batches, _STEPS.value, _REPORT.value, report)
    saved.close()
    if _EXPORT.value:
        convert.save(_EXPORT.value, config, state.params, tokenizer, dtype="bfloat16")
        console.print(f"wrote {_EXPORT.value}")


if __name__ == "__main__":
    flags.mark_flags_as_required(["data_dir", "tokenizer", "output"])
    app.run(main)
