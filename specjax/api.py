"""The public API at text level: text in, text out. The modules below it work on token arrays."""

import dataclasses
import hashlib
import os
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import acceptance, corpus, data, decode, sharding, texts
from specjax.decode import Generation, OnRound, Request
from specjax.generation_config import GenerationConfig, per_row, row_seeds
from specjax.loading import Model, check_loaded
from specjax.models import heads_io
from specjax.texts import Output
from specjax.types import AcceptanceRule, Drafter


@jax.transfer_guard("allow")  # transfers are intended here, whatever the user's setting
def generate(
    target: Model,
    prompts: Sequence[str],
    *,
    drafter: Drafter | None = None,
    rule: AcceptanceRule = acceptance.speculative,
    config: GenerationConfig | None = None,
    num_samples: int = 1,
    decoder_prefix: str | Sequence[str] | None = None,
    truncate: bool = False,
    max_source_length: int | None = None,
    on_round: OnRound | None = None,
    **options: Any,
) -> Output:
    """Generates text with exactly the target's distribution, faster when the drafter guesses well.

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
      drafter: for example `specjax.drafters.from_model(draft, num_draft=5)`; None: autoregressive decoding.
      rule: the acceptance rule where the temperature is above zero.
      config: the generation options; None: the defaults of `GenerationConfig`. Numbers apply to all prompts,
        or are given one per prompt. A row's text depends on its own seed only.
      num_samples: samples per prompt.
      decoder_prefix: one text that every output begins with, or one per prompt; it is not returned.
      truncate: cut sources that are too long instead of raising.
      max_source_length: the most tokens of a source; None: the target's limit, 512 unless `load` was given
        another. Sources are padded to a few fixed lengths, which double beyond 512.
      on_round: called after every round with the ids that each row emitted in it.
      **options: fields of `GenerationConfig`, which override those of `config`.

    Returns:
      One entry per prompt and sample, in the order of the prompts.

    Raises:
      ValueError: an invalid argument; the message states its value and a remedy.
    """
    rows = _check_call(
        target,
        prompts,
        drafter,
        rule,
        config,
        num_samples,
        decoder_prefix,
        truncate,
        max_source_length,
        options,
    )
    generation = decode.generate_requested(rows.whole_request(), on_round, rows.stop_at)
    return to_output(target.tokenizer, generation)


@jax.transfer_guard("allow")  # transfers are intended here, whatever the user's setting
class TextStream(Iterator[str]):
    """The pieces of a text, as rounds complete them; made by `stream`.

    Attributes:
      output: what `generate` returns; None until the last piece has been taken.
    """

    def __init__(self, pieces: Generator[str, None, Output]) -> None:
        self.output: Output | None = None
        self._pieces = pieces

    def __next__(self) -> str:
        """Runs rounds until the next piece is final."""
        with jax.transfer_guard("allow"):  # restored between pieces to the user's setting
            try:
                return next(self._pieces)
            except StopIteration as end:
                self.output = self.output or end.value
                raise


def stream(
    target: Model,
    prompt: str,
    *,
    drafter: Drafter | None = None,
    rule: AcceptanceRule = acceptance.speculative,
    config: GenerationConfig | None = None,
    decoder_prefix: str | None = None,
    truncate: bool = False,
    max_source_length: int | None = None,
    **options: Any,
) -> TextStream:
    """Generates the text of one prompt in pieces, as rounds complete them.

    Joined, the pieces are the text that `generate` returns. Nothing runs between two pieces, so leaving the
    loop stops the generation.

    >>> import specjax
    >>> target = specjax.load("experiments/checkpoints/captions-target")
    >>> drafter = specjax.drafters.from_model(specjax.load("experiments/checkpoints/captions-draft"))
    >>> for piece in specjax.stream(target, "A man rides a bicycle.", drafter=drafter):
    ...     print(piece, end="", flush=True)
    Ein Mann fährt ein Fahrrad.

    Args:
      target, drafter, rule, config, decoder_prefix, truncate, max_source_length: see `generate`.
      prompt: one encoder text.
      **options: fields of `GenerationConfig`, which override those of `config`.

    Returns:
      An iterator of texts, none empty. After the last one its `output` is what `generate` returns.

    Raises:
      ValueError: an invalid argument; raised when `stream` is called.
    """
    if not isinstance(prompt, str):
        raise ValueError(f"`prompt` must be one text, got {prompt!r:.80}; specjax.generate takes several")
    if "num_samples" in options:
        raise ValueError("`num_samples` must be left out of a stream; specjax.generate draws several samples")
    rows = _check_call(
        target, [prompt], drafter, rule, config, 1, decoder_prefix, truncate, max_source_length, options
    )
    return TextStream(_pieces(target.tokenizer, rows.whole_request(), rows.stop_at))


def _pieces(tokenizer: Any, request: Request, stop_at: decode.StopAt | None) -> Generator[str, None, Output]:
    """Yields the new final text of a one-row request after each round; returns the whole output."""
    program, inputs = request
    state, ids, given = decode.jitted_prefill(program, **inputs), [], ""
    for before, state in decode.rounds_on_host(program, state, stop_at=stop_at):  # noqa: B020
        ids += decode.emitted(before, state)[0]
        text = texts.settled_text(tokenizer, ids)
        if text.startswith(given) and text != given:
            yield text[len(given) :]
            given = text
    output = to_output(tokenizer, decode.jitted_finish(program, state))
    if output.texts[0] != given:
        yield output.texts[0][len(given) :]
    return output


@jax.transfer_guard("allow")  # transfers are intended here, whatever the user's setting
def compile_ahead(
    target: Model,
    *,
    batch_size: int = 1,
    longest_source: int | None = None,
    streaming: bool = False,
    drafter: Drafter | None = None,
    rule: AcceptanceRule = acceptance.speculative,
    config: GenerationConfig | None = None,
    **options: Any,
) -> tuple[int, ...]:
    """Compiles what `generate` needs for prompts of any length, so that no later call waits for the compiler.

    A program depends on the batch size, the padded length of the sources, `max_new_tokens` up to the next
    of a few sizes, the drafter and its K, the rule, which options are used, and whether every row is
    greedy; not on other values of temperature, penalties or seeds. Call this once for each combination.

    Args:
      target, drafter, rule, config: as of the later calls.
      batch_size: prompts times samples of a call.
      longest_source: the most tokens of a source; None: the target's limit.
      streaming: compile what `stream`, `stop` and `on_round` need instead.
      **options: as of the later calls.

    Returns:
      The padded lengths that were compiled.

    Raises:
      ValueError: an invalid argument; the message states its value and a remedy.
    """
    _check_count("batch_size", batch_size)
    if longest_source is not None:
        texts.check_max_source_length(longest_source)
    longest = longest_source or target.max_source_length
    rows = _check_call(target, [""] * batch_size, drafter, rule, config, 1, None, False, longest, options)
    widths = data.source_buckets(longest)
    widths = widths[: widths.index(data.bucket(longest, widths)) + 1]
    on_round: OnRound | None = (lambda *_: None) if streaming else None
    for width in widths:
        request = rows.request(width, range(batch_size))
        jax.block_until_ready(decode.generate_requested(request, on_round, rows.stop_at))
    return widths


@jax.transfer_guard("allow")  # transfers are intended here, whatever the user's setting
def generate_all(
    target: Model,
    prompts: Sequence[str],
    *,
    batch_size: int = 32,
    num_refilled: int | None = None,
    drafter: Drafter | None = None,
    rule: AcceptanceRule = acceptance.speculative,
    config: GenerationConfig | None = None,
    num_samples: int = 1,
    decoder_prefix: str | Sequence[str] | None = None,
    truncate: bool = False,
    max_source_length: int | None = None,
    journal: str | os.PathLike | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Output:
    """Generates text for thousands of prompts by continuous batching (see `corpus`).

    A row gets the text that `generate` returns for its seed, whatever the batch size. Near ties may differ,
    since sources are padded to other lengths.

    Args:
      target, prompts, drafter, rule, config, num_samples, decoder_prefix, truncate, max_source_length: see
        `generate`.
      batch_size: rows decoded together.
      num_refilled: finished rows to wait for before they are refilled together. It must divide `batch_size`
        and be a multiple of the mesh axis "data". None: about an eighth of `batch_size`.
      journal: a file to which outputs are appended as rows finish. A run that was killed resumes from it;
        resuming with other inputs or options raises. It stays when all are done: delete it.
      on_progress: called with the rows done so far, including those of an earlier run, and the tokens
        emitted in this run; the first call comes before decoding begins.
      **options: fields of `GenerationConfig`, which override those of `config`.

    Returns:
      One entry per prompt and sample, in the order of the prompts.

    Raises:
      ValueError: an invalid argument; the message states its value and a remedy.
    """
    rows = _check_call(
        target,
        prompts,
        drafter,
        rule,
        config,
        num_samples,
        decoder_prefix,
        truncate,
        max_source_length,
        options,
    )
    _check_count("batch_size", batch_size)
    if num_refilled is None:
        num_refilled = corpus.default_refill_size(batch_size, target.mesh)
    _check_count("num_refilled", num_refilled)
    if batch_size % num_refilled:
        raise ValueError(f"`num_refilled` must divide batch_size={batch_size}, got {num_refilled}")
    if journal is not None and jax.process_count() > 1:
        raise ValueError(f"`journal` must be None with several processes, got {journal}")
    lengths = list(map(len, rows.sources))
    rows.request(max(lengths), [0] * num_refilled)  # invalid options raise before a journal is begun
    with corpus.Journal.open(journal, {} if journal is None else rows.digest()) as done:
        left = [i for i in range(len(lengths)) if i not in done.records]
        num_emitted, report = 0, on_progress or (lambda done, tokens: None)
        report(len(done.records), num_emitted)
        for finished in corpus.decode_all(
            lambda width, some: rows.request(width, [left[i] for i in some]),
            [lengths[i] for i in left],
            data.source_buckets(max(lengths)),
            batch_size,
            num_refilled,
            rows.stop_at,
        ):
            done.add(texts.to_records([left[i] for i in finished.indices], finished.generation))
            num_emitted += int(finished.generation.length.sum())
            report(len(done.records), num_emitted)
    return texts.from_records(target.tokenizer, [done.records[i] for i in range(len(lengths))])


# Arguments of the functions above, for suggestions after a misspelt option.
_ALSO = (
    *("num_samples", "decoder_prefix", "truncate", "max_source_length"),
    *("on_round", "batch_size", "journal", "on_progress"),
)


class _CheckedCall(NamedTuple):
    """The arguments of a call, checked: one row per prompt and sample, samples of a prompt side by side.

    Attributes:
      target, drafter, rule: as given.
      config: numbers apply to all rows, or are given one per row.
      sources: ids of each row.
      prefix, prefix_length: the decoder prefix, `[rows, P]` and `[rows]`.
      seeds: `[rows] uint32`.
      stop_at: finds where stop strings end a row; None without stop strings.
    """

    target: Model
    drafter: Drafter | None
    rule: AcceptanceRule
    config: GenerationConfig
    sources: list[list[int]]
    prefix: np.ndarray
    prefix_length: np.ndarray
    seeds: np.ndarray
    stop_at: decode.StopAt | None

    def whole_request(self) -> Request:
        """Returns the request of all rows."""
        longest = max(map(len, self.sources))
        return self.request(data.bucket(longest, data.source_buckets(longest)), range(len(self.sources)))

    def request(self, width: int, index: Sequence[int]) -> Request:
        """Returns the request of rows `index`, sources padded to `width`; equal sizes share a program."""
        rows = np.asarray(index)
        config = dataclasses.replace(self.config.for_rows(rows, len(self.sources)), seed=self.seeds[rows])
        ids, mask = data.pad([self.sources[i] for i in rows], width, self.target.network.pad_id)
        return decode.prepare(
            self.target.network,
            ids,
            mask,
            drafter=self.drafter,
            rule=self.rule,
            config=config,
            prefix=self.prefix[rows],
            prefix_length=self.prefix_length[rows],
            length_bucket=decode.length_bucket(int(np.max(self.config.max_new_tokens))),
        )

    def digest(self) -> dict[str, Any]:
        """Returns the header of a journal: a summary of all that outputs depend on."""
        digest = lambda content: hashlib.sha256(content).hexdigest()  # noqa: E731

        def settings_and_params(part: Any) -> str:
            return digest(repr(jax.tree.structure(part)).encode()) + heads_io.fingerprint(part)

        return {
            "sources": digest(repr(self.sources).encode()),
            "target": settings_and_params(self.target.network),
            "drafter": self.drafter and settings_and_params(self.drafter),
            "rule": repr(self.rule),
            "config": self.config.described(),
            "prefix": digest(self.prefix.tobytes()),
            "seeds": digest(self.seeds.tobytes()),
        }


def _check_call(
    target: Model,
    prompts: Sequence[str],
    drafter: Drafter | None,
    rule: AcceptanceRule,
    config: GenerationConfig | None,
    num_samples: int,
    decoder_prefix: str | Sequence[str] | None,
    truncate: bool,
    max_source_length: int | None,
    options: dict[str, Any],
) -> _CheckedCall:
    """Checks the arguments that `generate`, `stream` and `generate_all` share."""
    config = decode.resolve(config, options, _ALSO)
    prompts = texts.check_prompts(prompts)
    check_loaded(target)
    if isinstance(drafter, Drafter):
        texts.check_vocabularies(target.network.vocabulary, drafter.vocabulary)
    _check_count("num_samples", num_samples)
    config.to_options(len(prompts), vocab_size=target.network.vocab_size)  # one per prompt, not per sample
    config = config.without_neutral()  # over all rows at once: a batch of neutral rows must not compile anew
    if num_samples > 1 and config.is_greedy:
        warnings.warn(f"`num_samples`={num_samples} equal samples: set a temperature above 0", stacklevel=3)
    limit = np.asarray(per_row("max_new_tokens", config.max_new_tokens, len(prompts), jnp.int32))
    config = dataclasses.replace(config, max_new_tokens=limit)
    network = target.network
    sources = _source_ids(target, prompts, truncate, max_source_length)
    prefix, prefix_length = texts.encode_prefixes(
        target.tokenizer, decoder_prefix, len(prompts), network.start_id, network.pad_id, network.vocab_size
    )
    of_row = np.repeat(np.arange(len(prompts)), num_samples)
    return _CheckedCall(
        target,
        drafter,
        rule,
        config.for_rows(of_row, len(prompts)),
        [sources[i] for i in of_row],
        prefix[of_row],
        prefix_length[of_row],
        np.asarray(sample_seeds(config.seed, len(prompts), num_samples)),
        texts.stop_at(target.tokenizer, config.stop_strings),
    )


def sample_seeds(seed: Any, num_prompts: int, num_samples: int) -> jax.Array:
    """Returns seeds `[prompts * samples]`: the samples of a prompt differ, independently of its batch."""
    seeds = row_seeds(seed, num_prompts)
    if num_samples == 1:
        return seeds
    return jnp.concatenate([row_seeds(one, num_samples) for one in seeds])


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"`{name}` must be a whole number of at least 1, got {value!r}")


def _source_ids(
    target: Model, prompts: Sequence[str], truncate: bool, max_source_length: int | None
) -> list[list[int]]:
    """Returns the ids of every prompt; see `texts.source_ids`."""
    limit, network = target.max_source_length, target.network
    if max_source_length is not None:
        texts.check_max_source_length(max_source_length)
        limit = max_source_length
    return texts.source_ids(target.tokenizer, prompts, truncate, network.vocab_size, limit, network.eos_ids)


def encode_sources(
    target: Model, prompts: Sequence[str], truncate: bool = False, max_source_length: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenises prompts and pads them to a bucket: ids `[B, S] int32`, mask `[B, S] bool`.

    Raises:
      ValueError: a source is over the limit and `truncate` is False.
    """
    rows = _source_ids(target, prompts, truncate, max_source_length)
    longest = max(map(len, rows))
    return data.pad(rows, data.bucket(longest, data.source_buckets(longest)), target.network.pad_id)


def to_output(tokenizer: Any, generation: Generation) -> Output:
    """Cuts arrays into lists and decodes the text."""
    generation = sharding.fetch(generation)
    return texts.from_records(tokenizer, texts.to_records(range(len(generation.length)), generation))
