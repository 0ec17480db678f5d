"""Loading of models, tokenizers and heads, onto one device or a mesh."""

import dataclasses
import functools
import os
import pathlib
from typing import Any

import jax

from specjax import sharding
from specjax.hub import reachable
from specjax.models import convert, families, heads, heads_io, quantize, t5
from specjax.texts import MAX_SOURCE_LENGTH, Vocabulary, check_max_source_length
from specjax.types import Params

_HUB_OPTIONS = ("revision", "subfolder", "token", "cache_dir", "local_files_only")
_VOCABULARY_FILES = (
    "tokenizer.json",
    "spiece.model",
    "vocab.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
)


@dataclasses.dataclass(frozen=True)
class Model:
    """A T5 or T5Gemma with its tokenizer.

    Attributes:
      network: the network with its params; its vocabulary is the tokenizer's.
      tokenizer: a transformers tokenizer, or None.
      max_source_length: the most ids of a source; a call may override it.
    """

    network: t5.T5Network
    tokenizer: Any
    max_source_length: int = MAX_SOURCE_LENGTH

    def __post_init__(self) -> None:
        if self.tokenizer is not None:
            network = self.network.replace(vocabulary=Vocabulary.of(self.tokenizer))
            object.__setattr__(self, "network", network)

    @property
    def params(self) -> Params:
        """Nested dicts of arrays, on the device."""
        return self.network.params

    @property
    def config(self) -> families.Config:
        """The shape and flavour of the network."""
        return self.network.config

    @property
    def module(self) -> families.Module:
        """The Linen module."""
        return self.network.module

    @property
    def num_ids(self) -> int | None:
        """Number of ids of the tokenizer, where the vocabulary is padded beyond them; None: all."""
        return self.network.num_ids

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The mesh that it was loaded onto; None: one device."""
        return self.network.mesh


@jax.transfer_guard("allow")  # transfers are intended here, whatever the user's setting
def load(
    name_or_directory: str | os.PathLike,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    rules: sharding.Rules = sharding.T5_RULES,
    max_source_length: int = MAX_SOURCE_LENGTH,
    adapter: str | os.PathLike | None = None,
    **hub: Any,
) -> Model:
    """Loads a T5 or T5Gemma from a hub id or a local Hugging Face directory (safetensors; torch is not used).

    Args:
      name_or_directory: for example "google-t5/t5-small", or a directory with config.json,
        model.safetensors (or its sharded index) and tokenizer files.
      dtype: compute dtype, "float32", "bfloat16" or "float16", or one of jax.numpy; None: float32 on
        a CPU, bfloat16 on GPU and TPU.
      mesh: from `sharding.make_mesh`: every tensor is read straight to the devices that store a part of it,
        and decoding runs on all of them. A draft must be on the mesh of its target. None: one device.
      rules: which axes are divided over "model"; `sharding.REPLICATED` replicates the model, which suits a
        small draft.
      max_source_length: the most ids of a source. T5's positions are relative, so any number works. Memory
        grows with its square in the encoder's attention, and in proportion in the decoder's cache.
      adapter: a directory or hub id of a LoRA adapter in PEFT's format (adapter_config.json,
        adapter_model.safetensors), merged in float32 while the weights are read; None: no adapter.
      **hub: `revision`, `subfolder`, `token`, `cache_dir` and `local_files_only`, for the hub.

    Raises:
      ValueError: the config is not supported, tensors do not fit it (each is named), or the mesh does not
        divide them.
    """
    if not isinstance(name_or_directory, str | os.PathLike):
        raise ValueError(f"`name_or_directory` must be a hub id or a directory, got {name_or_directory!r}")
    unknown = sorted(hub.keys() - set(_HUB_OPTIONS))
    if unknown:
        known = ", ".join(("dtype", "mesh", "rules", "max_source_length", "adapter", *_HUB_OPTIONS))
        raise ValueError(f"`{unknown[0]}` is not an option of load; the options are {known}")
    if adapter is not None and not isinstance(adapter, str | os.PathLike):
        raise ValueError(f"`adapter` must be a directory or a hub id, got {adapter!r:.80}")
    check_max_source_length(max_source_length)
    place = None
    if mesh is not None:
        if not isinstance(mesh, jax.sharding.Mesh) or set(mesh.axis_names) != {"data", "model"}:
            raise ValueError(f"`mesh` must be from specjax.sharding.make_mesh(data, model), got {mesh!r}")
        place = functools.partial(sharding.param_shardings, mesh=mesh, rules=rules)
    config, params = convert.load(name_or_directory, dtype, place, hub, adapter)
    cache_sharding = None if mesh is None else sharding.of_cache(mesh, rules, config.num_kv_heads)
    network = families.network(params, config, cache_sharding=cache_sharding)
    return Model(network, load_tokenizer(name_or_directory, **hub), max_source_length)


def check_loaded(target: Any) -> None:
    """Raises a ValueError if `target` is not a loaded model."""
    if not isinstance(target, Model):
        raise ValueError(f"`target` must be a loaded model, got {target!r:.80}; target = specjax.load(...)")


def outline(
    config: families.Config, mesh: jax.sharding.Mesh, rules: sharding.Rules = sharding.T5_RULES
) -> Model:
    """Returns the model that `load` would return on a mesh, without tokenizer and with shapes as params.

    Raises:
      ValueError: the mesh does not divide the params.
    """
    shapes = convert.shapes(config)
    placed = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        sharding.param_shardings(shapes, mesh, rules),
    )
    cache_sharding = sharding.of_cache(mesh, rules, config.num_kv_heads)
    return Model(families.network(placed, config, cache_sharding=cache_sharding), None)


@jax.transfer_guard("allow")  # transfers are intended here, whatever the user's setting
def load_heads(directory: str | os.PathLike, target: Model) -> heads.HeadsNetwork:
    """Loads Medusa, EAGLE or one-pass heads that `experiments.train_heads` wrote for a target.

    On a mesh the heads are replicated, and so are copies of the target's embedding and head, which they read:
    V M numbers each on every device (251 MiB for T5 XXL in bfloat16). So drafting waits for no other device.

    Raises:
      ValueError: the heads were trained for another target, or are damaged.
    """
    check_loaded(target)
    network = heads_io.load(directory, target.network)
    if target.mesh is None:
        return network
    whole = jax.device_put((network.params, network.frozen), sharding.replicated(target.mesh))
    place = sharding.of_cache(target.mesh, sharding.REPLICATED)
    originals = heads.Originals(network.frozen)
    return network.replace(params=whole[0], frozen=whole[1], cache_sharding=place, originals=originals)


@jax.transfer_guard("allow")  # transfers are intended here, whatever the user's setting
def int8(model: Model) -> Model:
    """Returns the model with int8 weights: a draft that needs no training, or a smaller target.

    As a target it is a different model; speculative decoding is then lossless with respect to it.

    Raises:
      ValueError: `model` is not a loaded model, or is int8 already.
    """
    if not isinstance(model, Model) or isinstance(model.network, quantize.QuantizedNetwork):
        raise ValueError(f"`model` must be a model from specjax.load, got {model!r:.80}")
    return dataclasses.replace(model, network=quantize.QuantizedNetwork.of(model.network))


def load_tokenizer(name_or_directory: str | os.PathLike, **hub: Any) -> Any:
    """Loads the transformers tokenizer of a hub id or a local directory.

    Args:
      name_or_directory, **hub: see `load`.

    Raises:
      ValueError: no tokenizer was found.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # silences a warning about missing torch
    import transformers

    name = os.path.expanduser(os.fspath(name_or_directory))
    needed = f"no tokenizer in {name!r}: it needs {', or '.join(_VOCABULARY_FILES)}"
    folder = os.path.join(name, hub.get("subfolder") or "")
    # Without a vocabulary transformers 5 returns an empty tokenizer. Only ByT5's needs none.
    if os.path.isdir(folder) and not any(os.path.isfile(os.path.join(folder, f)) for f in _VOCABULARY_FILES):
        config = os.path.join(folder, "tokenizer_config.json")
        if not os.path.isfile(config) or '"ByT5Tokenizer"' not in pathlib.Path(config).read_text("utf-8"):
            raise ValueError(needed)
    try:
        return transformers.AutoTokenizer.from_pretrained(
            name, **(hub if os.path.isdir(name) else reachable(hub))
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{needed} ({error})") from error
