"""Tasks: where text pairs are stored, and the prefix of their sources.

Tasks are declared in `TASKS`. A custom one: `dataclasses.replace(TASKS["text"], source="en", ...)`.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from specjax.data import prepared
from specjax.data.files import Example, read_jsonl, read_pairs

TextPair = tuple[str, str]  # source, its prefix included, and target


def one_pair(task: "Task", example: Example) -> list[TextPair]:
    """Returns the source field and the target field as one pair."""
    return [(task.prefix + _field(example, task.source, str), _field(example, task.target, str))]


def next_turns(task: "Task", example: Example, num_context: int = 4) -> list[TextPair]:
    """Returns each turn of a dialogue but the first as a target, the `num_context` turns before it as source.

    Turns are joined by " | ", since T5's tokenizer drops newlines.
    """
    turns = _field(example, task.source, list)
    contexts = [" | ".join(turns[max(0, i - num_context) : i]) for i in range(len(turns))]
    return [(task.prefix + context, turn) for context, turn in list(zip(contexts, turns, strict=True))[1:]]


def first_sentence(task: "Task", example: Example) -> list[TextPair]:
    """Returns pairs of two consecutive sentences and the first of them: a copying task."""
    sentences = re.split(r"(?<=[.!?])\s+", _field(example, task.source, str).strip())
    pairs = zip(sentences[::2], sentences[1::2], strict=False)
    return [(f"{task.prefix}{first} {second}", first) for first, second in pairs]


def _field(example: Example, name: str, kind: type) -> Any:
    if name not in example:
        raise ValueError(f"field {name!r} is missing; the fields are {', '.join(map(repr, example))}")
    value = example[name].decode() if isinstance(example[name], bytes) else example[name]
    if not isinstance(value, kind):
        raise ValueError(f"field {name!r} must be {kind.__name__}, got {type(value).__name__}")
    return value


@dataclasses.dataclass(frozen=True)
class Task:
    """A kind of text pairs.

    Attributes:
      prefix: put before each source; it states the task, as in T5's training.
      source: field of an example, or last part of a text file's name.
      target: the same for the target.
      files: split -> glob below the data directory. A glob that ends in `{}` matches text files, with
        `source` or `target` in its place; any other matches JSON lines. `[a:b]` after it selects
        examples; `.gz` files are found as well.
      dataset: of tensorflow-datasets, with the same fields.
      convert: converts an example to its pairs.
      metric: of quality, "bleu" or "rouge".
    """

    prefix: str
    source: str
    target: str
    files: Mapping[str, str]
    dataset: prepared.Dataset | None = None
    convert: Callable[["Task", Example], list[TextPair]] = one_pair
    metric: str = "bleu"


@dataclasses.dataclass(frozen=True)
class Examples:
    """Text pairs and where they came from.

    Attributes:
      pairs: source, its prefix included, and target. A prepared dataset is read when indexed.
      origin: for the log: the dataset and split, or the files.
    """

    pairs: Sequence[TextPair]
    origin: str


def _splits(pattern: str) -> dict[str, str]:
    return {split: pattern.replace("SPLIT", split) for split in ("train", "validation", "test")}


_WMT14 = Task(
    "translate English to German: ",
    "en",
    "de",
    {"train": "wmt/train*.{}", "validation": "wmt/newstest2013.{}", "test": "wmt/newstest2014.{}"},
    prepared.Dataset("wmt14_translate/de-en:1.0.0", "tensorflow_datasets.translate.wmt14"),
)


def _english_to_german(**files: str) -> Task:
    """Returns the WMT task with other files."""
    return dataclasses.replace(_WMT14, files=files, dataset=None)


def _to_english(task: Task) -> Task:
    return dataclasses.replace(task, prefix="translate German to English: ", source="de", target="en")


_MULTI30K = _english_to_german(
    train="multi30k/train.{}",
    validation="multi30k/val.{}",
    test="multi30k/test_2016_flickr.{}",
    test_2017="multi30k/test_2017_flickr.{}",
)


def _summaries(name: str, prefix: str) -> Task:
    return Task(prefix, "document", "summary", _splits(f"summaries/{name}.SPLIT.jsonl"), metric="rouge")


TASKS: Mapping[str, Task] = {
    "wmt14_en_de": _WMT14,
    "wmt14_de_en": _to_english(_WMT14),
    "multi30k_en_de": _MULTI30K,
    "multi30k_de_en": _to_english(_MULTI30K),
    "tatoeba_en_de": _english_to_german(
        train="en_de_more/tatoeba.train.{}",
        validation="en_de_more/tatoeba.val.{}",
        test="en_de_more/tatoeba.test.{}",
    ),
    # For training in mixtures: these have no held-out splits.
    "europarl_en_de": _english_to_german(train="en_de_more/europarl*.train.{}"),
    "wikipedia_en_de": _english_to_german(train="en_de_more/mlqe_pe.train.{}"),
    "manuals_en_de": _english_to_german(train="en_de_more/docs_msdynamics.train.{}"),
    # WMT's files without Tatoeba's sentences, which `tatoeba_en_de` has.
    "news_en_de": _english_to_german(
        train="wmt/train_[nw]*.{}", validation="wmt/newstest2013.{}", test="wmt/newstest2014.{}"
    ),
    "samsum": _summaries("samsum", "summarize: "),
    "scitldr": _summaries("scitldr", "summarize: "),
    "paper_titles": _summaries("paper_titles", "title: "),
    "cnn_dailymail": Task(
        "summarize: ",
        "article",
        "highlights",
        _splits("cnn_dm/SPLIT*.jsonl"),
        # Version 3.4.0 holds the texts of 3.0.0: cased, not anonymised.
        prepared.Dataset(
            "cnn_dailymail:3.4.0", "tensorflow_datasets.summarization.cnn_dailymail", ("tensorflow", "bs4")
        ),
        metric="rouge",
    ),
    # A copying task that a model without pretraining can learn; no summaries.
    "cnn_dailymail_lead": Task(
        "", "article", "article", _splits("cnn_dm/SPLIT*.jsonl"), convert=first_sentence
    ),
    # XDailyDialog: a list of turns in each language.
    "dialogue": Task(
        "reply: ",
        "en",
        "en",
        {"train": "dialog/*part1k*.jsonl", "validation": "dialog/*dev*.jsonl", "test": "dialog/*test*.jsonl"},
        convert=next_turns,
    ),
    # MBPP's own splits are ranges of its tasks, 1 to 974 in one file. T5's tokenizer drops newlines and
    # some characters of code; ByT5's keeps all.
    "mbpp": Task(
        "python: ",
        "text",
        "code",
        {
            "train": "prompts/mbpp.jsonl[600:]",
            "validation": "prompts/mbpp.jsonl[510:600]",
            "test": "prompts/mbpp.jsonl[10:510]",
        },
    ),
    "humaneval": Task("", "prompt", "canonical_solution", {"test": "prompts/HumanEval.jsonl"}),
    "text": Task("", "source", "target", _splits("SPLIT.{}")),
    "jsonl": Task("", "source", "target", _splits("SPLIT.jsonl")),
}


def load(task: Task, split: str, data_dir: str | pathlib.Path, *, download: bool = False) -> Examples:
    """Returns the text pairs of a split.

    Reads the dataset that tensorflow-datasets prepared in `data_dir`, or else the task's files below
    `data_dir`.

    Args:
      split: such as `test`, `validation[:100]` or `train+validation[200:]`.
      data_dir: the directory of datasets and files.
      download: prepares the dataset first if needed (hours for WMT14), and never reads the files.

    Raises:
      FileNotFoundError: both are missing; the message has each place searched.
      ValueError: an unknown split; files that differ in length; a missing field.
      ImportError, RuntimeError: from preparing, see `prepared.prepare`.
    """
    root, dataset = pathlib.Path(data_dir), task.dataset
    if download:
        if dataset is None:
            raise ValueError("`download` must be False for a task without a dataset, got True; use its files")
        prepared.prepare(dataset, root, f"Alternatives: {_alternatives(task, root)}.")
    if dataset and dataset.is_prepared(root):
        view = _View(task, prepared.read(dataset, root, split))
        return Examples(view, f"{dataset.name} {split}, prepared by tensorflow-datasets")
    parts = [_read_part(task, root, part) for part in split.split("+")]
    pairs = [pair for part_pairs, _ in parts for pair in part_pairs]
    return Examples(pairs, f"{split}: " + ", ".join(name for _, names in parts for name in names))


def _alternatives(task: Task, root: pathlib.Path) -> str:
    """Returns how to supply the files of a task, as a clause."""
    files = ", ".join(f"{root / pattern}" for pattern in task.files.values())
    if any("{}" in pattern for pattern in task.files.values()):
        return f"line-aligned text files with {{}} = {task.source} and {task.target}: {files}"
    return (
        f"JSON lines with the fields {task.source!r} and {task.target!r}, "
        f"exported from the Hugging Face hub for instance: {files}"
    )


def _read_part(task: Task, root: pathlib.Path, part: str) -> tuple[list[TextPair], list[str]]:
    """Returns the pairs of one term of a split, and the names of their files."""
    name, cut = _cut(part)
    if name not in task.files:
        raise ValueError(
            f"`split` must be one of {', '.join(task.files)}, or several joined by +, each with an "
            f"optional [a:b], got {part!r}"
        )
    pattern, cut_of_file = _cut(task.files[name])
    paths = list(_find(root, pattern.replace("{}", task.source)))
    if not paths:
        or_download = (
            f" or prepare {task.dataset.name} with download=True (--download)" if task.dataset else ""
        )
        raise FileNotFoundError(f"no data for {name!r}: supply {_alternatives(task, root)}{or_download}")
    pairs = [pair for path in paths for pair in _read_file(task, path, "{}" in pattern)]
    return pairs[cut_of_file][cut], [str(path.relative_to(root)) for path in paths]


def _read_file(task: Task, path: pathlib.Path, is_text: bool) -> list[TextPair]:
    if not is_text:
        converted = read_jsonl(path, functools.partial(task.convert, task))
        return [pair for pairs in converted for pair in pairs]
    lines = read_pairs(path, path.with_name(path.name.removesuffix(task.source) + task.target))
    return [pair for s, t in lines for pair in task.convert(task, {task.source: s, task.target: t})]


def _find(root: pathlib.Path, pattern: str) -> Iterator[pathlib.Path]:
    """Yields the matching files, sorted, without the `.gz` suffix (`read_lines` finds it)."""
    found = [*root.glob(pattern), *root.glob(pattern + ".gz")]
    yield from sorted({path.with_name(path.name.removesuffix(".gz")) for path in found})


def _cut(text: str) -> tuple[str, slice]:
    """Splits `train[:9]` into "train" and slice(None, 9); without brackets, the slice is full."""
    match = re.fullmatch(r"(.*?)\[(-?\d*):(-?\d*)\]", text)
    if match is None:
        return text, slice(None)
    name, start, stop = match.groups()
    return name, slice(int(start) if start else None, int(stop) if stop else None)


@dataclasses.dataclass(frozen=True)
class _View(Sequence):
    """The pairs of a prepared split, converted when indexed."""

    task: Task
    examples: Sequence[Example]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]  # raises IndexError, which ends an iteration
        (pair,) = self.task.convert(self.task, self.examples[i])
        return pair
