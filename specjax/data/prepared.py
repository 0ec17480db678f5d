"""Preparing and reading datasets of tensorflow-datasets.

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
      module: the module that registers it, imported explicitly: a missing optional package silently
        stops the registration of all older datasets.
      needs: the packages that preparing it requires.
    """

    name: str
    module: str
    needs: tuple[str, ...] = ("tensorflow",)

    def folder(self, data_dir: str | pathlib.Path) -> pathlib.Path:
        """Returns the folder of tensorflow-datasets for it, below `data_dir`."""
        return pathlib.Path(data_dir) / self.name.replace(":", "/")

    def is_prepared(self, data_dir: str | pathlib.Path) -> bool:
        return (self.folder(data_dir) / "dataset_info.json").exists()


def hide_gpus_from_tensorflow() -> None:
    """Keeps TensorFlow, if installed, from allocating memory on the GPUs that JAX uses."""
    try:
        import tensorflow
    except ImportError:
        return
    tensorflow.config.set_visible_devices([], "GPU")


def _tensorflow_datasets():
    """Returns the package, with GPUs hidden; nothing else imports it."""
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
    """Returns a prepared split, read from disk when indexed; text fields are UTF-8 bytes.

    Args:
      split: in the syntax of tensorflow-datasets, such as `train` or `validation[:100]`.

    Raises:
      ImportError: tensorflow-datasets is missing; the remedy is named.
      ValueError: the folder was prepared in a format without random access, or the split is unknown.
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
    """Downloads a dataset and writes it as array_record files, unless it is already prepared.

    tensorflow-datasets retries a download ten times with growing pauses; without a network it fails
    after three minutes. Complete downloads stay in `data_dir/downloads` for the next try; incomplete
    ones are removed.

    Args:
      alternative: a sentence for error messages on other ways to get the data.

    Raises:
      ImportError: a package that preparing needs is missing; the remedy is named.
      RuntimeError: the download or the conversion failed; the message has dataset, cause and alternative.
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
    """Removes the remains of a failed or interrupted download, and raises an error that states the cause."""
    try:
        yield
    except BaseException as error:
        num_pages = _remove_partial(downloads)
        if not isinstance(error, Exception):
            raise
        cause = " ".join(str(error).split()) or type(error).__name__
        # Google Drive answers with a confirmation page, which tensorflow-datasets parses with bs4, or
        # with a refusal, which it cannot parse.
        if num_pages or "bs4" in cause or "confirmation link" in cause:
            cause = f"the server sent a web page in place of the data, such as a quota notice ({cause})"
        raise RuntimeError(
            f"cannot prepare {dataset.name}: {cause}. Incomplete files were removed. {alternative}"
        ) from error


def _remove_partial(downloads: pathlib.Path) -> int:
    """Removes incomplete downloads and web pages saved as data; returns the number of pages."""
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
