"""Text files and JSON lines, gzipped or plain."""

import gzip
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Example = Mapping[str, Any]  # field -> value, of one example
T = TypeVar("T")


def read_lines(path: str | pathlib.Path) -> list[str]:
    """Lines of a text file, `.gz` or plain, without their line ends.

    A line ends with a line feed, a carriage return or both, as in Python's text files. Corpora hold other
    separators (U+2028, U+0085) inside sentences; splitting there would misalign parallel files.

    Raises:
      FileNotFoundError: neither `path` nor `path.gz` exists; both are named.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        raise FileNotFoundError(f"{path} is a directory: give a text file")
    zipped = path if path.suffix == ".gz" else path.with_name(path.name + ".gz")
    if path.exists() and path.suffix != ".gz":
        content = path.read_bytes()
    elif zipped.exists():
        content = gzip.decompress(zipped.read_bytes())
    else:
        raise FileNotFoundError(f"no text file {path} (nor {zipped.name} beside it)")
    return split_lines(content.decode("utf-8"))


def split_lines(text: str) -> list[str]:
    """Lines of a text, as `read_lines` has them."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def read_pairs(source: str | pathlib.Path, target: str | pathlib.Path) -> list[tuple[str, str]]:
    """Aligned lines of two text files.

    Raises:
      ValueError: the files differ in length; both counts are named.
    """
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise ValueError(
            f"{source} has {len(sources)} lines but {target} has {len(targets)}: "
            "line n of one must translate line n of the other"
        )
    return list(zip(sources, targets, strict=True))


def read_jsonl(path: str | pathlib.Path, convert: Callable[[Example], T]) -> list[T]:
    """`convert` of each JSON object of a file that holds one a line; empty lines are skipped.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is no JSON object, or `convert` raises ValueError; file and line are named.
    """
    converted = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
            if not isinstance(example, dict):
                raise ValueError(f"a JSON object is needed, not {line[:40]!r}")
            converted.append(convert(example))
        except ValueError as error:  # json.JSONDecodeError is one
            raise ValueError(f"{path}, line {number}: {error}") from error
    return converted
