"""How an experiment starts and fails: quiet logs, a console, compiled programs kept, errors in a sentence."""

import functools
import os
import pathlib
import sys
from collections.abc import Callable, Sequence

import jax
from absl import app, flags, logging
from rich.console import Console

_COMPILED = "/jax/core/compile/backend_compile_duration"
_TRACEBACK = flags.DEFINE_bool("traceback", False, "Where an error came from, beside its message.")


def run(main: Callable[[Console], None], required: Sequence[str] = ()) -> None:
    """Runs `main` under `absl.app.run`; a ValueError or OSError is printed as a sentence, exit status 2.

    Args:
      main: takes the console.
      required: names of flags without which it does not start.
    """
    flags.mark_flags_as_required(required)

    def guarded(argv: list[str]) -> None:
        try:
            if argv[1:]:
                raise ValueError(f"{argv[1]!r} is no flag: flags begin with --, as in --input=FILE")
            _check_output()
            main(console())
        except (ValueError, OSError) as error:
            if _TRACEBACK.value:
                raise
            print(f"{pathlib.Path(sys.argv[0]).stem}: {error} (--traceback shows where)", file=sys.stderr)
            sys.exit(2)

    app.run(guarded)


def _check_output() -> None:
    """Raises a ValueError if --output cannot be a directory to write into, before anything is computed."""
    given = flags.FLAGS["output"].value if "output" in flags.FLAGS else None
    if not given:
        return
    path = pathlib.Path(given).absolute()
    there = next(p for p in (path, *path.parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"--output={given}: {there} is no directory that can be written: give another")


def console() -> Console:
    """Returns where to print.

    Programs that took a second to compile are kept in JAX_COMPILATION_CACHE_DIR, else in ~/.cache/specjax;
    an empty JAX_COMPILATION_CACHE_DIR keeps none.
    """
    logging.set_verbosity(logging.WARNING)
    if jax.config.jax_compilation_cache_dir is None:
        caches = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(caches / "specjax"))
    _compilations()
    return Console()


def compile_seconds() -> float:
    """Returns the seconds that went into compiling, and into reading what was kept, so far."""
    return sum(_compilations())


@functools.cache
def _compilations() -> list[float]:
    """Returns the seconds of each compilation since the first call; the list grows."""
    seconds: list[float] = []

    def note(event: str, duration_s: float, **about: object) -> None:
        del about
        if event == _COMPILED:
            seconds.append(duration_s)

    jax.monitoring.register_event_duration_secs_listener(note)
    return seconds
