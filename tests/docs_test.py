"""The API page builds without a warning, and the examples in docstrings pass."""

import doctest
import importlib
import os
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import specjax

ROOT = pathlib.Path(__file__).parents[1]
MODULES = [module.name for module in pkgutil.walk_packages(specjax.__path__, "specjax.")]


@pytest.mark.slow
def test_docstring_examples_pass(monkeypatch):
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


PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
PAGES += [ROOT / folder / "README.md" for folder in ("configs", "experiments", "specjax")]
FLAGS = {
    name
    for path in (ROOT / "experiments").rglob("*.py")
    for name in re.findall(r"DEFINE_\w+\(\s*\"(\w+)\"", path.read_text("utf-8"))
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_files_scripts_and_flags_that_exist(page):
    text = page.read_text("utf-8")
    links = re.findall(r"\]\((?!http)([^)#]+)", text)
    assert not [link for link in links if not (page.parent / link).exists()]
    commands = re.findall(r"python -m (experiments\.\w+)([^\n`]*(?:\\\n[^\n`]*)*)", text)
    for module, rest in [found for found in commands if found[0] != "experiments.NAME"]:
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
        for flag, value in re.findall(r"--(?:no)?(\w+)(?:=(\S+))?", rest):
            if flag == "flagfile":
                assert (ROOT / value).exists() or value == "configs/NAME.flags", value
            else:
                assert flag in FLAGS | {"help", "helpfull"} or f"no{flag}" in FLAGS, (module, flag)
    assert commands or page.parent == ROOT


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "specjax/README.md"])
def test_python_of_the_pages_runs_as_it_stands(page, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), flags=re.DOTALL)
    names: dict = {}
    for block in blocks:
        if "make_mesh" not in block:  # needs eight devices and missing weights
            exec(block, names)
    assert names["output"].texts[0] and names["drafter"].num_draft == 5
    assert "Ein Mann" in capsys.readouterr().out


@pytest.mark.slow
def test_examples_run_from_any_directory(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "examples.py")]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n  ") == 6 and "own drafter: the same tokens" in done.stdout
