"""Seven rows of a toy target whose greedy path is known, and a draft that is right about half of the time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments import exact_law
from specjax import decode
from specjax.drafters.model import ModelDrafter
from specjax.drafters.model_tree import ModelTreeDrafter
from specjax.sampling import Sampling
from specjax.types import FinishReason

V = 40
NUM_ROWS = 7
BUCKET = 16
TOY = exact_law.ToyNetwork(V)
TABLE = exact_law.random_table(0, V, spread=2.0)
DRAFT_TABLE = TABLE + exact_law.random_table(1, V, spread=1.0)  # right about half of the time
SOURCE_LENGTHS = [5, 3, 1, 4, 2, 5, 3]
SOURCE_MASK = np.arange(5)[None] < np.array(SOURCE_LENGTHS)[:, None]
SOURCES = np.where(SOURCE_MASK, np.random.default_rng(3).integers(2, V, (NUM_ROWS, 5)), 0)
SEEDS = np.arange(NUM_ROWS, dtype=np.uint32) + 100
GREEDY = Sampling(temperature=0.0)
MIXED = np.array([0.0, 1.0, 0.7, 0.0, 1.3, 0.2, 1.0], np.float32)
LIMITS = np.array([16, 1, 9, 2, 16, 3, 12])


@functools.cache
def argmax_path(row: int, num_tokens: int = BUCKET) -> list[int]:
    """The target's greedy continuation of a row, in numpy."""
    (path,) = exact_law.target_law(TABLE, SOURCES[row, : SOURCE_LENGTHS[row]], num_tokens, GREEDY)
    return list(path)


def generate(
    drafter: int | tuple[int, ...],
    rows=slice(None),
    *,
    draft_table=DRAFT_TABLE,
    table=TABLE,
    temperature=0.0,
    sampling=None,
    **options,
):
    """`decode.generate` on some rows of the toy batch; nothing ends a row but its limit.

    `drafter`: K of a chain, or the branching of a tree.
    """
    options = dict(seed=SEEDS[rows], max_new_tokens=BUCKET, eos_ids=(), length_bucket=BUCKET) | options
    options["sampling"] = Sampling(temperature=temperature) if sampling is None else sampling
    num_draft = drafter
    if isinstance(drafter, tuple):
        drafter = ModelTreeDrafter(TOY, drafter)
    else:
        drafter = ModelDrafter(TOY, drafter) if drafter else None
    output = decode.generate(
        TOY,
        jnp.asarray(table),
        SOURCES[rows],
        SOURCE_MASK[rows],
        drafter=drafter,
        drafter_params=jnp.asarray(draft_table) if num_draft else None,
        **options,
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
