"""Stand-ins for what tensorflow-datasets would download; all else is its real code."""

import contextlib
import importlib
from unittest import mock

WMT14 = {
    "train": [{"en": f"sentence {i}", "de": f"Satz {i}, Straße"} for i in range(5)],
    "test": [{"en": "a cat", "de": "eine Katze"}],
}
CNN_DAILYMAIL = {
    "test": [
        {"article": f"article {i}", "highlights": "One .\nTwo .", "publisher": "cnn", "id": f"id{i}"}
        for i in range(3)
    ]
}


@contextlib.contextmanager
def source(dataset, splits, download=None):
    """While it is open, preparing `dataset` writes these examples.

    Args:
      dataset: a `prepared.Dataset`.
      splits: split -> examples.
      download: called with the download manager before examples are made; what it returns is ignored.
    """
    import tensorflow_datasets as tfds

    importlib.import_module(dataset.module)
    builder = tfds.builder_cls(dataset.name.split("/")[0].split(":")[0])

    def split_generators(self, dl_manager=None, **_):
        if download:
            download(dl_manager)
        return {split: self._generate_examples(split) for split in splits}

    def generate_examples(_, split):
        yield from enumerate(splits[split])

    with (
        mock.patch.object(builder, "_split_generators", split_generators),
        mock.patch.object(builder, "_generate_examples", generate_examples),
    ):
        yield
