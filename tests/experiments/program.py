"""Runs an experiment in this process, or starts it in another."""

import contextlib
import io
import os
import pathlib
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

from absl import flags

ROOT = pathlib.Path(__file__).parents[2]
# Programs are optimised, as for a user.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}


class Done(NamedTuple):
    """The result of a run."""

    returncode: int
    stdout: str
    stderr: str


def run(name: str, *given: str, stdin: str = "", stdout: io.TextIOBase | None = None) -> Done:
    """Runs `python -m experiments.NAME GIVEN...` in this process, which keeps imports and compiled programs.

    Args:
      stdout: where to write instead of returning it.
    """
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_apart())
        stack.enter_context(mock.patch.object(sys, "argv", [name, *given]))
        stack.enter_context(mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()))))
        stack.enter_context(contextlib.redirect_stdout(stdout or out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
        except SystemExit as error:
            code = error.code or 0
    return Done(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Removes the modules and flags of experiments from this process, and restores them after."""
    modules, own = _take_modules(), _take_flags()
    try:
        yield
    finally:
        _take_modules(), _take_flags()
        sys.modules.update(modules)
        for name, flag in own.items():
            flags.FLAGS[name] = flag


def _take_modules() -> dict[str, object]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("experiments.")}


def _take_flags() -> dict[str, flags.Flag]:
    """Removes the flags of experiments, not those of libraries that an experiment imports."""
    taken = {}
    for name in list(flags.FLAGS):
        # Flags of a script belong to its file; restored flags belong to no module.
        module = flags.FLAGS.find_module_defining_flag(name, "experiments.")
        if module.startswith(("experiments.", str(ROOT / "experiments"))):
            taken[name] = flags.FLAGS[name]
            delattr(flags.FLAGS, name)
    return taken


def start(name: str, *given: str, **settings: object) -> subprocess.Popen:
    """Starts `python -m experiments.NAME GIVEN...`; `settings` of `Popen`.

    A shell that starts the tests in the background has them ignore Ctrl-C, which they would hand on.
    """
    command = [sys.executable, "-m", f"experiments.{name}", *given]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, text=True, **settings)
    finally:
        signal.signal(signal.SIGINT, before)
