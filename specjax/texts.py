"""Conversion of text to token ids and back."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax import data
from specjax.decode import Generation
from specjax.round import FinishReason, Stats

MAX_SOURCE_LENGTH = data.SOURCE_BUCKETS[-1]  # the default
_FIELDS = ("token_ids", "log_probs", "processed_log_probs", "finish_reasons")


@dataclasses.dataclass(frozen=True)
class Output:
    """What `generate` returns: one entry per prompt and sample, samples of a prompt side by side.

    Attributes:
      texts: decoded texts, without special tokens.
      token_ids: emitted ids, without start token and padding; an emitted end token is included.
      log_probs: log softmax of the target's raw logits at every emitted token.
      processed_log_probs: log of the distribution that was sampled from; 0 for greedy rows.
      finish_reasons: "eos", "length", "stop" (a stop string), or "nonfinite" (the target's logits were not
        finite, or the options ruled out every token).
      stats: counts; `stats.alpha` and `stats.tau` per row, `stats.total()` over all rows.
    """

    texts: list[str]
    token_ids: list[list[int]]
    log_probs: list[list[float]]
    processed_log_probs: list[list[float]]
    finish_reasons: list[str]
    stats: Stats


def check_prompts(prompts: Any) -> list[str]:
    """Checks the prompts and returns them as a list.

    Raises:
      ValueError: a prompt is not a text, or there are none.
    """
    several = not isinstance(prompts, str | bytes | Mapping) and hasattr(prompts, "__iter__")
    found = list(prompts) if several else []
    if not found or not all(isinstance(p, str) for p in found):
        raise ValueError(
            f'`prompts` must be a non-empty list of strings, as in ["a text"], got {prompts!r:.80}'
        )
    for i, prompt in enumerate(found):
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"prompts[{i}] must be Unicode text, got half of a surrogate pair at {error.start}; "
                'replace it, as in text.encode("utf-8", "replace").decode()'
            ) from error
    return found


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The pieces of a tokenizer. Hashable, compared by digest: networks with equal tokenizers share programs.

    Attributes:
      digest: digest of all pieces and their ids.
      pieces: id -> piece.
    """

    digest: str
    pieces: Mapping[int, str] = dataclasses.field(compare=False, repr=False)

    @classmethod
    def of(cls, tokenizer: Any) -> "Vocabulary":
        """Returns the vocabulary of a transformers tokenizer."""
        pieces = dict(sorted((i, piece) for piece, i in tokenizer.get_vocab().items()))
        return cls(hashlib.sha256(repr(pieces).encode()).hexdigest(), pieces)

    def __len__(self) -> int:
        return len(self.pieces)


def check_vocabularies(target: Vocabulary | None, draft: Vocabulary | None) -> None:
    """Raises a ValueError if an id has different pieces; the message states the first such id."""
    if target is None or draft is None or target == draft:
        return
    ids = sorted(target.pieces.keys() | draft.pieces.keys())
    first = next(i for i in ids if target.pieces.get(i) != draft.pieces.get(i))
    raise ValueError(
        f"the draft's tokenizer must be the target's, got {draft.pieces.get(first)!r} for id {first}, which "
        f"is {target.pieces.get(first)!r} in the target; load a draft trained with the target's tokenizer"
    )


def check_max_source_length(value: Any) -> None:
    """Raises a ValueError if `value` is not a whole number of at least 1."""
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"`max_source_length` must be a whole number of at least 1, got {value!r}")


def source_ids(
    tokenizer: Any,
    prompts: Sequence[str],
    truncate: bool = False,
    vocab_size: int | None = None,
    max_source_length: int = MAX_SOURCE_LENGTH,
    eos_ids: Sequence[int] = (1,),
) -> list[list[int]]:
    """Returns the ids of every prompt; T5's tokenizer appends the end token.

    Args:
      vocab_size: rows of the embedding; None: ids are not checked.
      max_source_length: the most ids of a prompt; `truncate` cuts longer ones, and keeps an end token.
      eos_ids: end tokens.

    Raises:
      ValueError: a source exceeds the limit and `truncate` is False, or an id has no embedding.
    """
    rows = [list(ids) for ids in tokenizer(list(prompts), verbose=False).input_ids]
    for i, row in enumerate(rows):
        if vocab_size is not None and max(row, default=0) >= vocab_size:
            raise ValueError(
                f"prompts[{i}] has the id {max(row)}, but the model has {vocab_size} embeddings and the "
                f"tokenizer {len(tokenizer)} ids; leave out tokens that were added, or resize the model"
            )
    too_long = [i for i, row in enumerate(rows) if len(row) > max_source_length]
    if too_long and not truncate:
        longest, *others = sorted(too_long, key=lambda i: -len(rows[i]))
        also = (
            f" (and {len(others)} more: {', '.join(f'prompts[{i}]' for i in others[:5])})" if others else ""
        )
        raise ValueError(
            f"prompts[{longest}] must have at most {max_source_length} tokens, got {len(rows[longest])}"
            f"{also}; raise `max_source_length`, shorten it, or pass truncate=True"
        )
    for i in too_long:
        is_ended = rows[i][-1] in eos_ids
        rows[i] = data.truncate(rows[i], max_source_length) if is_ended else rows[i][:max_source_length]
    return rows


def encode_prefixes(
    tokenizer: Any,
    texts: str | Sequence[str] | None,
    num_rows: int,
    start_id: int,
    pad_id: int,
    vocab_size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the decoder prefixes `[B, P] int32`, start token first, and their lengths `[B]`.

    Raises:
      ValueError: `texts` is neither one text nor one per row, or an id is not below `vocab_size`.
    """
    if not isinstance(texts, str | Sequence | None):
        raise ValueError(
            f"`decoder_prefix` must be one text, or one per prompt ({num_rows}), got {texts!r:.80}"
        )
    rows = [""] * num_rows if texts is None else [texts] * num_rows if isinstance(texts, str) else list(texts)
    if len(rows) != num_rows:
        raise ValueError(
            f"`decoder_prefix` must be one text, or one per prompt ({num_rows}), got {len(rows)} entries"
        )
    ids = [tokenizer(row, add_special_tokens=False).input_ids if row else [] for row in rows]
    largest = max((max(row) for row in ids if row), default=0)
    if largest >= vocab_size:
        raise ValueError(
            f"`decoder_prefix` has the id {largest}, but the model has {vocab_size} embeddings; leave out "
            "tokens that were added, or resize the model"
        )
    rows_of_ids = [[start_id, *row] for row in ids]
    prefix, mask = data.pad(rows_of_ids, max(map(len, rows_of_ids)), pad_id)
    return prefix, mask.sum(1).astype(np.int32)


def stop_at(tokenizer: Any, strings: Sequence[str]) -> Callable[[list[int], int], int | None] | None:
    """Returns a `decode.StopAt` that ends a row once its decoded text contains one of `strings`.

    The whole text is searched after every token. Returns None without strings.
    """
    if not strings:
        return None
    special = getattr(tokenizer, "all_special_tokens", [])
    skip = not any(token in string for token in special for string in strings)

    def stop(ids: list[int], num_before: int) -> int | None:
        for end in range(num_before + 1, len(ids) + 1):
            text = tokenizer.decode(ids[:end], skip_special_tokens=skip)
            if any(string in text for string in strings):
                return end
        return None

    return stop


def settled_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Returns the text of the first ids of an output, up to where later ids can still change it.

    Trailing blanks and incomplete characters are left out. If the tokenizer cleans up blanks ("do n't"
    becomes "don't"), the last word is left out too.
    """
    text = tokenizer.decode(list(ids), skip_special_tokens=True).rstrip("\ufffd").rstrip()
    cleans_up = getattr(tokenizer, "clean_up_tokenization_spaces", False)
    return text.rpartition(" ")[0] if cleans_up else text


def to_records(indices: Sequence[int], generation: Generation) -> list[dict[str, Any]]:
    """Returns a JSON record for each row, with its `index` among `indices`.

    Args:
      generation: NumPy arrays.
    """
    stats = {
        field.name: getattr(generation.stats, field.name).tolist() for field in dataclasses.fields(Stats)
    }
    records = []
    for row, index in enumerate(indices):
        length = int(generation.length[row])
        arrays = (generation.tokens, generation.log_probs, generation.processed_log_probs)
        values: list[Any] = [array[row, :length].tolist() for array in arrays]
        values.append(FinishReason(int(generation.finish_reason[row])).name.lower())
        counts = {name: rows[row] for name, rows in stats.items()}
        records.append({"index": int(index), **dict(zip(_FIELDS, values, strict=True)), "stats": counts})
    return records


def from_records(tokenizer: Any, records: Sequence[dict[str, Any]]) -> Output:
    """Returns the output of the records, in order, with decoded texts."""
    fields: dict[str, Any] = {name: [record[name] for record in records] for name in _FIELDS}
    names = [field.name for field in dataclasses.fields(Stats)]
    counts: Any = [np.array([record["stats"][name] for record in records]) for name in names]
    texts = tokenizer.batch_decode(fields["token_ids"], skip_special_tokens=True)
    return Output(texts, stats=Stats(*counts), **fields)
