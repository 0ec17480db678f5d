"""A draft model as drafter: of a chain, token by token, or of a token tree, level by level.

Leviathan et al. 2023, section 2; trees: SpecInfer (Miao et al. 2024), siblings drawn without replacement as
in Jeon et al. 2024. Axes: B rows, K drafts, N nodes, V vocabulary.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax import cache as cache_lib
from specjax import sampling
from specjax import tree as tree_lib
from specjax.drafters import chain
from specjax.drafters.base import BranchingDrafter
from specjax.draws import Stream
from specjax.types import Context, Draft, Drafter, Draws, Network, Round


class _OfModel(Drafter):
    """The base of drafters with a draft model. Their state is that model's cache.

    Invariant: between rounds the cache contains all committed tokens but the last one, or the last
    two after full acceptance (the last draft was never fed), or fewer after rounds without a draft.

    Attributes:
      network: the draft model.
    """

    network: Network

    if TYPE_CHECKING:  # a field of each

        @property
        def share_encoder(self) -> bool: ...

    @property
    def vocabulary(self) -> Any:
        """The draft model's."""
        return self.network.vocabulary

    @property
    def cache_sharding(self) -> Any:
        """The network's."""
        return self.network.cache_sharding

    def check(self, target: Network) -> None:
        """Raises a ValueError if the vocabulary or the encoder width does not fit."""
        check_network(self.network, target, self.share_encoder)

    def init(self, context: Context, prefix_width: int) -> cache_lib.Cache:
        """Encodes the sources, unless the target's encoder is shared, and feeds the decoder prefix."""
        encoded = context.encoded if self.share_encoder else encode(self.network, context)
        return prefilled_cache(self.network, encoded, context, prefix_width, self.num_draft)


class ModelDrafter(_OfModel):
    """A drafter of chains of K tokens from a draft model.

    Attributes:
      num_draft: K.
      share_encoder: use the target's encoder output in place of the draft's own; widths must agree.
      min_confidence: a row stops when q is less confident; see `chain.draft_chain`.
    """

    num_draft: int = struct.field(pytree_node=False)
    share_encoder: bool = struct.field(pytree_node=False, default=False)
    min_confidence: float = struct.field(pytree_node=False, default=0.0)

    def with_min_confidence(self, min_confidence: float) -> Drafter:
        """Returns the drafter with this threshold."""
        return self.replace(min_confidence=min_confidence)

    def propose(
        self, cache: cache_lib.Cache, context: Context, draws: Draws | None, max_length: jax.Array | None
    ) -> tuple[Draft, cache_lib.Cache]:
        """Runs the draft model for K steps, or until no row drafts another token."""
        if max_length is not None:  # after rounds without a draft the cache may lack more than two tokens
            cache = feed_missing(self.network, cache, context, self.num_draft + 1)
        logits, cache = catch_up(self.network, cache, context)

        def feed(cache: cache_lib.Cache, token: jax.Array) -> tuple[jax.Array, cache_lib.Cache]:
            logits, _, cache = self.network.decode(cache, token)
            return logits, cache

        return chain.draft_chain(
            logits, cache, feed, context, draws, self.num_draft, max_length, self.min_confidence
        )

    def commit(self, cache: cache_lib.Cache, round: Round) -> cache_lib.Cache:
        """Removes uncommitted tokens from the cache; the last committed one was not fed yet."""
        # Not `rollback`: after full acceptance the cache is one token shorter.
        return cache_lib.trim(cache, round.context.length - 1)


class ModelTreeDrafter(_OfModel, BranchingDrafter):
    """A drafter of token trees from a draft model. Greedy rows get the most likely tokens as siblings.

    Attributes:
      with_replacement: siblings are independent draws, and may be equal.
      share_encoder: see `ModelDrafter`.
    """

    with_replacement: bool = struct.field(pytree_node=False, default=False)
    share_encoder: bool = struct.field(pytree_node=False, default=False)

    def propose(
        self, cache: cache_lib.Cache, context: Context, draws: Draws | None, max_length: jax.Array | None
    ) -> tuple[Draft, cache_lib.Cache]:
        """Calls the draft model once per level; a node is valid if q had a token left to draw for it."""
        if max_length is not None:
            cache = feed_missing(self.network, cache, context, self.max_depth + 1)
        num_rows = len(context.length)
        starts = tree_lib.level_starts(self.branching)
        tree = tree_lib.from_branching(self.branching, num_rows)
        before = tree_lib.ancestors(tree)[:, :, 1:]
        logits, cache = catch_up(self.network, cache, context)
        tokens = jnp.zeros((num_rows, self.num_draft), jnp.int32)
        valid: list[jax.Array] = []
        q: list[jax.Array] = []
        for depth, (first, last) in enumerate(itertools.pairwise(starts[:-1])):
            if depth:
                layout = tree_lib.layout(tree, context.length - 1, cache.num_slots, first, last)
                logits, _, cache = self.network.decode(cache, tokens[:, first - 1 : last - 1], layout)
            history = sampling.history(context, tokens, before[:, first:last])
            children, drawn, probs = self._children(logits, history, context, draws, depth, last - 1)
            tokens = tokens.at[:, last - 1 : last - 1 + children.shape[1]].set(children)
            valid.append(drawn)
            q += [] if probs is None else [probs]
        tree = tree.replace(valid=tree_lib.whole(tree_lib.ancestors(tree), jnp.concatenate(valid, axis=1)))
        probs = jnp.concatenate(q, axis=1) if q else None
        return tree_lib.draft(tree, tokens, probs, self.with_replacement), cache

    def _children(
        self,
        logits: jax.Array,
        history: sampling.History,
        context: Context,
        draws: Draws | None,
        depth: int,
        first: int,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Draws the children of one level's nodes, siblings adjacent; the first child is node `first`.

        Returns:
          tokens and whether q had one left to draw, `[B, nodes * branching]`; q `[B, nodes, V]`.
        """
        adjusted = sampling.adjust_logits(logits, context.options, history)
        num_parents, num_children = logits.shape[1], self.branching[depth]
        if draws is None:
            ranked = jax.lax.top_k(adjusted, num_children)[1].reshape(len(logits), -1)
            return ranked.astype(jnp.int32), jnp.ones(ranked.shape, bool), None
        probs = sampling.distribution(logits, context.options, history)
        greedy = sampling.is_greedy(context.options.temperature)[:, None]
        tokens, drawn = [], []
        for parent in range(num_parents):
            q, taken = probs[:, parent], jnp.zeros_like(probs[:, parent], bool)
            for child in range(num_children):
                node = first + parent * num_children + child
                left = jnp.where(taken, 0.0, q)
                some = (left > 0).any(-1, keepdims=True)
                token = draws.choose(Stream.DRAFT.at(node), jnp.where(some, left, q))
                # A greedy row's q is one-hot, so its siblings are ranked by their logits.
                ranked = sampling.argmax(jnp.where(taken, -jnp.inf, adjusted[:, parent]))
                token = jnp.where(greedy[:, 0], ranked, token)
                hot = jax.nn.one_hot(token, q.shape[1], dtype=bool)
                taken = taken | (hot & (greedy | (not self.with_replacement)))
                tokens.append(token)
                drawn.append((some | greedy)[:, 0])
        return jnp.stack(tokens, axis=1), jnp.stack(drawn, axis=1), probs

    def commit(self, cache: cache_lib.Cache, round: Round) -> cache_lib.Cache:
        """Keeps the part of the accepted path that was fed; the last level never is."""
        if round.result.path is not None:
            cache = cache_lib.keep_path(cache, round.root, round.result.path)
        num_kept = jnp.minimum(round.result.num_accepted, self.max_depth - 1)
        return cache_lib.trim(cache, jnp.minimum(round.root + 1 + num_kept, round.context.length - 1))


# ---- a draft model's cache, for these and for staged drafts


def check_network(network: Network, target: Network, share_encoder: bool) -> None:
    """Raises a ValueError if a draft model cannot draft for `target`."""
    theirs, ours = network.vocab_size, target.vocab_size
    existing = target.num_ids or ours
    if theirs < existing:
        raise ValueError(
            f"the draft's vocabulary must contain the target's {existing} ids, got {theirs}; use a draft "
            "with the target's tokenizer. If the target's vocabulary is padded, its `num_ids` must be the "
            "number of ids that exist"
        )
    if share_encoder and network.encoded_width != target.encoded_width:
        raise ValueError(
            f"`share_encoder` must be False for a draft of encoder width {network.encoded_width} and a "
            f"target of encoder width {target.encoded_width}; the draft then uses its own encoder"
        )


def encode(network: Network, context: Context) -> jax.Array:
    """Returns the draft model's own encoder output `[B, S, M]`."""
    return network.encode(context.source_ids, context.source_mask)


def prefilled_cache(
    network: Network, encoded: jax.Array, context: Context, prefix_width: int, num_extra: int
) -> cache_lib.Cache:
    """Returns a draft model's cache after the decoder prefix without its last token.

    It has the T slots of the committed ids, and `num_extra` more for the drafter's own calls.
    """
    num_slots = context.tokens.shape[1] + num_extra
    cache = network.init_cache(encoded, context.source_mask, num_slots)
    if prefix_width > 1:
        _, _, cache = network.decode(cache, context.tokens[:, : prefix_width - 1])
    return cache_lib.trim(cache, context.length - 1)


def feed_missing(network: Network, cache: cache_lib.Cache, context: Context, width: int) -> cache_lib.Cache:
    """Feeds committed tokens, `width` per call, until no row lacks more than the last two."""

    def lags(cache: cache_lib.Cache) -> jax.Array:
        return (context.length - cache.length).max() > 2

    def chunk(cache: cache_lib.Cache) -> cache_lib.Cache:
        start = jnp.minimum(cache.length, context.length - 1)
        _, _, cache = network.decode(cache_lib.rollback(cache, start), context.window(start, width))
        return cache_lib.trim(cache, context.length - 1)

    return jax.lax.while_loop(lags, chunk, cache)


def catch_up(network: Network, cache: cache_lib.Cache, context: Context) -> tuple[jax.Array, cache_lib.Cache]:
    """Feeds the last two committed tokens; returns logits `[B, 1, V]` after the last, and the cache.

    A row that lacks only the last rewrites the other with equal values.
    """
    window, start = context.last_tokens(2)
    cache = cache_lib.rollback(cache, start)
    _, features, cache = network.decode(cache, window)
    cache = cache_lib.rollback(cache, context.length)
    last = (context.length - 1 - start)[:, None, None]
    return network.logits(jnp.take_along_axis(features, last, axis=1)), cache


# ---- the public API


def from_model(draft: Any, num_draft: int = 5, share_encoder: bool = False) -> ModelDrafter:
    """Returns a drafter of chains from a loaded model (Leviathan et al. 2023).

    Args:
      draft: a model from `specjax.load`.
      num_draft: K, tokens per round.
      share_encoder: the draft's decoder reads the target's encoder output; its own encoder is not used.

    Raises:
      ValueError: `num_draft` is below 1.
    """
    check_num_draft(num_draft)
    return ModelDrafter(network_of(draft), num_draft, share_encoder)


def tree_from_model(
    draft: Any, branching: Sequence[int], with_replacement: bool = False, share_encoder: bool = False
) -> ModelTreeDrafter:
    """Returns a drafter of token trees from a loaded model (Miao et al. 2024).

    Args:
      draft: a model from `specjax.load`.
      branching: children of a node on each level; (3, 2, 1) drafts 3 + 6 + 6 nodes.
      with_replacement: siblings are independent draws; else each is drawn without those before it.
      share_encoder: the draft's decoder reads the target's encoder output.

    Raises:
      ValueError: `branching` is empty or contains a number below 1.
    """
    return ModelTreeDrafter(network_of(draft), as_branching(branching), with_replacement, share_encoder)


def network_of(draft: Any) -> Network:
    """Returns the network of a loaded model.

    Raises:
      ValueError: `draft` is not a loaded model.
    """
    network = getattr(draft, "network", None)
    if not isinstance(network, Network):
        raise ValueError(f"`draft` must be a loaded model, got {draft!r:.80}; draft = specjax.load(...)")
    return network


def check_num_draft(num_draft: Any) -> None:
    """Raises a ValueError if K is not a whole number of at least 1."""
    if not isinstance(num_draft, int) or num_draft < 1:
        raise ValueError(
            f"`num_draft` must be a whole number of at least 1, got {num_draft!r}; drafter=None decodes "
            "autoregressively"
        )


def as_branching(branching: Any) -> tuple[int, ...]:
    """Returns the children of each level as a tuple of whole numbers."""
    if not isinstance(branching, list | tuple) or not all(isinstance(n, int) for n in branching):
        raise ValueError(
            f"`branching` must be the children of each level, as in (3, 2, 1), got {branching!r}"
        )
    return tuple(branching)
