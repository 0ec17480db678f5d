"""Preparing and reading datasets with the real tensorflow-datasets, and the errors of both."""

import contextlib
import dataclasses
import http.server
import importlib.machinery
import importlib.util
import sys
import threading
import types
from unittest import mock

import pytest

from specjax.data import prepared, tasks
from tests import prepared_datasets

WMT14 = dataclasses.replace(tasks.TASKS["wmt14_en_de"].dataset, needs=())
CNN_DAILYMAIL = dataclasses.replace(tasks.TASKS["cnn_dailymail"].dataset, needs=())
PAGE = b"\n<!DOCTYPE html><html><body>" + b"Quota exceeded. " * 128 + b"</body></html>"


def files_below(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


@contextlib.contextmanager
def server(answers):
    """Yields an address, and the paths served; request i gets `answers[i]`, later ones the last."""
    served = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = answers[min(len(served), len(answers) - 1)]
            served.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/corpus.txt", served
        running.shutdown()
        thread.join()


def make_absent(monkeypatch, package):
    """Importing the package fails as if it were not installed, whether it is or not."""

    finder = importlib.machinery.PathFinder
    find_spec = finder.find_spec

    def find_other(name, *where):
        return None if name.split(".")[0] == package else find_spec(name, *where)

    monkeypatch.setattr(finder, "find_spec", find_other)
    monkeypatch.delitem(sys.modules, package, raising=False)


@pytest.fixture(autouse=True)
def without_proxy(monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")


def test_a_prepared_split_is_read_without_tensorflow(tmp_path, monkeypatch):
    make_absent(monkeypatch, "tensorflow")
    with prepared_datasets.source(WMT14, prepared_datasets.WMT14):
        prepared.prepare(WMT14, tmp_path, "")
    assert WMT14.is_prepared(tmp_path) and not CNN_DAILYMAIL.is_prepared(tmp_path)
    rows = prepared.read(WMT14, tmp_path, "train")
    assert {row["en"].decode() for row in rows} == {row["en"] for row in prepared_datasets.WMT14["train"]}
    assert len(prepared.read(WMT14, tmp_path, "train[:2]+test")) == 3


def test_preparing_again_does_nothing(tmp_path):
    with prepared_datasets.source(WMT14, prepared_datasets.WMT14):
        prepared.prepare(WMT14, tmp_path, "")
    prepared.prepare(WMT14, tmp_path, "")  # would need the network


def test_read_raises_for_an_unknown_split_with_the_known_ones(tmp_path):
    with prepared_datasets.source(WMT14, prepared_datasets.WMT14):
        prepared.prepare(WMT14, tmp_path, "")
    with pytest.raises(ValueError, match=r"Unknown split 'dev'.*'train', 'test'"):
        prepared.read(WMT14, tmp_path, "dev")


def test_a_web_page_in_place_of_data_is_explained_and_leaves_no_file(tmp_path):
    """As for cnn_dailymail on Google Drive: every address answers with the page."""
    import requests

    def send(_, request, **__):
        response = requests.Response()
        response.status_code, response.url, response.request = 200, request.url, request
        response._content, response._content_consumed = PAGE, True
        return response

    with (
        mock.patch.object(requests.adapters.HTTPAdapter, "send", send),
        pytest.raises(
            RuntimeError, match="cnn_dailymail:3.4.0: the server sent a web page .* Use JSON lines"
        ),
    ):
        prepared.prepare(CNN_DAILYMAIL, tmp_path, "Use JSON lines.")
    assert files_below(tmp_path) == [] and not CNN_DAILYMAIL.is_prepared(tmp_path)


def test_a_web_page_that_was_saved_as_data_is_removed_and_real_data_stays(tmp_path):
    """These addresses have no known checksum, so only the parser of the data fails."""

    def download(manager):
        assert manager.download(good).read_bytes() == b"Hello\n"
        assert manager.download(page).read_bytes() == PAGE
        raise AssertionError("Sizes do not match: 3 vs 4 for corpus.de vs corpus.en.")

    with (
        server([(200, b"Hello\n")]) as (good, _),
        server([(200, PAGE)]) as (page, _),
        prepared_datasets.source(WMT14, prepared_datasets.WMT14, download),
        pytest.raises(RuntimeError, match=r"wmt14_translate/de-en:1.0.0: .* web page .*3 vs 4"),
    ):
        prepared.prepare(WMT14, tmp_path, "")
    left = files_below(tmp_path / "downloads")
    assert [path.read_bytes() for path in left if path.suffix != ".INFO"] == [b"Hello\n"] and len(left) == 2
    assert not list(tmp_path.rglob("incomplete*"))


def test_a_download_that_fails_twice_is_tried_again(tmp_path):
    """Two 503s, then the file."""
    with (
        server([(503, b""), (503, b""), (200, b"Hello\n")]) as (address, served),
        prepared_datasets.source(WMT14, prepared_datasets.WMT14, lambda manager: manager.download(address)),
    ):
        prepared.prepare(WMT14, tmp_path, "")
    assert len(served) == 3 and len(prepared.read(WMT14, tmp_path, "train")) == 5


def test_prepare_removes_an_interrupted_download(tmp_path):
    def download(manager):
        folder = manager.download_dir / "wmt14_translate" / "corpus.tmp.1f"
        folder.mkdir(parents=True)
        (folder / "corpus").write_text("half of")
        raise KeyboardInterrupt

    with prepared_datasets.source(WMT14, prepared_datasets.WMT14, download), pytest.raises(KeyboardInterrupt):
        prepared.prepare(WMT14, tmp_path, "")
    assert not files_below(tmp_path / "downloads")


def test_prepare_raises_for_missing_packages_before_any_download(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    dataset = tasks.TASKS["cnn_dailymail"].dataset
    with pytest.raises(ImportError, match=r'needs tensorflow and bs4 .*pip install "specjax\[prepare\]"'):
        prepared.prepare(dataset, tmp_path, "")
    assert files_below(tmp_path) == []


def test_read_raises_with_the_remedy_without_tensorflow_datasets(tmp_path, monkeypatch):
    make_absent(monkeypatch, "tensorflow_datasets")
    with pytest.raises(
        ImportError, match="pip install tensorflow-datasets importlib_resources, or use local"
    ):
        prepared.read(WMT14, tmp_path, "train")


def test_read_raises_for_tfrecord_files_with_the_remedy(tmp_path):
    with prepared_datasets.source(WMT14, prepared_datasets.WMT14):
        prepared.prepare(WMT14, tmp_path, "")
    info = WMT14.folder(tmp_path) / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(ValueError, match="holds tfrecord files, .* in another data_dir, with download=True"):
        prepared.read(WMT14, tmp_path, "train")


def test_gpus_are_hidden_from_tensorflow_where_it_is_present(tmp_path, monkeypatch):
    with prepared_datasets.source(WMT14, prepared_datasets.WMT14):
        prepared.prepare(WMT14, tmp_path, "")
    hidden = mock.Mock()
    tensorflow = types.ModuleType("tensorflow")
    tensorflow.config = types.SimpleNamespace(set_visible_devices=hidden)
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
    prepared.read(WMT14, tmp_path, "train")
    hidden.assert_called_with([], "GPU")
