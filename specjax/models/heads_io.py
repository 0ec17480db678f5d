"""Heads on disk: heads.json and heads.safetensors, with a fingerprint of the target they were made for."""

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
    """Tells one target's params from another's: path, shape and first entries of every array, in bfloat16."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(f"{jax.tree_util.keystr(path)}{leaf.shape}".encode())
        digest.update(_first(leaf).tobytes())
    return digest.hexdigest()


def _first(leaf: Any) -> np.ndarray:
    """The first `_SAMPLE` entries, on a mesh of the rows that hold them."""
    if leaf.ndim == 0:
        return np.asarray(sharding.fetch(leaf))
    rows = -(-_SAMPLE // max(leaf[:1].size, 1))
    return np.asarray(sharding.fetch(leaf[:rows]).ravel()[:_SAMPLE].astype(jnp.bfloat16))


def save(
    directory: str | os.PathLike[str], config: heads.HeadsConfig, params: Any, target_params: Any
) -> None:
    """Writes heads, heads.json last.

    Args:
      directory: created when missing.
      config: their shape.
      params: of the heads alone; written in bfloat16.
      target_params: of the target that they were trained for.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        _name(path): np.asarray(leaf.astype(jnp.bfloat16))
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    document = {"format": FORMAT, "target": fingerprint(target_params), "config": dataclasses.asdict(config)}
    said = json.dumps(document, sort_keys=True) + "\n"
    write_whole(
        {
            directory / WEIGHTS: lambda path: safetensors.numpy.save_file(tensors, path),
            directory / CONFIG: lambda path: path.write_text(said, encoding="utf-8"),
        }
    )


def read_config(directory: str | os.PathLike[str]) -> tuple[heads.HeadsConfig, str]:
    """The shape of heads on disk, and the fingerprint of their target.

    Raises:
      ValueError: there are none, or not of this format.
    """
    path = pathlib.Path(directory) / CONFIG
    try:
        document = json.loads(path.read_text("utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}")
        settings: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in document["config"].items()
        }
        return heads.HeadsConfig(**settings), document["target"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not hold heads of the format {FORMAT!r} ({error}): make some with "
            "`python -m experiments.train_heads`"
        ) from error


def load(
    directory: str | os.PathLike[str], target: t5.T5Config, target_params: Any
) -> tuple[heads.HeadsNetwork, dict[str, Any]]:
    """Reads heads for a target.

    Returns:
      The network, and params of it: the heads, in the dtype of the target's, and the target's arrays.

    Raises:
      ValueError: they were made for another target, are damaged, or do not fit their config.
    """
    config, made_for = read_config(directory)
    found = fingerprint(target_params)
    if found != made_for:
        raise ValueError(
            f"the heads in {directory} were trained for another target (fingerprint {made_for[:12]}, not "
            f"{found[:12]}): train some for this one with `python -m experiments.train_heads`"
        )
    config.check(target)
    path = pathlib.Path(directory) / WEIGHTS
    try:
        tensors = safetensors.numpy.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} is missing or damaged ({error}): copy it again") from error
    network = heads.HeadsNetwork(config, target)
    wanted = jax.eval_shape(lambda: init(network, target_params, 0))
    names = {_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)}
    if names != {name: tensor.shape for name, tensor in tensors.items()}:
        raise ValueError(f"{path} holds other arrays than {CONFIG} says: copy both again")
    dtype = target_params["embedding"].dtype
    params = jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.asarray(tensors[_name(path)], dtype), wanted
    )
    return network, {"heads": params, "frozen": network.frozen(target_params)}


def init(network: heads.HeadsNetwork, target_params: Any, seed: int) -> Any:
    """Float32 params before the first step.

    Medusa's vocabulary head begins as the target's rows of the ids that are drafted: at first every head says
    what the target itself says of the next token.
    """
    config, target, frozen = network.config, network.target, network.frozen(target_params)
    frozen = jax.tree.map(lambda x: x.astype(jnp.float32), frozen)
    width = target.d_model * (1 + len(config.feature_layers))
    inputs: tuple = (jnp.zeros((1, 2, width)),)
    if config.kind != "medusa":
        inputs += (jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2, target.d_model)), jnp.ones((1, 2), bool))
    params = network.module.init(jax.random.key(seed), frozen, *inputs, method="unroll")["params"]
    if config.kind == "medusa" and config.draft_ids:
        ids = np.array(config.draft_ids)
        rows = frozen["embedding"][ids].T if target.tied_head else frozen["head"][:, ids]
        params["head"]["kernel"] = rows * (target.d_model**-0.5 if target.scale_logits else 1.0)
    return params
