"""The decoder cache: an immutable value with a length per row.

Axes: B rows, N new tokens, T slots, S source length, L layers, H heads, D head width.

Keys are `[B, H, D, T]` and values `[B, H, T, D]`, one leaf per layer: the layouts that the two products of
attention read without a copy. With `[B, T, H, D]` every call would copy both.

Invariant: slots at or beyond `length` may hold anything and influence nothing. So a rollback only reduces
`length`: no data moves.
"""

import jax
import jax.numpy as jnp
from flax import struct


class Cache(struct.PyTreeNode):
    """The state of a decoder: keys and values of the tokens so far, and of the source.

    Attributes:
      keys: L arrays `[B, H, D, T]`, self-attention keys of the tokens seen so far.
      values: L arrays `[B, H, T, D]`, the values of the same tokens.
      length: `[B] int32`, tokens seen so far; the next token goes into slot `length`.
      cross_keys: L arrays `[B, H, D, S]`, keys of the encoder output, computed once per source.
      cross_values: L arrays `[B, H, S, D]`, the values of the same.
      source_mask: `[B, S] bool`, True at real source tokens.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array
    cross_keys: tuple[jax.Array, ...]
    cross_values: tuple[jax.Array, ...]
    source_mask: jax.Array

    @property
    def num_slots(self) -> int:
        """T, the most tokens that fit. Static."""
        return self.values[0].shape[2]


def write(buffer: jax.Array, new: jax.Array, start: jax.Array, slots_last: bool = False) -> jax.Array:
    """Writes each row's new entries from that row's own start on; does not change the cache's `length`.

    Args:
      buffer: values `[B, H, T, D]` of one layer, or keys `[B, H, D, T]` if `slots_last`.
      new: `[B, N, H, D]` entries of the new tokens.
      start: `[B] int32` slot of each row's first new token.

    Returns:
      The buffer. Entries beyond slot T - 1 are dropped, except if B is 1: JAX would then shift the whole
      write back over earlier entries, so callers must leave room (`round.Program.num_slots`).
    """
    if buffer.shape[0] == 1:  # one slice update in place; a scatter would be four kernels
        entries = new.transpose(0, 2, 3, 1) if slots_last else new.swapaxes(1, 2)
        slot_axis = 3 if slots_last else 2
        return jax.lax.dynamic_update_slice_in_dim(buffer, entries.astype(buffer.dtype), start[0], slot_axis)
    return write_at(buffer, new, start[:, None] + jnp.arange(new.shape[1])[None, :], slots_last)


def write_at(buffer: jax.Array, new: jax.Array, slots: jax.Array, slots_last: bool = False) -> jax.Array:
    """Writes new entries into `slots` `[B, N]`, which increase in each row; see `write`."""

    def of_row(buffer: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
        new = new.transpose(1, 2, 0) if slots_last else new.swapaxes(0, 1)
        at = buffer.at[:, :, slots] if slots_last else buffer.at[:, slots]
        return at.set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

    # Row by row: with B among the indices, a mesh that divides the rows would exchange them.
    return jax.vmap(of_row)(buffer, new.astype(buffer.dtype), slots)


def rollback(cache: Cache, length: jax.Array) -> Cache:
    """Forgets every token at or beyond `length` `[B] int32`. Moves no data.

    `length` must not exceed the cache's own, or garbage would be read; see `trim`.
    """
    return cache.replace(length=length)


def trim(cache: Cache, length: jax.Array) -> Cache:
    """Rolls back the rows that contain more than `length` `[B]` tokens; leaves the others as they are."""
    return rollback(cache, jnp.minimum(cache.length, length))


def append(buffer: jax.Array, new: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """Writes the first `count` entries of each row of `new` from its `start` on.

    Args:
      buffer: `[B, T, ...]`.
      new: `[B, N, ...]`.
      start, count: `[B]`.
    """
    offsets = jnp.arange(new.shape[1])[None, :]
    slots = jnp.where(offsets < count[:, None], start[:, None] + offsets, buffer.shape[1])
    rows = jnp.arange(buffer.shape[0])[:, None]
    return buffer.at[rows, slots].set(new.astype(buffer.dtype), mode="drop")


def keep_path(cache: Cache, root: jax.Array, path: jax.Array) -> Cache:
    """Moves the accepted nodes of a tree to the slots after its root; does not change `length`.

    Args:
      cache: contains a call's tokens in slots `root`, `root` + 1, ...
      root: `[B]` slot of the root.
      path: `[B, D]`, call positions of the nodes to keep, increasing. A row that keeps fewer may hold
        anything in the other entries, since what they move is beyond its length.
    """
    source = jnp.clip(root[:, None] + path, 0, cache.num_slots - 1)
    slots = root[:, None] + 1 + jnp.arange(path.shape[1])[None, :]

    def move(buffer: jax.Array, slots_last: bool) -> jax.Array:
        axes, axis = ((2, 0, 1), -1) if slots_last else ((1, 0, 2), -2)
        kept = jax.vmap(lambda row, at: jnp.take(row, at, axis).transpose(axes))(buffer, source)
        return write_at(buffer, kept, slots, slots_last)  # kept is [B, path, H, D]

    return cache.replace(
        keys=tuple(move(keys, True) for keys in cache.keys),
        values=tuple(move(values, False) for values in cache.values),
    )
