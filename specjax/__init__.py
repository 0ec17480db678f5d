"""Speculative decoding for T5 in JAX and Flax: exactly the target's output distribution, in less time."""

from specjax import acceptance, decode, drafters, sharding, types
from specjax.api import compile_ahead, generate, generate_all, stream
from specjax.generation_config import GenerationConfig
from specjax.loading import Model, int8, load, load_heads
from specjax.texts import Output

__version__ = "0.1.0"

__all__ = [
    "GenerationConfig",
    "Model",
    "Output",
    "acceptance",
    "compile_ahead",
    "decode",
    "drafters",
    "generate",
    "generate_all",
    "int8",
    "load",
    "load_heads",
    "sharding",
    "stream",
    "types",
]
