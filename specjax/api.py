"""The text-level face: load a model, generate text.

Everything below works on token arrays.
"""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import acceptance, corpus, data, decode, sharding, texts
from specjax.drafters import BoundDrafter
from specjax.models import convert, heads_io, quantize, t5
from specjax.sampling import Sampling, refuse_unknown
from specjax.texts import Output, check_tokenizers
from specjax.types import AcceptanceRule, Generation, Params


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
    if not isinstance(name_or_directory, str | os.PathLike):
        raise ValueError(f"name_or_directory={name_or_directory!r}: give a hub id or a directory")
    if mesh is None:
        config, params = convert.load(name_or_directory, dtype)
        return Model(t5.T5Network(config), jax.device_put(params), load_tokenizer(name_or_directory))
    if not isinstance(mesh, jax.sharding.Mesh) or set(mesh.axis_names) != {"data", "model"}:
        raise ValueError(f"mesh={mesh!r}: give one of specjax.sharding.make_mesh(data, model)")
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
    _check_models(target, None)
    network, params = heads_io.load(directory, target.config, target.params)
    if target.mesh is not None:
        params["heads"] = sharding.replicate(params["heads"], target.mesh)
    return LoadedHeads(network, params)


def int8(model: Model) -> Model:
    """The model with weights in eight bits: a draft that needs no training, or a target of its own.

    As a target it is another model; speculation is then lossless with respect to that one.

    Raises:
      ValueError: it is no loaded model, or in eight bits already.
    """
    if not isinstance(getattr(model, "network", None), t5.T5Network):
        raise ValueError(f"model={model!r:.80}: give a model as specjax.load returns it")
    network: Any = quantize.QuantizedNetwork(model.network)
    return dataclasses.replace(model, network=network, params=jax.jit(quantize.quantize)(model.params))


def load_tokenizer(name_or_directory: str | os.PathLike) -> Any:
    """The transformers tokenizer of a hub id or a local directory.

    Raises:
      ValueError: the directory holds none.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is not there
    import transformers

    name = os.path.expanduser(os.fspath(name_or_directory))
    needed = f"no tokenizer in {name!r}: it needs tokenizer.json with tokenizer_config.json, or spiece.model"
    files = ("tokenizer.json", "tokenizer_config.json", "spiece.model")
    # transformers 5 would make an empty one.
    if os.path.isdir(name) and not any(os.path.isfile(os.path.join(name, file)) for file in files):
        raise ValueError(needed)
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{needed} ({error})") from error


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

    Raises:
      ValueError: an argument that cannot be used, named with its value and a remedy.
    """
    refuse_unknown(unsupported.keys())
    prompts = texts.check_prompts(prompts)
    _check_models(target, drafter)
    decode.check_kinds(None, rule, sampling)
    _check_count("num_samples", num_samples)
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
    generation = decode.generate_prepared(prepared, on_round, stop_at)
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
    refuse_unknown(unsupported.keys())
    prompts = texts.check_prompts(prompts)
    _check_models(target, drafter)
    _check_same_for_all(sampling, max_new_tokens)
    if num_refilled is None:
        num_refilled = eighth(batch_size, target)
    for name, value in (("batch_size", batch_size), ("num_refilled", num_refilled)):
        _check_count(name, value)
    if batch_size % num_refilled:
        raise ValueError(f"num_refilled={num_refilled}: must divide batch_size={batch_size}")
    if journal is not None and jax.process_count() > 1:
        raise ValueError(f"journal={journal}: kept by one process only; leave it out where there are more")
    rows = texts.source_ids(target.tokenizer, prompts, target.config.eos_id, truncate)
    seeds = np.asarray(decode.row_seeds(seed, len(prompts)))
    options: dict[str, Any] = dict(
        drafter=drafter, rule=rule, sampling=sampling, max_new_tokens=max_new_tokens
    )

    def request(width: int, these: Sequence[int]) -> decode.Prepared:
        ids, mask = data.pad([rows[i] for i in these], width, target.config.pad_id)
        return prepare(target, ids, mask, seed=seeds[list(these)], **options)

    request(max(map(len, rows)), [0] * num_refilled)  # whatever cannot be is refused before a journal begins
    header = {} if journal is None else _what_outputs_depend_on(target, rows, seeds, **options)
    done = corpus.Journal.open(journal, header)
    left = [i for i in range(len(rows)) if i not in done.records]
    num_emitted, report = 0, on_progress or (lambda done, tokens: None)
    report(len(done.records), num_emitted)
    for finished in corpus.decode_all(
        lambda width, some: request(width, [left[i] for i in some]), [len(rows[i]) for i in left],
        texts.SOURCE_BUCKETS, batch_size, num_refilled,
    ):  # fmt: skip
        done.add(texts.to_records([left[i] for i in finished.indices], finished.generation))
        num_emitted += int(finished.generation.length.sum())
        report(len(done.records), num_emitted)
    return texts.from_records(target.tokenizer, [done.records[i] for i in range(len(rows))])


def eighth(batch_size: int, target: Model) -> int:
    """Rows that `generate_all` refills together: about an eighth, dividing all, divided by a mesh."""
    least = 1 if target.mesh is None else target.mesh.shape["data"]
    _check_count("batch_size", batch_size)
    sizes = [f for f in range(least, max(least, batch_size // 8) + 1, least) if batch_size % f == 0]
    return max(sizes, default=batch_size)


def _check_models(target: Any, drafter: Any) -> None:
    """Refuses what is no loaded model, no drafter, and a draft with another tokenizer."""
    if not isinstance(target, Model):
        raise ValueError(f"target={target!r:.80}: load it first, target = specjax.load(...)")
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
    decode.check_kinds(None, acceptance.speculative, sampling)
    values = {"max_new_tokens": max_new_tokens} | (dataclasses.asdict(sampling) if sampling else {})
    for name, value in values.items():
        if np.ndim(value):
            raise ValueError(f"{name} has shape {np.shape(value)}: generate_all takes one for all prompts")


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name}={value!r}: give a whole number, at least 1")


def _what_outputs_depend_on(
    target: Model, rows: list[list[int]], seeds: np.ndarray, drafter: BoundDrafter | None, rule: Any,
    sampling: Sampling | None, max_new_tokens: int,
) -> dict[str, Any]:  # fmt: skip
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
) -> decode.Prepared:
    """`decode.prepare` with what the model says of its ids."""
    return decode.prepare(
        target.network, target.params, source_ids, source_mask,
        drafter=drafter and drafter.drafter, drafter_params=drafter and drafter.params,
        pad_id=target.config.pad_id, start_id=target.config.start_id, num_ids=num_ids(target),
        **{"eos_ids": (target.config.eos_id,), **options},
    )  # fmt: skip


def num_ids(target: Model) -> int | None:
    """Ids that the tokenizer knows, where the vocabulary has padding rows beyond them."""
    known = len(target.tokenizer)
    return known if known < target.config.vocab_size else None


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
    rows = texts.source_ids(target.tokenizer, prompts, target.config.eos_id, truncate)
    width = data.bucket(max(map(len, rows)), texts.SOURCE_BUCKETS)
    return data.pad(rows, width, target.config.pad_id)


def _repeat(value: Any, times: int) -> Any:
    """Repeats each row; leaves a single number alone."""
    return value if np.ndim(value) == 0 else np.repeat(np.asarray(value), times, axis=0)


def _sample_seeds(seed: int | Sequence[int], num_prompts: int, num_samples: int) -> jax.Array:
    """`[B * num_samples]` seeds: a prompt's samples differ, whatever else is in the batch."""
    seeds = decode.row_seeds(seed, num_prompts)
    if num_samples == 1:
        return seeds
    return jnp.concatenate([decode.row_seeds(one, num_samples) for one in seeds])


def to_output(tokenizer: Any, generation: Generation) -> Output:
    """Cuts arrays into lists and decodes the text."""
    generation = sharding.fetch(generation)
    return texts.from_records(tokenizer, texts.to_records(range(len(generation.length)), generation))
