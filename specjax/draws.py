"""Randomness of a round: one key per row and round, with a separate stream for each draw.

Axes: B rows, K drafts, V vocabulary.
"""

import enum

import jax
import jax.numpy as jnp
from flax import struct

GROUP = 128  # vocabulary entries summed together by `choose`


class Stream(enum.IntEnum):
    """The purpose of a draw: draft tokens, acceptance, or the token after the accepted ones."""

    DRAFT = 0
    ACCEPT = 1
    NEXT = 2

    def at(self, position: jax.typing.ArrayLike) -> jax.Array:
        """Returns the stream of one position; no two positions or purposes share a stream."""
        return len(Stream) * jnp.asarray(position, jnp.int32) + int(self)


class KeyDraws(struct.PyTreeNode):
    """Draws from one key per row, `keys` `[B]`, which depend only on the row's seed and round."""

    keys: jax.Array

    @classmethod
    def of_round(cls, seeds: jax.Array, num_rounds: jax.Array) -> "KeyDraws":
        """Returns the draws of one round, from each row's seed `[B] uint32` and round count `[B] int32`.

        The generator is fixed (threefry), so that a seed gives the same draws whatever JAX's default is.
        """
        key = jax.vmap(lambda seed: jax.random.key(seed, impl="threefry2x32"))(seeds)
        return cls(jax.vmap(jax.random.fold_in)(key, num_rounds))

    def accept(self, stream: jax.Array, probability: jax.Array) -> jax.Array:
        """See `types.Draws`."""
        uniform = jax.vmap(lambda key: jax.vmap(lambda one: _uniform(key, one, ()))(stream))(self.keys)
        return uniform < probability

    def choose(self, stream: jax.typing.ArrayLike, weights: jax.Array) -> jax.Array:
        """See `types.Draws`."""
        uniform = jax.vmap(lambda key: _uniform(key, stream, (2,)))(self.keys)
        return choose_by_inverse(weights, uniform)


def _uniform(key: jax.Array, stream: jax.typing.ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(key, stream), shape, jnp.float32)


def choose_by_inverse(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Samples by inverse CDF in two levels: first a group of entries, then an entry of the group.

    A single float32 cumulative sum over 32,128 entries loses the rare ones: its error is 6e-4, and thousands
    are never drawn. With sums over groups of 128 and a fresh uniform within the group, every probability is
    accurate to 1e-7, at a third of the cost. For a whole group of less mass than that, the 23 bits of a
    uniform limit the accuracy.

    Args:
      weights: `[B, V]` float, not negative, not all zero; need not be normalised.
      uniform: `[B, 2]` in [0, 1).

    Returns:
      Indices `[B] int32`, never of an entry of zero weight.
    """
    num_rows, num_entries = weights.shape
    num_groups = -(-num_entries // GROUP)
    padded = jnp.pad(weights, ((0, 0), (0, num_groups * GROUP - num_entries)))
    groups = padded.reshape(num_rows, num_groups, GROUP)
    group = _first_above(groups.sum(-1), uniform[:, 0])
    inside = jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0]
    return group * GROUP + _first_above(inside, uniform[:, 1])


def _first_above(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Returns `[B] int32`, the first index whose cumulative weight exceeds `uniform` times the total."""
    cumulative = jnp.cumsum(weights, axis=-1)
    threshold = uniform.astype(weights.dtype) * cumulative[:, -1]
    # The partial sums of a parallel scan may differ by rounding across an entry of zero weight, and rounding
    # may raise the threshold to the total. So only positive entries count, and the last if none is above.
    positive = weights > 0
    above = positive & (cumulative > threshold[:, None])
    last = weights.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    some = above.any(-1) | ~positive.any(-1)  # NaN weights give entry 0
    return jnp.where(some, jnp.argmax(above, axis=-1), last).astype(jnp.int32)
