"""Training checkpoints (orbax): the whole training state, written beside a running step.

    DIRECTORY/400/state/         orbax's files
    DIRECTORY/400/note.json      what the caller adds: the position in the data, the best result
    DIRECTORY/400/manifest.json  size and SHA-256 of every file, shape and dtype of every array

A checkpoint is complete or absent: all of it is written below `.partial-400`, the manifest last,
and then the folder is renamed. The manifest has checksums because orbax loads a flipped byte silently.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from orbax.checkpoint import v1 as ocp

FORMAT = "specjax training checkpoint 1"
MANIFEST, NOTE, STATE, PARTIAL = "manifest.json", "note.json", "state", ".partial-"


class Restored(NamedTuple):
    """A checkpoint read back: the state, and its note."""

    state: Any
    note: Any


class Checkpoints:
    """The checkpoints of one run in one process: the newest `num_kept`, and those that `save` is to keep.

    Args:
      directory: of all checkpoints; made absolute, created if missing.

    Raises:
      OSError: `directory` is not writable.
    """

    def __init__(self, directory: str | os.PathLike[str], num_kept: int = 2):
        self.directory = pathlib.Path(directory).expanduser().absolute()
        self._num_kept = num_kept
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "checkpoints")
        self._writing: concurrent.futures.Future[None] | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.directory).close()
        except OSError as error:
            raise OSError(
                f"cannot write checkpoints to {self.directory} ({error}): choose a directory that is writable"
            ) from error

    @property
    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, ascending; one being written is not among them."""
        return sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdecimal() and p.is_dir())

    @property
    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint, or None."""
        return max(self.steps, default=None)

    def save(self, step: int, state: Any, note: Any = None, keep: Iterable[int] = ()) -> None:
        """Starts writing in the background; an existing step is left unchanged.

        Waits for the previous write. The arrays are copied before this returns, so they may be donated.

        Args:
          state: a pytree of arrays.
          note: JSON that may contain `bytes`, such as the position in the data.
          keep: steps to keep besides the newest.

        Raises:
          The error of the previous write if it failed, such as an OSError.
        """
        self.wait()
        if step in self.steps:
            return
        for left_over in self.directory.glob(f"{PARTIAL}*"):
            shutil.rmtree(left_over)
        partial = self.directory / f"{PARTIAL}{step}"
        partial.mkdir()
        (partial / NOTE).write_text(json.dumps(note, default=_encode_bytes), encoding="utf-8")
        response = ocp.save_async(partial / STATE, state)
        self._writing = self._executor.submit(self._finish, step, _leaves(state), response, {*keep})

    def _finish(self, step: int, leaves: dict[str, str], response: Any, keep: set[int]) -> None:
        """Completes a save in the background: writes the manifest, renames, deletes old checkpoints."""
        response.result()
        partial = self.directory / f"{PARTIAL}{step}"
        write_manifest(partial, step, leaves)
        commit(partial, self.directory / str(step))
        for old in {*self.steps[: -self._num_kept]} - keep:
            away = self.directory / f"{PARTIAL}{old}"  # an interrupted deletion leaves no partial step
            os.rename(self.directory / str(old), away)
            shutil.rmtree(away)

    def restore(self, like: Any, step: int | None = None) -> Restored:
        """Reads and verifies one checkpoint; returns it in the structure, types and shardings of `like`.

        Args:
          like: arrays or `jax.ShapeDtypeStruct`s with shardings, which may differ from those saved.
          step: None: the newest.

        Raises:
          ValueError: it is missing, damaged, not written by this class, or its arrays differ from those
            of `like`; the message has the file and the remedy.
        """
        self.wait()
        step = self.latest_step if step is None else step
        if step not in self.steps:
            raise ValueError(f"{self.directory} has no checkpoint of step {step}; it has {self.steps}")
        folder = self.directory / str(step)
        earlier = [other for other in self.steps if other < step]
        remedy = f"remove {folder} to " + (f"resume from step {earlier[-1]}" if earlier else "start anew")
        _check_leaves(folder, read_manifest(folder, remedy), _leaves(like))
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        note = json.loads((folder / NOTE).read_text("utf-8"), object_hook=_decode_bytes)
        return Restored(ocp.load(folder / STATE, abstract), note)

    def wait(self) -> None:
        """Waits for the write in flight, and raises its error if it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Waits as `wait` does; `save` is invalid afterwards."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()


def write_manifest(folder: pathlib.Path, step: int, leaves: dict[str, str]) -> None:
    """Writes size and SHA-256 of every file below `folder`, and dtype and shape of every array."""
    files = {str(p.relative_to(folder)): _digest(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    content = {"format": FORMAT, "step": step, "files": files, "leaves": leaves}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1), encoding="utf-8")


def commit(partial: pathlib.Path, final: pathlib.Path) -> None:
    """Makes a checkpoint complete by an atomic rename."""
    os.rename(partial, final)


def read_manifest(folder: pathlib.Path, remedy: str) -> dict[str, Any]:
    """Returns the manifest after verifying every file against it.

    Raises:
      ValueError: a file is missing or differs in size or content, or the manifest is invalid; the
        message ends with `remedy`.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} was not written by this program, {MANIFEST} is missing: {remedy}")
    try:
        manifest = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): {remedy}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is not of the format {FORMAT!r}: {remedy}")
    if manifest.get("step") != int(folder.name):
        raise ValueError(f"{path} must state step {folder.name}, got {manifest.get('step')}: {remedy}")
    for name, written in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{file} is missing: {remedy}")
        found = _digest(file)
        if found[0] != written[0]:
            raise ValueError(f"{file} has {found[0]} bytes, {written[0]} were written: {remedy}")
        if found != written:
            raise ValueError(f"{file} was changed after it was written (SHA-256 differs): {remedy}")
    return manifest


def _check_leaves(folder: pathlib.Path, manifest: dict[str, Any], expected: dict[str, str]) -> None:
    held = manifest["leaves"]
    for name in sorted(held.keys() | expected.keys()):
        if held.get(name) != expected.get(name):
            raise ValueError(
                f"{folder} holds {held.get(name, 'nothing')} as {name}, not {expected.get(name, 'nothing')}: "
                "train with the model and the optimizer that wrote it, or choose another directory"
            )


def _leaves(state: Any) -> dict[str, str]:
    """Returns the dtype and shape of every array, keyed by its path."""
    paths_and_leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in paths_and_leaves}


def _digest(path: pathlib.Path) -> list[Any]:
    """Returns the size in bytes and the SHA-256 of a file."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return [path.stat().st_size, digest]


def _encode_bytes(value: Any) -> dict[str, str]:
    if not isinstance(value, bytes):
        raise TypeError(f"`note` must hold JSON and bytes, got {value!r}")
    return {"bytes in hex": value.hex()}


def _decode_bytes(value: dict[str, Any]) -> Any:
    return bytes.fromhex(value["bytes in hex"]) if value.keys() == {"bytes in hex"} else value
