"""A smaller model as drafter of a token tree, level by level.

SpecInfer (Miao et al. 2024); siblings drawn without replacement as in Jeon et al. 2024. Axes: B rows,
N nodes, V vocabulary.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax import sampling
from specjax import tree as tree_lib
from specjax.drafters import chain, model
from specjax.drafters.branching import Branching
from specjax.drafters.wanted import draft_if_wanted
from specjax.draws import Stream
from specjax.types import Context, Draft, Draws, Network, Params, Round


@dataclasses.dataclass(frozen=True)
class ModelTreeDrafter(Branching):
    """Draws a tree from a draft model. Its state is that model's cache.

    Greedy rows get the most likely tokens as siblings. Between rounds the cache holds all
    committed tokens but the last one or two, as `ModelDrafter`'s does.

    Raises:
      ValueError: `branching` is empty, no tuple, or holds a number below 1.

    Attributes:
      network: the draft model. Static.
      branching: children of a node at each depth: (3, 2, 1) makes 3 + 6 + 6 nodes.
      with_replacement: siblings are independent draws, and may be equal.
      share_encoder: as of `ModelDrafter`.
    """

    network: Network
    with_replacement: bool = False
    share_encoder: bool = False

    def init(self, params: Params, context: Context, prefix_width: int) -> cache_lib.Cache:
        """Encodes the sources, unless the target's encoder is shared, and feeds the decoder prefix."""
        encoded = model.encode(self.network, params, context, self.share_encoder)
        return model.init_cache(self.network, params, encoded, context, prefix_width, self.num_draft)

    def propose(
        self, params: Params, cache: cache_lib.Cache, context: Context, draws: Draws | None
    ) -> tuple[Draft, cache_lib.Cache]:
        """One call of the draft model a level; every row drafts every node that q gives a token for."""
        return self._run(params, context, draws, cache)

    def propose_up_to(
        self, params: Params, cache: cache_lib.Cache, context: Context, draws: Draws | None, wanted: jax.Array
    ) -> tuple[Draft, cache_lib.Cache]:
        """The same for rows that want a tree; none, and no call, where no row does."""

        def run(cache: cache_lib.Cache) -> tuple[Draft, cache_lib.Cache]:
            cache = model.feed_missing(self.network, params, cache, context, self.max_depth + 1)
            return self._run(params, context, draws, cache)

        nothing = self._nothing(params, cache, context, draws)
        return draft_if_wanted(run, lambda cache: cache, nothing, cache, wanted)

    def _nothing(
        self, params: Params, cache: cache_lib.Cache, context: Context, draws: Draws | None
    ) -> Draft:
        """A draft without a valid node."""
        like = jax.eval_shape(lambda: model.catch_up(self.network, params, cache, context)[0])
        draft = chain.empty(context, like, draws, self.num_draft, 0)
        tree = tree_lib.from_branching(self.branching, len(context.length))
        tree = tree.replace(valid=jnp.zeros_like(tree.valid))
        num_parents = tree_lib.level_starts(self.branching)[-2]
        probs = None if draft.probs is None else draft.probs[:, :num_parents]
        return Draft(draft.tokens, draft.num_drafted, probs, tree, self.with_replacement)

    def _run(
        self, params: Params, context: Context, draws: Draws | None, cache: cache_lib.Cache
    ) -> tuple[Draft, cache_lib.Cache]:
        num_rows = len(context.length)
        starts = tree_lib.level_starts(self.branching)
        tree = tree_lib.from_branching(self.branching, num_rows)
        before = tree_lib.ancestors(tree)[:, :, 1:]
        logits, cache = model.catch_up(self.network, params, cache, context)
        tokens = jnp.zeros((num_rows, self.num_draft), jnp.int32)
        valid: list[jax.Array] = []
        q: list[jax.Array] = []
        for depth, (first, last) in enumerate(itertools.pairwise(starts[:-1])):
            if depth:
                layout = tree_lib.layout(tree, context.length - 1, cache.num_slots, first, last)
                logits, _, cache = self.network.decode(params, cache, tokens[:, first - 1 : last - 1], layout)
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
        """The children of one level's nodes, siblings side by side; `first` is the first one's node.

        Returns:
          tokens and whether q had one left to draw, `[B, nodes * branching]`; q `[B, nodes, V]`.
        """
        adjusted = sampling.adjust(logits, context.options, history)
        num_parents, num_children = logits.shape[1], self.branching[depth]
        if draws is None:
            ranked = jax.lax.top_k(adjusted, num_children)[1].reshape(len(logits), -1)
            return ranked.astype(jnp.int32), jnp.ones(ranked.shape, bool), None
        probs = sampling.process(logits, context.options, history)
        greedy = sampling.is_greedy(context.options.temperature)[:, None]
        tokens, drawn = [], []
        for parent in range(num_parents):
            q, taken = probs[:, parent], jnp.zeros_like(probs[:, parent], bool)
            for child in range(num_children):
                node = first + parent * num_children + child
                left = jnp.where(taken, 0.0, q)
                some = (left > 0).any(-1, keepdims=True)
                token = draws.choose(Stream.DRAFT.at(node), jnp.where(some, left, q))
                # A greedy row's q has one token to give: its siblings are ranked by their logits.
                ranked = sampling.argmax(jnp.where(taken, -jnp.inf, adjusted[:, parent]))
                token = jnp.where(greedy[:, 0], ranked, token)
                hot = jax.nn.one_hot(token, q.shape[1], dtype=bool)
                taken = taken | (hot & (greedy | (not self.with_replacement)))
                tokens.append(token)
                drawn.append((some | greedy)[:, 0])
        return jnp.stack(tokens, axis=1), jnp.stack(drawn, axis=1), probs

    def commit(self, params: Params, cache: cache_lib.Cache, round: Round) -> cache_lib.Cache:
        """Keeps the accepted path, as far as it was fed: the last level never is."""
        del params
        assert round.verdict.path is not None
        cache = cache_lib.keep_path(cache, round.root, round.verdict.path)
        num_kept = jnp.minimum(round.verdict.num_accepted, self.max_depth - 1)
        return cache_lib.trim(cache, jnp.minimum(round.root + 1 + num_kept, round.context.length - 1))
