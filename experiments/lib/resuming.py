"""Resuming of interrupted runs: a target's outputs in a file, and checkpoints."""

import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from experiments.lib import progress, results
from specjax import data
from specjax.loading import Model
from specjax.models import heads_io
from specjax.training import distillation
from specjax.training.checkpoints import Checkpoints, Restored


def generated(
    console: Console, target: Model, pairs: Sequence[data.Pair], label: str, **options: Any
) -> list[data.Pair]:
    """Returns the pairs with the target's outputs in place of their targets, which are not read.

    Args:
      console: where to show progress.
      target: the model that generates.
      pairs: the sources.
      label: label of the progress.
      options: other options of `distillation.generate_targets`.
    """
    with progress.tokens(len(pairs), label, console) as report:
        return distillation.generate_targets(target.network, pairs, on_progress=report, **options)


def outputs(
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
    """Returns the result of `generated`, from a file if it has these pairs, this target and these options.

    Args:
      console, target, pairs: as for `generated`.
      target_name: the name that the target was loaded from.
      path: path of a JSON file, complete or missing.
      temperature, seed, max_new_tokens: options that the outputs depend on.
      options: other options of `generated`. A drafter keeps the distribution, and at temperature 0 the ids.
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


def restored(saved: Checkpoints, like: Any, run: Mapping[str, Any]) -> Restored | None:
    """Returns the newest checkpoint; None without one.

    Args:
      saved: the checkpoints of a run, whose notes hold its settings as "run".
      like: structure and types of the state; see `Checkpoints.restore`.
      run: the settings that a resumed run must share with the interrupted one.

    Raises:
      ValueError: as `Checkpoints.restore`; or a setting differs.
    """
    if saved.latest_step is None:
        return None
    found = saved.restore(like)
    before = found.note.get("run", {})
    for name, value in run.items():
        was = before.get(name, "another version of this script")
        if was != value:
            raise ValueError(
                f"{name}={value}, but {saved.directory} was made with {was}; resume with that, or give "
                "another --output"
            )
    return found
