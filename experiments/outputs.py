"""What a target says to the sources of a task: made once, kept in a file."""

import hashlib
import json
import pathlib
from collections.abc import Sequence

from rich.console import Console

from experiments import progress, results, tasks
from specjax import data
from specjax.drafters import BoundDrafter
from specjax.loading import Model
from specjax.training import distillation


def said(
    console: Console, target: Model, target_name: str, pairs: Sequence[data.Pair], path: pathlib.Path, *,
    temperature: float, seed: int, drafter: BoundDrafter | None = None,
) -> list[data.Pair]:  # fmt: skip
    """The pairs with the target's outputs in place of their targets; those in the file, if it is of them.

    Args:
      console: shows progress.
      target, target_name: the model, and what it was loaded from.
      pairs: their targets are not read.
      path: of a JSON file, written whole or not at all.
      temperature, seed: of the outputs.
      drafter: changes nothing but the time.
    """
    sources = hashlib.sha256(json.dumps([pair.source for pair in pairs]).encode()).hexdigest()
    limit = tasks.shapes()[-1][1]
    key = {"target": target_name, "temperature": temperature, "seed": seed, "sources": sources}
    key["max_new_tokens"] = limit
    if path.exists():
        document = json.loads(path.read_text())
        if document["key"] == key:
            return [data.Pair(p.source, ids) for p, ids in zip(pairs, document["ids"], strict=True)]
    label = f"the target's outputs, {path.stem}"
    with progress.tokens(len(pairs), label, console) as report:
        made = distillation.generate_targets(
            target.network, target.params, pairs, temperature=temperature, seed=seed, max_new_tokens=limit,
            num_ids=target.num_ids, drafter=drafter, on_progress=report,
        )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(path, json.dumps({"key": key, "ids": [pair.target for pair in made]}))
    return made
