"""The types of a round: contexts, drafts and results, and the interfaces of networks, drafters and rules.

Axes, always in this order: B rows, K drafts, N tokens of a decoder call or nodes of a tree, P call positions
with children, D depth of a draft, V vocabulary, T cache slots, S source length, M model width, F width of the
features (M, or more where the features of several layers are returned).

p is the target's distribution, q the draft's. Probabilities are linear, normalised, and at
least float32. Arrays of ids and counts are int32.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct

Params = Any  # a pytree of arrays
State = Any  # a pytree of arrays that a drafter keeps between rounds; axis 0 of each is B


class Network(struct.PyTreeNode, abc.ABC):
    """An encoder-decoder with its params: a target, or a draft model.

    Params are leaves of the pytree, everything else is static: networks of equal configuration share
    compiled programs. Every network defines `vocab_size`, the V rows of its vocabulary, and `encoded_width`,
    the M of its encoder output. The attributes below have defaults.

    Attributes:
      num_ids: number of ids that exist, where the vocabulary is padded to more rows; None: all V.
      pad_id, start_id: the id that fills a finished row; the id that the decoder's input begins with.
      eos_ids: tokens that end a row.
      vocabulary: the tokenizer's vocabulary, compared by value; None: unknown.
      mesh: the mesh of the params; None: one device.
      cache_sharding: the placement of its cache on that mesh (`sharding.of_cache`).
    """

    if TYPE_CHECKING:  # each is a field or a property of every network

        @property
        def vocab_size(self) -> int: ...

        @property
        def encoded_width(self) -> int: ...

        @property
        def num_ids(self) -> int | None: ...

        @property
        def pad_id(self) -> int: ...

        @property
        def start_id(self) -> int: ...

        @property
        def eos_ids(self) -> tuple[int, ...]: ...

        @property
        def vocabulary(self) -> Any: ...

        @property
        def mesh(self) -> jax.sharding.Mesh | None: ...

        @property
        def cache_sharding(self) -> jax.sharding.NamedSharding | None: ...

    else:  # no annotations: a dataclass field with a default may not precede a network's fields without
        num_ids, pad_id, start_id, eos_ids, vocabulary, mesh = None, 0, 0, (1,), None, None
        cache_sharding = None

    @abc.abstractmethod
    def encode(self, source_ids: jax.Array, source_mask: jax.Array) -> jax.Array:
        """Encodes sources `[B, S]`, padding masked; returns `[B, S, M]`."""

    @abc.abstractmethod
    def init_cache(self, encoded: jax.Array, source_mask: jax.Array, num_slots: int) -> Any:
        """Returns an empty cache of `num_slots` slots whose `length` `[B]` is zero."""

    @abc.abstractmethod
    def decode(
        self, cache: Any, tokens: jax.Array, layout: "Layout | None" = None
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Feeds `tokens` `[B, N]`; returns logits `[B, N, V]`, features `[B, N, F]`, cache.

        The tokens go into the slots after the cache's `length`. `layout` states their positions in the text
        and what they attend to (see `tree.layout`); None: they form a chain.
        """

    @abc.abstractmethod
    def logits(self, features: jax.Array) -> jax.Array:
        """Returns logits `[B, N, V]` of features `[B, N, M]`; its cost is proportional to N."""

    def with_features(self, layers: tuple[int, ...]) -> "Network":
        """Returns the same network, whose features also contain those of the decoder layers `layers`."""
        if not layers:
            return self
        raise ValueError(f"{type(self).__name__} does not return features of layers {layers}")


class Draws(Protocol):
    """The source of a round's randomness: random keys, or scripted outcomes in exhaustive enumeration.

    `stream` identifies a draw within a round (see `draws.Stream`): no two draws of a round share one. A
    row's draws do not depend on other rows.
    """

    def accept(self, stream: jax.Array, probability: jax.Array) -> jax.Array:
        """Draws independent Bernoulli outcomes, one per stream `[K]`: True with `probability` `[B, K]`."""

    def choose(self, stream: jax.typing.ArrayLike, weights: jax.Array) -> jax.Array:
        """Draws indices `[B] int32` in proportion to `weights` `[B, V]`, never one of zero weight."""


class History(NamedTuple):
    """The tokens before each position of a call, whose distribution is to be computed.

    Attributes:
      num_new: `[B, N]`, number of tokens generated before the position, drafted ones included.
      tokens: `[B, N, T]`, all ids before the position in order, start token first, -1 beyond `length`; None
        where no option reads them.
      length: `[B, N]`, number of those ids; None where `tokens` is None.
    """

    num_new: jax.Array
    tokens: jax.Array | None = None
    length: jax.Array | None = None


# (logits [B, N, V], history) -> logits of the same shape
LogitsProcessor = Callable[[jax.Array, History], jax.Array]


class Options(struct.PyTreeNode):
    """The options that `sampling.distribution` reads to turn logits into probabilities. One entry per row.

    An option that no row uses is None, which is static: it costs nothing. `GenerationConfig` documents each
    of them.

    Attributes:
      temperature: `[B] float32`; below `sampling.GREEDY_BELOW` a row is greedy.
      bias: `[B, num_ids] float32`, added to the logits, -inf for ids that are suppressed; or None.
      repetition_penalty, presence_penalty, frequency_penalty, top_p, min_p: `[B] float32`, or None.
      top_k, min_new_tokens: `[B] int32`, or None.
      bad_words: `[B, W, L] int32`, W sequences that must not occur, each at the end of its L ids, with -1
        before it; or None.
      no_repeat_ngram_size: n; no n-gram of ids occurs twice. 0: no such limit. Static.
      begin_suppress_tokens: ids that are suppressed at the first token. Static.
      logits_processor: a function of the user; None: none. Static.
      eos_ids: the end tokens, which `min_new_tokens` suppresses. Static.
      num_ids: number of ids that exist; vocabulary rows beyond are padding. None: all. Static.
    """

    temperature: jax.Array
    bias: jax.Array | None = None
    repetition_penalty: jax.Array | None = None
    presence_penalty: jax.Array | None = None
    frequency_penalty: jax.Array | None = None
    bad_words: jax.Array | None = None
    min_new_tokens: jax.Array | None = None
    top_k: jax.Array | None = None
    top_p: jax.Array | None = None
    min_p: jax.Array | None = None
    no_repeat_ngram_size: int = struct.field(pytree_node=False, default=0)
    begin_suppress_tokens: tuple[int, ...] = struct.field(pytree_node=False, default=())
    logits_processor: LogitsProcessor | None = struct.field(pytree_node=False, default=None)
    eos_ids: tuple[int, ...] = struct.field(pytree_node=False, default=())
    num_ids: int | None = struct.field(pytree_node=False, default=None)

    @property
    def read_tokens(self) -> bool:
        """Whether an option reads the ids before a position, so that `History.tokens` is needed."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        arrays = any(x is not None for x in (*penalties, self.bad_words))
        return arrays or self.no_repeat_ngram_size > 0 or self.logits_processor is not None

    @property
    def can_forbid_all(self) -> bool:
        """Whether the options can rule out every token at a position."""
        arrays = self.bias is not None or self.bad_words is not None
        own = self.logits_processor is not None or bool(self.begin_suppress_tokens)
        return arrays or own or self.no_repeat_ngram_size > 0


class Context(struct.PyTreeNode):
    """The information that a drafter may use.

    Attributes:
      tokens: `[B, T]` ids committed so far, the start token first; the pad id beyond `length`.
      length: `[B]` number of committed ids, start token included.
      prefix_length: `[B]`, number of committed ids that were given, not generated.
      source_ids: `[B, S]`.
      source_mask: `[B, S] bool`, True at real source tokens.
      encoded: `[B, S, M]`, the target's encoder output.
      options: how logits become probabilities, see `sampling.distribution`.
      remaining: `[B]`, number of tokens that the row may still emit; 0 once it has ended.
    """

    tokens: jax.Array
    length: jax.Array
    prefix_length: jax.Array
    source_ids: jax.Array
    source_mask: jax.Array
    encoded: jax.Array
    options: Options
    remaining: jax.Array

    @property
    def draft_budget(self) -> jax.Array:
        """`[B]`, the most drafts a row can use: a round emits one token more than it accepts."""
        return jnp.maximum(self.remaining - 1, 0)

    def window(self, start: jax.Array, width: int) -> jax.Array:
        """Returns `tokens` `[B, width]` from `start` `[B]` on; indices beyond T repeat the last slot."""
        index = start[:, None] + jnp.arange(width)[None, :]
        return jnp.take_along_axis(self.tokens, index, axis=1, mode="clip")

    def last_tokens(self, count: int) -> tuple[jax.Array, jax.Array]:
        """Returns the last `count` committed ids of each row.

        Returns:
          `[B, count]` ids and `[B]` the position of the first. A row with fewer ids gets the
          window at position 0, whose tail is padding.
        """
        start = jnp.maximum(self.length - count, 0)
        return self.window(start, count), start


class Layout(NamedTuple):
    """The positions in the text of a call's new tokens, and what they attend to.

    Attributes:
      positions: `[B, N]`, position of each new token; the start token is at 0.
      key_positions: `[1 or B, T]`, position of the token in each cache slot.
      visible: `[B, N, T] bool`, True at slots that a new token attends to.
    """

    positions: jax.Array
    key_positions: jax.Array
    visible: jax.Array


class Tree(struct.PyTreeNode):
    """The topology of a token tree; its functions are in `tree.py`.

    The call that verifies a draft has N + 1 tokens: the root, which is the last committed token, at call
    position 0, and node i at call position i + 1. Parents precede their children, and siblings are in the
    order in which they were drawn.

    Attributes:
      parents: `[B, N]`, call position of each node's parent, in 0..N - 1.
      valid: `[B, N] bool`; False: padding, which is never accepted and seen by its descendants only.
      max_depth: D, depth of the deepest node: the most tokens that can be accepted. Static.
    """

    parents: jax.Array
    valid: jax.Array
    max_depth: int = struct.field(pytree_node=False)


class Draft(struct.PyTreeNode):
    """The proposed tokens: a chain of K per row, or a tree of N.

    Attributes:
      tokens: `[B, N]`; N is K for a chain.
      num_drafted: `[B]`, number of proposed tokens; entries of a chain at or beyond it are padding.
      probs: `[B, P, V]`, the q from which the children of call position p were drawn, before any sibling
        was removed from it; for a chain P = K. Positions at or beyond P have no children. None: the
        children were not drawn (argmax, look-up), and their q is one-hot.
      tree: the topology; None for a chain.
      with_replacement: siblings are independent draws from q. Otherwise each was drawn from q without the
        siblings before it. Static; meaningless for a chain.
      num_candidates: only the first so many nodes can be accepted; the others are scored by the target call
        for the drafter's own use. None: all. Static.
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

    def narrow(self, width: int) -> "Draft":
        """Returns the draft cut to `width` positions, which hold all proposed tokens.

        A tree is never cut in part: `width` is then N or 0.
        """
        if width == self.tokens.shape[1]:
            return self
        assert width == 0 or self.tree is None
        probs = None if self.probs is None else self.probs[:, :width]
        return Draft(self.tokens[:, :width], self.num_drafted, probs)

    @property
    def candidates(self) -> "Draft":
        """The part of the draft that can be accepted."""
        if self.num_candidates is None or self.tree is None:
            return self
        parents, valid = (x[:, : self.num_candidates] for x in (self.tree.parents, self.tree.valid))
        tree = self.tree.replace(parents=parents, valid=valid)
        return self.replace(tokens=self.tokens[:, : self.num_candidates], tree=tree)


class AcceptanceResult(NamedTuple):
    """The outcome of verification.

    Attributes:
      num_accepted: `[B]` in 0..max_depth.
      next_token: `[B]`, the token after the accepted ones: drawn from the residual after a rejection, else
        the bonus token.
      path: `[B, max_depth]`, call positions of the accepted nodes of a tree, in order; 0 beyond
        `num_accepted`. None for a chain, whose path is 1, 2, ...
    """

    num_accepted: jax.Array
    next_token: jax.Array
    path: jax.Array | None = None


class Round(NamedTuple):
    """The record of a round, for `Drafter.commit`. N may be smaller than the drafter's `num_draft`.

    Attributes:
      context: the context after the round.
      root: `[B]`, slot and position of the last token committed before the round.
      draft: the proposed tokens.
      result: the accepted tokens, before truncation at an end token or the length limit.
      logits: `[B, N + 1, V]` of the target.
      features: `[B, N + 1, F]` of the target.
      target_probs: `[B, N + 1, V]`, p after each token of the call; None in the greedy program.
    """

    context: Context
    root: jax.Array
    draft: Draft
    result: AcceptanceResult
    logits: jax.Array
    features: jax.Array
    target_probs: jax.Array | None

    @property
    def num_committed(self) -> jax.Array:
        """`[B]`, number of tokens that the round committed."""
        return self.context.length - 1 - self.root

    @property
    def call_positions(self) -> jax.Array:
        """`[B, D + 1]`, call positions of the root and the accepted tokens, 0 beyond a tree's path."""
        if self.result.path is not None:
            return jnp.pad(self.result.path, ((0, 0), (1, 0)))
        order = jnp.arange(self.draft.tokens.shape[1] + 1)[None, :]
        return jnp.broadcast_to(order, (len(self.root), order.shape[1]))


class Drafter(struct.PyTreeNode, abc.ABC):
    """A proposer of tokens. A pytree: arrays and networks are leaves, numbers and flags are static fields.

    Drafters of equal configuration share compiled programs. Every drafter defines `num_draft`, the most
    tokens N that a round drafts: K for a chain, the number of nodes of a tree. The members below have
    defaults, which a drafter may override.
    """

    if TYPE_CHECKING:  # a field or a property of every drafter

        @property
        def num_draft(self) -> int: ...

    @property
    def max_depth(self) -> int:
        """The most drafts that can be accepted in a round; for a chain K."""
        return self.num_draft

    @property
    def num_candidates(self) -> int:
        """Number of nodes that can be accepted; the others are only scored by the target call."""
        return self.num_draft

    @property
    def drafts_trees(self) -> bool:
        """Whether it drafts trees, which are drafted whole or not at all."""
        return False

    @property
    def call_widths(self) -> tuple[int, ...]:
        """The draft lengths for which a target call is compiled, ascending; the last is `num_draft`.

        A round uses the shortest that holds all proposed tokens. For trees they are (0, `num_draft`).
        """
        return (self.num_draft,)

    @property
    def can_skip(self) -> bool:
        """Whether rounds without a draft are possible, as an adaptive draft length needs."""
        return True

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Decoder layers of the target whose features it reads besides the last hidden state."""
        return ()

    @property
    def vocabulary(self) -> Any:
        """Its vocabulary, as in `types.Network`; None: it has no ids of its own."""
        return None

    @property
    def cache_sharding(self) -> jax.sharding.NamedSharding | None:
        """The placement of its cache on a mesh; drafts are replicated where the cache is."""
        return None

    @property
    def own_params(self) -> Any:
        """The arrays that it adds to those of the target: a pytree."""
        return self

    def check(self, target: Network) -> None:
        """Raises a ValueError if the drafter cannot draft for `target`."""

    def with_min_confidence(self, min_confidence: float) -> "Drafter":
        """Returns the drafter whose rows stop below this confidence; see `chain.draft_chain`."""
        raise ValueError(
            f"`min_confidence` must be left out for {type(self).__name__}, which does not draft step by "
            f"step, got {min_confidence}"
        )

    @abc.abstractmethod
    def init(self, context: Context, prefix_width: int) -> State:
        """Returns the state before the first round; no row has more than `prefix_width` (static) ids yet.

        Axis 0 of every array is B, since continuous batching replaces rows (`corpus`).
        """

    def choose_length(self, state: State, context: Context) -> jax.Array | None:
        """Returns `[B]`, the most tokens that each row drafts in this round; 0 is allowed.

        None, which is static: every row drafts as many as it can in every round.
        """
        del state, context
        return None

    @abc.abstractmethod
    def propose(
        self, state: State, context: Context, draws: Draws | None, max_length: jax.Array | None
    ) -> tuple[Draft, State]:
        """Drafts for every row.

        Args:
          state: the drafter's state.
          context: the committed tokens.
          draws: the round's randomness; None in the greedy program: propose argmax ids.
          max_length: `[B]`, from `choose_length`, above 0 in some row. The round cuts off drafts beyond it,
            so a drafter uses it only to save work. None: no limit.
        """

    def skip(self, state: State, context: Context) -> State:
        """Returns the state after a round in which no row drafts; `propose` is not called."""
        del context
        return state

    @abc.abstractmethod
    def commit(self, state: State, round: Round) -> State:
        """Returns the state for the next round, given the record of this one."""


@dataclasses.dataclass(frozen=True)
class AcceptanceRule(abc.ABC):
    """A method of verification: accepts a path of a draft and chooses the next token. Frozen and stateless.

    A custom rule inherits from this class and overrides the properties that differ.
    """

    @property
    def is_lossless(self) -> bool:
        """Whether the output has the target's distribution."""
        return False

    @property
    def verifies_trees(self) -> bool:
        """Whether the rule verifies trees as well as chains."""
        return False

    @property
    def name(self) -> str:
        """The name of the rule in reports."""
        return type(self).__name__

    @abc.abstractmethod
    def __call__(self, draws: Draws, draft: Draft, target_probs: jax.Array) -> AcceptanceResult:
        """Verifies `draft` by `target_probs` `[B, N + 1, V]`, p after each token of the call."""
