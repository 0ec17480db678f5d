"""Models and heads from disk, with their tokenizers, on one device or on a mesh."""

import dataclasses
import functools
import os
from typing import Any, NamedTuple

import jax

from specjax import sharding
from specjax.models import convert, heads_io, quantize, t5
from specjax.types import Params


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
    def num_ids(self) -> int | None:
        """Ids that the tokenizer knows, where the vocabulary has padding rows beyond them; None: all."""
        known = self.config.vocab_size if self.tokenizer is None else len(self.tokenizer)
        return known if known < self.config.vocab_size else None

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """What it was loaded onto; None: one device."""
        place = getattr(self.network, "cache_sharding", None)
        return place and place.mesh


def load(
    name_or_directory: str | os.PathLike,
    dtype: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    rules: sharding.Rules = sharding.T5_RULES,
) -> Model:
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


def check_loaded(target: Any) -> None:
    """Refuses what is no loaded model.

    Raises:
      ValueError: it is named.
    """
    if not isinstance(target, Model):
        raise ValueError(f"target={target!r:.80}: load it first, target = specjax.load(...)")


def outline(config: t5.T5Config, mesh: jax.sharding.Mesh, rules: sharding.Rules = sharding.T5_RULES) -> Model:
    """What `load` would give on a mesh, without weights and tokenizer: shapes, and where they lie.

    Raises:
      ValueError: the mesh does not divide them.
    """
    shapes = convert.shapes(config)
    placed = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        sharding.param_shardings(shapes, mesh, rules),
    )
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
    check_loaded(target)
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
