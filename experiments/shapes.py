"""Models that are a shape and nothing else: random weights, for times that do not depend on what they are."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import t5
from specjax.request import Request, prepare


def default_dtype() -> str:
    """Of weights and computation: float32 on CPU, else bfloat16."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def shape(name: str, dtype: str, family: t5.T5Config = t5.PRESETS["t5-small"]) -> t5.T5Config:
    """A preset, or a smaller relative of a family: "1x256" has one layer on each side, 256 wide.

    Raises:
      ValueError: neither.
    """
    if name in t5.PRESETS:
        return dataclasses.replace(t5.PRESETS[name], dtype=dtype)
    parts = name.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{name!r} is no shape: give one of {', '.join(t5.PRESETS)}, or LAYERSxWIDTH")
    layers, width = map(int, parts)
    return dataclasses.replace(
        family,
        d_model=width,
        d_ff=4 * width,
        num_heads=max(1, width // 64),
        d_kv=64,
        num_layers=layers,
        num_decoder_layers=layers,
        dtype=dtype,
    )


def random_params(config: t5.T5Config, seed: int) -> Any:
    """Initial params, made on the device in the dtype of the computation."""
    ids = jnp.zeros((1, 8), jnp.int32)

    @jax.jit
    def init(key: jax.Array) -> Any:
        params = t5.T5(config).init(key, ids, ids == 0, ids)["params"]
        return jax.tree.map(lambda x: x.astype(config.dtype), params)

    return init(jax.random.key(seed))


def request(
    config: t5.T5Config, params: Any, size: tuple[int, int], max_new_tokens: int, **options: Any
) -> Request:
    """A request of random source tokens `[B, S]` = `size` that runs to its limit.

    Args:
      options: the others of `prepare`.
    """
    source = np.random.default_rng(0).integers(2, config.vocab_size, size)
    return prepare(
        t5.T5Network(config),
        params,
        source,
        np.ones(size, bool),
        max_new_tokens=max_new_tokens,
        eos_ids=(),
        **options,
    )
