"""The least time that a token can take: the weights that it reads, over the speed at which memory is read.

At batch 1 a decoder step multiplies each weight once, so reading them is what it costs at least. A model
that fits into the processor's caches may be below the floor of main memory; hence the second reading,
over an array of just the size of those weights.
"""

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import arms, measure, results
from specjax import analysis
from specjax.request import Request

NUM_BYTES = 1 << 28  # larger than the caches
_TIMES = 30
_COLUMNS = 1024  # of the array that is read


def read_bandwidth(num_bytes: int) -> float:
    """Bytes a second at which an array of so many bytes is read: the best of several ways and tries."""
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
    """What plain decoding, encoders excluded, takes over the floor.

    Args:
      requests: of the target alone, compiled before.
      num_tokens: that they emit together.
    """
    program, params, _ = requests[0]
    call = analysis.decoder_call(
        program.target.config,
        num_new=1,
        batch_size=1,
        num_source=0,
        num_cached=0,
        bytes_per_number=params.target["embedding"].dtype.itemsize,
    )
    num_bytes = int(call.weights)
    loops = [sum(loop for _, loop in arms.request_seconds(requests)) for _ in range(repeats + 1)][1:]
    ms = measure.Spread.of([1e3 * loop / num_tokens for loop in loops])
    large, alike = read_bandwidth(NUM_BYTES), read_bandwidth(num_bytes)
    floor_ms = 1e3 * num_bytes / large
    return {
        "weights_read_mb": num_bytes / 1e6,
        "read_gb_per_s": large / 1e9,
        "read_gb_per_s_at_that_size": alike / 1e9,
        "floor_ms": floor_ms,
        "floor_ms_at_that_size": 1e3 * num_bytes / alike,
        "plain_loop_ms_per_token": str(ms),
        "over_floor": ms.median / floor_ms,
    }
