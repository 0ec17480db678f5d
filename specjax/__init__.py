"""Speculative decoding for T5 in JAX and Flax: the target's exact output law, sooner."""

from specjax import acceptance, controller, decode, drafters, rounds, sharding, staged, types
from specjax.api import generate, generate_all
from specjax.loading import Model, int8, load, load_heads
from specjax.sampling import Sampling
from specjax.texts import Output

__all__ = [
    "Model",
    "Output",
    "Sampling",
    "acceptance",
    "controller",
    "decode",
    "drafters",
    "generate",
    "generate_all",
    "int8",
    "load",
    "load_heads",
    "rounds",
    "sharding",
    "staged",
    "types",
]
