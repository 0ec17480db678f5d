"""Where randomness comes from: one key per row and round, a stream for every use of it.

Axes: B rows, K drafts, V vocabulary.
"""

import enum

import jax
import jax.numpy as jnp
from flax import struct

GROUP = 128  # vocabulary entries summed together by `choose`


class Stream(enum.IntEnum):
    """Which draw of a round: draft tokens, acceptance, or the token after the accepted ones."""

    DRAFT = 0
    ACCEPT = 1
    NEXT = 2

    def at(self, position: jax.typing.ArrayLike) -> jax.Array:
        """The stream of one position of the chain: no two share noise."""
        return len(Stream) * jnp.asarray(position, jnp.int32) + int(self)


class KeyDraws(struct.PyTreeNode):
    """Draws from one key per row, `keys` `[B]`: a function of the row's seed and round only."""

    keys: jax.Array

    @classmethod
    def of_round(cls, seeds: jax.Array, num_rounds: jax.Array) -> "KeyDraws":
        """Keys of one round, from each row's seed `[B] uint32` and own round count `[B] int32`.

        The generator is pinned (threefry), so that a seed means the same whatever the process's
        default is.
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
    """Inverse-CDF sampling in two levels: a group of entries, then an entry of the group.

    One float32 cumulative sum over 32,128 entries loses the rare ones (an error of 6e-4, thousands
    never drawn). With sums over groups of 128 and a fresh uniform inside the group the distribution is off
    by less than 1e-7 in every entry, at a third of the cost; what a whole group of that mass or less
    gets is up to the 23 bits of a uniform.

    Args:
      weights: `[B, V]` float, not negative, not all zero; need not be normalised.
      uniform: `[B, 2]` in [0, 1).

    Returns:
      `[B] int32`; an entry of zero weight is never returned.
    """
    num_rows, num_entries = weights.shape
    num_groups = -(-num_entries // GROUP)
    padded = jnp.pad(weights, ((0, 0), (0, num_groups * GROUP - num_entries)))
    groups = padded.reshape(num_rows, num_groups, GROUP)
    group = _first_above(groups.sum(-1), uniform[:, 0])
    inside = jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0]
    return group * GROUP + _first_above(inside, uniform[:, 1])


def _first_above(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The first index whose cumulative weight exceeds `uniform` times the total; `[B] int32`."""
    cumulative = jnp.cumsum(weights, axis=-1)
    threshold = uniform.astype(weights.dtype) * cumulative[:, -1]
    # Partial sums of a parallel scan may round apart across an entry of zero weight, and rounding
    # may carry the threshold up to the total: only positive entries count, the last if none is above.
    positive = weights > 0
    above = positive & (cumulative > threshold[:, None])
    last = weights.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    some = above.any(-1) | ~positive.any(-1)  # weights that are not numbers give entry 0
    return jnp.where(some, jnp.argmax(above, axis=-1), last).astype(jnp.int32)
