"""The strict JAX that every test runs under.

Set before any computation, since the number of devices is fixed once a backend exists:

- broadcasting to a higher rank raises, since a missing axis is a mistake;
- using a random key twice raises, and so does making an untyped key, which escapes that check;
- there are two CPU devices, so that sharding is always tested.

Compiled programs are cached in .jax_cache, which the workers of a parallel run and experiments in other
processes share. LLVM does not optimise, since the suite compiles far longer than it runs (XLA's own passes
still run); two tests of `experiments.generate` are exempt.
"""

import os
import pathlib

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_legacy_prng_key", "error")
jax.config.update("jax_num_cpu_devices", 2)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Frees compiled programs: they hold memory maps, of which a process may have 65,530."""
    yield
    jax.clear_caches()
