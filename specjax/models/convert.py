"""Checkpoints in Hugging Face's format, read and written without torch; tensor names and config.json of T5.

For T5Gemma see `t5gemma_convert`. `tensor_names` is the only table of names; reading and writing iterate over
it, so every tensor of a file is used exactly once and every parameter is set exactly once.

Axes: V vocabulary, M model width, F feed-forward width, H heads, D head width. Torch stores a
linear layer as (out, in); the kernels here are (in, out), with H and D as separate axes.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from specjax import hub as hub_files
from specjax.models import adapters, t5gemma_convert
from specjax.models.config import T5Config
from specjax.models.layers import ACTIVATIONS
from specjax.models.t5gemma_config import T5GemmaConfig
from specjax.models.tensors import Format, Tensor
from specjax.writing import write_whole

Config = T5Config | T5GemmaConfig
DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS, INDEX, LEGACY = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
EMBEDDING, HEAD = "shared.weight", "lm_head.weight"
# Copies of the embedding in older files.
ALIASES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# Older files contain a cross-attention bias, which T5 does not use.
IGNORED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)

# model_type of config.json -> class in `architectures`, which identifies configs without a model_type.
MODEL_TYPES = {
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
}
_NOT_T5 = {
    "codet5p": "CodeT5+ of 2B and more is built from CodeGen; its 220m and 770m models are T5s",
    "longt5": "its encoder attends to local blocks",
    "switch_transformers": "its layers are mixtures of experts",
}
# Other names of activations -> keys of `ACTIVATIONS`.
_SAME_ACTIVATION = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new", "gelu_python": "gelu"}
_SAME_ACTIVATION |= {"swish": "silu"}

# Attributes of `T5Config` that config.json must contain; all attributes that it may contain -> their keys.
_REQUIRED = ("vocab_size", "d_model", "d_kv", "d_ff", "num_heads", "num_layers")
IDS = {"pad_id": "pad_token_id", "eos_id": "eos_token_id", "start_id": "decoder_start_token_id"}
_KEYS = {
    **{name: name for name in (*_REQUIRED, "num_decoder_layers", "layer_norm_epsilon", "dropout_rate")},
    "num_buckets": "relative_attention_num_buckets",
    "max_distance": "relative_attention_max_distance",
    **IDS,
}


# ---- names of tensors


def _norm(config: T5Config, name: str, *path: str) -> Tensor:
    return Tensor(f"{name}.weight", (*path, "scale"), "same", (config.d_model,), (config.d_model,))


def _attention(config: T5Config, name: str, *path: str) -> Iterator[Tensor]:
    m, h, d = config.d_model, config.num_heads, config.d_kv
    for part in "qkv":
        yield Tensor(f"{name}.{part}.weight", (*path, part), "transposed", (h * d, m), (m, h, d))
    yield Tensor(f"{name}.o.weight", (*path, "o"), "transposed", (m, h * d), (h, d, m))


def _feed_forward(config: T5Config, name: str, *path: str) -> Iterator[Tensor]:
    m, f = config.d_model, config.d_ff
    for part in ("wi_0", "wi_1") if config.gated else ("wi",):
        yield Tensor(f"{name}.{part}.weight", (*path, part), "transposed", (f, m), (m, f))
    yield Tensor(f"{name}.wo.weight", (*path, "wo"), "transposed", (m, f), (f, m))


def _stack(config: T5Config, stack: str, num_layers: int) -> Iterator[Tensor]:
    """Yields the tensors of the encoder or of the decoder."""
    table = (config.num_buckets, config.num_heads)
    for index in range(num_layers if config.bias_in_every_layer else 1):
        bias = f"{stack}.block.{index}.layer.0.SelfAttention.relative_attention_bias.weight"
        name = f"{stack}_bias_{index}" if config.bias_in_every_layer else f"{stack}_bias"
        yield Tensor(bias, (name, "table"), "same", table, table)
    for index in range(num_layers):
        layer, block = f"{stack}_layers_{index}", f"{stack}.block.{index}.layer"
        yield from _attention(config, f"{block}.0.SelfAttention", layer, "attention")
        yield _norm(config, f"{block}.0.layer_norm", layer, "attention_norm")
        if stack == "decoder":
            yield from _attention(config, f"{block}.1.EncDecAttention", layer, "cross")
            yield _norm(config, f"{block}.1.layer_norm", layer, "cross_norm")
        last = f"{block}.{2 if stack == 'decoder' else 1}"
        yield from _feed_forward(config, f"{last}.DenseReluDense", layer, "feed_forward")
        yield _norm(config, f"{last}.layer_norm", layer, "feed_forward_norm")
    yield _norm(config, f"{stack}.final_layer_norm", f"{stack}_norm")


def tensor_names(config: Config) -> Iterator[Tensor]:
    """Yields every tensor of a checkpoint of this shape once; copies of the embedding excluded."""
    return _FORMATS[config.family].tensor_names(config)


def _t5_tensor_names(config: T5Config) -> Iterator[Tensor]:
    v, m = config.vocab_size, config.d_model
    yield Tensor(EMBEDDING, ("embedding",), "same", (v, m), (v, m))
    yield from _stack(config, "encoder", config.num_layers)
    yield from _stack(config, "decoder", config.num_decoder_layers)
    if not config.tied_head:
        yield Tensor(HEAD, ("head",), "transposed", (v, m), (m, v))


# ---- config.json


def config_from_hf(config: dict[str, Any]) -> Config:
    """Returns the config that a config.json describes, whichever transformers version wrote it.

    Up to version 4, `tie_word_embeddings` states both that the head is the embedding and that
    logits are scaled. Version 5 always writes True there and, for T5 and UMT5, states the
    scaling in `scale_decoder_outputs`; it never scales mT5.

    Args:
      config: the parsed config.json.

    Returns:
      The config in float32. `tied_head` is provisional: the weights determine it (see `load`).
    """
    kind = model_type(config)
    if kind in t5gemma_convert.MODEL_TYPES:
        return t5gemma_convert.config_from_hf(config, kind)
    if kind not in MODEL_TYPES:
        reasons = [f" ({reason})" for name, reason in _NOT_T5.items() if kind.startswith(name)]
        known = ", ".join(map(repr, (*MODEL_TYPES, *t5gemma_convert.MODEL_TYPES)))
        raise ValueError(f"model_type {kind!r} is not supported{''.join(reasons)}: specjax runs {known}")
    gated, activation = _feed_forward_form(config, kind)
    absent = [key for key in _REQUIRED if config.get(key) is None]
    if absent:
        raise ValueError(f"config.json lacks {', '.join(absent)}: is this the config of a T5?")
    tied = config.get("tie_word_embeddings", True) is not False
    scaled = config.get("scale_decoder_outputs", tied if kind != "mt5" else False)
    given = {name: config[key] for name, key in _KEYS.items() if config.get(key) is not None}
    if isinstance(given.get("eos_id"), list):
        if not given["eos_id"]:
            raise ValueError("`eos_token_id` of config.json must contain an id, got []; give the end tokens")
        given["eos_id"], *others = given["eos_id"]
        given["other_eos_ids"] = tuple(others)
    given.setdefault("num_decoder_layers", given["num_layers"])
    given.setdefault("start_id", given.get("pad_id", 0))
    return T5Config(
        **given,
        gated=gated,
        tied_head=tied,
        scale_logits=bool(scaled),
        activation=activation,
        bias_in_every_layer=kind == "umt5",
    )


def model_type(config: dict[str, Any]) -> str:
    """Returns the model_type of a parsed config.json; google/umt5-small states its class only."""
    classes = config.get("architectures") or [None]
    kinds = MODEL_TYPES | t5gemma_convert.MODEL_TYPES
    known = [kind for kind, name in kinds.items() if name == classes[0]]
    return config.get("model_type") or (known or ["t5"])[0]


def _feed_forward_form(config: dict[str, Any], kind: str) -> tuple[bool, str | None]:
    """Returns whether the feed-forward layer is gated, and its activation (None: the default).

    `is_gated_act` and `dense_act_fn`, where given, override `feed_forward_proj`, as in transformers.
    """
    projection = config.get("feed_forward_proj") or ("relu" if kind == "t5" else "gated-gelu")
    name = "gelu_new" if projection == "gated-gelu" else projection.removeprefix("gated-")
    stated, derived = config.get("is_gated_act"), projection.startswith("gated-")
    gated = derived if stated is None else bool(stated)
    name = config.get("dense_act_fn") or name
    name = _SAME_ACTIVATION.get(name, name)
    if name not in ACTIVATIONS:
        known = ", ".join((*ACTIVATIONS, *_SAME_ACTIVATION))
        raise ValueError(
            f"the activation must be one of {known}, plain or gated, got {name!r} (feed_forward_proj "
            f"{projection!r})"
        )
    return gated, None if name == _usual(gated) else name


def _usual(gated: bool) -> str:
    return "gelu_new" if gated else "relu"


def config_to_hf(config: Config, dtype: str = "float32") -> dict[str, Any]:
    """Returns the config.json that transformers and `config_from_hf` read alike."""
    return _FORMATS[config.family].config_to_hf(config, dtype)


def _t5_config_to_hf(config: T5Config, dtype: str) -> dict[str, Any]:
    """Returns the config.json of a T5, which transformers 4 and 5 read alike.

    Note: an untied head with scaled logits exists in transformers 5 only. Version 4 would
    omit the scale; no published T5 has that form.
    """
    eos_ids = [config.eos_id, *config.other_eos_ids]
    kind = "umt5" if config.bias_in_every_layer else "t5"
    activation = config.activation or _usual(config.gated)
    plain = {"gelu_new": "gelu"}.get(activation, activation) if config.gated else activation
    return {key: getattr(config, name) for name, key in _KEYS.items()} | {
        "eos_token_id": eos_ids if config.other_eos_ids else config.eos_id,
        "architectures": [MODEL_TYPES[kind]],
        "model_type": kind,
        "is_encoder_decoder": True,
        "feed_forward_proj": f"gated-{plain}" if config.gated else plain,
        "dense_act_fn": activation,
        "is_gated_act": config.gated,
        # In version 4 True also means scaled logits. So a tied head without the scale is written as
        # an untied one that equals the embedding.
        "tie_word_embeddings": config.tied_head and config.scale_logits,
        "scale_decoder_outputs": config.scale_logits,
        "initializer_factor": 1.0,
        "use_cache": True,
        "torch_dtype": dtype,  # read by every version; only newer ones read "dtype"
    }


def _t5_copies(config: T5Config) -> tuple[str, ...]:
    return (*ALIASES, HEAD) if config.tied_head and config.scale_logits else ALIASES


_FORMATS = {
    "t5": Format(
        tensor_names=_t5_tensor_names,
        config_to_hf=_t5_config_to_hf,
        canonical=lambda name: name,
        embedding=lambda config: EMBEDDING,
        head=HEAD,
        copies=_t5_copies,
        has_head_copy=lambda config: config.tied_head and not config.scale_logits,  # see _t5_config_to_hf
        is_ignored=lambda name: name in IGNORED,
        hints=lambda *names: _t5_hints(*names),
    ),
    "t5gemma": t5gemma_convert.FORMAT,
}


# ---- reading


def read_config(source: str | os.PathLike[str], dtype: str | None = None) -> Config:
    """Returns the config that `load` returns, without reading the weights."""
    with _opened(source, _compute_dtype(dtype)) as (config, _):
        return config


def load(
    source: str | os.PathLike[str],
    dtype: str | None = None,
    place: Callable[[Any], Any] | None = None,
    hub: Mapping[str, Any] = MappingProxyType({}),
    adapter: str | os.PathLike[str] | None = None,
) -> tuple[Config, dict[str, Any]]:
    """Reads a checkpoint: config.json and model.safetensors, in one file or in shards.

    Args:
      source: a local directory or a hub id. A directory takes precedence.
      dtype: of the computation and of the params; None: float32 on a CPU, else bfloat16.
      place: maps the shapes of the params to their shardings. Tensors then go directly to their
        devices, one at a time, and each process reads only the parts of its own devices.
      hub: `revision`, `subfolder`, `token` and other options of the hub.
      adapter: a directory or hub id of a LoRA adapter in PEFT's format, which is merged into the weights in
        float32 as they are read (see `adapters`).

    Returns:
      The config and the params, in the structure of `families.module(config).init(...)["params"]`; without
      `place` as arrays on JAX's default device (see `jax.default_device`).
    """
    with _opened(source, _compute_dtype(dtype), hub, adapter) as (config, checkpoint):
        places = {} if place is None else _by_path(place(shapes(config)))
        return config, _nest(
            (t.path, _read(checkpoint, t, config.dtype, places.get(t.path))) for t in tensor_names(config)
        )


def _nest(leaves: Iterable[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """Returns (path, leaf) pairs as nested dicts."""
    tree: dict[str, Any] = {}
    for (*parents, last), leaf in leaves:
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def _by_path(params: Any) -> dict[tuple[str, ...], Any]:
    """Returns the leaves of nested dicts by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {tuple(jax.tree_util.keystr(path, simple=True, separator="/").split("/")): x for path, x in leaves}


def shapes(config: Config) -> dict[str, Any]:
    """Returns the params of a network of this config as `jax.ShapeDtypeStruct`s, in its compute dtype."""
    return _nest(
        (t.path, jax.ShapeDtypeStruct(t.shape, jnp.dtype(config.dtype))) for t in tensor_names(config)
    )


def _compute_dtype(dtype: Any) -> str:
    on_cpu = jax.default_backend() == "cpu"
    if dtype is None:
        return "float32" if on_cpu else "bfloat16"
    if not isinstance(dtype, str):  # as in jnp.bfloat16
        try:
            dtype = jnp.dtype(dtype).name
        except TypeError:
            pass
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if dtype == "float16" and on_cpu:
        warnings.warn("float16 on a CPU is slow and overflows: use float32 or bfloat16", stacklevel=3)
    return dtype


def read_json_config(
    source: str | os.PathLike[str], hub: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns the parsed config.json of a local directory or of a hub repository.

    Raises:
      ValueError: config.json is missing or is not valid JSON.
    """
    source = os.path.expanduser(os.fspath(source))
    path = hub_files.locate(source, "config.json", hub)
    if path is None:
        where = "" if os.path.isdir(source) else " locally or on the hub (or the hub cannot be reached)"
        raise ValueError(
            f"{source} has no config.json{where}: give a hub id, or a directory of a checkpoint in Hugging "
            "Face's format"
        )
    return hub_files.read_json(path)


@contextlib.contextmanager
def _opened(
    source: str | os.PathLike[str],
    dtype: str,
    hub: Mapping[str, Any] = MappingProxyType({}),
    adapter: str | os.PathLike[str] | None = None,
) -> Iterator[tuple[Config, "_Checkpoint"]]:
    """Yields the config of a checkpoint and its open files, checked against each other."""
    source = os.path.expanduser(os.fspath(source))
    find = functools.partial(hub_files.locate, source, hub=hub)
    described = read_json_config(source, hub)
    generation = find("generation_config.json")
    if generation is not None:  # its special ids take precedence
        found = hub_files.read_json(generation)
        keys = (*IDS.values(), "bos_token_id")
        described |= {key: found[key] for key in keys if found.get(key) is not None}
    config = dataclasses.replace(config_from_hf(described), dtype=dtype)
    with contextlib.ExitStack() as stack:
        stored = _FORMATS[config.family]
        embedding, head = stored.embedding(config), stored.head
        changes = None if adapter is None else _read_adapter(adapter)
        checkpoint = _Checkpoint(_weight_files(source, find), config, stack, changes)
        has_both = head in checkpoint.shapes and embedding in checkpoint.shapes
        own_head = has_both and not checkpoint.same(head, embedding)
        # An adapter of the head leaves the embedding unchanged, so the head is no longer tied.
        own_head |= changes is not None and head in changes.names
        config = dataclasses.replace(config, tied_head=not own_head)
        _check(checkpoint, config)
        if changes is not None:
            changes.check({tensor.name: tensor.file_shape for tensor in tensor_names(config)})
        yield config, checkpoint


def _read_adapter(source: str | os.PathLike[str]) -> adapters.Adapter:
    """Reads a LoRA adapter of a local directory or of a hub repository."""
    name = os.path.expanduser(os.fspath(source))
    config, weights = hub_files.locate(name, adapters.CONFIG), hub_files.locate(name, adapters.WEIGHTS)
    if config is None or weights is None:
        absent = adapters.CONFIG if config is None else adapters.WEIGHTS
        legacy = weights is None and hub_files.locate(name, adapters.LEGACY) is not None
        remedy = "load and save it with PEFT, safe_serialization=True" if legacy else "copy it again"
        raise ValueError(
            f"`adapter` must be the directory of a LoRA adapter, got {name}, which lacks {absent}; {remedy}"
        )
    return adapters.read(name, hub_files.read_json(config), weights)


def _weight_files(source: str, find: Callable[[str], str | None]) -> list[str]:
    """Returns the paths of the safetensors files: one file, or the shards that the index names."""
    path = find(WEIGHTS)
    if path is not None:
        return [path]
    index = find(INDEX)
    if index is None:
        legacy = any(find(name) for name in (LEGACY, f"{LEGACY}.index.json"))
        remedy = (
            f"only {LEGACY}: convert it with `python -m specjax.convert_checkpoint --input={source} "
            "--output=DIRECTORY` (it needs torch: pip install torch)"
        )
        raise ValueError(f"{source} has {remedy if legacy else f'neither {WEIGHTS} nor {INDEX}'}")
    shards = sorted(set(hub_files.read_json(index).get("weight_map", {}).values()))
    paths = {name: find(name) for name in shards}
    absent = [name for name, path in paths.items() if path is None]
    if absent or not shards:
        raise ValueError(f"{index} names missing shards: {', '.join(absent) or '(none named)'}")
    return [path for path in paths.values() if path is not None]


class _Checkpoint:
    """The open files of a checkpoint; a tensor is read when it is needed."""

    def __init__(
        self,
        paths: list[str],
        config: Config,
        stack: contextlib.ExitStack,
        adapter: adapters.Adapter | None = None,
    ):
        self._adapter = adapter
        stored = _FORMATS[config.family]
        embedding, head = stored.embedding(config), stored.head
        self._file_of: dict[str, Any] = {}
        self._stored_as: dict[str, str] = {}  # canonical name -> name in the file, if different
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            try:
                file = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
            except (safetensors.SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path} is truncated or corrupt ({error}): delete it, then fetch or copy it again"
                ) from error
            for written in file.keys():
                name = stored.canonical(written)
                self._file_of[name] = file
                self.shapes[name] = tuple(file.get_slice(written).get_shape())
                if name != written:
                    self._stored_as[name] = written
        # Some files store the embedding only under the name of a copy.
        found = [name for name in stored.copies(config) if name in self.shapes]
        if embedding not in self.shapes and found:
            self._take(embedding, found[0])
        # An adapter of a tied head starts from a copy of the embedding.
        if adapter is not None and head in adapter.names and head not in self.shapes:
            self._take(head, embedding)

    def _take(self, name: str, other: str) -> None:
        """Maps `name` to the tensor that is stored as `other`, if there is one."""
        if other in self.shapes:
            self._file_of[name], self.shapes[name] = self._file_of[other], self.shapes[other]
            self._stored_as[name] = self._stored_as.get(other, other)

    def read(self, name: str) -> np.ndarray:
        """Returns a full tensor as stored, without the adapter."""
        return self._file_of[name].get_tensor(self._stored_as.get(name, name))

    def read_part(self, tensor: Tensor, index: tuple[slice, ...]) -> np.ndarray:
        """Reads the part `index` of a parameter, and only that part of the file."""
        spans = [range(*s.indices(size)) for s, size in zip(index, tensor.shape, strict=True)]
        shape = [len(span) for span in spans]
        if tensor.kind == "same":
            return self._slice(tensor.name, spans)
        if len(spans) == 3:  # H and D are one axis of the file
            first = 1 if tensor.shape[0] == tensor.file_shape[1] else 0
            heads, width = spans[first], tensor.shape[first + 1]
            assert len(spans[first + 1]) == width  # no partition rule divides D
            spans[first : first + 2] = [range(heads.start * width, heads.stop * width)]
        return self._slice(tensor.name, spans[::-1]).T.reshape(shape)

    def _slice(self, name: str, spans: list[range]) -> np.ndarray:
        stored = self._file_of[name].get_slice(self._stored_as.get(name, name))
        part = stored[tuple(slice(span.start, span.stop) for span in spans)]
        return part if self._adapter is None else self._adapter.merged(name, part, spans)

    def same(self, name: str, other: str) -> bool:
        """Returns whether two tensors are equal in the file."""
        return self.shapes[name] == self.shapes[other] and np.array_equal(self.read(name), self.read(other))


def _check(checkpoint: _Checkpoint, config: Config) -> None:
    """Raises one ValueError that names every tensor that does not fit."""
    shapes, stored = checkpoint.shapes, _FORMATS[config.family]
    embedding, head, copies = stored.embedding(config), stored.head, stored.copies(config)
    expected = {tensor.name: tensor.file_shape for tensor in tensor_names(config)}
    accepted = {*expected, *copies} | ({head} if config.tied_head else set())
    missing = sorted(expected.keys() - shapes.keys())
    left_over = sorted(name for name in shapes.keys() - accepted if not stored.is_ignored(name))
    problems = [f"missing: {', '.join(missing)}"] if missing else []
    problems += [f"left over: {', '.join(left_over)}"] if left_over else []
    for name in sorted(expected.keys() & shapes.keys()):
        if shapes[name] != expected[name]:
            problems.append(f"{name} has shape {shapes[name]}, config.json states {expected[name]}")
    for name in copies:
        both = name != head and name in shapes and embedding in shapes
        if both and not checkpoint.same(name, embedding):
            problems.append(f"{name} differs from {embedding}, of which it must be a copy")
    problems += stored.hints(missing, left_over, config)
    if problems:
        raise ValueError("the weights do not fit config.json: " + "; ".join(problems))


def _t5_hints(missing: list[str], left_over: list[str], config: T5Config) -> list[str]:
    """Returns probable errors in config.json, given the missing and the left-over names."""
    hints = []
    if any(".wi_0." in name for name in left_over):
        hints.append('the weights have wi_0/wi_1: feed_forward_proj should be "gated-gelu" (v1.1)')
    if any(".wi_0." in name for name in missing) and any(".wi." in name for name in left_over):
        hints.append('the weights have wi, not wi_0/wi_1: feed_forward_proj should be "relu" (v1.0)')
    tables = [name for name in left_over if "layer.0.SelfAttention.relative_attention_bias" in name]
    if tables and not config.bias_in_every_layer:
        hints.append('the weights have a bias in every layer: model_type should be "umt5"')
    return hints


def _read(
    checkpoint: _Checkpoint, tensor: Tensor, dtype: str, place: jax.sharding.Sharding | None
) -> jax.Array:
    """Reads a parameter onto the devices of `place`, or the default device if None.

    A part that several devices hold is read once.
    """
    parts: dict[str, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        if str(index) not in parts:
            read = checkpoint.read_part(tensor, index)
            parts[str(index)] = np.ascontiguousarray(read, dtype=jnp.dtype(dtype))
        return parts[str(index)]

    if place is None:
        return jnp.asarray(part((slice(None),) * len(tensor.shape)))
    return jax.make_array_from_callback(tensor.shape, place, part)


# ---- writing


def _to_tensors(config: Config, params: dict[str, Any], dtype: str) -> dict[str, np.ndarray]:
    """Returns the tensors of the file by name; one ValueError names every param that does not fit."""
    arrays, tensors = _by_path(params), list(tensor_names(config))
    expected = {tensor.path: tensor.shape for tensor in tensors}
    faults = {
        "missing": expected.keys() - arrays.keys(),
        "left over": arrays.keys() - expected.keys(),
        "of another shape": {p for p in expected.keys() & arrays.keys() if expected[p] != arrays[p].shape},
    }
    named = {what: ", ".join(sorted("/".join(path) for path in paths)) for what, paths in faults.items()}
    if any(named.values()):
        found = "; ".join(f"{what}: {names}" for what, names in named.items() if names)
        raise ValueError(f"params do not fit config: {found}")
    result = {}
    for tensor in tensors:
        array = np.asarray(arrays[tensor.path])
        array = array.reshape(tensor.file_shape[::-1]).T if tensor.kind == "transposed" else array
        result[tensor.name] = np.ascontiguousarray(array, dtype=jnp.dtype(dtype))
    stored = _FORMATS[config.family]
    if stored.has_head_copy(config):
        result[stored.head] = result[stored.embedding(config)].copy()
    return result


def save(
    directory: str | os.PathLike[str],
    config: Config,
    params: dict[str, Any],
    tokenizer: Any = None,
    dtype: str = "float32",
) -> None:
    """Writes a checkpoint that `load` and `transformers` (4 and 5 for T5) read as the same model.

    Files are written atomically, config.json last, so a directory that has one is complete.

    Args:
      directory: created when missing; files of the same names are replaced.
      config, params: as `load` returns them.
      tokenizer: anything with `save_pretrained(directory)`, or None.
      dtype: of the tensors in the file.
    """
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}")
    tensors = _to_tensors(config, params, dtype)
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)

    def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    described = config_to_hf(config, dtype)
    ids = {key: described[key] for key in IDS.values()}
    writers = {
        WEIGHTS: lambda path: safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"}),
        "generation_config.json": lambda path: write_json(path, ids),
        "config.json": lambda path: write_json(path, described),
    }
    if tokenizer is not None:
        tokenizer.save_pretrained(str(directory))
    write_whole({directory / name: write for name, write in writers.items()})
