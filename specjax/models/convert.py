"""T5 checkpoints in Hugging Face's format, read and written without torch (names: `hf_names`)."""

import contextlib
import dataclasses
import json
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from specjax.models import t5
from specjax.models.hf_names import (
    ALIASES,
    EMBEDDING,
    HEAD,
    IDS,
    IGNORED,
    Tensor,
    config_from_hf,
    config_to_hf,
    tensor_names,
)
from specjax.writing import write_whole

DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS, INDEX, LEGACY = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


def _locate(source: str, name: str) -> str | None:
    """Path of one file of a local directory or of a hub repository, None when it has none such."""
    if os.path.isdir(source):
        path = os.path.join(source, name)
        return path if os.path.isfile(path) else None
    if os.path.isfile(source):
        raise ValueError(f"{source!r} is a file: give the directory that holds it and config.json")
    if source.startswith(("/", ".")) or source.count("/") > 1 or "\\" in source:
        raise ValueError(f"no directory {source!r}: give one that exists, or a hub id (google-t5/t5-small)")
    from transformers.utils import hub  # slow to import, and needed for hub ids only

    try:
        return hub.cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{source!r} is neither a local directory nor a model that could be fetched from the hub: {error}"
        ) from error


def _read_json(path: str) -> dict[str, Any]:
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): fetch or copy it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object: fetch or copy it again")
    return content


def _weight_files(source: str) -> list[str]:
    """Paths of the safetensors files: the one, or the shards that the index names."""
    path = _locate(source, WEIGHTS)
    if path is not None:
        return [path]
    index = _locate(source, INDEX)
    if index is None:
        legacy = any(_locate(source, name) for name in (LEGACY, f"{LEGACY}.index.json"))
        remedy = (
            f"only {LEGACY}: convert it with `python scripts/convert_checkpoint.py --input={source} "
            "--output=DIRECTORY` (it needs torch: pip install 'specjax[parity]')"
        )
        raise ValueError(f"{source} has {remedy if legacy else f'neither {WEIGHTS} nor {INDEX}'}")
    shards = sorted(set(_read_json(index).get("weight_map", {}).values()))
    paths = {name: _locate(source, name) for name in shards}
    absent = [name for name, path in paths.items() if path is None]
    if absent or not shards:
        raise ValueError(f"{index} names shards that are not there: {', '.join(absent) or '(none named)'}")
    return [path for path in paths.values() if path is not None]


class _Checkpoint:
    """The open files of a checkpoint; a tensor is read when it is asked for."""

    def __init__(self, paths: list[str], stack: contextlib.ExitStack):
        self._file_of: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            try:
                file = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
            except (safetensors.SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path} is truncated or corrupt ({error}): delete it, then fetch or copy it again"
                ) from error
            for name in file.keys():
                self._file_of[name] = file
                self.shapes[name] = tuple(file.get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        return self._file_of[name].get_tensor(name)

    def read_part(self, tensor: "Tensor", index: tuple[slice, ...]) -> np.ndarray:
        """The part `index` of a parameter; no other part of the file is read."""
        spans = [range(*s.indices(size)) for s, size in zip(index, tensor.shape, strict=True)]
        shape = [len(span) for span in spans]
        if tensor.kind == "same":
            return self._slice(tensor.name, spans)
        if len(spans) == 3:  # H and D are one axis of the file
            first = 1 if tensor.shape[0] == tensor.file_shape[1] else 0
            heads, width = spans[first], tensor.shape[first + 1]
            assert len(spans[first + 1]) == width  # no rule divides D
            spans[first : first + 2] = [range(heads.start * width, heads.stop * width)]
        return self._slice(tensor.name, spans[::-1]).T.reshape(shape)

    def _slice(self, name: str, spans: list[range]) -> np.ndarray:
        return self._file_of[name].get_slice(name)[tuple(slice(span.start, span.stop) for span in spans)]

    def same(self, name: str, other: str) -> bool:
        return self.shapes[name] == self.shapes[other] and np.array_equal(self.read(name), self.read(other))


def _check(checkpoint: _Checkpoint, config: t5.T5Config) -> None:
    """Raises one ValueError that names every tensor that does not fit."""
    shapes = checkpoint.shapes
    wanted = {tensor.name: tensor.file_shape for tensor in tensor_names(config)}
    accepted = {*wanted, *ALIASES, *IGNORED} | ({HEAD} if config.tied_head else set())
    missing = sorted(wanted.keys() - shapes.keys())
    left_over = sorted(shapes.keys() - accepted)
    problems = [f"missing: {', '.join(missing)}"] if missing else []
    problems += [f"left over: {', '.join(left_over)}"] if left_over else []
    for name in sorted(wanted.keys() & shapes.keys()):
        if shapes[name] != wanted[name]:
            problems.append(f"{name} has shape {shapes[name]}, the config says {wanted[name]}")
    for name in ALIASES:
        if name in shapes and EMBEDDING in shapes and not checkpoint.same(name, EMBEDDING):
            problems.append(f"{name} differs from {EMBEDDING}, whose copy it should be")
    if any(".wi_0." in name for name in left_over):
        problems.append('the weights have wi_0/wi_1: feed_forward_proj should be "gated-gelu" (v1.1)')
    if any(".wi_0." in name for name in missing) and any(".wi." in name for name in left_over):
        problems.append('the weights have wi, not wi_0/wi_1: feed_forward_proj should be "relu" (v1.0)')
    if problems:
        raise ValueError("the weights do not fit config.json: " + "; ".join(problems))


def _compute_dtype(dtype: str | None) -> str:
    on_cpu = jax.default_backend() == "cpu"
    if dtype is None:
        return "float32" if on_cpu else "bfloat16"
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown: one of {', '.join(DTYPES)}")
    if dtype == "float16" and on_cpu:
        warnings.warn("float16 on a CPU is slow and overflows: take float32 or bfloat16", stacklevel=3)
    return dtype


@contextlib.contextmanager
def _opened(source: str | os.PathLike[str], dtype: str) -> Iterator[tuple[t5.T5Config, _Checkpoint]]:
    """The config of a checkpoint and its open files, checked against each other."""
    source = os.path.expanduser(os.fspath(source))
    path = _locate(source, "config.json")
    if path is None:
        where = "" if os.path.isdir(source) else " here, nor on the hub, or the hub cannot be reached"
        raise ValueError(
            f"{source} has no config.json{where}: give a hub id, or a directory of a checkpoint in Hugging "
            "Face's format"
        )
    config = dataclasses.replace(config_from_hf(_read_json(path)), dtype=dtype)
    with contextlib.ExitStack() as stack:
        checkpoint = _Checkpoint(_weight_files(source), stack)
        own_head = HEAD in checkpoint.shapes and EMBEDDING in checkpoint.shapes
        config = dataclasses.replace(config, tied_head=not own_head or checkpoint.same(HEAD, EMBEDDING))
        _check(checkpoint, config)
        yield config, checkpoint


def _nest(leaves: Iterable[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """Nested dicts of (path, leaf) pairs."""
    tree: dict[str, Any] = {}
    for (*parents, last), leaf in leaves:
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def shapes(config: t5.T5Config) -> dict[str, Any]:
    """The params of such a network as `jax.ShapeDtypeStruct`s, in its compute dtype."""
    return _nest(
        (t.path, jax.ShapeDtypeStruct(t.shape, jnp.dtype(config.dtype))) for t in tensor_names(config)
    )


def read_config(source: str | os.PathLike[str], dtype: str | None = None) -> t5.T5Config:
    """The config that `load` gives, the weights left where they are."""
    with _opened(source, _compute_dtype(dtype)) as (config, _):
        return config


def load(
    source: str | os.PathLike[str], dtype: str | None = None, place: Callable[[Any], Any] | None = None
) -> tuple[t5.T5Config, dict[str, Any]]:
    """Reads a T5 checkpoint: config.json and model.safetensors, in one file or in shards.

    Args:
      source: a local directory or a hub id. A directory wins.
      dtype: of the computation and of the params; None: float32 on a CPU, else bfloat16.
      place: maps the shapes of the params to their shardings. Every tensor then goes straight to its
        devices, one after the other, and a process reads the parts of its own devices only.

    Returns:
      The config and the params, in the structure of `T5(config).init(...)["params"]`; without
      `place` as arrays on JAX's default device. Within `jax.default_device` they lie where that says.
    """
    with _opened(source, _compute_dtype(dtype)) as (config, checkpoint):
        tensors = list(tensor_names(config))
        if place is None:
            return config, _nest((t.path, _read(checkpoint, t, config.dtype)) for t in tensors)
        shardings = {
            tuple(key.key for key in path): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(place(shapes(config)))
        }
        return config, _nest(
            (t.path, _read_onto(checkpoint, t, config.dtype, shardings[t.path])) for t in tensors
        )


def _read(checkpoint: _Checkpoint, tensor: Tensor, dtype: str) -> jax.Array:
    """A whole parameter, on the default device."""
    array = checkpoint.read(tensor.name)
    array = (array.T if tensor.kind == "transposed" else array).reshape(tensor.shape)
    return jnp.asarray(np.ascontiguousarray(array, dtype=jnp.dtype(dtype)))


def _read_onto(
    checkpoint: _Checkpoint, tensor: Tensor, dtype: str, place: jax.sharding.Sharding
) -> jax.Array:
    """A parameter on the devices that `place` says; devices that hold the same part share one reading."""
    parts: dict[str, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        if str(index) not in parts:
            read = checkpoint.read_part(tensor, index)
            parts[str(index)] = np.ascontiguousarray(read, dtype=jnp.dtype(dtype))
        return parts[str(index)]

    return jax.make_array_from_callback(tensor.shape, place, part)


def _to_tensors(config: t5.T5Config, params: dict[str, Any], dtype: str) -> dict[str, np.ndarray]:
    """The tensors of the file, by name; raises one ValueError that names every param that does not fit."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    arrays = {tuple(str(getattr(key, "key", key)) for key in path): leaf for path, leaf in leaves}
    tensors = list(tensor_names(config))
    wanted = {tensor.path: tensor.shape for tensor in tensors}
    faults = {
        "missing": wanted.keys() - arrays.keys(),
        "left over": arrays.keys() - wanted.keys(),
        "of another shape": {p for p in wanted.keys() & arrays.keys() if wanted[p] != arrays[p].shape},
    }
    named = {what: ", ".join(sorted("/".join(path) for path in paths)) for what, paths in faults.items()}
    if any(named.values()):
        said = "; ".join(f"{what}: {names}" for what, names in named.items() if names)
        raise ValueError(f"params do not fit config: {said}")
    result = {}
    for tensor in tensors:
        array = np.asarray(arrays[tensor.path])
        array = array.reshape(tensor.file_shape[::-1]).T if tensor.kind == "transposed" else array
        result[tensor.name] = np.ascontiguousarray(array, dtype=jnp.dtype(dtype))
    if config.tied_head and not config.scale_logits:  # see config_to_hf
        result[HEAD] = result[EMBEDDING].copy()
    return result


def save(
    directory: str | os.PathLike[str],
    config: t5.T5Config,
    params: dict[str, Any],
    tokenizer: Any = None,
    dtype: str = "float32",
) -> None:
    """Writes a checkpoint that `load` and `transformers` (4 and 5) read as the same model.

    Files are written whole; config.json comes last, so a directory that has one is complete.

    Args:
      directory: created when missing; files of the same names are replaced.
      config, params: as `load` returns them.
      tokenizer: anything with `save_pretrained(directory)`, or None.
      dtype: of the tensors in the file.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown: one of {', '.join(DTYPES)}")
    tensors = _to_tensors(config, params, dtype)
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)

    def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    ids = {key: getattr(config, name) for name, key in IDS.items()}
    writers = {
        WEIGHTS: lambda path: safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"}),
        "generation_config.json": lambda path: write_json(path, ids),
        "config.json": lambda path: write_json(path, config_to_hf(config, dtype)),
    }
    if tokenizer is not None:
        tokenizer.save_pretrained(str(directory))
    write_whole({directory / name: write for name, write in writers.items()})
