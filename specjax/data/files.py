"""Text files and JSON lines, gzipped or plain."""

import codecs
import gzip
import json
import pathlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Example = Mapping[str, Any]  # field -> value, of one example
T = TypeVar("T")
_GZIP = b"\x1f\x8b"  # the magic number of a gzip file


def read_lines(path: str | pathlib.Path) -> list[str]:
    """Returns the lines of a text file, `.gz` or plain, without their line ends.

    A line ends with a line feed, a carriage return or both, as in Python's text files. Corpora contain other
    separators (U+2028, U+0085) inside sentences; splitting there would misalign parallel files.

    Raises:
      FileNotFoundError, ValueError: see `read_text`.
    """
    return split_lines(read_text(path))


def read_text(path: str | pathlib.Path) -> str:
    """Returns the text of a file, `.gz` or plain; see `decode_text`.

    Raises:
      FileNotFoundError: neither `path` nor `path.gz` exists; the message has both.
      ValueError: the file is not UTF-8 text, or is a `.gz` that is damaged or not a gzip file.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        raise FileNotFoundError(f"{path} is a directory: give a text file")
    zipped = path if path.suffix == ".gz" else path.with_name(path.name + ".gz")
    found = next((p for p in (path, zipped) if p.exists()), None)
    if found is None:
        raise FileNotFoundError(f"no text file {path} (nor {zipped.name} beside it)")
    content = found.read_bytes()
    if found.suffix == ".gz" and not content.startswith(_GZIP):
        raise ValueError(f"{found} must be a gzip file, got {content[:8]!r}: rename it, or fetch it again")
    return decode_text(content, str(found))


def decode_text(content: bytes, name: str) -> str:
    """Returns the text of UTF-8 bytes, gzipped or not, without a byte order mark.

    Raises:
      ValueError: invalid bytes; the message has `name` and the line.
    """
    if content.startswith(_GZIP):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{name} is cut off or damaged ({error}): copy or fetch it again") from error
    remedy = "convert it, as in `iconv -f {} -t utf-8`"
    start = content[:4096]
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 4 * start.count(0) > len(start):
        raise ValueError(f"{name}, line 1: must be UTF-8, got UTF-16; {remedy.format('utf-16')}")
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        line = len(split_lines(error.object[: error.start].decode("utf-8") + "."))
        byte = f"byte 0x{error.object[error.start]:02x}"
        remedy = remedy.format("latin1")
        raise ValueError(
            f"{name}, line {line}: must be UTF-8, got {byte} ({error.reason}); {remedy}"
        ) from error


def split_lines(text: str) -> list[str]:
    """Returns the lines of a text; see `read_lines`."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def read_pairs(source: str | pathlib.Path, target: str | pathlib.Path) -> list[tuple[str, str]]:
    """Returns the aligned lines of two text files.

    Raises:
      ValueError: the files differ in their number of lines; the message has both.
    """
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise ValueError(
            f"{source} has {len(sources)} lines but {target} has {len(targets)}: "
            "line n of one must translate line n of the other"
        )
    return list(zip(sources, targets, strict=True))


def read_jsonl(path: str | pathlib.Path, convert: Callable[[Example], T]) -> list[T]:
    """Returns `convert` of each object of a JSON lines file; skips empty lines.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: a line is not a JSON object, or `convert` raises ValueError; the message has file and line.
    """
    converted = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
            if not isinstance(example, dict):
                raise ValueError(f"must be a JSON object, got {line[:40]!r}")
            converted.append(convert(example))
        except ValueError as error:  # json.JSONDecodeError is one
            raise ValueError(f"{path}, line {number}: {error}") from error
    return converted
