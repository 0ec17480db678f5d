"""Drafting as much as rows want: what drafters of adaptable length have in common.

Axes: B rows.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from specjax import tree as tree_lib
from specjax.types import Draft

State = TypeVar("State")


def draft_if_wanted(
    run: Callable[[State], tuple[Draft, State]],
    skip: Callable[[State], State],
    nothing: Draft,
    state: State,
    wanted: jax.Array,
) -> tuple[Draft, State]:
    """Drafts where some row wants to.

    Args:
      run: drafts; what rows do not want is cut off here.
      skip: what becomes of the state where no row wants any.
      nothing: a draft of no tokens, of the shape of those that are drafted.
      wanted: `[B]`, the most tokens that each row is to draft; of a tree it is all or none.
    """
    draft, state = jax.lax.cond(wanted.max() > 0, run, lambda state: (nothing, skip(state)), state)
    return cut(draft, wanted), state


def nothing_like(run: Callable[[State], tuple[Draft, State]], state: State) -> Draft:
    """A draft of no tokens, of the shape of what `run` drafts; for what draws nothing."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, state)[0])


def cut(draft: Draft, wanted: jax.Array) -> Draft:
    """The draft with at most `wanted` `[B]` tokens of a chain; of a tree all or none."""
    if draft.tree is None:
        return draft.replace(num_drafted=jnp.minimum(draft.num_drafted, wanted))
    return tree_lib.keep_nodes(draft, (wanted > 0)[:, None])
