"""Speculative decoding for T5 in JAX and Flax: the target's exact output law, sooner."""

from specjax import acceptance, decode, drafters, sharding
from specjax.api import Model, Output, generate, generate_all, int8, load, load_heads
from specjax.sampling import Sampling

__all__ = [
    "Model", "Output", "Sampling", "acceptance", "decode", "drafters", "generate", "generate_all", "int8",
    "load", "load_heads", "sharding",
]  # fmt: skip
