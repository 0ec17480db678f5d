"""Converts a checkpoint of pytorch_model.bin, whole or in shards, into safetensors, which specjax reads.

    python scripts/convert_checkpoint.py --input=DIRECTORY --output=DIRECTORY
    python scripts/convert_checkpoint.py --input=google-t5/t5-11b --output=DIRECTORY --dtype=bfloat16

Streams: tensors are read from the disk one by one and written in shards of at most --shard_gb, so that 11 B
weights in float32 (45 GB) take memory for a shard. Files that PyTorch wrote before version 1.6 cannot be read
that way and are loaded whole. Needs torch (the extra `parity`). Tokenizer and configs are copied as they are.
"""

import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from absl import app, flags

_INPUT = flags.DEFINE_string("input", None, "Directory or hub id with pytorch_model.bin.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Directory to write; it must not exist.", required=True)
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16", "float16"], "Of the weights; default: as they are."
)
_SHARD = flags.DEFINE_float("shard_gb", 4.0, "Largest shard, in 10^9 bytes.", lower_bound=1e-6)

WHOLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
COPIED = ("config.json", "generation_config.json", "spiece.model", "tokenizer.json", "tokenizer_config.json")
COPIED += (
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "sentencepiece.bpe.model",
)
EMBEDDING, HEAD = "shared.weight", "lm_head.weight"
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# A table that T5 v1.0 files hold and no T5 reads.
DROPPED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)


def located(name: str) -> str | None:
    """Returns the path of a file of --input, downloaded if need be; None: it has none."""
    from transformers.utils.hub import cached_file

    return cached_file(_INPUT.value, name, _raise_exceptions_for_missing_entries=False)


def weight_files() -> list[str]:
    """Returns the paths of the weights, in order.

    Raises:
      FileNotFoundError: there are none.
    """
    index = located(INDEX)
    names = (
        [WHOLE]
        if index is None
        else sorted(set(json.loads(pathlib.Path(index).read_text())["weight_map"].values()))
    )
    found = [located(name) for name in names]
    missing = [name for name, path in zip(names, found, strict=True) if path is None]
    if missing:
        raise FileNotFoundError(
            f"--input={_INPUT.value}: no {', '.join(missing)}; give a directory that has them"
        )
    return [path for path in found if path is not None]


def opened(path: str) -> dict[str, Any]:
    """Returns the tensors of one file by name, each read from the disk when it is used."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        gigabytes = os.path.getsize(path) / 1e9
        print(f"{path} was written by an old PyTorch: it is loaded whole ({gigabytes:.1f} GB)")
        return torch.load(path, map_location="cpu", weights_only=True)


def tensors(paths: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields names and tensors of all files, without copies of the embedding."""
    import torch

    files = [opened(path) for path in paths]
    embedding = next((file[EMBEDDING] for file in files if EMBEDDING in file), None)
    for file in files:
        for name in sorted(file):
            tensor = file[name]
            is_copy = name in COPIES or (name == HEAD and embedding is not None and same(tensor, embedding))
            if name in DROPPED or (is_copy and embedding is not None):
                continue
            if name in COPIES:  # the only one there is
                embedding, name = tensor, EMBEDDING
            yield name, tensor.to(getattr(torch, _DTYPE.value) if _DTYPE.value else tensor.dtype).clone()


def same(one: Any, other: Any) -> bool:
    """Returns whether two tensors are one in memory."""
    return one.data_ptr() == other.data_ptr()


def write_shards(folder: pathlib.Path) -> None:
    """Writes the weights into `folder`, and an index if there are several shards."""
    from safetensors.torch import save_file

    shards: list[dict[str, str]] = []  # name of a tensor -> shard, by shard
    pending: dict[str, Any] = {}

    def flush() -> None:
        if pending:
            save_file(pending, folder / f"{len(shards)}.part", metadata={"format": "pt"})
            shards.append(dict.fromkeys(pending, ""))
            print(f"shard {len(shards)}: {len(pending)} tensors")
            pending.clear()

    size = 0
    for name, tensor in tensors(weight_files()):
        if size + tensor.nbytes > 1e9 * _SHARD.value:
            flush()
            size = 0
        pending[name], size = tensor.contiguous(), size + tensor.nbytes
    flush()
    if len(shards) == 1:
        os.replace(folder / "0.part", folder / "model.safetensors")
        return
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / f"{i}.part", folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def main(_: list[str]) -> None:
    output = pathlib.Path(_OUTPUT.value)
    if output.exists():
        raise app.UsageError(f"--output={output} exists: give a directory that does not")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        folder = pathlib.Path(scratch) / "whole"
        folder.mkdir()
        write_shards(folder)
        for name in COPIED:
            path = located(name)
            if path is not None:
                shutil.copy(path, folder / name)
        os.replace(folder, output)
    print(f"wrote {output}")


if __name__ == "__main__":
    app.run(main)
