"""Files that are there whole or not at all, and have one writer at a time."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping

try:
    import fcntl
except ImportError:  # Windows: nothing is locked
    fcntl = None  # type: ignore[assignment]


def write_whole(files: Mapping[pathlib.Path, Callable[[pathlib.Path], object]]) -> None:
    """Writes all of `files` under temporary names beside them, then renames them in their order.

    A writer that fails leaves every file as it was. The one that says that the others are complete
    comes last.

    Args:
      files: path -> a function that writes its content to the path it is given.
    """
    temporary = {path: path.with_name(f".{path.name}.part") for path in files}
    try:
        for path, write in files.items():
            write(temporary[path])
        for path, part in temporary.items():
            os.replace(part, path)
    finally:
        for part in temporary.values():
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: str | os.PathLike) -> Iterator[None]:
    """Keeps other processes that ask for the same out of a file or directory, which exists.

    The lock is the kernel's: that of a process that was killed is gone with it.

    Raises:
      BlockingIOError: another holds it.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)
