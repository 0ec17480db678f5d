"""The API page builds without a warning, and the examples in docstrings are true."""

import doctest
import importlib
import os
import pathlib
import pkgutil
import subprocess
import sys

import pytest

import specjax

ROOT = pathlib.Path(__file__).parents[1]
MODULES = [module.name for module in pkgutil.walk_packages(specjax.__path__, "specjax.")]


@pytest.mark.slow
def test_docstrings_hold_true_examples(monkeypatch):
    monkeypatch.chdir(ROOT)
    tried = [doctest.testmod(importlib.import_module(name)) for name in MODULES]
    assert sum(result.failed for result in tried) == 0
    assert sum(result.attempted for result in tried) >= 10


@pytest.mark.slow
def test_api_page_builds_without_a_warning(tmp_path):
    pytest.importorskip("pdoc")
    parts = ["specjax", "specjax.analysis", "specjax.models.t5", "specjax.training"]
    command = [sys.executable, "-W", "error::UserWarning", "-m", "pdoc", "-o", str(tmp_path), *parts]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0 and "Warn" not in done.stderr, done.stderr
    pages = {str(page.relative_to(tmp_path)) for page in tmp_path.rglob("*.html")}
    assert {"specjax.html", "specjax/decode.html", "specjax/drafters.html", "specjax/models/t5.html"} <= pages
