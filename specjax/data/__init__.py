"""From tasks to padded batches: the public API of the modules below."""

from specjax.data.batches import (
    SOURCE_BUCKETS,
    Batch,
    Encode,
    Pair,
    Shape,
    bucket,
    epoch,
    evaluation_batches,
    make_batch,
    pad,
    shape_for,
    source_buckets,
    tokenize,
    training_rows,
    truncate,
)
from specjax.data.files import decode_text, read_jsonl, read_lines, read_pairs, read_text, split_lines
from specjax.data.stream import Stream, stream
from specjax.data.tasks import TASKS, Examples, Task, TextPair, load
from specjax.data.tokenizers import load_or_train_tokenizer

__all__ = [
    "SOURCE_BUCKETS",
    "TASKS",
    "Batch",
    "Encode",
    "Examples",
    "Pair",
    "Shape",
    "Stream",
    "Task",
    "TextPair",
    "bucket",
    "decode_text",
    "epoch",
    "evaluation_batches",
    "load",
    "load_or_train_tokenizer",
    "make_batch",
    "pad",
    "read_jsonl",
    "read_lines",
    "read_pairs",
    "read_text",
    "shape_for",
    "source_buckets",
    "split_lines",
    "stream",
    "tokenize",
    "training_rows",
    "truncate",
]
