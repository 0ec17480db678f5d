"""Distils drafts from a frozen target, several ways side by side, and says what each brings.

  python -m experiments.distill --flagfile=configs/distill_captions.flags --data_dir=DATA

Every arm is an objective and the sequences it is trained on; all take the same steps from the same
draft. `likelihood:data` is the control: training that goes on as before. Every `--report_every`
steps the expected alpha on validation sources is printed, checkpoints are written, and a run that
was stopped goes on from the newest. At the end each arm's best step (by validation) is judged on
the test split, and the best arm is exported.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from rich.console import Console

import specjax
from experiments import arms as arms_lib
from experiments import distill_arms, outputs, results, resuming, start, training_data
from experiments.distill_arms import Arms
from specjax import data
from specjax.loading import Model
from specjax.models import convert, heads_io
from specjax.sampling import Sampling
from specjax.texts import check_tokenizers
from specjax.training import checkpoints, distillation, loop, stopping
from specjax.training.optimization import Optimization
from specjax.training.state import abstract_state, init_state

_TARGET = flags.DEFINE_string("target", None, "Frozen target: a Hugging Face directory or hub id.")
_DRAFT = flags.DEFINE_string("draft", None, "The draft to start from, the same way.")
_SPLITS = flags.DEFINE_list("splits", ["train", "validation", "test"], "For training, choice, result.")
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
    "OBJECTIVE:SEQUENCES each; sequences are data, target (sampled before) or draft (on policy).",
)
_NUM_SEQUENCES = flags.DEFINE_integer("num_sequences", 16384, "Training sources.")
_NUM_HELD_OUT = flags.DEFINE_integer("num_held_out", 256, "Validation sources.")
_NUM_TEST = flags.DEFINE_integer("num_test", 1000, "Test sources.")
_STEPS = flags.DEFINE_integer("num_steps", 1000, "Steps of each arm.", lower_bound=1)
_RATE = flags.DEFINE_float("learning_rate", 5e-3, "Peak rate of Adafactor, relative to a parameter's size.")
_WARMUP = flags.DEFINE_integer(
    "warmup_steps", 50, "Steps of linear warm-up; then cosine to zero.", lower_bound=0
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Sequences a step.", lower_bound=1)
_NUM_DRAFT = flags.DEFINE_integer("num_draft", 5, "K of the measured alpha and tau.", lower_bound=1)
_REPORT = flags.DEFINE_integer("report_every", 100, "Steps between reports.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of everything drawn.", lower_bound=0)
_OUTPUT = flags.DEFINE_string("output", None, "Directory for checkpoints, results.json, table.md, plot.")
_EXPORT = flags.DEFINE_string("export", None, "Hugging Face directory for the best draft (bfloat16).")


@dataclasses.dataclass(frozen=True)
class Batch(data.Batch):
    """A batch of the data, and what the target says to the same sources."""

    generated_ids: np.ndarray
    generated_mask: np.ndarray


def batches(pairs: Sequence[data.Pair], generated: Sequence[data.Pair], start_step: int) -> Iterator[Batch]:
    """Endless batches of both, a function of the step; the longer target decides the shape."""
    shapes = training_data.shapes()
    longer = [max(both, key=lambda pair: len(pair.target)) for both in zip(pairs, generated, strict=True)]
    for rows in data.training_rows(longer, _BATCH_SIZE.value, shapes, _SEED.value, start_step):
        shape = data.shape_for([longer[i] for i in rows], shapes)
        own, other = (data.make_batch([kind[i] for i in rows], shape) for kind in (pairs, generated))
        yield Batch(
            **dataclasses.asdict(own), generated_ids=other.target_ids, generated_mask=other.target_mask
        )


def generated_pairs(
    console: Console, target: Model, draft: Model, pairs: Sequence[data.Pair], name: str, temperature: float
) -> list[data.Pair]:
    """What the target says to the sources of `pairs`; kept in a file, so that a resumed run reads it."""
    return outputs.said(
        console,
        target,
        _TARGET.value,
        pairs,
        pathlib.Path(_OUTPUT.value) / f"{name}.json",
        temperature=temperature,
        seed=_SEED.value,
        max_new_tokens=training_data.max_new_tokens(),
        drafter=specjax.drafters.from_model(draft, 3),
    )


def evaluation_batches(
    console: Console, target: Model, draft: Model, pairs: Sequence[data.Pair], name: str, temperature: float
) -> list[data.Batch]:
    said = generated_pairs(console, target, draft, pairs, f"{name}_t{temperature:g}", temperature)
    return data.evaluation_batches(said, 64, training_data.shapes())


def evaluate(
    target: Model, acceptance: Any, params: Any, sampled: list[data.Batch], greedy: list[data.Batch]
) -> dict[str, float]:
    """Chances of acceptance where the target goes: on its samples, and on its greedy outputs."""
    return {
        "expected_alpha": acceptance(target.params, params, sampled)[0],
        "greedy_agreement": acceptance(target.params, params, greedy)[1],
    }


def measured(console: Console, target: Model, draft: Model, texts: Sequence[str]) -> dict[str, float]:
    """alpha and tau of real decoding at temperature 0 and 1."""
    row = {}
    for temperature in (0.0, 1.0):
        requests = arms_lib.requests(
            target,
            specjax.drafters.from_model(draft, _NUM_DRAFT.value),
            texts,
            batch_size=50,
            sampling=Sampling(temperature=temperature),
            max_new_tokens=training_data.max_new_tokens(),
            seed=_SEED.value,
            truncate=True,
        )
        label = f"decoding the test split at temperature {temperature:g}"
        total = arms_lib.decode_all(requests, len(texts), label, console).stats.total()
        row |= {
            f"alpha_t{temperature:g}": float(total.alpha[0]),
            f"tau_t{temperature:g}": float(total.tau[0]),
        }
    return row


def plot(path: pathlib.Path, history: dict[str, list[dict[str, float]]]) -> None:
    """Expected alpha and greedy agreement on validation sources, over steps, a line an arm."""
    figure, axes = results.subplots(1, 2, figsize=(11, 5), sharex=True)
    names = {"expected_alpha": "expected alpha, temperature 1", "greedy_agreement": "greedy agreement"}
    for axis, (name, title) in zip(axes, names.items(), strict=True):
        for arm, reports in history.items():
            style = "--" if arm.startswith("likelihood") else "-"
            axis.plot([r["step"] for r in reports], [r[name] for r in reports], style, label=arm, marker=".")
        axis.set_title(f"{title} (validation)")
        axis.set_xlabel("steps")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    results.save_figure(figure, path)


def identity(target: Model, draft: Model, num_pairs: int) -> dict[str, Any]:
    """What a run that is resumed must share with the one that was stopped."""
    return {
        "target": _TARGET.value,
        "target_fingerprint": heads_io.fingerprint(target.params),
        "draft": _DRAFT.value,
        "draft_fingerprint": heads_io.fingerprint(draft.params),
        **training_data.fingerprint(),
        "splits": _SPLITS.value,
        "arms": _ARMS.value,
        "num_pairs": num_pairs,
        "num_held_out": _NUM_HELD_OUT.value,
        "batch_size": _BATCH_SIZE.value,
        "buckets": [list(shape) for shape in training_data.shapes()],
        "learning_rate": _RATE.value,
        "warmup_steps": _WARMUP.value,
        "num_steps": _STEPS.value,
        "seed": _SEED.value,
    }


def train(
    console: Console, target: Model, draft: Model, saved: checkpoints.Checkpoints, acceptance: Any
) -> tuple[dict[str, Any], dict[str, list[dict[str, float]]], dict[str, Any]]:
    """Runs all arms; returns each one's best params by validation, its reports, and how good the best was."""
    train_split, validation_split, _ = _SPLITS.value
    pairs = training_data.tokenize(training_data.read(train_split, _NUM_SEQUENCES.value), target.tokenizer)
    generated = generated_pairs(console, target, draft, pairs, "train_t1", 1.0)
    held_out = training_data.read(validation_split, _NUM_HELD_OUT.value)
    held_out = training_data.tokenize(held_out, target.tokenizer)
    sampled, greedy = (
        evaluation_batches(console, target, draft, held_out, "validation", temperature)
        for temperature in (1.0, 0.0)
    )
    optimization = Optimization("adafactor", _RATE.value, _WARMUP.value, _STEPS.value, "cosine")
    like, run = abstract_state(draft.params, optimization), identity(target, draft, len(pairs))
    arms = Arms({arm: init_state(draft.params, optimization, seed=_SEED.value) for arm in _ARMS.value})
    history: dict[str, list[dict[str, float]]] = {arm: [] for arm in _ARMS.value}
    best = {arm: dataclasses.asdict(stopping.Best(larger_is_better=True)) for arm in _ARMS.value}
    kept = {arm: jax.device_get(draft.params) for arm in _ARMS.value}
    shapes = {"arms": Arms(dict.fromkeys(_ARMS.value, like)), "kept": dict.fromkeys(_ARMS.value, like.params)}
    found = resuming.restored(saved, shapes, run)
    if found is not None:
        arms, kept = found.state["arms"], found.state["kept"]
        history, best = found.note["history"], found.note["best"]
        console.print(f"resumed at step {int(arms.step)} from {saved.directory}", soft_wrap=True)

    def report(arms: Arms, now: loop.Progress) -> bool:
        console.print(
            f"step {now.step}/{_STEPS.value}  {now.tokens_per_s:.0f} tokens/s an arm", soft_wrap=True
        )
        for arm, state in arms.states.items():
            found = evaluate(target, acceptance, state.params, sampled, greedy)
            history[arm].append({"step": now.step, **found})
            console.print(
                f"  {arm:24s}" + "  ".join(f"{k} {v:.4f}" for k, v in found.items()), soft_wrap=True
            )
            updated = stopping.Best(**best[arm]).update(now.step, sum(found.values()))
            if updated.step == now.step:
                kept[arm] = jax.device_get(state.params)
            best[arm] = dataclasses.asdict(updated)
        saved.save(now.step, {"arms": arms, "kept": kept}, {"history": history, "best": best, "run": run})
        return True

    if not history[_ARMS.value[0]]:
        start = evaluate(target, acceptance, draft.params, sampled, greedy)
        console.print("before: " + "  ".join(f"{k} {v:.4f}" for k, v in start.items()))
        history.update({arm: [{"step": 0, **start}] for arm in _ARMS.value})
        first = dataclasses.asdict(stopping.Best(True, 0, sum(start.values())))
        best.update(dict.fromkeys(_ARMS.value, first))
    step = distill_arms.make_step(
        target, draft, _ARMS.value, training_data.max_new_tokens(), optimization, like
    )
    loop.run(arms, step, batches(pairs, generated, int(arms.step)), _STEPS.value, _REPORT.value, report)
    saved.wait()
    return kept, history, best


def judge(
    console: Console, target: Model, draft: Model, kept: dict[str, Any], acceptance: Any
) -> list[dict[str, Any]]:
    """Every arm's best step, and the draft it all began with, on the test split."""
    test = training_data.read(_SPLITS.value[2], _NUM_TEST.value)
    pairs, texts = training_data.tokenize(test, target.tokenizer), [source for source, _ in test]
    sampled, greedy = (
        evaluation_batches(console, target, draft, pairs, "test", temperature) for temperature in (1.0, 0.0)
    )
    rows = []
    for arm, params in {"before": draft.params, **{arm: kept[arm] for arm in _ARMS.value}}.items():
        console.print(f"test: {arm}")
        model = dataclasses.replace(draft, params=jax.tree.map(jnp.asarray, params))
        found = evaluate(target, acceptance, model.params, sampled, greedy)
        rows.append({"arm": arm, **found, **measured(console, target, model, texts)})
    control = next((row for row in rows if row["arm"].startswith("likelihood")), rows[0])
    for row in rows:
        for name in ("expected_alpha", "alpha_t0"):
            row[f"{name}_over_before"] = row[name] / rows[0][name]
            row[f"{name}_over_control"] = row[name] / control[name]
    return rows


def main(argv: list[str]) -> None:
    del argv
    for arm in _ARMS.value:
        distill_arms.parse(arm)
    console = start.console()
    saved = checkpoints.Checkpoints(pathlib.Path(_OUTPUT.value) / "checkpoints")
    with console.status("loading"):
        target, draft = (specjax.load(name, "float32") for name in (_TARGET.value, _DRAFT.value))
    check_tokenizers(target.tokenizer, draft.tokenizer)
    acceptance = distillation.make_acceptance(target.module, draft.module, target.num_ids)
    kept, history, best = train(console, target, draft, saved, acceptance)
    output = pathlib.Path(_OUTPUT.value)
    plot(output / "distill.png", history)
    rows = judge(console, target, draft, kept, acceptance)
    results.show_lines(console, f"drafts on {_SPLITS.value[2]}", rows)
    results.write(output, "distill", rows)
    saved.close()
    if _EXPORT.value:
        chosen = max(kept, key=lambda arm: best[arm]["value"])
        convert.save(_EXPORT.value, draft.config, kept[chosen], draft.tokenizer, dtype="bfloat16")
        console.print(f"wrote {chosen}, the best on validation, to {_EXPORT.value}", soft_wrap=True)


if __name__ == "__main__":
    flags.mark_flags_as_required(["target", "draft", "output"])
    start.run(main)
