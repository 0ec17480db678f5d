"""Distils a draft from a frozen target with several objectives side by side, and compares them.

  python -m experiments.distill --flagfile=configs/distill_captions.flags --data_dir=DATA

An arm is an objective and the sequences that it is trained on. All arms start from the same draft and take
the same number of steps. `likelihood:data` is the control: further training without distillation. Every
--report_every steps the script prints expected alpha on validation sources and writes a checkpoint; an
interrupted run resumes from the newest. At the end each arm's best step by validation is evaluated on the
test split, and the best arm is exported.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import struct
from rich.console import Console

import specjax
from experiments.lib import arms as arms_lib
from experiments.lib import results, resuming, start, training
from experiments.lib.training import FLAGS
from specjax import GenerationConfig, data, drafters
from specjax.loading import Model
from specjax.models import convert, families, heads_io
from specjax.texts import check_vocabularies
from specjax.training import checkpoints, distillation, loop, losses
from specjax.training.state import Optimization, TrainState, abstract_state, init_state

training.define_run(
    "train,validation,test", num_steps=1000, learning_rate=5e-3, warmup_steps=50, report_every=100
)
training.define_sequences()
_TARGET = flags.DEFINE_string("target", None, "Frozen target: a Hugging Face directory or hub id.")
_DRAFT = flags.DEFINE_string("draft", None, "Draft to start from, given like --target.")
_ARMS = flags.DEFINE_list(
    "arms",
    [
        "likelihood:data",
        "forward_kl:data",
        "forward_kl:target",
        "reverse_kl:target",
        "jensen_shannon:target",
        "total_variation:target",
        "forward_kl:draft",
    ],
    "Arms, each OBJECTIVE:SEQUENCES; sequences are data, target (sampled once) or draft (on policy).",
)
_NUM_TEST = flags.DEFINE_integer("num_test", 1000, "Number of test sources.")
_NUM_DRAFT = flags.DEFINE_integer("num_draft", 5, "K at which alpha and tau are measured.", lower_bound=1)


Evaluate = Callable[[Any], dict[str, float]]


# ---- the arms, trained in step


class Arms(struct.PyTreeNode):
    """One training state per arm."""

    states: dict[str, TrainState]

    @property
    def step(self) -> jax.Array:
        """The step, the same for every arm."""
        return next(iter(self.states.values())).step


@dataclasses.dataclass(frozen=True)
class Batch(data.Batch):
    """A batch of the data, with the target's outputs for the same sources."""

    generated_ids: np.ndarray
    generated_mask: np.ndarray


def parse(arm: str) -> tuple[str, str]:
    """Returns the objective and the kind of sequences: ("forward_kl", "target") for "forward_kl:target".

    Raises:
      ValueError: an unknown objective or kind of sequences.
    """
    objective, _, sequences = arm.partition(":")
    objectives = ["likelihood", *losses.DIVERGENCES]
    if objective not in objectives or sequences not in ("data", "target", "draft"):
        raise ValueError(
            f"`--arms` must be OBJECTIVE:SEQUENCES, got {arm}; objectives are {', '.join(objectives)}, and "
            "sequences are data, target, draft"
        )
    return objective, sequences


def make_step(target: Model, draft: Model, optimization: Optimization, like: TrainState) -> Callable:
    """Returns a training step of all --arms: `(Arms, arrays of a Batch) -> (Arms, mean loss)`."""
    module = families.module(dataclasses.replace(draft.config, dropout_rate=0.0))
    teacher = distillation.make_teacher(target.network)
    on_policy = distillation.make_on_policy(draft.network, training.max_new_tokens())
    parsed = {arm: parse(arm) for arm in _ARMS.value}
    needs = {sequences for objective, sequences in parsed.values() if objective != "likelihood"}
    steps = {}
    for objective, _ in parsed.values():
        if objective == "likelihood":
            loss = loop.likelihood(module)
        else:
            loss = distillation.divergence_from_target(module, losses.DIVERGENCES[objective])
        steps[objective] = loop.make_step(loss, optimization, like)

    def step(arms: Arms, batch: dict[str, Any]) -> tuple[Arms, jax.Array]:
        sources = {name: batch[name] for name in ("source_ids", "source_mask")}
        own = sources | {name: batch[name] for name in ("target_ids", "target_mask")}
        other = sources | {"target_ids": batch["generated_ids"], "target_mask": batch["generated_mask"]}
        known = {"data": own, "target": other}
        known = {kind: teacher(values) if kind in needs else values for kind, values in known.items()}
        states, total = {}, 0.0
        for arm, (objective, sequences) in parsed.items():
            state = arms.states[arm]
            if sequences == "draft":
                values = on_policy(state.params, own, int(state.step))
                values = values if objective == "likelihood" else teacher(values)
            else:
                values = dict(known[sequences])
            if objective == "likelihood":
                values.pop("target_logits", None)
            states[arm], loss = steps[objective](state, values)
            total += loss / len(parsed)
        return Arms(states), total

    return step


# ---- sequences and evaluation


def batches(pairs: Sequence[data.Pair], generated: Sequence[data.Pair], start_step: int) -> Iterator[Batch]:
    """Yields batches of both without end; they depend on the step only."""
    for own, other in training.batches(start_step, pairs, generated):
        yield Batch(*dataclasses.astuple(own), other.target_ids, other.target_mask)


def generated_pairs(
    console: Console, target: Model, draft: Model, pairs: Sequence[data.Pair], name: str, temperature: float
) -> list[data.Pair]:
    """Returns the target's outputs for the sources of `pairs`, from a file if an earlier run has made it."""
    return resuming.outputs(
        console,
        target,
        _TARGET.value,
        pairs,
        pathlib.Path(FLAGS.output) / f"{name}_t{temperature:g}.json",
        temperature=temperature,
        seed=FLAGS.seed,
        max_new_tokens=training.max_new_tokens(),
        drafter=drafters.from_model(draft, 3),
    )


def make_evaluate(
    console: Console, target: Model, draft: Model, name: str, split: str, count: int
) -> Evaluate:
    """Returns a function from a draft's params to its mean acceptance along the target's outputs.

    Expected alpha is along the target's samples, greedy agreement along its greedy outputs. Both are stored
    under `name`.
    """
    pairs = training.tokenized(split, count, target.tokenizer)
    acceptance = distillation.make_acceptance(target.network, draft.network)
    sampled, greedy = (
        data.evaluation_batches(
            generated_pairs(console, target, draft, pairs, name, temperature), 64, training.shapes()
        )
        for temperature in (1.0, 0.0)
    )
    return lambda params: {
        "expected_alpha": acceptance(params, sampled)[0],
        "greedy_agreement": acceptance(params, greedy)[1],
    }


def measured(console: Console, target: Model, draft: Model, texts: Sequence[str]) -> dict[str, float]:
    """Returns alpha and tau measured by decoding at temperatures 0 and 1."""
    row = {}
    for temperature in (0.0, 1.0):
        config = GenerationConfig(
            max_new_tokens=training.max_new_tokens(), temperature=temperature, seed=FLAGS.seed
        )
        drafter = drafters.from_model(draft, _NUM_DRAFT.value)
        requests = arms_lib.requests(target, drafter, texts, batch_size=50, config=config, truncate=True)
        label = f"decoding the test split at temperature {temperature:g}"
        total = arms_lib.decode_all(requests, len(texts), label, console).stats.total()
        row[f"alpha_t{temperature:g}"] = float(total.alpha[0])
        row[f"tau_t{temperature:g}"] = float(total.tau[0])
    return row


# ---- the run


def train(
    console: Console, target: Model, draft: Model, saved: checkpoints.Checkpoints
) -> tuple[dict[str, Any], dict[str, list[dict[str, float]]], dict[str, Any]]:
    """Trains all arms; returns each arm's best params by validation, its reports, and the best value."""
    names = _ARMS.value
    pairs = training.tokenized(FLAGS.splits[0], FLAGS.num_sequences, target.tokenizer)
    generated = generated_pairs(console, target, draft, pairs, "train", 1.0)
    evaluate = make_evaluate(console, target, draft, "validation", FLAGS.splits[1], FLAGS.num_held_out)
    optimization = training.optimization(decay="cosine")
    like = abstract_state(draft.params, optimization)
    run = training.run_identity(
        target=_TARGET.value,
        target_fingerprint=heads_io.fingerprint(target.params),
        draft=_DRAFT.value,
        draft_fingerprint=heads_io.fingerprint(draft.params),
        arms=names,
        num_pairs=len(pairs),
        num_held_out=FLAGS.num_held_out,
    )
    arms = Arms({arm: init_state(draft.params, optimization, seed=FLAGS.seed) for arm in names})
    history: dict[str, list[dict[str, float]]] = {arm: [] for arm in names}
    best: dict[str, Any] = {}
    kept = {arm: jax.device_get(draft.params) for arm in names}
    shapes = {"arms": Arms(dict.fromkeys(names, like)), "kept": dict.fromkeys(names, like.params)}
    found = resuming.restored(saved, shapes, run)
    if found is not None:
        arms, kept = found.state["arms"], found.state["kept"]
        history, best = found.note["history"], found.note["best"]
        console.print(f"resumed at step {int(arms.step)} from {saved.directory}", soft_wrap=True)

    def report(arms: Arms, now: loop.Progress) -> bool:
        console.print(
            f"step {now.step}/{FLAGS.num_steps}  {now.tokens_per_s:.0f} tokens/s per arm", soft_wrap=True
        )
        for arm, state in arms.states.items():
            found = evaluate(state.params)
            history[arm].append({"step": now.step, **found})
            shown = "  ".join(f"{k} {v:.4f}" for k, v in found.items())
            console.print(f"  {arm:24s}{shown}", soft_wrap=True)
            updated = loop.Best(**best[arm]).update(now.step, sum(found.values()))
            if updated.step == now.step:
                kept[arm] = jax.device_get(state.params)
            best[arm] = dataclasses.asdict(updated)
        saved.save(now.step, {"arms": arms, "kept": kept}, {"history": history, "best": best, "run": run})
        return True

    if not best:
        before = evaluate(draft.params)
        console.print("before distillation: " + "  ".join(f"{k} {v:.4f}" for k, v in before.items()))
        history = {arm: [{"step": 0, **before}] for arm in names}
        first = loop.Best(larger_is_better=True, step=0, value=sum(before.values()))
        best = dict.fromkeys(names, dataclasses.asdict(first))
    step = make_step(target, draft, optimization, like)
    loop.run(
        arms, step, batches(pairs, generated, int(arms.step)), FLAGS.num_steps, FLAGS.report_every, report
    )
    saved.wait()
    return kept, history, best


def compare(console: Console, target: Model, draft: Model, kept: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the test-split rows of each arm's best step, and of the draft before distillation."""
    texts = [source for source, _ in training.pairs(FLAGS.splits[2], _NUM_TEST.value)]
    evaluate = make_evaluate(console, target, draft, "test", FLAGS.splits[2], _NUM_TEST.value)
    rows = []
    for arm, params in {"before": draft.params, **{arm: kept[arm] for arm in _ARMS.value}}.items():
        console.print(f"evaluating on the test split: {arm}")
        network = draft.network.replace(params=jax.tree.map(jnp.asarray, params))
        found = evaluate(network.params)
        model = dataclasses.replace(draft, network=network)
        rows.append({"arm": arm, **found, **measured(console, target, model, texts)})
    control = next((row for row in rows if row["arm"].startswith("likelihood")), rows[0])
    for row in rows:
        for name in ("expected_alpha", "alpha_t0"):
            row[f"{name}_over_before"] = row[name] / rows[0][name]
            row[f"{name}_over_control"] = row[name] / control[name]
    return rows


def plot(history: dict[str, list[dict[str, float]]]) -> Any:
    """Returns a figure: expected alpha and greedy agreement (validation) over steps, one line per arm."""
    figure, axes = results.subplots(1, 2, figsize=(11, 5), sharex=True)
    names = {"expected_alpha": "expected alpha, temperature 1", "greedy_agreement": "greedy agreement"}
    for axis, (name, title) in zip(axes, names.items(), strict=True):
        for arm, reports in history.items():
            style = "--" if arm.startswith("likelihood") else "-"
            axis.plot([r["step"] for r in reports], [r[name] for r in reports], style, label=arm, marker=".")
        axis.set(title=f"{title} (validation)", xlabel="steps")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def main(console: Console) -> None:
    for arm in _ARMS.value:
        parse(arm)
    saved = checkpoints.Checkpoints(pathlib.Path(FLAGS.output) / "checkpoints")
    with console.status("loading"):
        target, draft = (specjax.load(name, "float32") for name in (_TARGET.value, _DRAFT.value))
    check_vocabularies(target.network.vocabulary, draft.network.vocabulary)
    kept, history, best = train(console, target, draft, saved)
    rows = compare(console, target, draft, kept)
    results.show_lines(console, f"drafts on {FLAGS.splits[2]}", rows)
    results.save(console, FLAGS.output, "distill", rows, lambda: plot(history))
    saved.close()
    if FLAGS.export:
        chosen = max(kept, key=lambda arm: best[arm]["value"])
        convert.save(FLAGS.export, draft.config, kept[chosen], draft.tokenizer, dtype="bfloat16")
        console.print(f"wrote {chosen}, the best arm by validation, to {FLAGS.export}", soft_wrap=True)


if __name__ == "__main__":
    start.run(main, required=["target", "draft", "output"])
