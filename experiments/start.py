"""What every experiment does first: quiet logs, a console, and compiled programs kept for the next run."""

import os
import pathlib

import jax
from absl import logging
from rich.console import Console

_COMPILED = "/jax/core/compile/backend_compile_duration"
_seconds: list[float] = []


def console(quiet: bool = False) -> Console:
    """Where to print.

    Programs that took a second to compile are kept where JAX_COMPILATION_CACHE_DIR says, else in
    ~/.cache/specjax; an empty JAX_COMPILATION_CACHE_DIR keeps none.
    """
    logging.set_verbosity(logging.WARNING)
    if jax.config.jax_compilation_cache_dir is None:
        caches = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(caches / "specjax"))
    jax.monitoring.register_event_duration_secs_listener(_note)
    return Console(quiet=quiet)


def compile_seconds() -> float:
    """Seconds that went into compiling, and into reading what was kept, so far."""
    return sum(_seconds)


def _note(event: str, duration_s: float, **about: object) -> None:
    del about
    if event == _COMPILED:
        _seconds.append(duration_s)
