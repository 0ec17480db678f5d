"""What is static about a generation, and what its rounds hand on.

Axes: B rows, N drafted tokens, D most of them that can be accepted (N = D = K for a chain), T token slots.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax.types import AcceptanceRule, Context, Drafter, FinishReason, Network, Params, Stats


@dataclasses.dataclass(frozen=True)
class Program:
    """What is static: another value compiles anew, an equal one does not.

    Attributes:
      target: the target network.
      drafter: None for plain decoding.
      rule: how drafts are judged where a row's temperature is above zero.
      length_bucket: the most tokens that any row may ask for.
      prefix_width: width of the decoder prefix, start token included.
      eos_ids: tokens that end a row.
      pad_id: what fills a row after its end.
    """

    target: Network
    drafter: Drafter | None
    rule: AcceptanceRule
    length_bucket: int
    prefix_width: int
    eos_ids: tuple[int, ...]
    pad_id: int

    @property
    def num_draft(self) -> int:
        """N, 0 for plain decoding."""
        return 0 if self.drafter is None else self.drafter.num_draft

    @property
    def max_depth(self) -> int:
        """D, 0 for plain decoding."""
        return 0 if self.drafter is None else self.drafter.max_depth

    @property
    def widths(self) -> tuple[int, ...]:
        """Drafted tokens that a target call may have room for; a round takes the first that suffices."""
        return getattr(self.drafter, "widths", (self.num_draft,))

    @property
    def num_slots(self) -> int:
        """T: prefix, the longest output, and a round beyond it, so that no write falls outside."""
        return self.prefix_width + self.length_bucket + self.num_draft + 1


class LoopState(struct.PyTreeNode):
    """What the next round needs.

    Attributes:
      context: committed ids and the source; see `types.Context`.
      cache: the target's cache, which holds all committed ids but the last.
      drafter_state: the drafter's own.
      seeds: `[B] uint32`.
      log_probs: `[B, T, 2] float32` beside `context.tokens`: under the log softmax of the target's
        raw logits, and under the distribution sampled from.
      finish_reason: `[B]`, a `FinishReason`.
      stats: counts so far.
    """

    context: Context
    cache: Any
    drafter_state: Any
    seeds: jax.Array
    log_probs: jax.Array
    finish_reason: jax.Array
    stats: Stats

    @classmethod
    def begin(
        cls, program: Program, context: Context, cache: Any, drafter_state: Any, seeds: jax.Array
    ) -> "LoopState":
        """The state before the first round; a row without room has ended."""
        count = jnp.zeros_like(context.length)
        by_position = jnp.zeros((len(count), program.max_depth), jnp.int32)
        return cls(
            context=context,
            cache=cache,
            drafter_state=drafter_state,
            seeds=seeds,
            log_probs=jnp.zeros((*context.tokens.shape, 2), jnp.float32),
            finish_reason=jnp.where(context.room > 0, FinishReason.RUNNING, FinishReason.LENGTH).astype(
                jnp.int32
            ),
            stats=Stats(count, count, by_position, by_position, count),
        )

    @property
    def running(self) -> jax.Array:
        """`[B] bool`."""
        return self.finish_reason == FinishReason.RUNNING


class AllParams(struct.PyTreeNode):
    """The arrays of a program: the target's and the drafter's."""

    target: Params
    drafter: Params = None
