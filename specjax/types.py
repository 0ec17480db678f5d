"""The values that travel through a round, and the callables that make them.

Axes, always in this order: B rows, K drafts, N token positions fed to a decoder call or nodes of a
tree, P of them with children, D depth of a draft, V vocabulary, T cache slots, S source length, M model
width, F width of the features (M, or more where several layers are given out).

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

    A target and a draft model are both one. A target for drafters that read its layers (see `Drafter`) also
    has `with_features(layers)`, the same network with those in its features; one on a mesh has a
    `cache_sharding`, of keys and values `[B, H, ...]`.
    """

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def encoded_width(self) -> int:
        """M, of the encoder output."""

    def encode(self, params: Params, source_ids: jax.Array, source_mask: jax.Array) -> jax.Array:
        """Encodes sources `[B, S]`, padding invisible; returns `[B, S, M]`."""

    def init_cache(self, params: Params, encoded: jax.Array, source_mask: jax.Array, num_slots: int) -> Any:
        """An empty cache of `num_slots` slots whose `length` `[B]` is zero."""

    def decode(
        self, params: Params, cache: Any, tokens: jax.Array, layout: "Layout | None" = None
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Feeds `tokens` `[B, N]`; returns logits `[B, N, V]`, features `[B, N, F]`, cache.

        They go into the slots after the cache's `length`; `layout` says where they stand in the
        text and what they see, None that they follow each other (see `tree.layout`).
        """

    def head(self, params: Params, features: jax.Array) -> jax.Array:
        """Logits `[B, N, V]` of features `[B, N, M]`. Asking for few positions costs for few."""


class Draws(Protocol):
    """Where a round's randomness comes from: keys in production, a script in the proof.

    `stream` tells draws of one round apart (see `draws.Stream`); no two draws of a round
    share a stream and a position. No row's draws depend on another row.
    """

    def accept(self, stream: jax.Array, probability: jax.Array) -> jax.Array:
        """Independent coins, one per stream `[K]`: True with `probability` `[B, K]`."""

    def choose(self, stream: jax.typing.ArrayLike, weights: jax.Array) -> jax.Array:
        """An index in proportion to `weights` `[B, V]`, zero weights never; returns `[B] int32`."""


class Options(struct.PyTreeNode):
    """How logits become a distribution: what `sampling.process` reads. One entry per row.

    An option that no row uses is None, which is static: it costs nothing. `sampling.Sampling` says
    what each means.

    Attributes:
      temperature: `[B] float32`; below `sampling.GREEDY_BELOW` a row is greedy.
      repetition_penalty, top_p, min_p: `[B] float32`, or None.
      top_k, min_new_tokens: `[B] int32`, or None.
      eos_ids: the end tokens, which `min_new_tokens` holds back. Static.
      num_ids: ids that exist; the vocabulary's rows beyond are padding. None: all. Static.
    """

    temperature: jax.Array
    repetition_penalty: jax.Array | None = None
    min_new_tokens: jax.Array | None = None
    top_k: jax.Array | None = None
    top_p: jax.Array | None = None
    min_p: jax.Array | None = None
    eos_ids: tuple[int, ...] = struct.field(pytree_node=False, default=())
    num_ids: int | None = struct.field(pytree_node=False, default=None)


class Context(struct.PyTreeNode):
    """What a drafter may look at.

    Attributes:
      tokens: `[B, T]` ids committed so far, the start token first; the pad id beyond `length`.
      length: `[B]` number of committed ids, start token included.
      prefix_length: `[B]`, how many of them were given; the others were generated.
      source_ids: `[B, S]`.
      source_mask: `[B, S] bool`, True at real source tokens.
      encoded: `[B, S, M]`, the target's encoder output.
      options: with logits and `sampling.history` they make a distribution.
      seen: `[B, V] bool`, ids among the committed ones; None where no penalty asks for it.
      room: `[B]`, tokens that the row may still emit: 0 once it has ended.
    """

    tokens: jax.Array
    length: jax.Array
    prefix_length: jax.Array
    source_ids: jax.Array
    source_mask: jax.Array
    encoded: jax.Array
    options: Options
    seen: jax.Array | None
    room: jax.Array

    @property
    def draft_budget(self) -> jax.Array:
        """`[B]`, drafts that a row has use for: a round emits one token beside them."""
        return jnp.maximum(self.room - 1, 0)

    def window(self, start: jax.Array, width: int) -> jax.Array:
        """`[B, width]` of `tokens`, from `start` `[B]` on; what lies beyond T is the last slot."""
        index = start[:, None] + jnp.arange(width)[None, :]
        return jnp.take_along_axis(self.tokens, index, axis=1, mode="clip")

    def last_tokens(self, count: int) -> tuple[jax.Array, jax.Array]:
        """The last `count` committed ids of each row.

        Returns:
          `[B, count]` ids and `[B]` the position of the first. A row with fewer ids gets the
          window at position 0, whose tail is padding.
        """
        start = jnp.maximum(self.length - count, 0)
        return self.window(start, count), start


class Layout(NamedTuple):
    """Where the new tokens of a decoder call stand in the text, and what they see.

    Attributes:
      positions: `[B, N]`, of each new token in its text, the start token at 0.
      key_positions: `[1 or B, T]`, of what each cache slot holds.
      visible: `[B, N, T] bool`, True where a new token may look.
    """

    positions: jax.Array
    key_positions: jax.Array
    visible: jax.Array


class Tree(struct.PyTreeNode):
    """The topology of a token tree. `tree.py` has its functions.

    The call that verifies a draft holds N + 1 tokens: at call position 0 the root, which is the last
    committed token, and node i at call position i + 1. Parents precede their children, and siblings
    stand in the order in which they were drawn.

    Attributes:
      parents: `[B, N]`, call position of each node's parent, in 0..N - 1.
      valid: `[B, N] bool`; False: padding, never accepted and seen by its descendants only.
      max_depth: D, edges from the root to the deepest node; the most tokens that can be accepted. Static.
    """

    parents: jax.Array
    valid: jax.Array
    max_depth: int = struct.field(pytree_node=False)


class Draft(struct.PyTreeNode):
    """What was proposed: a chain of K tokens per row, or a tree of N.

    Attributes:
      tokens: `[B, N]`; N is K for a chain.
      num_drafted: `[B]` proposed tokens; those of a chain at or beyond it are not proposed.
      probs: `[B, P, V]`, the q from which the children of call position p were drawn, before any of
        them was ruled out; for a chain P = K. Positions at or beyond P have no children. None: the
        children were not drawn (argmax, look-up), their q is one-hot.
      tree: the topology; None for a chain.
      with_replacement: siblings are independent draws from q. Otherwise each was drawn from what q
        leaves after those before it. Static; of no meaning for a chain.
      num_candidates: nodes that can be accepted, the first ones; those behind them ride along in the target
        call. None: all. Static.
    """

    tokens: jax.Array
    num_drafted: jax.Array
    probs: jax.Array | None
    tree: Tree | None = None
    with_replacement: bool = struct.field(pytree_node=False, default=False)
    num_candidates: int | None = struct.field(pytree_node=False, default=None)

    @property
    def max_depth(self) -> int:
        """The most drafts that can be accepted: K for a chain. Static."""
        return self.tokens.shape[1] if self.tree is None else self.tree.max_depth


class Verdict(NamedTuple):
    """What a rule decides.

    Attributes:
      num_accepted: `[B]` in 0..max_depth.
      next_token: `[B]`, the token after the accepted ones: from the residual, or the bonus
        token when all were accepted.
      path: `[B, max_depth]`, call positions of the accepted nodes of a tree, in order; 0 beyond
        `num_accepted`. None for a chain, whose path is 1, 2, ...
    """

    num_accepted: jax.Array
    next_token: jax.Array
    path: jax.Array | None = None

    @property
    def call_positions(self) -> jax.Array:
        """`[B, max_depth + 1]`, those of the root and of `path`, which there must be."""
        assert self.path is not None
        return jnp.pad(self.path, ((0, 0), (1, 0)))


class Round(NamedTuple):
    """What happened in a round, for `Drafter.commit`.

    Attributes:
      context: the context after the round.
      root: `[B]`, slot and position of the last token committed before it.
      draft: what was proposed.
      verdict: what was accepted, before cutting at an end token or the length limit.
      logits: `[B, N + 1, V]` of the target.
      features: `[B, N + 1, F]` of the target.
      target_probs: `[B, N + 1, V]`, p after each token that is judged; None in the greedy program.
    """

    context: Context
    root: jax.Array
    draft: Draft
    verdict: Verdict
    logits: jax.Array
    features: jax.Array
    target_probs: jax.Array | None

    @property
    def num_committed(self) -> jax.Array:
        """`[B]`, tokens that the round added to the committed ones."""
        return self.context.length - 1 - self.root


class Drafter(Protocol):
    """Proposes tokens. Frozen and hashable: building an equal one again compiles nothing.

    Its arrays arrive as params. `draws` is None in the greedy program: propose argmax ids.

    What a drafter may have besides, all static but the last:
      drafts_trees: True if it drafts trees.
      widths: a growing tuple that ends with `num_draft`: a target call takes only as many drafts as the
        first of them that holds all that were proposed. Of trees it is (0, `num_draft`).
      network: what it runs; its `vocab_size` must be the target's, and the target gives out its
        `feature_layers`, if it names some.
      share_encoder: True if its network reads the target's encoder output.
      min_confidence: see `drafters.chain.draw_up_to`.
      propose_up_to: `(params, state, context, draws, wanted)`, `propose` of at most `wanted` `[B]` tokens,
        of a tree all or none: so `controller.adaptive` chooses how many.
    """

    @property
    def num_draft(self) -> int:
        """N, tokens a round drafts at most: K for a chain, the nodes of a tree. Static."""

    @property
    def max_depth(self) -> int:
        """The most of them that can be accepted; for a chain K. Static."""

    def init(self, params: Params, context: Context, prefix_width: int) -> State:
        """The state before the first round; `prefix_width` static: no row has more ids yet.

        Axis 0 of every array of it is B: rows are exchanged for others (`corpus`).
        """

    def propose(
        self, params: Params, state: State, context: Context, draws: Draws | None
    ) -> tuple[Draft, State]:
        """Drafts for every row."""

    def commit(self, params: Params, state: State, round: Round) -> State:
        """The state for the next round, after what the target accepted."""


class AcceptanceRule(Protocol):
    """Keeps a path of a draft and chooses the token after it. Frozen, hashable, stateless."""

    def __call__(self, draws: Draws, draft: Draft, target_probs: jax.Array) -> Verdict:
        """Judges `draft` by `target_probs` `[B, N + 1, V]`, p after each token of the call."""


class FinishReason(enum.IntEnum):
    """Why a row ended; RUNNING while it has not."""

    RUNNING = 0
    EOS = 1
    LENGTH = 2
    NONFINITE = 3
    STOP = 4


class Stats(struct.PyTreeNode):
    """Counts per row, of committed tokens only: nothing after a row's end is counted.

    Attributes:
      num_rounds: `[B]`, target calls.
      num_drafted: `[B]`, proposed tokens.
      tested: `[B, K]`, rounds in which a draft at this position (depth of a tree) was judged.
      accepted: `[B, K]`, rounds in which one was accepted (and committed).
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
    def accepted_per_round(self) -> jax.Array:
        """Accepted drafts per target call, `[B]`; nan without calls. For every rule, and for trees."""
        return self.accepted.sum(-1) / jnp.where(self.num_rounds > 0, self.num_rounds, jnp.nan)

    @property
    def alpha(self) -> jax.Array:
        """Accepted over tested drafts, `[B]`; nan when none was tested.

        An estimate of the mean of sum min(p, q) for chains under the token-wise rule only.
        """
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
      processed_log_probs: `[B, bucket] float32`, log of the distribution sampled from (0 for greedy
        rows, whose distribution is one-hot); 0 after.
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
