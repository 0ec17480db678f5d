"""Outputs of `generate`: a line of text, or an object of JSON lines, for each line of --input."""

import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.lib import results
from experiments.lib.inputs import Line, value_of
from specjax.texts import Output

Record = dict[str, Any]


def records(lines: Sequence[Line], id_field: str, has_source: Sequence[bool], output: Output) -> list[Record]:
    """Returns a record for each line, in order; lines without a source have an empty text.

    Args:
      lines: the lines of --input.
      id_field: field to copy as "id" from lines that have it.
      has_source: whether each line has a source.
      output: a row for each line that has a source.
    """
    found, row = [], 0
    taus = np.asarray(output.stats.tau).tolist()
    for line, is_decoded in zip(lines, has_source, strict=True):
        record: Record = {"line": line.number}
        identity = value_of(line.fields or {}, id_field)
        if identity is not None:
            record["id"] = identity
        record |= {"text": "", "token_ids": [], "log_probs": [], "finish_reason": None}
        record["tokens_per_target_call"] = None
        if is_decoded:
            record |= {"text": output.texts[row], "token_ids": output.token_ids[row]}
            record["log_probs"] = [_finite(x) for x in output.log_probs[row]]
            record["finish_reason"] = output.finish_reasons[row]
            record["tokens_per_target_call"] = _finite(taus[row])
            row += 1
        found.append(record)
    return found


def _finite(number: float) -> float | None:
    """Returns a number, or None for infinity and NaN, which JSON lacks."""
    return number if math.isfinite(number) else None


def _as_text(record: Record, encoding: str) -> str:
    """Returns the text on one line; the stream handles characters that `encoding` lacks."""
    del encoding
    return record["text"].replace("\r", "\\r").replace("\n", "\\n")


def _as_json(record: Record, encoding: str) -> str:
    """Returns the record as JSON, escaped if the encoding lacks a character."""
    text = json.dumps(record, ensure_ascii=False)
    return text if text.encode(encoding, "replace").decode(encoding) == text else json.dumps(record)


_FORMS = {"lines": _as_text, "jsonl": _as_json}
FORMATS = tuple(_FORMS)


def write(folder: pathlib.Path, found: Sequence[Record]) -> None:
    """Writes output.txt and output.jsonl, each complete or not at all."""
    for name, form in (("output.txt", _as_text), ("output.jsonl", _as_json)):
        results.write_text(folder / name, "".join(f"{form(record, 'utf-8')}\n" for record in found))


def show(found: Sequence[Record], kind: str) -> None:
    """Prints the outputs on standard output, one per line, in one of `FORMATS`."""
    encoding = (sys.stdout and sys.stdout.encoding) or "utf-8"
    for record in found:
        print(_FORMS[kind](record, encoding))
    print(end="", flush=True)
