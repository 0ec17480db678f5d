"""The text-level face: load a model, generate text.

Strings stay in this file; everything below it works on token arrays.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import acceptance, data, decode, sharding
from specjax.drafters import BoundDrafter
from specjax.models import convert, heads_io, quantize, t5
from specjax.sampling import Sampling, refuse_unknown
from specjax.types import AcceptanceRule, FinishReason, Generation, Params, Stats

SOURCE_BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # then multiples of 512
MAX_SOURCE_LENGTH = 512


@dataclasses.dataclass(frozen=True)
class Model:
    """A T5 with its weights and tokenizer.

    Attributes:
      network: its pure functions; `network.config` is its shape.
      params: nested dicts of arrays, on the device.
      tokenizer: a transformers tokenizer, or None.
    """

    network: t5.T5Network
    params: Params
    tokenizer: Any

    @property
    def config(self) -> t5.T5Config:
        """Shape and flavour."""
        return self.network.config

    @property
    def module(self) -> t5.T5:
        """The Linen module."""
        return t5.T5(self.config)

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """What it was loaded onto; None: one device."""
        place = getattr(self.network, "cache_sharding", None)
        return place and place.mesh


def load(
    name_or_directory: str | os.PathLike, dtype: str | None = None, mesh: jax.sharding.Mesh | None = None,
    rules: sharding.Rules = sharding.T5_RULES,
) -> Model:  # fmt: skip
    """Loads a T5 from a hub id or a local Hugging Face directory (safetensors; torch is not used).

    Args:
      name_or_directory: for example "google-t5/t5-small", or a directory with config.json,
        model.safetensors (or its sharded index) and tokenizer files.
      dtype: compute dtype, "float32", "bfloat16" or "float16"; None: float32 on a CPU, bfloat16
        on GPU and TPU.
      mesh: of `sharding.make_mesh`: every tensor goes straight to the devices that hold a part of it, and
        decoding runs on all of them. A draft lies on the mesh of its target. None: one device.
      rules: what is divided over "model"; `sharding.REPLICATED` puts the model whole on every device, as
        suits a small draft.

    Raises:
      ValueError: a config or tensors that do not fit, each named; a mesh that does not divide them.
    """
    if mesh is None:
        config, params = convert.load(name_or_directory, dtype)
        return Model(t5.T5Network(config), jax.device_put(params), load_tokenizer(name_or_directory))
    place = functools.partial(sharding.param_shardings, mesh=mesh, rules=rules)
    config, params = convert.load(name_or_directory, dtype, place)
    network = t5.T5Network(config, cache_sharding=sharding.of_cache(mesh, rules))
    return Model(network, params, load_tokenizer(name_or_directory))


def outline(config: t5.T5Config, mesh: jax.sharding.Mesh, rules: sharding.Rules = sharding.T5_RULES) -> Model:
    """What `load` would give on a mesh, without weights and tokenizer: shapes, and where they lie.

    Raises:
      ValueError: the mesh does not divide them.
    """
    shapes = convert.shapes(config)
    placed = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes, sharding.param_shardings(shapes, mesh, rules),
    )  # fmt: skip
    return Model(t5.T5Network(config, cache_sharding=sharding.of_cache(mesh, rules)), placed, None)


class LoadedHeads(NamedTuple):
    """Heads that draft for a target: their pure functions, and the arrays of both."""

    network: Any
    params: Params


def load_heads(directory: str | os.PathLike, target: Model) -> LoadedHeads:
    """Loads what `experiments.train_heads` wrote for a target: Medusa, EAGLE or one-pass heads.

    On the target's mesh they lie whole on every device.

    Raises:
      ValueError: they were made for another target, or are damaged.
    """
    network, params = heads_io.load(directory, target.config, target.params)
    if target.mesh is not None:
        params["heads"] = sharding.replicate(params["heads"], target.mesh)
    return LoadedHeads(network, params)


def int8(model: Model) -> Model:
    """The model with weights in eight bits: a draft that needs no training, or a target of its own.

    As a target it is another model; speculation is then lossless with respect to that one.
    """
    network: Any = quantize.QuantizedNetwork(model.network)
    return dataclasses.replace(model, network=network, params=jax.jit(quantize.quantize)(model.params))


def load_tokenizer(name_or_directory: str | os.PathLike) -> Any:
    """The transformers tokenizer of a hub id or a local directory.

    Raises:
      ValueError: the directory holds none.
    """
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(os.fspath(name_or_directory))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no tokenizer in {os.fspath(name_or_directory)!r}: it needs tokenizer.json with "
            f"tokenizer_config.json, or spiece.model ({error})"
        ) from error


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

    Raises:
      ValueError: an argument that cannot be used, named with its value and a remedy.
    """
    refuse_unknown(unsupported.keys())
    if isinstance(prompts, str) or not prompts or not all(isinstance(p, str) for p in prompts):
        raise ValueError(f"prompts={prompts!r}: give a non-empty list of strings")
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples}: must be at least 1")
    if drafter is not None:
        check_tokenizers(target.tokenizer, drafter.tokenizer)
    per_row = lambda value: _repeat(value, num_samples)  # noqa: E731
    source_ids, source_mask = encode_sources(target, prompts, truncate)
    prefix, prefix_length = _encode_prefixes(target, decoder_prefix, len(prompts))
    generation = decode.generate(
        target.network,
        target.params,
        per_row(source_ids),
        per_row(source_mask),
        drafter=None if drafter is None else drafter.drafter,
        drafter_params=None if drafter is None else drafter.params,
        rule=rule,
        sampling=sampling and repeat_options(sampling, num_samples),
        max_new_tokens=per_row(max_new_tokens),
        seed=_sample_seeds(seed, len(prompts), num_samples),
        prefix=per_row(prefix),
        prefix_length=per_row(prefix_length),
        eos_ids=(target.config.eos_id,) if eos_ids is None else eos_ids,
        pad_id=target.config.pad_id,
        num_ids=num_ids(target),
        on_round=on_round,
        stop=_stop_at(target.tokenizer, [stop] if isinstance(stop, str) else stop),
    )
    return to_output(target.tokenizer, generation)


def num_ids(target: Model) -> int | None:
    """Ids that the tokenizer knows, where the vocabulary has padding rows beyond them."""
    known = len(target.tokenizer)
    return known if known < target.config.vocab_size else None


def repeat_options(sampling: Sampling, times: int) -> Sampling:
    """The same options with each row's entry repeated."""
    values: dict[str, Any] = {f.name: getattr(sampling, f.name) for f in dataclasses.fields(sampling)}
    return Sampling(**{name: _repeat(v, times) for name, v in values.items() if v is not None})


def _stop_at(tokenizer: Any, strings: Sequence[str]) -> decode.Stop | None:
    """Where decoded text first holds one of `strings`, looked for in all of it after every token."""
    if not strings:
        return None
    if not all(isinstance(s, str) and s for s in strings):
        raise ValueError(f"stop={list(strings)!r}: give non-empty strings")

    def stop(ids: list[int], num_before: int) -> int | None:
        for end in range(num_before + 1, len(ids) + 1):
            text = tokenizer.decode(ids[:end], skip_special_tokens=True)
            if any(string in text for string in strings):
                return end
        return None

    return stop


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


def encode_sources(
    target: Model, prompts: Sequence[str], truncate: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenises prompts and pads them to a bucket: ids `[B, S] int32`, mask `[B, S] bool`.

    Raises:
      ValueError: a source is over the limit and `truncate` is False.
    """
    rows = [list(ids) for ids in target.tokenizer(list(prompts), verbose=False).input_ids]
    longest = max(range(len(rows)), key=lambda i: len(rows[i]))
    if len(rows[longest]) > MAX_SOURCE_LENGTH:
        if not truncate:
            raise ValueError(
                f"prompts[{longest}] has {len(rows[longest])} tokens, over the limit of {MAX_SOURCE_LENGTH}: "
                "shorten it, or pass truncate=True"
            )
        eos = target.config.eos_id
        rows = [r if len(r) <= MAX_SOURCE_LENGTH else [*r[: MAX_SOURCE_LENGTH - 1], eos] for r in rows]
    width = data.bucket(max(map(len, rows)), SOURCE_BUCKETS)
    return data.pad(rows, width, target.config.pad_id)


def _encode_prefixes(
    target: Model, texts: str | Sequence[str] | None, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """The decoder's input so far: `[B, P] int32`, the start token first, and lengths `[B]`."""
    rows = [""] * num_rows if texts is None else [texts] * num_rows if isinstance(texts, str) else list(texts)
    if len(rows) != num_rows:
        raise ValueError(
            f"decoder_prefix has {len(rows)} entries: give one text, or one per prompt ({num_rows})"
        )
    ids = [target.tokenizer(row, add_special_tokens=False).input_ids if row else [] for row in rows]
    rows_of_ids = [[target.config.start_id, *row] for row in ids]
    prefix, mask = data.pad(rows_of_ids, max(map(len, rows_of_ids)), target.config.pad_id)
    return prefix, mask.sum(1).astype(np.int32)


def _repeat(value: Any, times: int) -> Any:
    """Repeats each row; leaves a single number alone."""
    array = np.asarray(value)
    return array if array.ndim == 0 else np.repeat(array, times, axis=0)


def _sample_seeds(seed: int | Sequence[int], num_prompts: int, num_samples: int) -> jax.Array:
    """`[B * num_samples]` seeds: a prompt's samples differ, whatever else is in the batch."""
    seeds = decode.row_seeds(seed, num_prompts)
    if num_samples == 1:
        return seeds
    return jnp.concatenate([decode.row_seeds(one, num_samples) for one in seeds])


def to_output(tokenizer: Any, generation: Generation) -> Output:
    """Cuts arrays into lists and decodes the text."""
    generation = sharding.fetch(generation)
    cut = lambda array: [row[:n].tolist() for row, n in zip(array, generation.length, strict=True)]  # noqa: E731
    token_ids = cut(generation.tokens)
    return Output(
        texts=tokenizer.batch_decode(token_ids, skip_special_tokens=True),
        token_ids=token_ids,
        log_probs=cut(generation.log_probs),
        processed_log_probs=cut(generation.processed_log_probs),
        finish_reasons=[FinishReason(int(reason)).name.lower() for reason in generation.finish_reason],
        stats=generation.stats,
    )
