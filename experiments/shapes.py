"""T5s of any shape with random weights: times do not depend on what the weights are."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from specjax import decode
from specjax.models import t5
from specjax.sampling import Sampling

_SOURCE = flags.DEFINE_integer("source_length", 64, "Source tokens.")
_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Tokens of a run.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1, "Rows.")
_DTYPE = flags.DEFINE_string("dtype", None, "Of weights and computation; float32 on CPU, else bfloat16.")
_NUM_RUNS = flags.DEFINE_integer("num_runs", 8, "Runs in a timed turn, each with coins of its own.")


def dtype() -> str:
    return _DTYPE.value or ("float32" if jax.default_backend() == "cpu" else "bfloat16")


def shape(name: str, family: t5.T5Config = t5.PRESETS["t5-small"]) -> t5.T5Config:
    """A preset, or a smaller relative of a family: "1x256" has one layer on each side, 256 wide.

    Raises:
      ValueError: neither.
    """
    if name in t5.PRESETS:
        return dataclasses.replace(t5.PRESETS[name], dtype=dtype())
    parts = name.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{name!r} is no shape: give one of {', '.join(t5.PRESETS)}, or LAYERSxWIDTH")
    layers, width = map(int, parts)
    return dataclasses.replace(
        family, d_model=width, d_ff=4 * width, num_heads=max(1, width // 64), d_kv=64, num_layers=layers,
        num_decoder_layers=layers, dtype=dtype(),
    )  # fmt: skip


def random_params(config: t5.T5Config, seed: int) -> Any:
    """Initial params, made on the device in the dtype of the computation."""
    ids = jnp.zeros((1, 8), jnp.int32)

    @jax.jit
    def init(key: jax.Array) -> Any:
        params = t5.T5(config).init(key, ids, ids == 0, ids)["params"]
        return jax.tree.map(lambda x: x.astype(config.dtype), params)

    return init(jax.random.key(seed))


def build(
    target: t5.T5Config, params: Any, drafter: Any, drafter_params: Any, rule: Any,
    sampling: Sampling | None = Sampling(),  # noqa: B008
) -> list[decode.Prepared]:  # fmt: skip
    """Requests of random tokens that run to their limit; `sampling` None: greedy."""
    size = (_BATCH_SIZE.value, _SOURCE.value)
    source = np.random.default_rng(0).integers(2, target.vocab_size, size)
    return [
        decode.prepare(
            t5.T5Network(target), params, source, np.ones(size, bool), drafter=drafter,
            drafter_params=drafter_params, rule=rule, sampling=sampling, seed=seed, eos_ids=(),
            max_new_tokens=_NEW_TOKENS.value,
        )
        for seed in range(_NUM_RUNS.value)
    ]  # fmt: skip
