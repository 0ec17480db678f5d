"""The same checkpoint and sentences in other libraries, side by side (extra `parity`).

  python -m experiments.peers --flagfile=configs/peers.flags

Greedy, batch 1, end to end (encoder included, text handling excluded), the same number of
threads; all arms take turns sentence set by sentence set, and the tokens are compared.
"""

import functools
import os
from collections.abc import Callable

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

import jax
import numpy as np
from absl import app, flags, logging
from rich.console import Console

import specjax
from experiments import arms, measure, progress, results
from specjax import data, decode

_TARGET = flags.DEFINE_string("target", None, "Target: a Hugging Face directory.")
_DRAFT = flags.DEFINE_string("draft", None, "Draft model, the same way.")
_INPUT = flags.DEFINE_string("input", "configs/demo.txt", "File with one source a line.")
_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", None, "Only the first so many sources.")
_NUM_DRAFT = flags.DEFINE_integer("num_draft", 5, "K, drafted tokens a round.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Limit of a row.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed turns of each arm.")
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json and table.md.")

Arm = Callable[[], list[list[int]]]


def specjax_arm(batches: list[decode.Prepared]) -> Arm:
    """All sentences through one of our programs; ids of each."""

    def run() -> list[list[int]]:
        done = [jax.device_get(decode.jitted_generate(*request)) for request in batches]
        return [g.tokens[0, : g.length[0]].tolist() for g in done]

    return run


def torch_arm(directory: str, sources: list[np.ndarray], max_new_tokens: int) -> Arm:
    """All sentences through transformers' `generate` in torch, with its cache."""
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = transformers.T5ForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    inputs = [torch.tensor(ids)[None] for ids in sources]

    def generate(ids):
        # Its own cache has one slot per *encoder* layer (transformers 5.24): too few for this target.
        cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
        return model.generate(
            ids, max_new_tokens=max_new_tokens, do_sample=False, use_cache=True, cache=cache
        )

    def run() -> list[list[int]]:
        with torch.inference_mode():
            return [generate(ids)[0, 1:].tolist() for ids in inputs]

    return run


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    console = Console()
    with console.status("loading"):
        target, draft = specjax.load(_TARGET.value), specjax.load(_DRAFT.value)
    sources = [line for line in data.read_lines(_INPUT.value) if line.strip()][: _NUM_EXAMPLES.value]
    common = dict(batch_size=1, sampling=None, max_new_tokens=_MAX_NEW_TOKENS.value, seed=0)
    drafter = specjax.drafters.from_model(draft, _NUM_DRAFT.value)
    plain = arms.requests(target, None, sources, **common)
    speculative = arms.requests(target, drafter, sources, **common)
    unpadded = [np.asarray(r.inputs["source_ids"])[np.asarray(r.inputs["source_mask"])] for r in plain]
    runs: dict[str, Arm] = {
        "specjax, target alone": specjax_arm(plain),
        f"specjax, speculative, K = {_NUM_DRAFT.value}": specjax_arm(speculative),
        "transformers (torch) generate": torch_arm(_TARGET.value, unpadded, _MAX_NEW_TOKENS.value),
    }
    tokens = {}
    for name, run in runs.items():
        with console.status(f"warming up: {name}"):
            tokens[name] = run()
    reference = tokens["specjax, target alone"]
    count = sum(map(len, reference))
    timed = {name: functools.partial(measure.seconds, run) for name, run in runs.items()}
    turns = list(
        progress.track(measure.alternate(timed, _REPEATS.value), _REPEATS.value, "timing in turns", console)
    )
    rows = []
    for name in runs:
        same = sum(a == b for a, b in zip(tokens[name], reference, strict=True))
        ratios = measure.Spread.of([turn[name] / turn["specjax, target alone"] for turn in turns])
        rows.append(
            {
                "arm": name,
                "ms_per_token": str(measure.Spread.of([1e3 * turn[name] / count for turn in turns])),
                "time_over_specjax_alone": str(ratios),
                "same_tokens": f"{same} of {len(sources)}",
            }
        )
    results.show(console, f"greedy, batch 1, {len(sources)} sentences, {results.hardware()}", rows)
    if _OUTPUT.value:
        results.write(_OUTPUT.value, "peers", rows)


if __name__ == "__main__":
    flags.mark_flags_as_required(["target", "draft"])
    app.run(main)
