"""Are two greedy runs the same, and where they are not: was it a near tie?

In float32 a target call on K + 1 tokens rounds differently from a call on one. Where the two
best logits are that close, either may win; any other difference is an error.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling, sharding
from specjax.request import Request
from specjax.types import Generation

NEAR_TIE = 1e-4  # float32 top-2 margin of the logits, below which a difference is a near tie


@dataclasses.dataclass(frozen=True)
class Difference:
    """One row that differs.

    Attributes:
      row: its index.
      position: of the first token that differs.
      margin: float32 difference of the target's two best logits there.
    """

    row: int
    position: int
    margin: float

    @property
    def is_near_tie(self) -> bool:
        return self.margin < NEAR_TIE


def differences(
    plain: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
    request_of: Callable[[int], tuple[Request, int]],
) -> list[Difference]:
    """The rows of two greedy runs that differ, with the target's margin at each first difference.

    Args:
      plain, others: ids of each row; `plain` are the target's own.
      request_of: from a row to what the target decodes it by, and its index in that batch.
    """
    found = []
    for row, (ours, theirs) in enumerate(zip(plain, others, strict=True)):
        position = first_difference(ours, theirs)
        if position is not None:
            request, index = request_of(row)
            found.append(Difference(row, position, margin(request, ours[:position], index)))
    return found


def counted(found: Sequence[Difference], num_rows: int) -> tuple[str, int]:
    """How many rows are the same, in words, and how many of the others differ at a near tie."""
    return f"{num_rows - len(found)} of {num_rows}", sum(d.is_near_tie for d in found)


def ids(generation: Generation) -> list[list[int]]:
    """What each row emitted."""
    return [row[:n].tolist() for row, n in zip(generation.tokens, generation.length, strict=True)]


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The position of the first token that differs, also where one row ends; None: they are alike."""
    pairs = itertools.zip_longest(ours, theirs)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), None)


def margin(request: Request, before: Sequence[int], index: int) -> float:
    """The top-2 margin of what the target decides by after the tokens `before` of row `index`."""
    program, params, inputs = request
    # The row in all rows: a mesh that divides them wants as many.
    rows = np.full(len(inputs["limit"]), index)
    source, mask, prefix = (inputs[k][rows] for k in ("source_ids", "source_mask", "prefix"))
    before = np.broadcast_to(np.asarray(before, np.int32), (len(rows), len(before)))
    tokens = jnp.concatenate([prefix, before], axis=1)
    encoded = program.target.encode(params.target, source, mask)
    cache = program.target.init_cache(params.target, encoded, mask, tokens.shape[1])
    logits, _, _ = program.target.decode(params.target, cache, tokens)
    tokens, last, options = sharding.fetch((tokens[:1], logits[:1, -1:], inputs["options"]))
    seen = jnp.zeros((1, 1, last.shape[-1]), bool).at[:, :, tokens[0]].set(True)
    history = sampling.History(jnp.asarray([[before.shape[1]]]), seen)
    options = jax.tree.map(lambda x: jnp.asarray(x[index][None]), options)
    best, second = jax.lax.top_k(sampling.adjust(jnp.asarray(last), options, history)[0, 0], 2)[0]
    return float(best - second)
