"""The values that travel through a round, and what makes them: networks, drafters, rules, draws.

Axes, always in this order: B rows, K drafts, N token positions fed to a decoder call or nodes of a
tree, P of them with children, D depth of a draft, V vocabulary, T cache slots, S source length, M model
width, F width of the features (M, or more where several layers are given out).

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
    compiled programs. Every network has `vocab_size`, the V rows of its vocabulary, and `encoded_width`, the
    M of its encoder output. What follows has defaults.

    Attributes:
      num_ids: ids that exist, where the vocabulary is padded to more rows; None: all V.
      pad_id, start_id: what fills a finished row; what the decoder's input begins with.
      eos_ids: tokens that end a row.
      vocabulary: what the ids mean, compared by value; None: unknown.
      mesh: that the params lie on; None: one device.
      cache_sharding: where its cache lies on that mesh (`sharding.of_cache`).
    """

    if TYPE_CHECKING:  # fields or properties of each network

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

    else:  # plain attributes: as dataclass fields they would forbid fields without a default in a network
        num_ids, pad_id, start_id, eos_ids, vocabulary, mesh = None, 0, 0, (1,), None, None
        cache_sharding = None

    @abc.abstractmethod
    def encode(self, source_ids: jax.Array, source_mask: jax.Array) -> jax.Array:
        """Encodes sources `[B, S]`, padding invisible; returns `[B, S, M]`."""

    @abc.abstractmethod
    def init_cache(self, encoded: jax.Array, source_mask: jax.Array, num_slots: int) -> Any:
        """Returns an empty cache of `num_slots` slots whose `length` `[B]` is zero."""

    @abc.abstractmethod
    def decode(
        self, cache: Any, tokens: jax.Array, layout: "Layout | None" = None
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Feeds `tokens` `[B, N]`; returns logits `[B, N, V]`, features `[B, N, F]`, cache.

        They go into the slots after the cache's `length`; `layout` states where they stand in the
        text and what they see, None that they follow each other (see `tree.layout`).
        """

    @abc.abstractmethod
    def logits(self, features: jax.Array) -> jax.Array:
        """Returns logits `[B, N, V]` of features `[B, N, M]`. Few positions cost little."""

    def with_features(self, layers: tuple[int, ...]) -> "Network":
        """Returns the same network, whose features hold those of decoder layers `layers` too."""
        if not layers:
            return self
        raise ValueError(f"{type(self).__name__} does not return features of layers {layers}")


class Draws(Protocol):
    """Where a round's randomness comes from: keys in production, a script in exhaustive enumeration.

    `stream` tells draws of one round apart (see `draws.Stream`); no two draws of a round
    share a stream and a position. No row's draws depend on another row.
    """

    def accept(self, stream: jax.Array, probability: jax.Array) -> jax.Array:
        """Draws independent Bernoulli outcomes, one per stream `[K]`: True with `probability` `[B, K]`."""

    def choose(self, stream: jax.typing.ArrayLike, weights: jax.Array) -> jax.Array:
        """Draws an index in proportion to `weights` `[B, V]`, zero weights never; returns `[B] int32`."""


class History(NamedTuple):
    """What precedes each position whose distribution is wanted.

    Attributes:
      num_new: `[B, N]`, tokens generated before it, drafted ones included.
      tokens: `[B, N, T]`, all ids before it in their order, the start token first, -1 beyond `length`; None
        where no option reads them.
      length: `[B, N]`, how many those are; None where `tokens` is.
    """

    num_new: jax.Array
    tokens: jax.Array | None = None
    length: jax.Array | None = None


# (logits [B, N, V], what precedes each position) -> logits of the same shape
LogitsProcessor = Callable[[jax.Array, History], jax.Array]


class Options(struct.PyTreeNode):
    """How logits become a distribution: what `sampling.distribution` reads. One entry per row.

    An option that no row uses is None, which is static: it costs nothing. `GenerationConfig` states what
    each means.

    Attributes:
      temperature: `[B] float32`; below `sampling.GREEDY_BELOW` a row is greedy.
      bias: `[B, num_ids] float32`, added to the logits, -inf for ids that are suppressed; or None.
      repetition_penalty, presence_penalty, frequency_penalty, top_p, min_p: `[B] float32`, or None.
      top_k, min_new_tokens: `[B] int32`, or None.
      bad_words: `[B, W, L] int32`, W sequences that must not occur, each at the end of its L ids, with -1
        before it; or None.
      no_repeat_ngram_size: no sequence of so many ids occurs twice; 0: any may. Static.
      begin_suppress_tokens: ids that are suppressed at the first token. Static.
      logits_processor: the user's own function; None: none. Static.
      eos_ids: the end tokens, which `min_new_tokens` suppresses. Static.
      num_ids: ids that exist; the vocabulary's rows beyond are padding. None: all. Static.
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
        """Whether a distribution depends on which tokens precede it, beside what the network sees in them."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        arrays = any(x is not None for x in (*penalties, self.bad_words))
        return arrays or self.no_repeat_ngram_size > 0 or self.logits_processor is not None

    @property
    def can_forbid_all(self) -> bool:
        """Whether there may be positions at which no token is left."""
        arrays = self.bias is not None or self.bad_words is not None
        own = self.logits_processor is not None or bool(self.begin_suppress_tokens)
        return arrays or own or self.no_repeat_ngram_size > 0


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
      remaining: `[B]`, tokens that the row may still emit: 0 once it has ended.
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
        """`[B]`, drafts that a row has use for: a round emits one token beside them."""
        return jnp.maximum(self.remaining - 1, 0)

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

    def narrow(self, width: int) -> "Draft":
        """Returns the draft in `width` positions, which hold all that was proposed; a tree whole or not."""
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


class Round(NamedTuple):
    """What happened in a round, for `Drafter.commit`. N may be narrower than the drafter's `num_draft`.

    Attributes:
      context: the context after the round.
      root: `[B]`, slot and position of the last token committed before it.
      draft: what was proposed.
      result: what was accepted, before truncation at an end token or the length limit.
      logits: `[B, N + 1, V]` of the target.
      features: `[B, N + 1, F]` of the target.
      target_probs: `[B, N + 1, V]`, p after each token that is verified; None in the greedy program.
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
        """`[B]`, tokens that the round added to the committed ones."""
        return self.context.length - 1 - self.root

    @property
    def call_positions(self) -> jax.Array:
        """`[B, D + 1]`, call positions of the root and of what was accepted, 0 beyond a tree's path."""
        if self.result.path is not None:
            return jnp.pad(self.result.path, ((0, 0), (1, 0)))
        order = jnp.arange(self.draft.tokens.shape[1] + 1)[None, :]
        return jnp.broadcast_to(order, (len(self.root), order.shape[1]))


class Drafter(struct.PyTreeNode, abc.ABC):
    """Proposes tokens. A pytree: arrays and networks are leaves, numbers and flags are static fields.

    Building an equal configuration again compiles nothing. Every drafter has `num_draft`, the tokens N that a
    round drafts at most: K for a chain, the nodes of a tree. What follows has defaults; a drafter overrides
    what is different.
    """

    if TYPE_CHECKING:  # a field or a property of each drafter

        @property
        def num_draft(self) -> int: ...

    @property
    def max_depth(self) -> int:
        """The most drafts that can be accepted in a round; for a chain K."""
        return self.num_draft

    @property
    def num_candidates(self) -> int:
        """Nodes that can be accepted; the others ride along in the target call."""
        return self.num_draft

    @property
    def drafts_trees(self) -> bool:
        """Whether it drafts trees, which are drafted whole or not at all."""
        return False

    @property
    def call_widths(self) -> tuple[int, ...]:
        """Growing numbers of drafts that a target call may have room for; the last is `num_draft`.

        A round takes the first that holds all that was proposed, and each is compiled. Of trees they are
        (0, `num_draft`).
        """
        return (self.num_draft,)

    @property
    def can_skip(self) -> bool:
        """Whether rounds may go by without a draft, as an adaptive length asks for."""
        return True

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Decoder layers of the target whose features it reads beside the last hidden state."""
        return ()

    @property
    def vocabulary(self) -> Any:
        """What its ids mean, as of `types.Network`; None: it has no ids of its own."""
        return None

    @property
    def cache_sharding(self) -> jax.sharding.NamedSharding | None:
        """Where its cache lies on a mesh; one that is not divided keeps what it drafts whole as well."""
        return None

    @property
    def own_params(self) -> Any:
        """The arrays that it adds to the target's: a pytree."""
        return self

    def check(self, target: Network) -> None:
        """Raises a ValueError if the drafter cannot draft for `target`."""

    def with_min_confidence(self, min_confidence: float) -> "Drafter":
        """Returns the drafter whose rows stop early by it; see `chain.draft_chain`."""
        raise ValueError(
            f"`min_confidence` must be left out for {type(self).__name__}, which does not draft step by "
            f"step, got {min_confidence}"
        )

    @abc.abstractmethod
    def init(self, context: Context, prefix_width: int) -> State:
        """Returns the state before the first round; `prefix_width` static: no row has more ids yet.

        Axis 0 of every array of it is B: rows are exchanged for others (`corpus`).
        """

    def choose_length(self, state: State, context: Context) -> jax.Array | None:
        """Returns `[B]`, the most tokens that each row drafts in this round, 0 among them.

        None, which is static: every row drafts all it can in every round.
        """
        del state, context
        return None

    @abc.abstractmethod
    def propose(
        self, state: State, context: Context, draws: Draws | None, max_length: jax.Array | None
    ) -> tuple[Draft, State]:
        """Drafts for every row.

        Args:
          state: of the drafter.
          context: what was committed.
          draws: the round's randomness; None in the greedy program: propose argmax ids.
          max_length: `[B]`, of `choose_length`; some row's is above 0. What is drafted beyond it is cut off
            by the round, so it only saves work. None: all.
        """

    def skip(self, state: State, context: Context) -> State:
        """Returns the state after a round in which no row drafts; `propose` is not called."""
        del context
        return state

    @abc.abstractmethod
    def commit(self, state: State, round: Round) -> State:
        """Returns the state for the next round, after what the target accepted."""


@dataclasses.dataclass(frozen=True)
class AcceptanceRule(abc.ABC):
    """Keeps a path of a draft and chooses the token after it. Frozen, hashable, stateless.

    A rule of one's own inherits from this class and declares what is true of it.
    """

    @property
    def is_lossless(self) -> bool:
        """Whether the output is known to keep the target's distribution."""
        return False

    @property
    def verifies_trees(self) -> bool:
        """Whether the rule takes trees beside chains."""
        return False

    @property
    def name(self) -> str:
        """What reports call it."""
        return type(self).__name__

    @abc.abstractmethod
    def __call__(self, draws: Draws, draft: Draft, target_probs: jax.Array) -> AcceptanceResult:
        """Verifies `draft` by `target_probs` `[B, N + 1, V]`, p after each token of the call."""
