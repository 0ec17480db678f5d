"""Runs an experiment as a program of its own, as a user does."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
OPTIMIZED = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}  # compiled as a user's


def run(module, *flags, stdin=None, **settings):
    """Runs an experiment to its end; `settings` are variables of its environment."""
    command = [sys.executable, "-m", f"experiments.{module}", *flags]
    environment = {**ENVIRONMENT, **settings}
    return subprocess.run(
        command, cwd=ROOT, env=environment, input=stdin, capture_output=True, text=True, timeout=300
    )
