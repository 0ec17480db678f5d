"""Strings to token ids, and back."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specjax import data
from specjax.types import FinishReason, Generation, Stats

MAX_SOURCE_LENGTH = data.SOURCE_BUCKETS[-1]
_FIELDS = ("token_ids", "log_probs", "processed_log_probs", "finish_reasons")


@dataclasses.dataclass(frozen=True)
class Output:
    """What `generate` returns: one entry per prompt and sample, samples of a prompt side by side.

    Attributes:
      texts: decoded text, special tokens left out.
      token_ids: emitted ids: no start token, no padding, the end token kept where it was emitted.
      log_probs: log softmax of the target's raw logits at every emitted token.
      processed_log_probs: log of the distribution that was sampled from; 0 where greedy.
      finish_reasons: "eos", "length", "stop" (a stop string), or "nonfinite" (the target's logits were
        not numbers).
      stats: counts; `stats.alpha` and `stats.tau` per row, `stats.total()` over all.
    """

    texts: list[str]
    token_ids: list[list[int]]
    log_probs: list[list[float]]
    processed_log_probs: list[list[float]]
    finish_reasons: list[str]
    stats: Stats


def check_prompts(prompts: Any) -> list[str]:
    """The prompts as a list.

    Raises:
      ValueError: they are no texts, or none.
    """
    several = not isinstance(prompts, str | bytes) and hasattr(prompts, "__iter__")
    found = list(prompts) if several else []
    if not found or not all(isinstance(p, str) for p in found):
        raise ValueError(f'prompts={prompts!r:.80}: give a non-empty list of strings, as in ["a text"]')
    return found


def check_tokenizers(target: Any, draft: Any) -> None:
    """Refuses a draft that means other pieces by the same ids.

    Raises:
      ValueError: the first id that differs is named.
    """
    if draft is None or target is None or draft is target:
        return
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    pieces, others = ({i: piece for piece, i in v.items()} for v in (ours, theirs))
    first = next(i for i in sorted(pieces.keys() | others.keys()) if pieces.get(i) != others.get(i))
    raise ValueError(
        f"the draft's tokenizer differs from the target's: id {first} is {others.get(first)!r} there and "
        f"{pieces.get(first)!r} here; a draft must share the target's tokenizer"
    )


def source_ids(tokenizer: Any, prompts: Sequence[str], truncate: bool = False) -> list[list[int]]:
    """The ids of every prompt, the end token last.

    Raises:
      ValueError: a source is over the limit and `truncate` is False.
    """
    rows = [list(ids) for ids in tokenizer(list(prompts), verbose=False).input_ids]
    longest = max(range(len(rows)), key=lambda i: len(rows[i]))
    if len(rows[longest]) > MAX_SOURCE_LENGTH and not truncate:
        raise ValueError(
            f"prompts[{longest}] has {len(rows[longest])} tokens, over the limit of {MAX_SOURCE_LENGTH}: "
            "shorten it, or pass truncate=True"
        )
    return [data.truncate(row, MAX_SOURCE_LENGTH) for row in rows]


def encode_prefixes(
    tokenizer: Any, texts: str | Sequence[str] | None, num_rows: int, start_id: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """The decoder's input so far: `[B, P] int32`, the start token first, and lengths `[B]`.

    Raises:
      ValueError: not one text, nor one per row.
    """
    rows = [""] * num_rows if texts is None else [texts] * num_rows if isinstance(texts, str) else list(texts)
    if len(rows) != num_rows:
        raise ValueError(
            f"decoder_prefix has {len(rows)} entries: give one text, or one per prompt ({num_rows})"
        )
    ids = [tokenizer(row, add_special_tokens=False).input_ids if row else [] for row in rows]
    rows_of_ids = [[start_id, *row] for row in ids]
    prefix, mask = data.pad(rows_of_ids, max(map(len, rows_of_ids)), pad_id)
    return prefix, mask.sum(1).astype(np.int32)


def stop_at(tokenizer: Any, strings: Sequence[str]) -> Callable[[list[int], int], int | None] | None:
    """Where decoded text first holds one of `strings`, looked for in all of it after every token.

    Returns:
      A `decode.Stop`, or None without strings.

    Raises:
      ValueError: an empty string.
    """
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError(f"stop={strings!r:.80}: give non-empty strings")
    if not strings:
        return None

    def stop(ids: list[int], num_before: int) -> int | None:
        for end in range(num_before + 1, len(ids) + 1):
            text = tokenizer.decode(ids[:end], skip_special_tokens=True)
            if any(string in text for string in strings):
                return end
        return None

    return stop


def to_records(indices: Sequence[int], generation: Generation) -> list[dict[str, Any]]:
    """A row each, as JSON has it, with the `index` given for it.

    Args:
      generation: on the host.
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
    """The rows in their order, with their texts."""
    fields: dict[str, Any] = {name: [record[name] for record in records] for name in _FIELDS}
    names = [field.name for field in dataclasses.fields(Stats)]
    counts: Any = [np.array([record["stats"][name] for record in records]) for name in names]
    texts = tokenizer.batch_decode(fields["token_ids"], skip_special_tokens=True)
    return Output(texts, stats=Stats(*counts), **fields)
