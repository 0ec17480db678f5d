"""LoRA adapters in PEFT's format, merged into the tensors of a checkpoint as these are read.

Sources: Hu et al. 2021 (arXiv 2106.09685), section 4.1; for `use_rslora` Kalajdzievski 2023 (arXiv
2312.03732).

Axes: O outputs and I inputs of a linear layer, as torch stores them; R rank.
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy

CONFIG, WEIGHTS, LEGACY = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"

# Tensor names have the prefix of the wrapped model; some versions of PEFT add the name of the adapter.
_LOW_RANK = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_WHOLE = re.compile(
    r"(?:base_model\.model\.)?(.+?)(?:\.base_layer|(?:\.modules_to_save)?(?:\.default)?)\.weight"
)

# Settings with which an adapter is more than a low-rank sum -> the reason, for the error message.
_OTHER_METHODS = {
    "use_dora": "DoRA scales the columns of the sum",
    "use_qalora": "QALoRA pools the inputs",
    "use_bdlora": "block-diagonal LoRA",
    "alora_invocation_tokens": "activated LoRA starts within the sequence",
    "layer_replication": "layers are repeated",
    "arrow_config": "Arrow selects an adapter per token",
    "monteclora_config": "MonteCLoRA samples its weights",
}
# Initialisations that subtract from the base weights, as PEFT does again when it loads the adapter.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class LowRank(NamedTuple):
    """A low-rank update `scale * b @ a` of a matrix.

    Attributes:
      a, b: `[R, I]` and `[O, R]` float32.
      scale: alpha / R, or alpha / sqrt(R) with `use_rslora`.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter: updates and replacements of the tensors of a checkpoint.

    Attributes:
      source: the directory or hub id that it was read from.
      changes: tensor name -> the update that is added.
      replaced: tensor name -> the tensor that replaces it before the update (PEFT's `modules_to_save`, and
        the embedding and the head, which it saves if the head is adapted or the vocabulary was resized).
    """

    source: str
    changes: Mapping[str, LowRank]
    replaced: Mapping[str, np.ndarray]

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors that it updates or replaces."""
        return frozenset((*self.changes, *self.replaced))

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises one ValueError that names every tensor that does not fit.

        Args:
          shapes: tensor name -> shape in the checkpoint.
        """
        found = [(name, (len(b), a.shape[1])) for name, (a, b, _) in self.changes.items()]
        found += [(name, tensor.shape) for name, tensor in self.replaced.items()]
        unknown = sorted(self.names - shapes.keys())
        problems = [f"the model has no {', '.join(unknown)}"] if unknown else []
        problems += [
            f"{name} must have the model's shape {shapes[name]}, got {shape}"
            for name, shape in sorted(found)
            if shape != shapes.get(name, shape)
        ]
        if problems:
            raise ValueError(f"the adapter {self.source} does not fit the model: {'; '.join(problems)}")

    def merged(self, name: str, part: np.ndarray, spans: Sequence[range]) -> np.ndarray:
        """Returns a part of a tensor with the adapter merged, in float32 if the adapter contains the tensor.

        Args:
          part: the part as the checkpoint has it.
          spans: the indices of the part, one range per axis.
        """
        index = tuple(slice(span.start, span.stop) for span in spans)
        part = self.replaced[name][index] if name in self.replaced else part
        if name not in self.changes:
            return part
        a, b, scale = self.changes[name]
        return part.astype(np.float32) + (b[index[0]] @ a[:, index[1]]) * np.float32(scale)


def read(source: str, config: Mapping[str, Any], weights: str | os.PathLike[str]) -> Adapter:
    """Reads an adapter; every tensor of the file is used exactly once.

    Args:
      source: its directory or hub id, for messages.
      config: the parsed adapter_config.json.
      weights: the path of adapter_model.safetensors.

    Raises:
      ValueError: it is not plain LoRA, it is damaged, or its tensors do not match its config.
    """
    _check_method(source, config)
    try:
        tensors = safetensors.numpy.load_file(weights)
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{weights} is truncated or corrupt ({error}): fetch or copy it again") from error
    replaced: dict[str, np.ndarray] = {}
    sides: dict[str, dict[str, np.ndarray]] = {}  # module -> "A", "B" -> matrix
    for key, tensor in tensors.items():
        low_rank, whole = _LOW_RANK.fullmatch(key), _WHOLE.fullmatch(key)
        if low_rank:
            module, side = low_rank.groups()
            place, name = sides.setdefault(module, {}), side
        else:
            place, name = replaced, f"{whole[1]}.weight" if whole else key
        if name in place:
            raise ValueError(f"{weights} has {key} under two names: write the adapter again with PEFT")
        place[name] = np.asarray(tensor, np.float32)
    changes = {f"{module}.weight": _low_rank(source, config, module, pair) for module, pair in sides.items()}
    if not tensors:
        raise ValueError(f"{weights} has no tensors: write the adapter again with PEFT")
    return Adapter(source, changes, replaced)


def _check_method(source: str, config: Mapping[str, Any]) -> None:
    """Raises a ValueError if merging takes more than the addition of a low-rank product."""
    kind, begin = config.get("peft_type", "LORA"), config.get("init_lora_weights")
    used = [f"{key} ({what})" for key, what in _OTHER_METHODS.items() if config.get(key)]
    if kind != "LORA":
        used = [f"peft_type {kind}"]
    elif isinstance(begin, str) and begin.lower().startswith(_CHANGES_BASE):
        used.append(f"init_lora_weights {begin} (it changes the base weights)")
    if used:
        raise ValueError(
            f"the adapter {source} has {', '.join(used)}, which is not supported: merge it with PEFT's "
            "`merge_and_unload` and load the merged checkpoint"
        )


def _low_rank(
    source: str, config: Mapping[str, Any], module: str, sides: Mapping[str, np.ndarray]
) -> LowRank:
    """Returns the update of one module's matrix.

    Raises:
      ValueError: A or B is missing, or their rank differs from the config's.
    """
    absent = sorted({"A", "B"} - sides.keys())
    if absent:
        raise ValueError(f"the adapter {source} lacks lora_{absent[0]} of {module}: copy it again")
    a, b = sides["A"], sides["B"]
    rank = _of_pattern(config.get("rank_pattern"), module, config.get("r", 8))
    alpha = _of_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
    if a.ndim != 2 or b.ndim != 2 or not len(a) == b.shape[1] == rank:
        raise ValueError(
            f"the adapter {source} has lora_A {a.shape} and lora_B {b.shape} of {module}, but {CONFIG} "
            f"states rank {rank}: copy both files again"
        )
    # `fan_in_fan_out` is for layers that store (in, out); a T5 has none, and PEFT ignores it here.
    return LowRank(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _of_pattern(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Returns the value of the first key that matches the end of a module's name, as PEFT does."""
    keys: Iterable[str] = pattern or {}
    found = next((key for key in keys if re.match(rf"(.*\.)?({key})$", module)), None)
    return default if pattern is None or found is None else pattern[found]
