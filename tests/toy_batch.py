"""Seven rows of a toy target whose greedy path is known, and a draft that is right about half of the time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.exactness import toys
from specjax import decode
from specjax.drafters import ModelDrafter, ModelTreeDrafter
from specjax.generation_config import GenerationConfig
from specjax.round import FinishReason

V = 40
NUM_ROWS = 7
BUCKET = 16
TABLE = toys.random_table(0, V, spread=2.0)
TOY = toys.ToyNetwork(jnp.asarray(TABLE))
DRAFT_TABLE = TABLE + toys.random_table(1, V, spread=1.0)  # right about half of the time
SOURCE_LENGTHS = [5, 3, 1, 4, 2, 5, 3]
SOURCE_MASK = np.arange(5)[None] < np.array(SOURCE_LENGTHS)[:, None]
SOURCES = np.where(SOURCE_MASK, np.random.default_rng(3).integers(2, V, (NUM_ROWS, 5)), 0)
SEEDS = np.arange(NUM_ROWS, dtype=np.uint32) + 100
GREEDY = GenerationConfig(temperature=0.0)
MIXED = np.array([0.0, 1.0, 0.7, 0.0, 1.3, 0.2, 1.0], np.float32)
LIMITS = np.array([16, 1, 9, 2, 16, 3, 12])


@functools.cache
def argmax_path(row: int, num_tokens: int = BUCKET) -> list[int]:
    """The target's greedy continuation of a row, in numpy."""
    (path,) = toys.target_distribution(TOY, SOURCES[row, : SOURCE_LENGTHS[row]], num_tokens, GREEDY)
    return list(path)


def drafter_of(drafter: int | tuple[int, ...], table=DRAFT_TABLE):
    """K of a chain, or the branching of a tree; 0: none."""
    network = toys.ToyNetwork(jnp.asarray(table))
    if isinstance(drafter, tuple):
        return ModelTreeDrafter(network, drafter)
    return ModelDrafter(network, drafter) if drafter else None


def generate(
    drafter: int | tuple[int, ...], rows=slice(None), *, draft_table=DRAFT_TABLE, table=TABLE, **options
):
    """`decode.generate` on some rows of the toy batch; nothing ends a row but its limit."""
    defaults = dict(
        seed=SEEDS[rows], max_new_tokens=BUCKET, eos_ids=(), length_bucket=BUCKET, temperature=0.0
    )
    if "config" in options:
        del defaults["temperature"]
    output = decode.generate(
        toys.ToyNetwork(jnp.asarray(table)),
        SOURCES[rows],
        SOURCE_MASK[rows],
        drafter=drafter_of(drafter, draft_table),
        **defaults | options,
    )
    return jax.tree.map(np.asarray, output)


def emitted(output, row: int) -> list[int]:
    return output.tokens[row, : output.length[row]].tolist()


def cut(path: list[int], limit: int, eos_ids=()) -> tuple[list[int], FinishReason]:
    """What is kept of a path, and why it ends."""
    for index, token in enumerate(path[:limit]):
        if token in eos_ids:
            return path[: index + 1], FinishReason.EOS
    return path[:limit], FinishReason.LENGTH


# An end token that rows reach at different places, some early.
PATHS = [argmax_path(row) for row in range(NUM_ROWS)]
EOS = max(range(V), key=lambda token: len({path.index(token) for path in PATHS if token in path}))
