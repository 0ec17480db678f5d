"""Saves and loads heads: heads.json and heads.safetensors, with a fingerprint of their target."""

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from specjax import sharding
from specjax.models import heads, t5
from specjax.writing import write_whole

FORMAT = "specjax heads 1"
CONFIG, WEIGHTS = "heads.json", "heads.safetensors"
_SAMPLE = 4096  # entries of every array that a fingerprint reads


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def fingerprint(params: Any) -> str:
    """Returns a digest of params: path, shape and first entries of every array, in bfloat16."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(f"{jax.tree_util.keystr(path)}{leaf.shape}".encode())
        digest.update(_first(leaf).tobytes())
    return digest.hexdigest()


def _first(leaf: Any) -> np.ndarray:
    """Returns the first `_SAMPLE` entries; only the rows that contain them are fetched from a mesh."""
    if leaf.ndim == 0:
        return np.asarray(sharding.fetch(leaf))
    rows = -(-_SAMPLE // max(leaf[:1].size, 1))
    return np.asarray(sharding.fetch(leaf[:rows]).ravel()[:_SAMPLE].astype(jnp.bfloat16))


def save(directory: str | os.PathLike[str], network: heads.HeadsNetwork, target: t5.T5Network) -> None:
    """Writes heads in bfloat16, heads.json last.

    Args:
      directory: created when missing.
      network: the heads.
      target: the target that they were trained for.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        _name(path): np.asarray(leaf.astype(jnp.bfloat16))
        for path, leaf in jax.tree_util.tree_leaves_with_path(network.params)
    }
    config = dataclasses.asdict(network.config)
    document = {"format": FORMAT, "target": fingerprint(target.params), "config": config}
    text = json.dumps(document, sort_keys=True) + "\n"
    write_whole(
        {
            directory / WEIGHTS: lambda path: safetensors.numpy.save_file(tensors, path),
            directory / CONFIG: lambda path: path.write_text(text, encoding="utf-8"),
        }
    )


def read_config(directory: str | os.PathLike[str]) -> tuple[heads.HeadsConfig, str]:
    """Returns the config of saved heads and the fingerprint of their target.

    Raises:
      ValueError: the file is missing or has another format.
    """
    path = pathlib.Path(directory) / CONFIG
    config: dict[str, Any]
    try:
        document = json.loads(path.read_text("utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}")
        config = {k: tuple(v) if isinstance(v, list) else v for k, v in document["config"].items()}
        return heads.HeadsConfig(**config), document["target"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not contain heads of the format {FORMAT!r} ({error}): train heads with "
            "`python -m experiments.train_heads`"
        ) from error


def load(directory: str | os.PathLike[str], target: t5.T5Network) -> heads.HeadsNetwork:
    """Reads heads for a target, in the dtype of its params.

    Raises:
      ValueError: they were trained for another target, are damaged, or do not fit their config.
    """
    config, made_for = read_config(directory)
    found = fingerprint(target.params)
    if found != made_for:
        raise ValueError(
            f"the heads in {directory} were trained for another target (fingerprint {made_for[:12]}, not "
            f"{found[:12]}): train heads for this one with `python -m experiments.train_heads`"
        )
    config.check(target.config)
    path = pathlib.Path(directory) / WEIGHTS
    try:
        tensors = safetensors.numpy.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} is missing or damaged ({error}): copy it again") from error
    expected = jax.eval_shape(lambda: init(config, target, 0).params)
    shapes = {_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(expected)}
    if shapes != {name: tensor.shape for name, tensor in tensors.items()}:
        raise ValueError(f"the arrays of {path} do not match {CONFIG}: copy both again")
    dtype = target.params["embedding"].dtype
    params = jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.asarray(tensors[_name(path)], dtype), expected
    )
    return heads.HeadsNetwork.of(config, target, params)


def init(config: heads.HeadsConfig, target: t5.T5Network, seed: int) -> heads.HeadsNetwork:
    """Returns untrained heads with float32 params.

    Medusa's output head is initialised with the target's rows of the drafted ids: every head first predicts
    the target's distribution of the next token.
    """
    network = heads.HeadsNetwork.of(config, target)
    frozen = jax.tree.map(lambda x: x.astype(jnp.float32), network.frozen)
    m = target.config.d_model
    inputs: tuple = (jnp.zeros((1, 2, config.num_features(target.config))),)
    if config.kind != "medusa":
        encoded = jnp.zeros((1, 2, target.encoded_width))
        inputs += (jnp.zeros((1, 2), jnp.int32), encoded, jnp.ones((1, 2), bool))
    params = network.module.init(jax.random.key(seed), frozen, *inputs, method="unroll")["params"]
    if config.kind == "medusa" and config.draft_ids:
        ids = np.array(config.draft_ids)
        rows = frozen["embedding"][ids].T if target.config.tied_head else frozen["head"][:, ids]
        params["head"]["kernel"] = rows * (m**-0.5 if target.config.scale_logits else 1.0)
    return network.replace(params=params)
