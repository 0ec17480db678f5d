"""Trains a T5 from scratch, or fine-tunes one from a Hugging Face directory.

  python -m experiments.train --flagfile=configs/train_captions_target.flags --data_dir=DATA
  python -m experiments.train --flagfile=configs/train_finetune.flags --data_dir=DATA --init_from=MODEL

Prints loss and target tokens per second; every `--report_every` steps validates and checkpoints.
Resumes from the newest checkpoint in `--output`, and exports a Hugging Face directory at the end.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from rich.console import Console

from experiments import measure, resuming, start, training_data
from specjax import api, data, loading, metrics, sharding
from specjax.loading import Model
from specjax.models import convert, t5
from specjax.training import checkpoints, loop, stopping
from specjax.training.optimization import Optimization
from specjax.training.state import TrainState, abstract_state, init_state

_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "Tokenizer directory; trained into it when it has none. Default: that of --init_from."
)
_VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", 4000, "Pieces of a tokenizer trained here; 0: ByT5's, of bytes."
)
_SPLITS = flags.DEFINE_list("splits", ["train", "validation"], "For training and for validation.")
_TRAIN_TARGETS = flags.DEFINE_list(
    "train_targets", [], "Text files whose line n is a further target of training source n."
)
_INIT_FROM = flags.DEFINE_string("init_from", None, "Hugging Face directory or hub id to start from.")
_OUTPUT = flags.DEFINE_string("output", None, "Where checkpoints go.")
_EXPORT = flags.DEFINE_string("export", None, "Hugging Face directory to write at the end (bfloat16).")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Pairs a step.", lower_bound=1)
_ACCUMULATED = flags.DEFINE_integer(
    "num_accumulated", 1, "Parts of a batch, one in memory at a time.", lower_bound=1
)
_STEPS = flags.DEFINE_integer("num_steps", 2600, "Steps in all.", lower_bound=1)
_WARMUP = flags.DEFINE_integer("warmup_steps", 300, "Steps of linear warm-up.", lower_bound=0)
_DECAY = flags.DEFINE_enum(
    "decay", "cosine", ["constant", "rsqrt", "cosine", "linear"], "Learning rate after the warm-up."
)
_RATE = flags.DEFINE_float(
    "learning_rate", 2e-2, "Peak rate; of Adafactor relative to each parameter's size."
)
_OPTIMIZER = flags.DEFINE_enum("optimizer", "adafactor", ["adafactor", "adamw"], "Update rule.")
_WEIGHT_DECAY = flags.DEFINE_float("weight_decay", 0.0, "Of AdamW.")
_GRAD_NORM = flags.DEFINE_float("max_grad_norm", 1.0, "Clipping by the global norm.")
_SMOOTHING = flags.DEFINE_float("label_smoothing", 0.1, "Mass spread over the vocabulary.")
_DROPOUT = flags.DEFINE_float("dropout_rate", 0.1, "Dropout in training.")
_DTYPE = flags.DEFINE_enum(
    "compute_dtype", "float32", ["float32", "bfloat16"], "Of the computation; params stay float32."
)
_DATA_PARALLEL = flags.DEFINE_integer(
    "data_parallel", 1, "Devices that share the rows of a batch.", lower_bound=1
)
_MODEL_PARALLEL = flags.DEFINE_integer(
    "model_parallel", 1, "Devices that share heads, width, vocabulary.", lower_bound=1
)
_REPORT = flags.DEFINE_integer(
    "report_every", 100, "Steps between reports; each validates and checkpoints.", lower_bound=1
)
_NUM_VALIDATION = flags.DEFINE_integer("num_validation", 2000, "Validation pairs, at most.", lower_bound=1)
_BLEU = flags.DEFINE_integer(
    "bleu_examples", 0, "Validation sources to decode greedily at each report.", lower_bound=0
)
_EXPORT_BY = flags.DEFINE_enum(
    "export_by", "loss", ["loss", "bleu", "last"], "Which step to export: the best one, or the last."
)
_PATIENCE = flags.DEFINE_integer(
    "patience", 0, "Reports without a better one that end the run; 0: none do.", lower_bound=0
)
_SEED = flags.DEFINE_integer("seed", 0, "Of initial params, dropout and shuffling.", lower_bound=0)
_SHAPE = {
    name: flags.DEFINE_integer(name, default, f"Model shape: {name}.")
    for name, default in {
        "d_model": 384,
        "d_kv": 64,
        "d_ff": 1536,
        "num_heads": 6,
        "num_layers": 3,
        "num_decoder_layers": 6,
    }.items()
}

Validate = Callable[[Any], dict[str, float]]


def training_texts() -> Sequence[data.TextPair]:
    """Those of the training split, then its sources with each file of --train_targets."""
    texts = training_data.pairs(_SPLITS.value[0])
    if not _TRAIN_TARGETS.value:
        return texts
    joined = list(texts)
    for path in _TRAIN_TARGETS.value:
        lines = data.read_lines(path)
        if len(lines) != len(texts):
            raise ValueError(
                f"--train_targets: {path} has {len(lines)} lines, but there are {len(texts)} training "
                "sources: give one line for each"
            )
        joined += [(source, line) for (source, _), line in zip(texts, lines, strict=True)]
    return joined


def load_tokenizer(texts: Sequence[data.TextPair]) -> Any:
    """That of --tokenizer, made first if need be, else that of --init_from."""
    if _TOKENIZER.value:
        prefix = len(training_data.source_prefix())
        lines = (line for source, target in texts for line in (source[prefix:], target))
        return data.load_or_train_tokenizer(_TOKENIZER.value, lines, _VOCAB_SIZE.value or None)
    if _INIT_FROM.value:
        return loading.load_tokenizer(_INIT_FROM.value)
    raise ValueError("--tokenizer and --init_from are both missing: give the directory of a tokenizer")


def read_optimization() -> Optimization:
    return Optimization(
        _OPTIMIZER.value,
        _RATE.value,
        _WARMUP.value,
        _STEPS.value,
        _DECAY.value,
        _WEIGHT_DECAY.value,
        _GRAD_NORM.value,
        _ACCUMULATED.value,
    )


def initial_model(vocab_size: int) -> tuple[t5.T5Config, Any]:
    """Config, and float32 params before the first step, in the host's memory."""
    changes = {"dropout_rate": _DROPOUT.value, "dtype": _DTYPE.value}
    with jax.default_device(jax.devices("cpu")[0]):
        if _INIT_FROM.value:
            config, params = convert.load(_INIT_FROM.value, "float32")
            if vocab_size > config.vocab_size:
                raise ValueError(
                    f"the tokenizer has {vocab_size} ids, {_INIT_FROM.value} only {config.vocab_size} "
                    "embeddings: give --tokenizer the directory of the tokenizer that it was trained with"
                )
            return dataclasses.replace(config, **changes), params
        shape = {name: flag.value for name, flag in _SHAPE.items()}
        config = t5.T5Config(vocab_size=vocab_size, **shape, **changes)
        ids = np.zeros((1, 8), np.int32)
        params = jax.jit(t5.T5(config).init)(jax.random.key(_SEED.value), ids, ids == 0, ids)["params"]
    return config, params


def make_validate(module: t5.T5, mesh: Any, tokenizer: Any) -> Validate:
    """A function from params to {"loss": nats per token, "bleu": of greedy outputs, if asked for}."""
    texts = training_data.read(_SPLITS.value[1], _NUM_VALIDATION.value)
    batches = data.evaluation_batches(training_data.tokenize(texts, tokenizer), 64, training_data.shapes())
    evaluate = loop.make_evaluate(module, mesh)
    decoded = texts[: _BLEU.value]

    def validate(params: Any) -> dict[str, float]:
        results = {"loss": evaluate(params, batches)}
        if decoded:
            model = Model(t5.T5Network(module.config), params, tokenizer)
            outputs = []
            for i in range(0, len(decoded), 64):
                sources = [source for source, _ in decoded[i : i + 64]]
                outputs += api.generate(
                    model, sources, max_new_tokens=training_data.max_new_tokens(), truncate=True
                ).texts
            results["bleu"], _ = metrics.bleu(outputs, [reference for _, reference in decoded])
        return results

    return validate


def start_or_resume(
    saved: checkpoints.Checkpoints, params: Any, optimization: Optimization, mesh: Any, batches: data.Stream
) -> tuple[TrainState, stopping.Best]:
    """The newest checkpoint, if there is one; `batches` goes on where it stood then."""
    found = resuming.restored(saved, abstract_state(params, optimization, mesh), identity())
    if found is None:
        best = stopping.Best(larger_is_better=_EXPORT_BY.value == "bleu")
        return init_state(params, optimization, seed=_SEED.value, mesh=mesh), best
    try:
        batches.set_state(found.note["data"].encode())
    except ValueError as error:
        raise ValueError(f"{saved.directory}: {error}, with another --output") from error
    return found.state, stopping.Best(**found.note["best"])


def identity() -> dict[str, Any]:
    """What a run that is resumed must share with the one that was stopped, besides its data's settings."""
    files = [pathlib.Path(path) for path in _TRAIN_TARGETS.value]
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    run = {
        "splits": _SPLITS.value,
        "export_by": _EXPORT_BY.value,
        "train_targets": hashes,
        "num_validation": _NUM_VALIDATION.value,
        "bleu_examples": _BLEU.value,
    }
    return training_data.fingerprint() | run


def train(
    console: Console,
    saved: checkpoints.Checkpoints,
    state: TrainState,
    best: stopping.Best,
    step: loop.Step,
    batches: data.Stream,
    validate: Validate,
) -> tuple[TrainState, stopping.Best]:
    """Runs the loop: validates, prints, keeps the best step's checkpoint, stops early."""

    def report(state: TrainState, progress: loop.Progress) -> bool:
        nonlocal best
        results = validate(state.params)
        shown = "  ".join(f"validation {name} {value:.3f}" for name, value in results.items())
        console.print(
            f"step {progress.step}/{_STEPS.value}  loss {progress.loss:.3f}  {shown}  "
            f"{progress.tokens_per_s:.0f} tokens/s",
            soft_wrap=True,
        )
        best = best.update(progress.step, results.get(_EXPORT_BY.value, results["loss"]))
        position = batches.get_state().decode()
        note = {"run": identity(), "data": position, "best": dataclasses.asdict(best)}
        saved.save(progress.step, state, note, keep=() if best.step is None else (best.step,))
        if best.should_stop(_PATIENCE.value):
            console.print(f"stopped: none of the last {best.num_worse} reports was better than {best.step}")
        return not best.should_stop(_PATIENCE.value)

    if not best.should_stop(_PATIENCE.value):
        state = loop.run(state, step, batches, _STEPS.value, _REPORT.value, report)
    return state, best


def main(argv: list[str]) -> None:
    del argv
    if _EXPORT_BY.value == "bleu" and _BLEU.value < 1:
        raise ValueError(f"--export_by=bleu with --bleu_examples={_BLEU.value}: give at least 1")
    if len(_SPLITS.value) != 2:
        raise ValueError(f"--splits={','.join(_SPLITS.value)}: give two, as in --splits=train,validation")
    console = start.console()
    mesh = sharding.make_mesh(_DATA_PARALLEL.value, _MODEL_PARALLEL.value)
    optimization = read_optimization()
    with console.status("reading"):
        texts = training_texts()
        tokenizer = load_tokenizer(texts)
        config, params = initial_model(len(tokenizer))
        module = t5.T5(config)
        validate = make_validate(module, mesh, tokenizer)
    batches = data.stream(
        texts,
        training_data.encoder(tokenizer),
        batch_size=_BATCH_SIZE.value,
        shapes=training_data.shapes(),
        seed=_SEED.value,
        truncate_sources=training_data.truncate_sources(),
    )
    console.print(f"{measure.num_params(params) / 1e6:.2f} M parameters, {len(texts)} training pairs")
    saved = checkpoints.Checkpoints(_OUTPUT.value)
    state, best = start_or_resume(saved, params, optimization, mesh, batches)
    like = abstract_state(params, optimization, mesh)
    first = int(state.step)
    console.print(f"resumed at step {first} from {_OUTPUT.value}" if first else "new run", soft_wrap=True)
    step = loop.make_step(loop.likelihood(module, _SMOOTHING.value), optimization, like)
    state, best = train(console, saved, state, best, step, batches, validate)
    if _EXPORT_BY.value != "last" and best.step is not None:
        state, _ = saved.restore(like, best.step)
    saved.close()
    if _EXPORT.value:
        convert.save(_EXPORT.value, config, state.params, tokenizer, dtype="bfloat16")
        console.print(f"wrote step {int(state.step)} to {_EXPORT.value}", soft_wrap=True)


if __name__ == "__main__":
    flags.mark_flags_as_required(["output"])
    start.run(main)
