"""Datasets of tensorflow-datasets: reading one that is prepared, and preparing it.

Reading array_record files needs no TensorFlow. Preparing does, since tensorflow-datasets unpacks
archives with it; a folder that was prepared elsewhere may be copied.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import pathlib
import shutil
from collections.abc import Iterator, Sequence

from specjax.data.files import Example


@dataclasses.dataclass(frozen=True)
class Dataset:
    """One dataset of tensorflow-datasets.

    Attributes:
      name: with config and version, as in `wmt14_translate/de-en:1.0.0`.
      module: the module that registers it. By name alone it may not be found: an optional package
        that is missing stops the registration of all older datasets, without a word.
      needs: the packages without which it cannot be prepared.
    """

    name: str
    module: str
    needs: tuple[str, ...] = ("tensorflow",)

    def folder(self, data_dir: str | pathlib.Path) -> pathlib.Path:
        """Where tensorflow-datasets keeps it below `data_dir`."""
        return pathlib.Path(data_dir) / self.name.replace(":", "/")

    def is_prepared(self, data_dir: str | pathlib.Path) -> bool:
        return (self.folder(data_dir) / "dataset_info.json").exists()


def hide_gpus_from_tensorflow() -> None:
    """Keeps TensorFlow, where it is installed, from taking the memory of the GPUs that JAX uses."""
    try:
        import tensorflow
    except ImportError:
        return
    tensorflow.config.set_visible_devices([], "GPU")


def _tensorflow_datasets():
    """The package, GPUs hidden: the only place that imports it."""
    hide_gpus_from_tensorflow()
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise ImportError(
            f"this dataset is read by tensorflow-datasets, which cannot be imported ({error}): "
            "pip install tensorflow-datasets importlib_resources, or use local text files or JSON lines"
        ) from error
    return tensorflow_datasets


def read(dataset: Dataset, data_dir: str | pathlib.Path, split: str) -> Sequence[Example]:
    """A prepared split, read from disk as it is indexed; text fields are UTF-8 bytes.

    Args:
      split: as tensorflow-datasets writes it, such as `train` or `validation[:100]`.

    Raises:
      ImportError: tensorflow-datasets is missing; the remedy is named.
      ValueError: the folder was prepared in a format without random access, or has no such split.
    """
    folder = dataset.folder(data_dir)
    builder = _tensorflow_datasets().builder_from_directory(folder)
    try:
        return builder.as_data_source(split)
    except NotImplementedError as error:
        raise ValueError(
            f"{folder} holds {builder.info.file_format.value} files, which only TensorFlow reads: "
            f"prepare {dataset.name} in another data_dir, with download=True"
        ) from error


def prepare(dataset: Dataset, data_dir: str | pathlib.Path, alternative: str) -> None:
    """Downloads a dataset and writes it as array_record files, unless it is there already.

    tensorflow-datasets retries a download ten times with growing pauses, three minutes in all
    before it gives up where there is no network. What was downloaded completely stays in
    `data_dir/downloads` for the next try; what was not is removed.

    Args:
      alternative: a sentence for error messages: how else to get the data.

    Raises:
      ImportError: a package that preparing needs is missing; the remedy is named.
      RuntimeError: the download or the conversion failed; dataset, cause and alternative are named.
    """
    if dataset.is_prepared(data_dir):
        return
    missing = [package for package in dataset.needs if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(
            f"preparing {dataset.name} needs {' and '.join(missing)} (reading it does not): "
            f'pip install "specjax[prepare]", or copy the folder from a machine where it is prepared '
            f"to {dataset.folder(data_dir)}. {alternative}"
        )
    tfds = _tensorflow_datasets()
    importlib.import_module(dataset.module)
    downloads = pathlib.Path(data_dir) / "downloads"
    with _failure_explained(dataset, downloads, alternative):
        builder = tfds.builder(dataset.name, data_dir=data_dir, file_format="array_record")
        config = tfds.download.DownloadConfig(
            compute_stats=tfds.download.ComputeStatsMode.SKIP, try_download_gcs=False
        )
        builder.download_and_prepare(download_dir=downloads, download_config=config)


@contextlib.contextmanager
def _failure_explained(dataset: Dataset, downloads: pathlib.Path, alternative: str) -> Iterator[None]:
    """Removes what a failed download left, an interrupted one included, and says what happened."""
    try:
        yield
    except BaseException as error:
        num_pages = _remove_partial(downloads)
        if not isinstance(error, Exception):
            raise
        cause = " ".join(str(error).split()) or type(error).__name__
        # Google Drive answers with a page that asks for a confirmation, which tensorflow-datasets
        # parses with bs4, or with one that refuses, which it cannot parse.
        if num_pages or "bs4" in cause or "confirmation link" in cause:
            cause = f"the server sent a web page in place of the data, such as a quota notice ({cause})"
        raise RuntimeError(
            f"cannot prepare {dataset.name}: {cause}. Nothing unfinished was kept. {alternative}"
        ) from error


def _remove_partial(downloads: pathlib.Path) -> int:
    """Removes unfinished downloads and web pages that were saved as data; how many were pages."""
    unfinished = [*downloads.glob("*/*.tmp.*/"), *downloads.glob("extracted/incomplete*/")]
    finished = [path for path in downloads.glob("*/*") if path.is_file() and path.suffix != ".INFO"]
    inside = [path for folder in unfinished for path in folder.glob("*") if path.is_file()]
    pages = [path for path in [*finished, *inside] if _is_web_page(path)]
    for folder in unfinished:
        shutil.rmtree(folder, ignore_errors=True)
    for path in set(pages) & set(finished):
        path.unlink()
        path.with_suffix(path.suffix + ".INFO").unlink(missing_ok=True)
    return len(pages)


def _is_web_page(path: pathlib.Path) -> bool:
    with path.open("rb") as stream:
        start = stream.read(256).lstrip().lower()
    return start.startswith((b"<!doctype html", b"<html"))
