"""Measures the floor of the time per token: the weights that a token reads, over memory bandwidth.

At batch 1 a decoding step multiplies each weight once, so it takes at least the time to read them. A model
that fits into the processor's caches can be faster than the floor of main memory; hence the second floor,
with the bandwidth of an array as large as these weights.
"""

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import measure, results
from specjax import analysis
from specjax.decode import Request

NUM_BYTES = 1 << 28  # larger than the caches
_TIMES = 30
_COLUMNS = 1024  # of the array that is read


def read_bandwidth(num_bytes: int) -> float:
    """Returns the bytes per second at which an array of `num_bytes` is read, the best of several ways."""
    rows = max(num_bytes // 4 // _COLUMNS, 1)
    on_host = np.ones((rows, _COLUMNS), np.float32)
    array, vector = jnp.asarray(on_host), jnp.ones(_COLUMNS)
    total, product = jax.jit(jnp.sum), jax.jit(jnp.dot)
    ways: list[Callable[[], Any]] = [lambda: total(array), lambda: product(array, vector)]
    with concurrent.futures.ThreadPoolExecutor(results.num_cores()) as pool:
        if jax.default_backend() == "cpu":
            parts = np.array_split(on_host.ravel(), results.num_cores())
            ways.append(lambda: list(pool.map(np.dot, parts, parts)))
        for way in ways:
            jax.block_until_ready(way())
        best_s = min(measure.seconds(way) for _ in range(_TIMES) for way in ways)
    return on_host.nbytes / best_s


def row(requests: Sequence[Request], num_tokens: int, repeats: int) -> dict[str, Any]:
    """Returns a row with the floor, and the time of autoregressive decoding, encoder time excluded, over it.

    Args:
      requests: autoregressive requests, already compiled.
      num_tokens: tokens that they emit together.
      repeats: timed turns.
    """
    target: Any = requests[0].program.target
    sizes = dict(num_new=1, batch_size=1, num_source=0, num_cached=0)
    itemsize = target.params["embedding"].dtype.itemsize
    num_bytes = int(analysis.decoder_call(target.config, **sizes, bytes_per_number=itemsize).weights)
    loops = [sum(loop for _, loop in measure.request_seconds(requests)) for _ in range(repeats + 1)][1:]
    ms = measure.Spread.of([1e3 * loop / num_tokens for loop in loops])
    large, alike = read_bandwidth(NUM_BYTES), read_bandwidth(num_bytes)
    floor_ms = 1e3 * num_bytes / large
    found = {"weights_read_mb": num_bytes / 1e6, "read_gb_per_s": large / 1e9}
    found |= {"read_gb_per_s_at_that_size": alike / 1e9, "floor_ms": floor_ms}
    found |= {"floor_ms_at_that_size": 1e3 * num_bytes / alike, "autoregressive_loop_ms_per_token": str(ms)}
    return found | {"over_floor": ms.median / floor_ms}
