"""Trains heads that draft for a frozen target, on the target's own outputs.

  python -m experiments.train_heads --flagfile=configs/train_captions_eagle.flags --data_dir=DATA

The target decodes the training sources once, at temperature 1 and greedily; the heads then learn its
distributions along these texts. Every --report_every steps the chances of acceptance on validation
sources are printed, position by position, and a checkpoint is written, from which a run that was stopped
goes on.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags
from rich.console import Console

import specjax
from experiments import measure, outputs, resuming, start, training_data
from specjax import data, sharding
from specjax.loading import Model
from specjax.models import heads as heads_lib
from specjax.models import heads_io
from specjax.training import checkpoints, heads, loop
from specjax.training.optimization import Optimization
from specjax.training.state import TrainState, abstract_state, init_state

_TARGET = flags.DEFINE_string("target", None, "Frozen target: a Hugging Face directory or hub id.")
_KIND = flags.DEFINE_enum("kind", "eagle", heads_lib.KINDS, "What is trained.")
_SPLITS = flags.DEFINE_list("splits", ["train", "validation"], "For training and reports.")
_NUM_SEQUENCES = flags.DEFINE_integer("num_sequences", 16384, "Training sources.")
_NUM_HELD_OUT = flags.DEFINE_integer("num_held_out", 256, "Validation sources.")
_NUM_IDS = flags.DEFINE_integer(
    "num_draft_ids", 0, "Ids that the heads can say, the target's most frequent; 0: all, by its own head."
)
_NUM_STEPS_AHEAD = flags.DEFINE_integer("num_steps_ahead", 5, "Positions ahead that are trained.")
_SHAPE = {
    name: flags.DEFINE_integer(name, default, f"Shape of the layers: {name}; 0: the target's.")
    for name, default in {"d_model": 0, "d_kv": 0, "d_ff": 0, "num_heads": 0}.items()
}
_LAYERS = flags.DEFINE_integer("num_layers", 1, "Layers; Medusa has none.")
_FEATURES = flags.DEFINE_list("feature_layers", [], "Decoder layers of the target to read beside the last.")
_STEPS = flags.DEFINE_integer("num_steps", 2000, "Steps.", lower_bound=1)
_OPTIMIZER = flags.DEFINE_enum(
    "optimizer", "adafactor", ["adafactor", "adamw"], "adamw for Medusa, whose params begin at zero."
)
_RATE = flags.DEFINE_float("learning_rate", 2e-2, "Peak rate; of adafactor relative to a parameter's size.")
_WARMUP = flags.DEFINE_integer(
    "warmup_steps", 100, "Steps of linear warm-up; then cosine to zero.", lower_bound=0
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Sequences a step.", lower_bound=1)
_REPORT = flags.DEFINE_integer("report_every", 250, "Steps between reports.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of everything drawn.", lower_bound=0)
_OUTPUT = flags.DEFINE_string("output", None, "Directory for checkpoints.")
_TEXTS = flags.DEFINE_string("texts", None, "Where the target's outputs are kept; None: in --output.")
_EXPORT = flags.DEFINE_string("export", None, "Directory for the heads.")


def texts(console: Console, target: Model, split: str, count: int) -> list[data.Pair]:
    """Sources of a split with what the target says to them, sampled and greedily."""
    pairs = training_data.tokenize(training_data.read(split, count), target.tokenizer)
    folder = pathlib.Path(_TEXTS.value or _OUTPUT.value)
    made: list[data.Pair] = []
    for temperature in (1.0, 0.0):
        made += outputs.said(
            console,
            target,
            _TARGET.value,
            pairs,
            folder / f"{split}_t{temperature:g}.json",
            temperature=temperature,
            seed=_SEED.value,
            max_new_tokens=training_data.max_new_tokens(),
        )
    return made


def read_config(target: Model, pairs: Sequence[data.Pair]) -> heads_lib.HeadsConfig:
    """The shape that the flags ask for."""
    ids: tuple[int, ...] = ()
    if _NUM_IDS.value:
        counts = collections.Counter(token for pair in pairs for token in pair.target)
        ids = tuple(sorted(token for token, _ in counts.most_common(_NUM_IDS.value)))
    shape = {name: flag.value or getattr(target.config, name) for name, flag in _SHAPE.items()}
    config = heads_lib.HeadsConfig(
        _KIND.value,
        _NUM_STEPS_AHEAD.value,
        **shape,
        num_layers=_LAYERS.value,
        draft_ids=ids,
        feature_layers=tuple(int(layer) for layer in _FEATURES.value),
    )
    config.check(target.config)
    return config


def taught(batches: Iterator[data.Batch], teacher: Any) -> Iterator[dict[str, Any]]:
    for batch in batches:
        yield teacher(dataclasses.asdict(batch))


def training_batches(pairs: Sequence[data.Pair], start_step: int) -> Iterator[data.Batch]:
    """Endless, a function of the step."""
    shapes = training_data.shapes()
    for rows in data.training_rows(pairs, _BATCH_SIZE.value, shapes, _SEED.value, start_step):
        chosen = [pairs[i] for i in rows]
        yield data.make_batch(chosen, data.shape_for(chosen, shapes))


def identity(target: Model, config: heads_lib.HeadsConfig, num_texts: int) -> dict[str, Any]:
    """What a run that is resumed must share with the one that was stopped."""
    return {
        **training_data.fingerprint(),
        "target": heads_io.fingerprint(target.params),
        "splits": _SPLITS.value,
        "num_texts": num_texts,
        "buckets": [list(shape) for shape in training_data.shapes()],
        "batch_size": _BATCH_SIZE.value,
        "optimizer": _OPTIMIZER.value,
        "learning_rate": _RATE.value,
        "warmup_steps": _WARMUP.value,
        "num_steps": _STEPS.value,
        "seed": _SEED.value,
        "kind": config.kind,
        "config": list(map(str, dataclasses.astuple(config))),
    }


def start_or_resume(
    console: Console,
    saved: checkpoints.Checkpoints,
    params: Any,
    optimization: Optimization,
    run: dict[str, Any],
) -> TrainState:
    """The newest checkpoint, if there is one."""
    found = resuming.restored(saved, abstract_state(params, optimization, rules=sharding.REPLICATED), run)
    if found is None:
        return init_state(params, optimization, seed=_SEED.value, rules=sharding.REPLICATED)
    console.print(f"resumed at step {int(found.state.step)} from {_OUTPUT.value}", soft_wrap=True)
    return found.state


def show(console: Console, now: loop.Progress, overlap: Sequence[float], agree: Sequence[float]) -> None:
    """Prints a report: chances of acceptance, position by position."""
    shown = "  ".join(
        f"{name} {' '.join(f'{x:.3f}' for x in values)}"
        for name, values in (("expected alpha", overlap), ("greedy", agree))
    )
    console.print(
        f"step {now.step}/{_STEPS.value}  loss {now.loss:.3f}  {shown}  {now.tokens_per_s:.0f} tokens/s",
        soft_wrap=True,
    )


def train(
    console: Console,
    saved: checkpoints.Checkpoints,
    target: Model,
    network: heads_lib.HeadsNetwork,
    pairs: Sequence[data.Pair],
    held_out: Sequence[data.Pair],
) -> TrainState:
    """Runs the loop, from the newest checkpoint if there is one; reports and checkpoints."""
    config, frozen = network.config, network.frozen(target.params)
    params = heads_io.init(network, target.params, _SEED.value)
    console.print(f"{measure.num_params(params) / 1e6:.2f} M parameters, {len(pairs)} texts")
    optimization = Optimization(_OPTIMIZER.value, _RATE.value, _WARMUP.value, _STEPS.value, "cosine")
    run = identity(target, config, len(pairs))
    state = start_or_resume(console, saved, params, optimization, run)
    like = abstract_state(params, optimization, rules=sharding.REPLICATED)
    step = loop.make_step(heads.objective(network, frozen), optimization, like)
    teacher = heads.make_teacher(target.module, target.params, config.feature_layers, target.num_ids)
    agreement = heads.make_agreement(network, frozen)
    batches = data.evaluation_batches(held_out, 64, training_data.shapes())

    def report(state: TrainState, now: loop.Progress) -> bool:
        show(console, now, *agreement(state.params, taught(iter(batches), teacher)))
        saved.save(now.step, state, {"run": run})
        return True

    return loop.run(
        state,
        lambda state, batch: step(state, teacher(batch)),
        training_batches(pairs, int(state.step)),
        _STEPS.value,
        _REPORT.value,
        report,
    )


def main(argv: list[str]) -> None:
    del argv
    console = start.console()
    saved = checkpoints.Checkpoints(pathlib.Path(_OUTPUT.value) / "checkpoints")
    with console.status("loading"):
        target = specjax.load(_TARGET.value, "float32")
    pairs = texts(console, target, _SPLITS.value[0], _NUM_SEQUENCES.value)
    config = read_config(target, pairs)
    held_out = texts(console, target, _SPLITS.value[1], _NUM_HELD_OUT.value)
    state = train(console, saved, target, heads_lib.HeadsNetwork(config, target.config), pairs, held_out)
    saved.close()
    if _EXPORT.value:
        heads_io.save(_EXPORT.value, config, state.params, target.params)
        console.print(f"wrote {config.kind} heads to {_EXPORT.value}", soft_wrap=True)


if __name__ == "__main__":
    flags.mark_flags_as_required(["target", "output"])
    start.run(main)
