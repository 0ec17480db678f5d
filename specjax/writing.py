"""Atomic writes, and locks for one writer at a time."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping

try:
    import fcntl
except ImportError:  # Windows: nothing is locked
    fcntl = None  # type: ignore[assignment]


def write_whole(files: Mapping[pathlib.Path, Callable[[pathlib.Path], object]]) -> None:
    """Writes all of `files` under temporary names, then renames them in order.

    If a writer fails, every file stays as it was. Give the file that marks the others as complete last.

    Args:
      files: path -> a function that writes the content to the path it is given.
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
    """Locks an existing file or directory against other processes that call this function.

    It is a lock of the kernel, which releases it when the process ends or is killed.

    Raises:
      BlockingIOError: another process holds the lock.
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
