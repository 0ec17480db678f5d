"""How an experiment starts and ends: quiet logs, a console, compiled programs kept, errors in a sentence."""

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
_TRACEBACK = flags.DEFINE_bool("traceback", False, "Where an error came from, beside its message.")
INTERRUPTED, CLOSED_PIPE = 130, 141  # exit status, 128 and the signal's number


def run(main: Callable[[Console], None], required: Sequence[str] = ()) -> None:
    """Runs `main` under `absl.app.run`; what goes wrong is printed as a sentence.

    A ValueError or OSError has exit status 2, memory that is exhausted 1, Ctrl-C 130. Who no longer reads
    what is printed does not stop an experiment that writes into --output; any other ends quietly, with 141.
    An --output that another run is writing into is refused.

    Args:
      main: takes the console. Its KeyboardInterrupt says, as its argument, what is kept.
      required: names of flags without which it does not start.
    """
    flags.mark_flags_as_required(required)

    def guarded(argv: list[str]) -> None:
        try:
            if argv[1:]:
                raise ValueError(f"{argv[1]!r} is no flag: flags begin with --, as in --input=FILE")
            _check_output()
            # What is transferred here is meant, whatever JAX_TRANSFER_GUARD says of the user's own programs.
            with _held(_output()), jax.transfer_guard("allow"):
                main(console())
            print(end="", flush=True)
        except BrokenPipeError:
            _discard(sys.stdout)
            sys.exit(CLOSED_PIPE)
        except KeyboardInterrupt as interrupt:
            stays = f"what was written stays in {_output()}" if _output() else "nothing was written"
            _end(f"interrupted; {interrupt if interrupt.args else stays}", INTERRUPTED)
        except (ValueError, OSError) as error:
            if _TRACEBACK.value:
                raise
            _end(f"{error} (--traceback shows where)", 2)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if _TRACEBACK.value or not ("RESOURCE_EXHAUSTED" in str(error) or isinstance(error, MemoryError)):
                raise
            told = str(error).partition("\n")[0]
            _end(f"out of memory: lower --batch_size or a length ({told}; --traceback shows where)", 1)

    app.run(guarded)


def _end(sentence: str, status: int) -> None:
    """Ends the process with one line on standard error."""
    print(f"{pathlib.Path(sys.argv[0]).stem}: {sentence}", file=sys.stderr)
    sys.exit(status)


def _output() -> str:
    """Returns --output; empty where none is given, or the experiment has no such flag."""
    return flags.FLAGS["output"].value or "" if "output" in flags.FLAGS else ""


def _check_output() -> None:
    """Raises a ValueError if --output cannot be a directory to write into, before anything is computed."""
    given = _output()
    if not given:
        return
    path = pathlib.Path(given).absolute()
    there = next(p for p in (path, *path.parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"--output={given}: {there} is no directory that can be written: give another")


@contextlib.contextmanager
def _held(output: str) -> Iterator[None]:
    """Makes the directory `output` and keeps other runs out of it; does nothing if it is empty.

    Processes of one run on several hosts share a directory, into which only the first writes: they do not
    lock it.

    Raises:
      ValueError: another run holds it.
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
                    f"--output={output}: another run is writing there: give another, or wait for it"
                ) from error
            yield
    finally:
        for directory in created:  # of a run that wrote nothing nothing is left
            with contextlib.suppress(OSError):
                directory.rmdir()


class _Console(Console):
    """A console whose reader may leave: an experiment that writes files goes on without it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _discard(self.file)
        if not _output():
            sys.exit(CLOSED_PIPE)


def _discard(stream: io.TextIOBase) -> None:
    """Lets what is still written to a stream, its buffer included, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def console(stderr: bool = False) -> Console:
    """Returns where to print: on standard output, or on standard error.

    Characters that the terminal's encoding lacks are printed as escapes. Programs that took a second to
    compile are kept in JAX_COMPILATION_CACHE_DIR, else in ~/.cache/specjax; an empty
    JAX_COMPILATION_CACHE_DIR keeps none.
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
    """Prints which models are asked of the hub, which may take a while to answer."""
    for name in names:
        if not os.path.exists(os.path.expanduser(name)) and not name.startswith(("/", ".", "~")):
            console.print(f"{name} is no directory: asking the Hugging Face hub")


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
