"""Converts a checkpoint from pytorch_model.bin, in one file or in shards, to safetensors.

    python -m specjax.convert_checkpoint --input=DIRECTORY --output=DIRECTORY
    python -m specjax.convert_checkpoint --input=google-t5/t5-11b --output=DIRECTORY --dtype=bfloat16

Tensors are read from disk one by one and written in shards of at most --shard_gb, so that 11 B weights in
float32 (45 GB) need memory for one shard only. Files written by PyTorch before version 1.6 do not allow that
and are loaded whole. Needs torch (`pip install torch`). Tokenizer and configs are copied.
"""

import argparse
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from specjax.hub import locate
from specjax.models.convert import ALIASES, DTYPES, EMBEDDING, HEAD, IGNORED, LEGACY

_CONFIGS = ("config.json", "generation_config.json")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_VOCABULARY = (
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
)


def convert_checkpoint(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    dtype: str | None = None,
    shard_gb: float = 4.0,
    report: Callable[[str], object] = lambda line: None,
) -> None:
    """Converts a checkpoint from pytorch_model.bin to safetensors, and copies its configs and tokenizer.

    Args:
      source: a local directory or a hub id.
      output: the directory to write, which must not exist; it appears only once it is complete.
      dtype: dtype of the weights; None: unchanged.
      shard_gb: the largest shard, in 10^9 bytes.
      report: called with a line of text for each step, such as `print`.

    Raises:
      ValueError: the weights are missing, `output` exists, or torch is missing.
    """
    name, output = os.path.expanduser(os.fspath(source)), pathlib.Path(output)
    if dtype not in (None, *DTYPES):
        raise ValueError(f"`dtype` must be None or one of {', '.join(DTYPES)}, got {dtype!r}")
    if output.exists():
        raise ValueError(f"`output` must be a new directory, got {output}, which exists; give another path")
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{LEGACY} is read by torch, which is missing: pip install torch") from error
    paths = _weight_files(name)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        folder = pathlib.Path(scratch) / "whole"
        folder.mkdir()
        _write_shards(folder, _tensors(paths, dtype, report), 1e9 * shard_gb, report)
        for file in (*_CONFIGS, *_SETTINGS, *_VOCABULARY):
            path = locate(name, file)
            if path is not None:
                shutil.copy(path, folder / file)
        os.replace(folder, output)


def _weight_files(source: str) -> list[str]:
    """Returns the paths of the weights, in order.

    Raises:
      ValueError: a file is missing.
    """
    index = locate(source, f"{LEGACY}.index.json")
    names = [LEGACY]
    if index is not None:
        names = sorted(set(json.loads(pathlib.Path(index).read_text("utf-8"))["weight_map"].values()))
    found = {name: locate(source, name) for name in names}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise ValueError(f"{source} has no {', '.join(missing)}; give a directory that has them")
    return [path for path in found.values() if path is not None]


def _opened(path: str, report: Callable[[str], object]) -> dict[str, Any]:
    """Returns the tensors of one file by name; each is read from disk when it is used."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        gigabytes = os.path.getsize(path) / 1e9
        report(f"{path} was written by an old PyTorch: it is loaded whole ({gigabytes:.1f} GB)")
        return torch.load(path, map_location="cpu", weights_only=True)


def _tensors(
    paths: list[str], dtype: str | None, report: Callable[[str], object]
) -> Iterator[tuple[str, Any]]:
    """Yields names and tensors of all files, except copies of the embedding."""
    import torch

    files = [_opened(path, report) for path in paths]
    embedding = next((file[EMBEDDING] for file in files if EMBEDDING in file), None)
    for file in files:
        for name in sorted(file):
            tensor = file[name]
            is_head = name == HEAD and embedding is not None and tensor.data_ptr() == embedding.data_ptr()
            if name in IGNORED or ((name in ALIASES or is_head) and embedding is not None):
                continue
            if name in ALIASES:  # the embedding itself is missing
                embedding, name = tensor, EMBEDDING
            yield name, tensor.to(getattr(torch, dtype) if dtype else tensor.dtype).clone()


def _write_shards(
    folder: pathlib.Path,
    tensors: Iterator[tuple[str, Any]],
    max_bytes: float,
    report: Callable[[str], object],
) -> None:
    """Writes the weights to `folder`, with an index if there are several shards."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []  # the names in each
    pending: dict[str, Any] = {}

    def flush() -> None:
        if pending:
            save_file(pending, folder / f"{len(shards)}.part", metadata={"format": "pt"})
            shards.append(list(pending))
            report(f"shard {len(shards)}: {len(pending)} tensors")
            pending.clear()

    size = 0
    for name, tensor in tensors:
        if size + tensor.nbytes > max_bytes:
            flush()
            size = 0
        pending[name], size = tensor.contiguous(), size + tensor.nbytes
    flush()
    if len(shards) == 1:
        os.replace(folder / "0.part", folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / f"{i}.part", folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def main() -> None:
    """Runs the command line."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "specjax.convert_checkpoint", None, summary, details, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--input", required=True, help=f"directory or hub id with {LEGACY}")
    parser.add_argument("--output", required=True, help="directory to write; it must not exist")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights; default: unchanged")
    parser.add_argument("--shard_gb", type=float, default=4.0, help="largest shard, in 10^9 bytes")
    given = parser.parse_args()
    try:
        convert_checkpoint(given.input, given.output, given.dtype, given.shard_gb, print)
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    print(f"wrote {given.output}")


if __name__ == "__main__":
    main()
