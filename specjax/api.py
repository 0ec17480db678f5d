"""The text-level face: text in, text out. Everything below works on token arrays."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import acceptance, corpus, data, decode, sharding, texts
from specjax import request as request_lib
from specjax.drafters import BoundDrafter
from specjax.loading import Model, check_loaded
from specjax.models import heads_io
from specjax.request import Request
from specjax.sampling import Sampling, refuse_unknown
from specjax.texts import Output, check_tokenizers
from specjax.types import AcceptanceRule, Generation


def generate(
    target: Model,
    prompts: Sequence[str],
    *,
    drafter: BoundDrafter | None = None,
    rule: AcceptanceRule = acceptance.speculative,
    sampling: Sampling | None = None,
    max_new_tokens: int | Sequence[int] = 64,
    seed: int | Sequence[int] = 0,
    num_samples: int = 1,
    decoder_prefix: str | Sequence[str] | None = None,
    eos_ids: Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    truncate: bool = False,
    on_round: Callable[[list[list[int]]], None] | None = None,
    **unsupported: Any,
) -> Output:
    """Generates text with the target's exact law, faster when the drafter guesses well.

    >>> import specjax
    >>> target = specjax.load("experiments/checkpoints/captions-target")
    >>> draft = specjax.load("experiments/checkpoints/captions-draft")
    >>> drafter = specjax.drafters.from_model(draft, num_draft=5)
    >>> output = specjax.generate(target, ["A man rides a bicycle."], drafter=drafter, max_new_tokens=16)
    >>> output.texts
    ['Ein Mann fährt ein Fahrrad.']

    Args:
      target: a loaded model.
      prompts: encoder texts, task prefix included ("translate English to German: ...").
      drafter: for example `specjax.drafters.from_model(draft, num_draft=5)`; None: the plain loop.
      rule: how drafts are judged where the temperature is above zero.
      sampling: None: greedy.
      max_new_tokens: one number, or one per prompt.
      seed: one number, or one per prompt; a row's text depends on its own seed only.
      num_samples: samples per prompt.
      decoder_prefix: text that every output (or each) must begin with; it is not returned.
      eos_ids: tokens that end an output; None: the target's own end token.
      stop: strings that end an output, at the token that completes one; that token is kept.
      truncate: cut sources over 512 tokens instead of refusing them.
      on_round: called after every round with the ids that each row emitted in it.

    Returns:
      One entry per prompt and sample, in the order of the prompts.

    Raises:
      ValueError: an argument that cannot be used, named with its value and a remedy.
    """
    refuse_unknown(unsupported.keys())
    prompts = texts.check_prompts(prompts)
    _check_models(target, drafter)
    request_lib.check_kinds(None, rule, sampling)
    _check_count("num_samples", num_samples)
    if sampling is not None:
        sampling.lay_out(len(prompts))  # one per prompt, not per sample
    per_row = lambda value: _repeat(value, num_samples)  # noqa: E731
    source_ids, source_mask = encode_sources(target, prompts, truncate)
    prefix, prefix_length = texts.encode_prefixes(
        target.tokenizer, decoder_prefix, len(prompts), target.config.start_id, target.config.pad_id
    )
    prepared = prepare(
        target,
        per_row(source_ids),
        per_row(source_mask),
        drafter=drafter,
        rule=rule,
        sampling=sampling and repeat_options(sampling, num_samples),
        max_new_tokens=per_row(max_new_tokens),
        seed=_sample_seeds(seed, len(prompts), num_samples),
        prefix=per_row(prefix),
        prefix_length=per_row(prefix_length),
        **({} if eos_ids is None else {"eos_ids": eos_ids}),
    )
    stop_at = texts.stop_at(target.tokenizer, [stop] if isinstance(stop, str) else stop)
    generation = decode.generate_requested(prepared, on_round, stop_at)
    return to_output(target.tokenizer, generation)


def generate_all(
    target: Model,
    prompts: Sequence[str],
    *,
    batch_size: int = 32,
    num_refilled: int | None = None,
    drafter: BoundDrafter | None = None,
    rule: AcceptanceRule = acceptance.speculative,
    sampling: Sampling | None = None,
    max_new_tokens: int = 64,
    seed: int | Sequence[int] = 0,
    truncate: bool = False,
    journal: str | os.PathLike | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    **unsupported: Any,
) -> Output:
    """Generates text for thousands of prompts: rows that finish get the next prompt (see `corpus`).

    A prompt's text is what `generate` makes of it with its seed, whatever the batch size (up to near ties:
    sources are padded to other lengths).

    Args:
      target, prompts, drafter, rule, sampling, max_new_tokens, seed, truncate: see `generate`; options and
        limit are the same for all prompts.
      batch_size: rows decoded together.
      num_refilled: rows that are refilled together once so many have finished; it divides `batch_size`, and a
        mesh divides it. None: about an eighth.
      journal: a file to which outputs are written as they come. A run that was killed goes on from it;
        one that differs in anything that outputs depend on is refused.
      on_progress: called with the prompts done so far, those of an earlier run among them, and the tokens
        emitted in this run; first before it begins.

    Returns:
      One entry per prompt, in their order.

    Raises:
      ValueError: an argument that cannot be used, named with its value and a remedy.
    """
    refuse_unknown(unsupported.keys(), "generate_all")
    prompts = texts.check_prompts(prompts)
    _check_models(target, drafter)
    _check_same_for_all(sampling, max_new_tokens)
    _check_count("batch_size", batch_size)
    if num_refilled is None:
        num_refilled = corpus.eighth(batch_size, target.mesh)
    _check_count("num_refilled", num_refilled)
    if batch_size % num_refilled:
        raise ValueError(f"num_refilled={num_refilled}: must divide batch_size={batch_size}")
    if journal is not None and jax.process_count() > 1:
        raise ValueError(f"journal={journal}: kept by one process only; leave it out where there are more")
    rows = texts.source_ids(target.tokenizer, prompts, truncate)
    seeds = np.asarray(request_lib.row_seeds(seed, len(prompts)))
    options: dict[str, Any] = dict(
        drafter=drafter, rule=rule, sampling=sampling, max_new_tokens=max_new_tokens
    )

    def request(width: int, these: Sequence[int]) -> Request:
        ids, mask = data.pad([rows[i] for i in these], width, target.config.pad_id)
        return prepare(target, ids, mask, seed=seeds[list(these)], **options)

    request(max(map(len, rows)), [0] * num_refilled)  # whatever cannot be is refused before a journal begins
    header = {} if journal is None else _what_outputs_depend_on(target, rows, seeds, **options)
    done = corpus.Journal.open(journal, header)
    left = [i for i in range(len(rows)) if i not in done.records]
    num_emitted, report = 0, on_progress or (lambda done, tokens: None)
    report(len(done.records), num_emitted)
    for finished in corpus.decode_all(
        lambda width, some: request(width, [left[i] for i in some]),
        [len(rows[i]) for i in left],
        data.SOURCE_BUCKETS,
        batch_size,
        num_refilled,
    ):
        done.add(texts.to_records([left[i] for i in finished.indices], finished.generation))
        num_emitted += int(finished.generation.length.sum())
        report(len(done.records), num_emitted)
    return texts.from_records(target.tokenizer, [done.records[i] for i in range(len(rows))])


def _check_models(target: Any, drafter: Any) -> None:
    """Refuses what is no loaded model, no drafter, and a draft with another tokenizer."""
    check_loaded(target)
    if drafter is None:
        return
    if not isinstance(drafter, BoundDrafter):
        raise ValueError(
            f"drafter={drafter!r:.80}: give what specjax.drafters make, such as drafters.from_model(draft, 5)"
        )
    check_tokenizers(target.tokenizer, drafter.tokenizer)
    frozen = drafter.params.get("frozen", {}) if isinstance(drafter.params, dict) else {}
    if any(frozen[name] is not target.params.get(name) for name in frozen):
        raise ValueError("the drafter's heads were loaded for another target: load_heads(directory, target)")


def _check_same_for_all(sampling: Any, max_new_tokens: Any) -> None:
    """Refuses one value per prompt, which `generate_all` does not take."""
    request_lib.check_kinds(None, acceptance.speculative, sampling)
    values = {"max_new_tokens": max_new_tokens} | (dataclasses.asdict(sampling) if sampling else {})
    for name, value in values.items():
        if np.ndim(value):
            raise ValueError(f"{name} has shape {np.shape(value)}: generate_all takes one for all prompts")


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name}={value!r}: give a whole number, at least 1")


def _what_outputs_depend_on(
    target: Model,
    rows: list[list[int]],
    seeds: np.ndarray,
    drafter: BoundDrafter | None,
    rule: Any,
    sampling: Sampling | None,
    max_new_tokens: int,
) -> dict[str, Any]:
    """What a journal begins with."""
    digest = lambda content: hashlib.sha256(content).hexdigest()  # noqa: E731
    return {
        "sources": digest(repr(rows).encode()),
        "target": f"{target.network} {heads_io.fingerprint(target.params)}",
        "drafter": drafter and f"{drafter.drafter} {heads_io.fingerprint(drafter.params)}",
        "rule": getattr(rule, "__name__", repr(rule)),
        "sampling": repr(sampling),
        "max_new_tokens": int(max_new_tokens),
        "seeds": digest(seeds.tobytes()),
    }


def prepare(
    target: Model, source_ids: Any, source_mask: Any, *, drafter: BoundDrafter | None, **options: Any
) -> Request:
    """`request.prepare` with what the model says of its ids."""
    return request_lib.prepare(
        target.network,
        target.params,
        source_ids,
        source_mask,
        drafter=drafter and drafter.drafter,
        drafter_params=drafter and drafter.params,
        num_ids=target.num_ids,
        **target.config.special_ids | options,
    )


def repeat_options(sampling: Sampling, times: int) -> Sampling:
    """The same options with each row's entry repeated."""
    values: dict[str, Any] = {f.name: getattr(sampling, f.name) for f in dataclasses.fields(sampling)}
    repeated: dict[str, Any] = {
        name: None if value is None else _repeat(value, times) for name, value in values.items()
    }
    return Sampling(**repeated)


def encode_sources(
    target: Model, prompts: Sequence[str], truncate: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenises prompts and pads them to a bucket: ids `[B, S] int32`, mask `[B, S] bool`.

    Raises:
      ValueError: a source is over the limit and `truncate` is False.
    """
    rows = texts.source_ids(target.tokenizer, prompts, truncate)
    width = data.bucket(max(map(len, rows)), data.SOURCE_BUCKETS)
    return data.pad(rows, width, target.config.pad_id)


def _repeat(value: Any, times: int) -> Any:
    """Repeats each row; leaves a single number alone."""
    return value if np.ndim(value) == 0 else np.repeat(np.asarray(value), times, axis=0)


def _sample_seeds(seed: int | Sequence[int], num_prompts: int, num_samples: int) -> jax.Array:
    """`[B * num_samples]` seeds: a prompt's samples differ, whatever else is in the batch."""
    seeds = request_lib.row_seeds(seed, num_prompts)
    if num_samples == 1:
        return seeds
    return jnp.concatenate([request_lib.row_seeds(one, num_samples) for one in seeds])


def to_output(tokenizer: Any, generation: Generation) -> Output:
    """Cuts arrays into lists and decodes the text."""
    generation = sharding.fetch(generation)
    return texts.from_records(tokenizer, texts.to_records(range(len(generation.length)), generation))
