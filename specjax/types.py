"""The values that travel through a round, and the callables that make them.

Axes, always in this order: B rows, K drafts, N token positions fed to a decoder call,
V vocabulary, T cache slots, S source length, L layers, H heads, D head width, M model width.

p is the target's distribution, q the draft's. Probabilities are linear, normalised, and at
least float32. Arrays of ids and counts are int32.
"""

import enum
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct

Params = Any  # a pytree of arrays
State = Any  # a pytree of arrays that a drafter keeps between rounds


class Network(Protocol):
    """An encoder-decoder as pure functions. Hashable and compared by value: it is static.

    A target and a draft model are both one.
    """

    @property
    def vocab_size(self) -> int:
        """V."""

    def encode(self, params: Params, source_ids: jax.Array, source_mask: jax.Array) -> jax.Array:
        """Encodes sources `[B, S]`, padding invisible; returns `[B, S, M]`."""

    def init_cache(self, params: Params, encoded: jax.Array, source_mask: jax.Array, num_slots: int) -> Any:
        """An empty cache of `num_slots` slots whose `length` `[B]` is zero."""

    def decode(self, params: Params, cache: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        """Feeds `tokens` `[B, N]`; returns logits `[B, N, V]`, features `[B, N, M]`, cache."""

    def head(self, params: Params, features: jax.Array) -> jax.Array:
        """Logits `[B, N, V]` of features `[B, N, M]`. Asking for few positions costs for few."""


class Draws(Protocol):
    """Where a round's randomness comes from: keys in production, a script in the proof.

    `stream` tells draws of one round apart (see `sampling.Stream`); no two draws of a round
    share a stream and a position. No row's draws depend on another row.
    """

    def accept(self, stream: jax.Array, probability: jax.Array) -> jax.Array:
        """Independent coins, one per stream `[K]`: True with `probability` `[B, K]`."""

    def choose(self, stream: jax.typing.ArrayLike, weights: jax.Array) -> jax.Array:
        """An index in proportion to `weights` `[B, V]`, zero weights never; returns `[B] int32`."""


class Context(struct.PyTreeNode):
    """What a drafter may look at.

    Attributes:
      tokens: `[B, T]` ids committed so far, the start token first; the pad id beyond `length`.
      length: `[B]` number of committed ids, start token included.
      source_ids: `[B, S]`.
      source_mask: `[B, S] bool`, True at real source tokens.
      encoded: `[B, S, M]`, the target's encoder output.
      temperature: `[B] float32`; `sampling.process` turns it and logits into a distribution.
    """

    tokens: jax.Array
    length: jax.Array
    source_ids: jax.Array
    source_mask: jax.Array
    encoded: jax.Array
    temperature: jax.Array

    def last_tokens(self, count: int) -> tuple[jax.Array, jax.Array]:
        """The last `count` committed ids of each row, as a window into `tokens`.

        Returns:
          `[B, count]` ids and `[B]` the position of the first. A row with fewer ids gets the
          window at position 0, whose tail is padding.
        """
        start = jnp.maximum(self.length - count, 0)
        index = start[:, None] + jnp.arange(count)[None, :]
        return jnp.take_along_axis(self.tokens, index, axis=1), start


class Draft(struct.PyTreeNode):
    """A chain of K proposed tokens per row.

    Attributes:
      tokens: `[B, K]`.
      num_drafted: `[B]` in 0..K; tokens at or beyond it are not proposed.
      probs: `[B, K, V]`, the q that each token was drawn from; None for deterministic drafts,
        whose q is one-hot.
    """

    tokens: jax.Array
    num_drafted: jax.Array
    probs: jax.Array | None


class Verdict(NamedTuple):
    """What a rule decides.

    Attributes:
      num_accepted: `[B]` in 0..num_drafted.
      next_token: `[B]`, the token after the accepted ones: from the residual, or the bonus
        token when all were accepted.
    """

    num_accepted: jax.Array
    next_token: jax.Array


class Round(NamedTuple):
    """What happened in a round, for `Drafter.commit`.

    Attributes:
      context: the context after the round.
      draft: what was proposed.
      verdict: what was accepted, before cutting at an end token or the length limit.
      logits: `[B, K + 1, V]` of the target.
      features: `[B, K + 1, M]` of the target.
    """

    context: Context
    draft: Draft
    verdict: Verdict
    logits: jax.Array
    features: jax.Array


class Drafter(Protocol):
    """Proposes tokens. Frozen and hashable: building an equal one again compiles nothing.

    Its arrays arrive as params. `draws` is None in the greedy program: propose argmax ids.
    """

    @property
    def num_draft(self) -> int:
        """K, the most tokens a round drafts. Static."""

    def init(self, params: Params, context: Context, prefix_width: int) -> State:
        """The state before the first round; `prefix_width` static: no row has more ids yet."""

    def propose(
        self, params: Params, state: State, context: Context, draws: Draws | None
    ) -> tuple[Draft, State]:
        """Drafts K tokens for every row."""

    def commit(self, params: Params, state: State, round: Round) -> State:
        """The state for the next round, after what the target accepted."""


class AcceptanceRule(Protocol):
    """Keeps a prefix of a draft and chooses the token after it. Frozen, hashable, stateless."""

    def __call__(self, draws: Draws, draft: Draft, target_probs: jax.Array) -> Verdict:
        """Judges `draft` by `target_probs` `[B, K + 1, V]`, p at each position of the chain."""


class FinishReason(enum.IntEnum):
    """Why a row ended; RUNNING while it has not."""

    RUNNING = 0
    EOS = 1
    LENGTH = 2
    NONFINITE = 3


class Stats(struct.PyTreeNode):
    """Counts per row, of committed tokens only: nothing after a row's end is counted.

    Attributes:
      num_rounds: `[B]`, target calls.
      num_drafted: `[B]`, proposed tokens.
      tested: `[B, K]`, rounds in which the draft at this position was judged.
      accepted: `[B, K]`, rounds in which it was accepted (and committed).
      num_emitted: `[B]`, committed tokens.
    """

    num_rounds: jax.Array
    num_drafted: jax.Array
    tested: jax.Array
    accepted: jax.Array
    num_emitted: jax.Array

    @property
    def tau(self) -> jax.Array:
        """Tokens per target call, `[B]`; nan without calls."""
        return self.num_emitted / jnp.where(self.num_rounds > 0, self.num_rounds, jnp.nan)

    @property
    def alpha(self) -> jax.Array:
        """Accepted over tested drafts, `[B]`; nan when none was tested."""
        tested = self.tested.sum(-1)
        return self.accepted.sum(-1) / jnp.where(tested > 0, tested, jnp.nan)

    def total(self) -> "Stats":
        """The sums over rows, as if they were one row."""
        return jax.tree.map(lambda x: x.sum(0, keepdims=True), self)


class Generation(struct.PyTreeNode):
    """What `generate` returns.

    Attributes:
      tokens: `[B, bucket]` emitted ids, without start token and prefix; the end token is kept,
        the pad id follows.
      log_probs: `[B, bucket] float32`, log softmax of the target's raw logits at each; 0 after.
      processed_log_probs: `[B, bucket] float32`, log of the distribution sampled from (temperature
        applied; 0 for greedy rows, whose distribution is one-hot); 0 after.
      length: `[B]` number of emitted ids.
      finish_reason: `[B]`, a `FinishReason`.
      stats: counts per row.
    """

    tokens: jax.Array
    log_probs: jax.Array
    processed_log_probs: jax.Array
    length: jax.Array
    finish_reason: jax.Array
    stats: Stats
