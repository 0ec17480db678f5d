"""Starts and ends an experiment: logging, console, compilation cache, and errors in one sentence."""

import contextlib
import functools
import io
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence

import jax
from absl import app, flags, logging
from rich.console import Console

from specjax import writing

_COMPILED = "/jax/core/compile/backend_compile_duration"
_TRACEBACK = flags.DEFINE_bool("traceback", False, "Print tracebacks of errors.")
INTERRUPTED, CLOSED_PIPE = 130, 141  # exit statuses: 128 plus the number of the signal


def run(main: Callable[[Console], None], required: Sequence[str] = ()) -> None:
    """Runs `main` under `absl.app.run`, and prints an error as one sentence.

    The exit status is 2 for a ValueError or OSError, 1 for exhausted memory, 130 for Ctrl-C. A closed pipe
    does not stop an experiment that writes into --output; any other experiment ends quietly with status 141.
    Two runs cannot write into the same --output at once.

    Args:
      main: takes the console. The argument of a KeyboardInterrupt that it raises states what is kept.
      required: names of required flags.
    """
    flags.mark_flags_as_required(required)

    def guarded(argv: list[str]) -> None:
        try:
            if argv[1:]:
                raise ValueError(f"flags must begin with --, as in --input=FILE, got {argv[1]!r}")
            _check_output()
            # Transfers here are intended, whatever JAX_TRANSFER_GUARD is set to for programs of the user.
            with _held(_output()), jax.transfer_guard("allow"):
                main(console())
            print(end="", flush=True)
        except BrokenPipeError:
            _discard(sys.stdout)
            sys.exit(CLOSED_PIPE)
        except KeyboardInterrupt as interrupt:
            stays = f"files written so far stay in {_output()}" if _output() else "no file was written"
            _end(f"interrupted; {interrupt if interrupt.args else stays}", INTERRUPTED)
        except (ValueError, OSError) as error:
            if _TRACEBACK.value:
                raise
            _end(f"{error} (--traceback shows where)", 2)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if _TRACEBACK.value or not ("RESOURCE_EXHAUSTED" in str(error) or isinstance(error, MemoryError)):
                raise
            told = str(error).partition("\n")[0]
            _end(f"out of memory; lower --batch_size or a length ({told}; --traceback shows where)", 1)

    app.run(guarded)


def _end(sentence: str, status: int) -> None:
    """Ends the process with one line on standard error."""
    print(f"{pathlib.Path(sys.argv[0]).stem}: {sentence}", file=sys.stderr)
    sys.exit(status)


def _output() -> str:
    """Returns --output; empty if it is not given, or the experiment has no such flag."""
    return flags.FLAGS["output"].value or "" if "output" in flags.FLAGS else ""


def _check_output() -> None:
    """Raises a ValueError if --output cannot be written, before anything is computed."""
    given = _output()
    if not given:
        return
    path = pathlib.Path(given).absolute()
    there = next(p for p in (path, *path.parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"`--output` must be in a writable directory, got {given}, where {there} is not one")


@contextlib.contextmanager
def _held(output: str) -> Iterator[None]:
    """Makes and locks the directory `output`; does nothing if `output` is empty.

    Processes of one run on several hosts share the directory and only the first writes, so they do not lock
    it.

    Raises:
      ValueError: another run has locked it.
    """
    shared = "coordinator" in flags.FLAGS and (flags.FLAGS.coordinator or flags.FLAGS.num_processes)
    if not output or shared:
        yield
        return
    path = pathlib.Path(output).absolute()
    created = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(writing.locked(path))
            except BlockingIOError as error:
                raise ValueError(
                    f"`--output` must not be in use, got {output}, where another run is writing; give "
                    "another, or wait"
                ) from error
            yield
    finally:
        for directory in created:  # removes only empty directories, of a run that wrote nothing
            with contextlib.suppress(OSError):
                directory.rmdir()


class _Console(Console):
    """A console whose pipe may close: an experiment that writes files continues without it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _discard(self.file)
        if not _output():
            sys.exit(CLOSED_PIPE)


def _discard(stream: io.TextIOBase) -> None:
    """Discards all further output of a stream, its buffer included."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def console(stderr: bool = False) -> Console:
    """Returns a console on standard output or standard error, and sets up the compilation cache.

    Characters that the encoding of the terminal lacks are printed as escapes. Programs that take over a
    second to compile are cached in JAX_COMPILATION_CACHE_DIR, by default ~/.cache/specjax; if that is empty,
    none are.
    """
    logging.set_verbosity(logging.WARNING)
    if jax.config.jax_compilation_cache_dir is None:
        caches = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(caches / "specjax"))
    _compilations()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    return _Console(stderr=stderr)


def note_hub(console: Console, names: Sequence[str]) -> None:
    """Prints the models that come from the hub, which may take a while."""
    for name in names:
        if not os.path.exists(os.path.expanduser(name)) and not name.startswith(("/", ".", "~")):
            console.print(f"{name} is not a directory; looking on the Hugging Face hub")


def compile_seconds() -> float:
    """Returns the seconds spent so far on compiling and on reading the compilation cache."""
    return sum(_compilations())


@functools.cache
def _compilations() -> list[float]:
    """Returns a growing list of the seconds of each compilation since the first call."""
    seconds: list[float] = []

    def note(event: str, duration_s: float, **about: object) -> None:
        del about
        if event == _COMPILED:
            seconds.append(duration_s)

    jax.monitoring.register_event_duration_secs_listener(note)
    return seconds
