"""Lookahead decoding: n-grams that the target generates by Jacobi iteration, without training.

Fu et al. 2024, for encoder-decoders. Axes: B rows, W columns of the window, L = n - 1
of its levels, G candidates, P n-grams of a pool, V vocabulary.

    call position   0     1 .. G L                    then level 0, level 1, ... of W columns each
                    root  G candidates of L tokens    guesses for the positions after the root

Level 0 is a chain after the root; the node below another guesses the position after it. A column read
downwards, followed by the target's argmax below it, is an n-gram. Nodes of the window are never accepted, and
only nodes of the window attend to them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import sampling
from specjax import tree as tree_lib
from specjax.drafters.pairs import check_whole
from specjax.types import Context, Draft, Drafter, Draws, Round, Tree


class LookaheadState(struct.PyTreeNode):
    """The window and the pool of each row.

    Attributes:
      window: `[B, L, W]` ids.
      pool: `[B, P, n]` ids of n-grams, -1 in empty entries; the oldest is replaced first.
      stamp: `[B, P]`, number of n-grams generated before each; -1 if empty, or if a newer entry is equal.
      num_made: `[B]`, number of n-grams generated.
    """

    window: jax.Array
    pool: jax.Array
    stamp: jax.Array
    num_made: jax.Array


class LookaheadDrafter(Drafter):
    """A drafter of the newest n-grams that begin with the last token; each call also contains the window.

    Candidates are not drawn: their q is one-hot. They depend only on earlier rounds, so decoding is lossless
    above temperature 0 as well; the window follows the target's argmax.

    Raises:
      ValueError: a number is too small.

    Attributes:
      num_columns: W.
      ngram: n, at least 2.
      num_ngrams: G.
      pool_size: P.
    """

    num_columns: int = struct.field(pytree_node=False)
    ngram: int = struct.field(pytree_node=False)
    num_ngrams: int = struct.field(pytree_node=False)
    pool_size: int = struct.field(pytree_node=False, default=64)

    drafts_trees = True
    can_skip = False  # the window advances in every round

    def __post_init__(self) -> None:
        if self.ngram < 2 or min(self.num_columns, self.num_ngrams) < 1:
            raise ValueError(
                "`num_columns`, `ngram` and `num_candidates` must be at least 1, 2 and 1, got "
                f"{self.num_columns}, {self.ngram} and {self.num_ngrams}"
            )
        if self.pool_size < max(self.num_columns, self.num_ngrams):
            raise ValueError(
                f"`pool_size` must be at least `num_columns` and `num_candidates`, {self.num_columns} and "
                f"{self.num_ngrams}, got {self.pool_size}"
            )

    @property
    def max_depth(self) -> int:
        """L, tokens of a candidate."""
        return self.ngram - 1

    @property
    def num_candidates(self) -> int:
        """G L; nodes of the window cannot be accepted."""
        return self.num_ngrams * self.max_depth

    @property
    def num_draft(self) -> int:
        """Number of all nodes, the window's included."""
        return self.num_candidates + self.max_depth * self.num_columns

    def init(self, context: Context, prefix_width: int) -> LookaheadState:
        """Fills the window with the first tokens of the source; the pool is empty."""
        del prefix_width
        num_rows = len(context.length)
        length = jnp.maximum(context.source_mask.sum(1, dtype=jnp.int32), 1)
        index = jnp.arange(self.num_columns)[None, :] % length[:, None]
        guess = jnp.take_along_axis(context.source_ids, index, axis=1)
        window = jnp.broadcast_to(guess[:, None], (num_rows, self.max_depth, self.num_columns))
        pool = jnp.full((num_rows, self.pool_size, self.ngram), -1, jnp.int32)
        return LookaheadState(window, pool, pool[..., 0], jnp.zeros(num_rows, jnp.int32))

    def propose(
        self, state: LookaheadState, context: Context, draws: Draws | None, max_length: jax.Array | None
    ) -> tuple[Draft, LookaheadState]:
        """Proposes the newest n-grams that begin with the last token; runs no network."""
        del draws, max_length
        last, _ = context.last_tokens(1)
        fits = (state.pool[..., 0] == last) & (state.stamp >= 0)
        stamp, newest = jax.lax.top_k(jnp.where(fits, state.stamp, -1), self.num_ngrams)
        found = jnp.take_along_axis(state.pool, newest[..., None], axis=1)[..., 1:]
        there = jnp.repeat(stamp >= 0, self.max_depth, axis=1)
        candidates = jnp.where(there, found.reshape(there.shape), 0)
        window = state.window.reshape(len(there), -1)
        tokens = jnp.concatenate([candidates, window], axis=1)
        parents = jnp.broadcast_to(jnp.asarray(self._parents())[None], tokens.shape)
        valid = jnp.concatenate([there, jnp.zeros(window.shape, bool)], axis=1)
        tree = Tree(parents, valid, self.max_depth)
        return tree_lib.draft(tree, tokens, num_candidates=self.num_candidates), state

    def _parents(self) -> np.ndarray:
        """Returns `[N] int32`, the call positions of the parents."""
        depth, first = self.max_depth, self.num_candidates + 1
        candidates = np.arange(self.num_candidates)
        candidates = np.where(candidates % depth == 0, 0, candidates)
        level_0 = np.concatenate([[0], first + np.arange(self.num_columns - 1)])
        below = first + np.arange((depth - 1) * self.num_columns)
        return np.concatenate([candidates, level_0, below]).astype(np.int32)

    def commit(self, state: LookaheadState, round: Round) -> LookaheadState:
        """Adds the window's n-grams to the pool, and shifts the window by the number of committed tokens."""
        num_rows, width = len(state.num_made), self.num_columns
        logits = round.logits[:, -width:, : round.context.options.num_ids]
        below = sampling.argmax(logits)  # of each column
        columns = jnp.concatenate([state.window, below[:, None]], axis=1)  # [B, n, W]
        order = state.num_made[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
        rows, place = jnp.arange(num_rows)[:, None], order % self.pool_size
        ngrams = columns.swapaxes(1, 2)
        known = (state.pool[:, :, None] == ngrams[:, None]).all(-1).any(-1)  # [B, P]: generated again
        again = (ngrams[:, :, None] == ngrams[:, None]).all(-1)  # [B, W, W]
        later = jnp.triu(jnp.ones((width, width), bool), 1)
        stamp = jnp.where(known, -1, state.stamp)
        new_stamp = jnp.where((again & later[None]).any(-1), -1, order)
        moved = jnp.maximum(round.num_committed, 1) - 1
        index = jnp.minimum(jnp.arange(width)[None, :] + moved[:, None], width - 1)
        index = jnp.broadcast_to(index[:, None], state.window.shape)
        return LookaheadState(
            window=jnp.take_along_axis(columns[:, 1:], index, axis=2),
            pool=state.pool.at[rows, place].set(ngrams),
            stamp=stamp.at[rows, place].set(new_stamp),
            num_made=state.num_made + width,
        )


def lookahead(num_columns: int = 5, ngram: int = 3, num_candidates: int = 3) -> LookaheadDrafter:
    """Returns a drafter of n-grams that the target generates (Fu et al. 2024); it needs no draft model.

    Args:
      num_columns, ngram: width of the window and length of the n-grams.
      num_candidates: number of n-grams proposed per round.

    Raises:
      ValueError: a number is too small.
    """
    check_whole(num_columns=num_columns, ngram=ngram, num_candidates=num_candidates)
    return LookaheadDrafter(num_columns, ngram, num_candidates)
