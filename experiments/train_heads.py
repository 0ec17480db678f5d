"""Trains heads that draft for a frozen target, on the target's own outputs.

  python -m experiments.train_heads --flagfile=configs/train_captions_eagle.flags --data_dir=DATA

The target decodes the training sources once at temperature 1 and once greedily; the heads then learn its
distributions along these texts. Every --report_every steps the script prints the probability of acceptance at
each position, on validation sources, and writes a checkpoint from which an interrupted run resumes.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from absl import flags
from rich.console import Console

import specjax
from experiments.lib import measure, resuming, start, training
from experiments.lib.training import FLAGS
from specjax import data, sharding
from specjax.loading import Model
from specjax.models import heads as heads_lib
from specjax.models import heads_io
from specjax.training import checkpoints, heads, loop
from specjax.training.state import TrainState, abstract_state, init_state

training.define_run(
    "train,validation", num_steps=2000, learning_rate=2e-2, warmup_steps=100, report_every=250
)
training.define_sequences()
_TARGET = flags.DEFINE_string("target", None, "Frozen target: a Hugging Face directory or hub id.")
_KIND = flags.DEFINE_enum("kind", "eagle", heads_lib.KINDS, "Kind of heads to train.")
_NUM_IDS = flags.DEFINE_integer(
    "num_draft_ids", 0, "Draft only the target's this many most frequent ids; 0: all."
)
_NUM_STEPS_AHEAD = flags.DEFINE_integer("num_steps_ahead", 5, "Number of positions ahead to train.")
_SHAPE = {
    name: flags.DEFINE_integer(name, 0, f"Shape of the layers: {name}; 0: that of the target.")
    for name in ("d_model", "d_kv", "d_ff", "num_heads")
}
_LAYERS = flags.DEFINE_integer("num_layers", 1, "Number of layers; Medusa has none.")
_FEATURES = flags.DEFINE_list("feature_layers", [], "Decoder layers of the target to read besides the last.")
_OPTIMIZER = flags.DEFINE_enum(
    "optimizer", "adafactor", ["adafactor", "adamw"], "Optimizer; use adamw for Medusa."
)
_TEXTS = flags.DEFINE_string("texts", None, "Directory for the target's outputs; default: --output.")


def texts(console: Console, target: Model, split: str, count: int) -> list[data.Pair]:
    """Returns sources of a split with the target's sampled and greedy outputs."""
    pairs = training.tokenized(split, count, target.tokenizer)
    folder = pathlib.Path(_TEXTS.value or FLAGS.output)
    common = dict(seed=FLAGS.seed, max_new_tokens=training.max_new_tokens())
    made: list[data.Pair] = []
    for temperature in (1.0, 0.0):
        path = folder / f"{split}_t{temperature:g}.json"
        made += resuming.outputs(
            console, target, _TARGET.value, pairs, path, temperature=temperature, **common
        )
    return made


def read_config(target: Model, pairs: Sequence[data.Pair]) -> heads_lib.HeadsConfig:
    """Returns the shape that the flags select."""
    ids: tuple[int, ...] = ()
    if _NUM_IDS.value:
        counts = collections.Counter(token for pair in pairs for token in pair.target)
        ids = tuple(sorted(token for token, _ in counts.most_common(_NUM_IDS.value)))
    config = heads_lib.HeadsConfig(
        _KIND.value,
        _NUM_STEPS_AHEAD.value,
        **{name: flag.value or getattr(target.config, name) for name, flag in _SHAPE.items()},
        num_layers=_LAYERS.value,
        draft_ids=ids,
        feature_layers=tuple(int(layer) for layer in _FEATURES.value),
    )
    config.check(target.config)
    return config


def taught(batches: Iterable[data.Batch], teacher: Any) -> Iterator[dict[str, Any]]:
    """Yields the batches with the target's features and logits."""
    for batch in batches:
        yield teacher(dataclasses.asdict(batch))


def train(
    console: Console,
    saved: checkpoints.Checkpoints,
    target: Model,
    network: heads_lib.HeadsNetwork,
    pairs: Sequence[data.Pair],
    held_out: Sequence[data.Pair],
) -> TrainState:
    """Runs the training loop, from the newest checkpoint if any; reports and writes checkpoints."""
    config, params = network.config, network.params
    console.print(f"{measure.num_params(params) / 1e6:.2f} M parameters, {len(pairs)} texts")
    optimization = training.optimization(optimizer=_OPTIMIZER.value, decay="cosine")
    run = training.run_identity(
        target=heads_io.fingerprint(target.params),
        num_texts=len(pairs),
        optimizer=_OPTIMIZER.value,
        kind=config.kind,
        config=list(map(str, dataclasses.astuple(config))),
    )
    like = abstract_state(params, optimization, rules=sharding.REPLICATED)
    found = resuming.restored(saved, like, run)
    if found is None:
        state = init_state(params, optimization, seed=FLAGS.seed, rules=sharding.REPLICATED)
    else:
        state = found.state
        console.print(f"resumed at step {int(state.step)} from {FLAGS.output}", soft_wrap=True)
    step = loop.make_step(heads.objective(network), optimization, like)
    teacher = heads.make_teacher(target.network, config.feature_layers)
    agreement = heads.make_agreement(network)
    batches = data.evaluation_batches(held_out, 64, training.shapes())

    def report(state: TrainState, now: loop.Progress) -> bool:
        overlap, agree = agreement(state.params, taught(batches, teacher))
        shown = "  ".join(
            f"{name} {' '.join(f'{x:.3f}' for x in values)}"
            for name, values in (("expected alpha", overlap), ("greedy", agree))
        )
        console.print(
            f"step {now.step}/{FLAGS.num_steps}  loss {now.loss:.3f}  {shown}  "
            f"{now.tokens_per_s:.0f} tokens/s",
            soft_wrap=True,
        )
        saved.save(now.step, state, {"run": run})
        return True

    return loop.run(
        state,
        lambda state, batch: step(state, teacher(batch)),
        (batch for (batch,) in training.batches(int(state.step), pairs)),
        FLAGS.num_steps,
        FLAGS.report_every,
        report,
    )


def main(console: Console) -> None:
    saved = checkpoints.Checkpoints(pathlib.Path(FLAGS.output) / "checkpoints")
    with console.status("loading"):
        target = specjax.load(_TARGET.value, "float32")
    pairs = texts(console, target, FLAGS.splits[0], FLAGS.num_sequences)
    config = read_config(target, pairs)
    held_out = texts(console, target, FLAGS.splits[1], FLAGS.num_held_out)
    network = heads_io.init(config, target.network, FLAGS.seed)
    state = train(console, saved, target, network, pairs, held_out)
    saved.close()
    if FLAGS.export:
        heads_io.save(FLAGS.export, network.replace(params=state.params), target.network)
        console.print(f"wrote {config.kind} heads to {FLAGS.export}", soft_wrap=True)


if __name__ == "__main__":
    start.run(main, required=["target", "output"])
