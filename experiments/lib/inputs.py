"""The flag --input: sources as lines of text, or as a field of JSON lines, CSV or TSV."""

import csv
import io
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from specjax import data

FORMATS = ("lines", "jsonl", "csv", "tsv")
_BY_ENDING = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv"}
_FIELD = flags.DEFINE_string(
    "input_field",
    "text",
    "Field of JSON lines, CSV or TSV that holds the source; nested as in translation.en.",
)
_FORMAT = flags.DEFINE_enum(
    "input_format",
    None,
    FORMATS,
    "Format of --input; by default that of its name without .gz: .jsonl, .csv (with a header), .tsv, or else "
    "one source per line. Standard input is JSON lines if --input_field is given.",
)
_LISTED = 10  # lines that an error lists


class Line(NamedTuple):
    """One source: a line of text, or a record of a file.

    Attributes:
      number: line in the file, from 1, on which it begins.
      fields: fields of the record; None: it is empty.
    """

    number: int
    fields: Mapping[str, Any] | None


def name(path: str) -> str:
    """Returns the name of --input for messages."""
    return "standard input" if path == "-" else f"--input={path}"


def read(path: str, limit: int | None = None) -> list[Line]:
    """Returns the first `limit` lines or records of a file (None: all), empty ones included.

    Args:
      path: path of a file, or - for standard input; may be gzipped.
      limit: maximum number of lines.

    Raises:
      FileNotFoundError, ValueError: a missing or malformed file; the message has file and line.
    """
    kind = _format(path)
    text = _standard_input() if path == "-" else data.read_text(path)
    found = {"lines": _lines, "jsonl": _json_lines}.get(kind)
    records = found(text) if found else _table(text, "excel" if kind == "csv" else "excel-tab")
    taken: list[Line] = []
    try:
        for line in records:
            if len(taken) == limit:
                break
            taken.append(line)
    except _Malformed as error:
        raise ValueError(f"{name(path)}, line {error.number}: {error.reason}") from error
    return taken


def texts(path: str, lines: Sequence[Line], field: str | None = None) -> list[str]:
    """Returns one field of each line, by default --input_field; the text of an empty record is empty.

    Raises:
      ValueError: the field is missing or not a string; the message has the line.
    """
    asked = field or ("text" if _format(path) == "lines" else _FIELD.value)
    flag = "--input_field" if field is None else "--reference_field"
    found = []
    for line in lines:
        if line.fields is None:
            found.append("")
            continue
        value = value_of(line.fields, asked)
        if not isinstance(value, str):
            which = f"the field {asked!r} ({flag})"
            wrong = f"must be a string, got {value!r:.40}" if value is not None else "is not in the record"
            has = f"which has the fields {', '.join(line.fields):.200}"
            raise ValueError(f"{name(path)}, line {line.number}: {which} {wrong}, {has}")
        found.append(value)
    return found


def asked(path: str, limit: int | None = None) -> tuple[list[Line], list[str]]:
    """Returns the first `limit` lines (None: all) that are not blank, and their texts.

    Raises:
      FileNotFoundError, ValueError: as `read` and `texts`; or no line has text.
    """
    lines = read(path)
    pairs = [(line, text) for line, text in zip(lines, texts(path, lines), strict=True) if text.strip()]
    if not pairs:
        raise ValueError(f"{name(path)} must contain text, got blank lines only; give one source per line")
    return [line for line, _ in pairs[:limit]], [text for _, text in pairs[:limit]]


def value_of(fields: Mapping[str, Any], path: str) -> Any:
    """Returns the value of a field, possibly nested (`outer.inner`); None if it is missing."""
    if path in fields:
        return fields[path]
    outer, _, inner = path.partition(".")
    found = fields.get(outer)
    return value_of(found, inner) if inner and isinstance(found, Mapping) else None


def check_lengths(path: str, lines: Sequence[Line], lengths: Sequence[int], limit: int, remedy: str) -> None:
    """Raises a ValueError that lists the lines whose sources have more than `limit` tokens."""
    over = [(line.number, length) for line, length in zip(lines, lengths, strict=True) if length > limit]
    if not over:
        return
    listed = ", ".join(f"{number} ({length})" for number, length in over[:_LISTED])
    more = f" and {len(over) - _LISTED} more, the longest with {max(lengths)}" if len(over) > _LISTED else ""
    raise ValueError(
        f"{name(path)}: sources must have at most {limit} tokens, got line (tokens) {listed}{more}; {remedy}"
    )


class _Malformed(Exception):
    """A malformed line, with the reason."""

    def __init__(self, number: int, reason: str):
        super().__init__(number, reason)
        self.number, self.reason = number, reason


def _format(path: str) -> str:
    """Returns one of `FORMATS`: --input_format, or that of the name of the file."""
    if _FORMAT.value:
        return _FORMAT.value
    is_given = flags.FLAGS["input_field"].present
    if path == "-":
        return "jsonl" if is_given else "lines"
    found = _BY_ENDING.get(pathlib.Path(path.removesuffix(".gz")).suffix, "lines")
    if found == "lines" and is_given:
        raise ValueError(
            f"`--input_field` must not be given for lines of text, got {_FIELD.value} for {path}; give "
            "--input_format as well"
        )
    return found


def _standard_input() -> str:
    if sys.stdin is None:
        raise ValueError("standard input must not be closed; or give --input=FILE")
    if sys.stdin.isatty():
        print("reading sources from the terminal, one per line; end with Ctrl-D", file=sys.stderr)
    return data.decode_text(sys.stdin.buffer.read(), "standard input")


def _lines(text: str) -> Iterator[Line]:
    for number, line in enumerate(data.split_lines(text), 1):
        yield Line(number, {"text": line})


def _json_lines(text: str) -> Iterator[Line]:
    for number, line in enumerate(data.split_lines(text), 1):
        if not line.strip():
            yield Line(number, None)
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise _Malformed(number, f"must be JSON ({error}); give one object per line") from error
        except RecursionError as error:
            raise _Malformed(number, "must not be nested so deeply") from error
        if not isinstance(fields, dict):
            raise _Malformed(number, f"must be a JSON object, got {line[:40]!r}; give one object per line")
        yield Line(number, fields)


def _table(text: str, dialect: str) -> Iterator[Line]:
    """Yields the rows of a table after its header, each with the line on which it begins."""
    csv.field_size_limit(sys.maxsize)  # articles are longer than the default limit
    reader = csv.reader(io.StringIO(text, newline=""), dialect, strict=True)
    header: list[str] | None = None
    number = 1
    try:
        for row in reader:
            if header is None:
                header = row
                if len(set(row)) < len(row):
                    raise _Malformed(
                        number, f"fields of the header must be distinct, got {', '.join(row)[:200]}"
                    )
            elif row and len(row) != len(header):
                raise _Malformed(number, f"must have {len(header)} fields, as the header has, got {len(row)}")
            else:
                yield Line(number, dict(zip(header, row, strict=True)) if row else None)
            number = reader.line_num + 1
    except csv.Error as error:
        raise _Malformed(number, f"must be a row of the table ({error})") from error
