"""Files that are there whole or not at all."""

import os
import pathlib
from collections.abc import Callable, Mapping


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
