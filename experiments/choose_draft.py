"""Predicts which draft models pay off for a target, before any is used.

  python -m experiments.choose_draft --flagfile=configs/choose_draft.flags

For each candidate this script measures the probability of acceptance along the target's own outputs (one
teacher-forced pass) and the cost of its steps on this machine. From both it predicts the speed-up at the best
K, at temperatures 0 and 1. --measure also times the best K, in turns with autoregressive decoding.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from rich.console import Console

import specjax
from experiments.lib import arms, inputs, measure, parse, results, resuming, start
from specjax import GenerationConfig, analysis, api, data, drafters, loading, sampling
from specjax.decode import Request
from specjax.loading import Model
from specjax.texts import MAX_SOURCE_LENGTH, check_vocabularies
from specjax.training import loop, losses
from specjax.types import Drafter

_TARGET = flags.DEFINE_string("target", None, "Target: a Hugging Face directory or hub id.")
_DRAFTS = flags.DEFINE_multi_string(
    "draft", [], "Draft model to consider, given like --target; may be repeated."
)
_INPUT = flags.DEFINE_string(
    "input", None, "Sources: a file of text lines, JSON lines, CSV or TSV; may be gzipped."
)
_PREFIX = flags.DEFINE_string("prefix", "", "Prefix of every source.")
_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", 100, "Number of sources to use.", lower_bound=1)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Maximum new tokens per row.", lower_bound=0)
_NUM_DRAFT = flags.DEFINE_list("num_draft", ["1", "2", "3", "4", "5", "6", "8"], "Values of K to consider.")
_TEMPERATURE = flags.DEFINE_list("temperature", ["0", "1"], "Temperatures; each has its own ranking.")
_DTYPE = parse.define_dtype()
_MEASURE = flags.DEFINE_integer("measure", 0, "Timed turns at the best K; 0 times nothing.", lower_bound=0)
_NUM_TIMED = flags.DEFINE_integer("num_timed", 32, "Number of sources per timed turn.", lower_bound=1)
_SEED = parse.define_seed()
_CLOSE = 0.95  # of the best predicted speed-up: predictions this close do not decide which K is best
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json and table.md.")


def lengths() -> list[int]:
    """Returns the values of --num_draft."""
    return parse.counts("num_draft", _NUM_DRAFT.value)


def build(
    target: Model, drafter: Drafter | None, sources: Sequence[str], temperature: float
) -> list[Request]:
    """Returns the requests of one arm, one per source."""
    config = GenerationConfig(max_new_tokens=_MAX_NEW_TOKENS.value, temperature=temperature, seed=_SEED.value)
    return arms.requests(target, drafter, sources, batch_size=1, config=config)


def own_outputs(
    console: Console, target: Model, sources: Sequence[str], temperature: float
) -> list[data.Pair]:
    """Returns source ids and the target's outputs."""
    source_ids, source_mask = api.encode_sources(target, sources)
    pairs = [data.Pair(row[mask].tolist(), []) for row, mask in zip(source_ids, source_mask, strict=True)]
    return resuming.generated(
        console,
        target,
        pairs,
        f"the target's outputs at temperature {temperature:g}",
        temperature=temperature,
        seed=_SEED.value,
        max_new_tokens=_MAX_NEW_TOKENS.value,
        batch_size=24,
    )


def acceptance_chances(
    target: Model, draft: Model, outputs: Sequence[data.Pair], temperature: float
) -> tuple[list[np.ndarray], float]:
    """Returns the probability of acceptance of each token of the target's outputs, and expected alpha.

    The probabilities are one array per output; expected alpha is the mean over positions of sum(min(p, q)).
    """
    num_ids, greedy = target.num_ids, sampling.is_greedy(temperature)

    @jax.jit
    def chances_of(params: tuple[Any, Any], batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits = [
            loop.teacher_forced_logits(model.module, values, batch)[..., :num_ids]
            / (1.0 if greedy else temperature)
            for model, values in zip((target, draft), params, strict=True)
        ]
        mean = losses.acceptance_chances(*logits)[1 if greedy else 0]
        return mean if greedy else losses.acceptance_of(*logits, batch["target_ids"]), mean

    found = []
    for pair in outputs:
        shape = tuple(
            data.bucket(len(ids), data.source_buckets(len(ids))) for ids in (pair.source, pair.target)
        )
        batch = dataclasses.asdict(data.make_batch([pair], shape))
        both = chances_of((target.params, draft.params), batch)
        found.append([np.asarray(x)[0, : len(pair.target)] for x in both])
    return [chances for chances, _ in found], float(np.concatenate([mean for _, mean in found]).mean())


def candidate(
    console: Console,
    target: Model,
    name: str,
    draft: Model,
    temperature: float,
    sources: Sequence[str],
    outputs: Sequence[data.Pair],
    verify: dict[int, float],
) -> dict[str, Any]:
    """Returns the row of one draft: the predicted speed-up at its best K."""
    with console.status(f"{name}: measuring acceptance along the target's outputs"):
        chances, expected_alpha = acceptance_chances(target, draft, outputs, temperature)
    # K c + o, the cost of a round besides the target call, is timed at both ends and interpolated linearly.
    ends = sorted({min(verify), max(verify)})
    beside = []
    for k in ends:
        request = build(target, drafters.from_model(draft, k), sources[:1], temperature)[0]
        costs = measure.round_costs(request, not sampling.is_greedy(temperature), console)
        beside.append(k * costs.c + costs.o)
    rest = {k: float(np.interp(k, ends, beside)) for k in verify}
    taus = {k: analysis.expected_tau(chances, k) for k in verify}
    speedups = {k: float(analysis.predicted_speedup(taus[k], k, 0.0, v, rest[k])) for k, v in verify.items()}
    best = max(speedups, key=lambda k: speedups[k])
    row = {"draft": name, "temperature": temperature}
    row |= {"million_params": measure.num_params(draft.params) / 1e6, "expected_alpha": expected_alpha}
    row |= {"c": costs.c, "overhead": rest[best] - best * costs.c, "num_draft": best}
    row |= {"verify_cost": verify[best], "tau": taus[best], "predicted_speedup": speedups[best]}
    row["predicted_by_num_draft"] = {str(k): speedups[k] for k in sorted(speedups)}
    return row | {"pays": "yes" if speedups[best] > 1 else "no"}


def memory_row(target: Model, name: str, draft: Model, num_source: int) -> dict[str, Any]:
    """Returns the memory of the pair at batch 1 in the target's dtype, and what sharing would save."""
    size, num_draft = jnp.dtype(target.config.dtype).itemsize, max(lengths())
    target_memory, draft_memory = (
        analysis.memory(
            model.config,
            num_params=measure.num_params(model.params),
            batch_size=1,
            num_source=num_source,
            num_slots=_MAX_NEW_TOKENS.value + num_draft + 2,
            num_new=num_new,
            bytes_per_number=size,
        )
        for model, num_new in ((target, num_draft + 1), (draft, 1))
    )
    encoder = measure.num_params({k: x for k, x in draft.params.items() if k.startswith("encoder")})
    saved = {"encoder": encoder, "embedding": draft.params["embedding"].size}
    same_width = draft.config.d_model == target.config.d_model
    mib = 2**20
    return {
        "draft": name,
        "target_mib": target_memory.total / mib,
        "draft_mib": draft_memory.total / mib,
        "caches_mib": sum(m.cache + m.cross for m in (target_memory, draft_memory)) / mib,
        "logits_mib": (target_memory.logits + draft_memory.logits) / mib,
    } | {
        f"shared_{part}_saves_mib": size * count / mib if same_width else "not possible: widths differ"
        for part, count in saved.items()
    }


def run_measured(
    console: Console, target: Model, draft: Model, row: dict[str, Any], sources: Sequence[str]
) -> dict[str, Any]:
    """Returns the measured speed-up at a row's K, timed in turns with autoregressive decoding."""
    timed = sources[: _NUM_TIMED.value]
    both = (
        build(target, drafter, timed, row["temperature"])
        for drafter in (None, drafters.from_model(draft, row["num_draft"]))
    )
    speedup = measure.time_arms(*both, len(timed), _MEASURE.value, console).speedup()
    return speedup.named("speedup") | {"measured_over_predicted": speedup.median / row["predicted_speedup"]}


def rank(
    console: Console, target: Model, candidates: dict[str, Model], sources: Sequence[str], temperature: float
) -> list[dict[str, Any]]:
    """Returns the rows of one temperature, best candidate first."""
    outputs = own_outputs(console, target, sources, temperature)
    with console.status("timing target calls on K + 1 tokens"):
        request = build(target, drafters.from_model(target, 1), sources[:1], temperature)[0]
        verify = measure.verify_costs(request, not sampling.is_greedy(temperature), lengths())
    rows = [
        candidate(console, target, name, draft, temperature, sources, outputs, verify)
        for name, draft in candidates.items()
    ]
    rows.sort(key=lambda row: -row["predicted_speedup"])
    if _MEASURE.value:
        rows = [row | run_measured(console, target, candidates[row["draft"]], row, sources) for row in rows]
    return rows


def main(console: Console) -> None:
    if not _DRAFTS.value:
        raise ValueError("`--draft` must be given; name at least one candidate")
    temperatures = parse.numbers("temperature", _TEMPERATURE.value)
    lengths()
    lines, texts = inputs.asked(_INPUT.value, _NUM_EXAMPLES.value)
    asked = [_PREFIX.value + text for text in texts]
    start.note_hub(console, [_TARGET.value, *_DRAFTS.value])
    token_counts = [len(ids) for ids in loading.load_tokenizer(_TARGET.value)(asked, verbose=False).input_ids]
    inputs.check_lengths(_INPUT.value, lines, token_counts, MAX_SOURCE_LENGTH, "shorten them")
    with console.status("loading"):
        target = specjax.load(_TARGET.value, _DTYPE.value)
        candidates = {name: specjax.load(name, _DTYPE.value) for name in _DRAFTS.value}
    for draft in candidates.values():
        check_vocabularies(target.network.vocabulary, draft.network.vocabulary)
    console.print(f"{len(asked)} lines, batch 1, K of {', '.join(_NUM_DRAFT.value)}")
    memory = [memory_row(target, name, draft, max(token_counts)) for name, draft in candidates.items()]
    results.show_lines(console, "memory at batch 1", memory)
    rows = []
    for temperature in temperatures:
        ranked = rank(console, target, candidates, asked, temperature)
        shown = [row | {"draft": pathlib.PurePath(row["draft"]).name} for row in ranked]
        shown = [{k: v for k, v in row.items() if k != "temperature"} for row in shown]
        results.show_lines(console, f"temperature {temperature:g}, best first", shown)
        best = ranked[0]
        if best["predicted_speedup"] <= 1:
            console.print("no candidate pays off here: decode autoregressively")
        else:
            close = [
                k for k, x in best["predicted_by_num_draft"].items() if x > _CLOSE * best["predicted_speedup"]
            ]
            console.print(
                "to measure the best candidate at each K that may be the best: "
                f"python -m experiments.generate --target={_TARGET.value} --draft={best['draft']} "
                f"--input={_INPUT.value} --num_draft={','.join(close)} --temperature={temperature:g}",
                soft_wrap=True,
            )
        rows += ranked
    results.save(console, _OUTPUT.value, "choose_draft", rows)


if __name__ == "__main__":
    start.run(main, required=["target", "input"])
