"""Trains a T5 or T5Gemma from scratch, or fine-tunes one from a Hugging Face directory.

  python -m experiments.train --flagfile=configs/train_captions_target.flags --data_dir=DATA
  python -m experiments.train --flagfile=configs/train_finetune.flags --data_dir=DATA --init_from=MODEL

Every --report_every steps the script prints the loss and target tokens per second, validates, and writes a
checkpoint. It resumes from the newest checkpoint in --output, and exports a Hugging Face directory at the
end.
"""

import dataclasses
import hashlib
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from rich.console import Console

from experiments.lib import measure, resuming, start, tasks, training
from experiments.lib.training import FLAGS
from specjax import api, data, loading, metrics, sharding
from specjax.loading import Model
from specjax.models import convert, families
from specjax.training import checkpoints, loop
from specjax.training.state import Optimization, TrainState, abstract_state, init_state

training.define_run(
    "train,validation", num_steps=2600, learning_rate=2e-2, warmup_steps=300, report_every=100
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "Directory of the tokenizer, trained if empty; default: --init_from."
)
_TOKENIZER_TASK = flags.DEFINE_list(
    "tokenizer_task", [], "Tasks whose training texts it is trained on; default: --task."
)
_VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", 4000, "Vocabulary of a tokenizer trained here; 0: ByT5's bytes."
)
_TRAIN_TARGETS = flags.DEFINE_list("train_targets", [], "Files whose line n is another target for source n.")
_INIT_FROM = flags.DEFINE_string("init_from", None, "Hugging Face directory or hub id to start from.")
flags.DEFINE_enum("optimizer", "adafactor", ["adafactor", "adamw"], "Optimizer.")
flags.DEFINE_enum(
    "decay", "cosine", ["constant", "rsqrt", "cosine", "linear"], "Learning rate schedule after warm-up."
)
flags.DEFINE_float("weight_decay", 0.0, "Weight decay of AdamW.")
flags.DEFINE_float("max_grad_norm", 1.0, "Maximum global norm of gradients.")
flags.DEFINE_integer("num_accumulated", 1, "Parts of a batch to accumulate gradients over.", lower_bound=1)
_SMOOTHING = flags.DEFINE_float("label_smoothing", 0.1, "Probability mass spread over the vocabulary.")
_DROPOUT = flags.DEFINE_float("dropout_rate", 0.1, "Dropout rate.")
_DTYPE = flags.DEFINE_enum("compute_dtype", "float32", ["float32", "bfloat16"], "Params stay in float32.")
_DATA = flags.DEFINE_integer("data_parallel", 1, "Devices along the data axis.", lower_bound=1)
_MODEL = flags.DEFINE_integer("model_parallel", 1, "Devices along the model axis.", lower_bound=1)
_NUM_VALIDATION = flags.DEFINE_integer(
    "num_validation", 2000, "Maximum number of validation pairs.", lower_bound=1
)
_NUM_DECODED = flags.DEFINE_integer(
    "num_decoded", 0, "Validation sources per task to decode greedily, for BLEU or ROUGE.", lower_bound=0
)
_EXPORT_BY = flags.DEFINE_enum(
    "export_by",
    "loss",
    ["loss", "quality", "last"],
    "Step to export: the best by its mean over tasks, or the last.",
)
_PATIENCE = flags.DEFINE_integer(
    "patience", 0, "Stop after this many reports without improvement; 0: never.", lower_bound=0
)
_DEFAULTS = dict(d_model=384, d_kv=64, d_ff=1536, num_heads=6, num_layers=3, num_decoder_layers=6)
for _name, _default in _DEFAULTS.items():
    flags.DEFINE_integer(_name, _default, f"Model shape: {_name}.")
_FAMILY = flags.DEFINE_enum("family", "t5", families.FLAVOURS, "Architecture to train from scratch.")
_KV_HEADS = flags.DEFINE_integer(
    "num_kv_heads", None, "Heads of keys and values in a T5Gemma; default: --num_heads.", lower_bound=1
)
_WINDOW = flags.DEFINE_integer(
    "window", 4096, "Attention window of every other layer in a T5Gemma, in tokens.", lower_bound=1
)

Validate = Callable[[Any], dict[str, dict[str, float]]]


def training_texts() -> Sequence[data.TextPair]:
    """Returns the training split, then its sources with the targets of each file of --train_targets."""
    texts = training.pairs(FLAGS.splits[0])
    if not _TRAIN_TARGETS.value:
        return texts
    joined = list(texts)
    for path in _TRAIN_TARGETS.value:
        lines = data.read_lines(path)
        if len(lines) != len(texts):
            raise ValueError(
                f"`--train_targets` must have one line for each of the {len(texts)} training sources, got "
                f"{len(lines)} in {path}"
            )
        joined += [(source, line) for (source, _), line in zip(texts, lines, strict=True)]
    return joined


def load_tokenizer(texts: Sequence[data.TextPair]) -> Any:
    """Returns the tokenizer of --tokenizer, trained first if missing, or that of --init_from."""
    if _TOKENIZER.value:
        mixture = tasks.parse_mixture(_TOKENIZER_TASK.value, "tokenizer_task")
        parts = [tasks.pairs(FLAGS.splits[0], name) for name, times in mixture.items() for _ in range(times)]
        texts = [pair for part in parts for pair in part] or texts
        lines = (line for pair in texts for line in pair)
        return data.load_or_train_tokenizer(_TOKENIZER.value, lines, _VOCAB_SIZE.value or None)
    if _INIT_FROM.value:
        return loading.load_tokenizer(_INIT_FROM.value)
    raise ValueError("`--tokenizer` or `--init_from` must be given; give the directory of a tokenizer")


def initial_model(vocab_size: int) -> tuple[families.Config, Any]:
    """Returns the config and the initial float32 params, in host memory."""
    changes = {"dropout_rate": _DROPOUT.value, "dtype": _DTYPE.value}
    with jax.default_device(jax.devices("cpu")[0]):
        if _INIT_FROM.value:
            config, params = convert.load(_INIT_FROM.value, "float32")
            if vocab_size > config.vocab_size:
                raise ValueError(
                    f"the tokenizer must have at most {config.vocab_size} ids, the embeddings of "
                    f"{_INIT_FROM.value}, got {vocab_size}; give --tokenizer the one that it was trained with"
                )
            return dataclasses.replace(config, **changes), params
        shape = {name: FLAGS[name].value for name in _DEFAULTS}
        if _KV_HEADS.value and FLAGS.num_heads % _KV_HEADS.value:
            raise ValueError(
                f"`--num_kv_heads` must divide --num_heads={FLAGS.num_heads}, got {_KV_HEADS.value}"
            )
        grouped = dict(num_kv_heads=_KV_HEADS.value, window=_WINDOW.value)
        config = dataclasses.replace(families.sized(_FAMILY.value, vocab_size, **shape, **grouped), **changes)
        ids, init = np.zeros((1, 8), np.int32), jax.jit(families.module(config).init)
        params = init(jax.random.key(FLAGS.seed), ids, ids == 0, ids)["params"]
    return config, params


def make_validate(module: families.Module, mesh: Any, tokenizer: Any) -> Validate:
    """Returns a function from params to `{"loss": ..., "quality": ...}`, each a dict with a value per task.

    Losses are in nats per token. Quality (BLEU, or ROUGE-Lsum in percent, of greedy outputs) is computed if
    --num_decoded is not 0. Tasks without validation pairs are left out.
    """
    evaluate = loop.make_evaluate(module, mesh)
    texts = {name: training.pairs_of(name, FLAGS.splits[1]) for name in training.mixture()}
    texts = {name: tasks.first(found, _NUM_VALIDATION.value) for name, found in texts.items() if len(found)}
    batches = {
        name: data.evaluation_batches(training.tokenize(found, tokenizer), 64, training.shapes())
        for name, found in texts.items()
    }

    def quality(name: str, model: Model) -> float:
        decoded = texts[name][: _NUM_DECODED.value]
        options = dict(max_new_tokens=training.max_new_tokens(), truncate=True)
        outputs = []
        for i in range(0, len(decoded), 64):
            outputs += api.generate(model, [source for source, _ in decoded[i : i + 64]], **options).texts
        references = [reference for _, reference in decoded]
        if data.TASKS[name].metric == "bleu":
            return metrics.bleu(outputs, references)[0]
        return metrics.rouge(outputs, references)[0]["rougeLsum"]

    def validate(params: Any) -> dict[str, dict[str, float]]:
        found = {"loss": {name: evaluate(params, batches[name]) for name in texts}}
        if _NUM_DECODED.value:
            model = Model(families.network(params, module.config), tokenizer)
            found["quality"] = {name: quality(name, model) for name in texts}
        return found

    return validate


def start_or_resume(
    saved: checkpoints.Checkpoints, params: Any, optimization: Optimization, mesh: Any, batches: data.Stream
) -> tuple[TrainState, loop.Best]:
    """Returns the state of the newest checkpoint and positions `batches` there; or an initial state."""
    found = resuming.restored(saved, abstract_state(params, optimization, mesh), identity())
    if found is None:
        best = loop.Best(larger_is_better=_EXPORT_BY.value == "quality")
        return init_state(params, optimization, seed=FLAGS.seed, mesh=mesh), best
    try:
        batches.set_state(found.note["data"].encode())
    except ValueError as error:
        raise ValueError(f"{saved.directory}: {error}, with another --output") from error
    return found.state, loop.Best(**found.note["best"])


def identity() -> dict[str, Any]:
    """Returns the settings that a resumed run must share with the interrupted one, except its data's."""
    files = [pathlib.Path(path) for path in _TRAIN_TARGETS.value]
    return training.fingerprint() | {
        "splits": FLAGS.splits,
        "export_by": _EXPORT_BY.value,
        "train_targets": [hashlib.sha256(path.read_bytes()).hexdigest() for path in files],
        "num_validation": _NUM_VALIDATION.value,
        "num_decoded": _NUM_DECODED.value,
    }


def train(
    console: Console,
    saved: checkpoints.Checkpoints,
    state: TrainState,
    best: loop.Best,
    step: loop.Step,
    batches: data.Stream,
    validate: Validate,
) -> tuple[TrainState, loop.Best]:
    """Runs the training loop: validates, prints, keeps the checkpoint of the best step, stops early."""
    chosen = "quality" if _EXPORT_BY.value == "quality" else "loss"

    def report(state: TrainState, progress: loop.Progress) -> bool:
        nonlocal best
        found = validate(state.params)
        shown = "  ".join(
            f"validation {kind} " + ", ".join(f"{name} {value:.3f}" for name, value in values.items())
            for kind, values in found.items()
        )
        console.print(
            f"step {progress.step}/{FLAGS.num_steps}  loss {progress.loss:.3f}  {shown}  "
            f"{progress.tokens_per_s:.0f} tokens/s",
            soft_wrap=True,
        )
        best = best.update(progress.step, statistics.mean(found[chosen].values()))
        position = batches.get_state().decode()
        note = {"run": identity(), "data": position, "best": dataclasses.asdict(best)}
        saved.save(progress.step, state, note, keep=() if best.step is None else (best.step,))
        if best.should_stop(_PATIENCE.value):
            console.print(
                f"stopped: no improvement over step {best.step} in the last {best.num_worse} reports"
            )
        return not best.should_stop(_PATIENCE.value)

    if not best.should_stop(_PATIENCE.value):
        state = loop.run(state, step, batches, FLAGS.num_steps, FLAGS.report_every, report)
    return state, best


def main(console: Console) -> None:
    if _EXPORT_BY.value == "quality" and _NUM_DECODED.value < 1:
        raise ValueError(
            f"`--num_decoded` must be at least 1 with --export_by=quality, got {_NUM_DECODED.value}"
        )
    if len(FLAGS.splits) != 2:
        raise ValueError(f"`--splits` must be two, as in train,validation, got {','.join(FLAGS.splits)}")
    mesh = sharding.make_mesh(_DATA.value, _MODEL.value)
    chosen = ("optimizer", "decay", "weight_decay", "max_grad_norm", "num_accumulated")
    optimization = training.optimization(**{name: FLAGS[name].value for name in chosen})
    with console.status("reading"):
        texts = training_texts()
        tokenizer = load_tokenizer(texts)
        config, params = initial_model(len(tokenizer))
        module = families.module(config)
        validate = make_validate(module, mesh, tokenizer)
    batches = data.stream(
        texts,
        training.encoder(tokenizer),
        batch_size=FLAGS.batch_size,
        shapes=training.shapes(),
        seed=FLAGS.seed,
        truncate_sources=FLAGS.truncate_sources,
        encode_targets=training.target_encoder(tokenizer),
    )
    console.print(f"{measure.num_params(params) / 1e6:.2f} M parameters, {len(texts)} training pairs")
    saved = checkpoints.Checkpoints(FLAGS.output)
    state, best = start_or_resume(saved, params, optimization, mesh, batches)
    like, first = abstract_state(params, optimization, mesh), int(state.step)
    console.print(f"resumed at step {first} from {FLAGS.output}" if first else "new run", soft_wrap=True)
    step = loop.make_step(loop.likelihood(module, _SMOOTHING.value), optimization, like)
    state, best = train(console, saved, state, best, step, batches, validate)
    if _EXPORT_BY.value != "last" and best.step is not None:
        state, _ = saved.restore(like, best.step)
    saved.close()
    if FLAGS.export:
        convert.save(FLAGS.export, config, state.params, tokenizer, dtype="bfloat16")
        console.print(f"wrote step {int(state.step)} to {FLAGS.export}", soft_wrap=True)


if __name__ == "__main__":
    start.run(main, required=["output"])
