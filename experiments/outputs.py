"""What a target says to the sources of a task: made once, kept in a file."""

import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from experiments import progress, results
from specjax import data
from specjax.loading import Model
from specjax.models import heads_io
from specjax.training import distillation


def generated(
    console: Console, target: Model, pairs: Sequence[data.Pair], label: str, **options: Any
) -> list[data.Pair]:
    """The pairs with the target's outputs in place of their targets.

    Args:
      console: shows progress, under `label`.
      target: the model.
      pairs: their targets are not read.
      options: the others of `distillation.generate_targets`.
    """
    with progress.tokens(len(pairs), label, console) as report:
        return distillation.generate_targets(
            target.network, target.params, pairs, num_ids=target.num_ids, on_progress=report, **options
        )


def said(
    console: Console,
    target: Model,
    target_name: str,
    pairs: Sequence[data.Pair],
    path: pathlib.Path,
    *,
    temperature: float,
    seed: int,
    max_new_tokens: int,
    **options: Any,
) -> list[data.Pair]:
    """As `generated`; those in the file, if it is of them, and of this target as it is now.

    Args:
      target_name: what the target was loaded from.
      path: of a JSON file, written whole or not at all.
      temperature, seed, max_new_tokens: of the outputs.
      options: the others; with a drafter the law stays, and at temperature 0 the ids.
    """
    sources = hashlib.sha256(json.dumps([pair.source for pair in pairs]).encode()).hexdigest()
    asked = {"temperature": temperature, "seed": seed, "max_new_tokens": max_new_tokens}
    key = {"target": target_name, "fingerprint": heads_io.fingerprint(target.params), "sources": sources}
    key |= asked
    if path.exists():
        document = json.loads(path.read_text())
        if document["key"] == key:
            return [data.Pair(p.source, ids) for p, ids in zip(pairs, document["ids"], strict=True)]
    made = generated(console, target, pairs, f"the target's outputs, {path.stem}", **asked, **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(path, json.dumps({"key": key, "ids": [pair.target for pair in made]}))
    return made
