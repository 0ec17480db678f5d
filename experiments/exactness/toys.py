"""Toy networks with tables instead of layers, and their target distribution in numpy.

The logits of a toy depend on every token, position and cache entry that it sees, so an error in any of them
changes the logits. Those of an oracle depend on the last token only, so a drafter can know the next tokens.

Axes: B rows, N token positions, D positions ahead, V vocabulary, T cache slots, S source length.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import cache as cache_lib
from specjax import sampling
from specjax import tree as tree_lib
from specjax.generation_config import GenerationConfig
from specjax.types import History, Layout, Network

NUM_CONTEXTS = 1009  # rows of a table; a prime
GARBAGE = 99.0  # initial value of cache slots


def random_table(seed: int, vocab_size: int, spread: float = 1.0, dtype: Any = np.float32) -> np.ndarray:
    """Returns logits `[NUM_CONTEXTS, V]` of a toy network."""
    return (spread * np.random.default_rng(seed).normal(size=(NUM_CONTEXTS, vocab_size))).astype(dtype)


def token_weights(num: int, base: int) -> np.ndarray:
    """Returns the weights of tokens at `num` positions in the key of a context."""
    return np.array([pow(base, position + 1, NUM_CONTEXTS) for position in range(num)], np.int64)


def toy_cache(dtype: Any, encoded: jax.Array, source_mask: jax.Array, num_slots: int) -> cache_lib.Cache:
    """Returns a cache of one layer, one head, and one number per slot."""
    keys = jnp.full((len(encoded), 1, 1, num_slots), GARBAGE, dtype)
    cross, length = encoded[:, None], jnp.zeros(len(encoded), jnp.int32)
    return cache_lib.Cache((keys,), (keys.swapaxes(2, 3),), length, (cross,), (cross,), source_mask)


def _remember(cache: cache_lib.Cache, new: jax.Array) -> tuple[jax.Array, cache_lib.Cache]:
    """Writes numbers `[B, N]`; returns the contents of all slots, `[B, T]`, and the cache."""
    keys = cache_lib.write(cache.keys[0], new[:, :, None, None], cache.length, slots_last=True)
    cache = cache.replace(keys=(keys,), values=(keys.swapaxes(2, 3),), length=cache.length + new.shape[1])
    return keys[:, 0, 0].astype(jnp.int32), cache


class ToyNetwork(Network):
    """A network whose logits are a table row, selected by the source and every token so far.

    Tokens are stored in a `cache.Cache` (as keys, the source as cross keys), so the logits depend on the
    contents of the cache.

    Attributes:
      table: `[NUM_CONTEXTS, V]`; see `random_table`.
      num_ids: as in `types.Network`.
    """

    table: jax.Array
    num_ids: int | None = struct.field(pytree_node=False, default=None)

    encoded_width = 1

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.table.shape[1]

    def encode(self, source_ids: jax.Array, source_mask: jax.Array) -> jax.Array:
        """Returns the part of each source token in the key, `[B, S, 1]`, zero at padding."""
        weights = jnp.asarray(token_weights(source_ids.shape[1], 5), self.table.dtype)[None, :]
        return jnp.where(source_mask, (source_ids + 1) * weights, 0)[..., None].astype(self.table.dtype)

    def init_cache(self, encoded: jax.Array, source_mask: jax.Array, num_slots: int) -> cache_lib.Cache:
        """See `toy_cache`."""
        return toy_cache(self.table.dtype, encoded, source_mask, num_slots)

    def decode(
        self, cache: cache_lib.Cache, tokens: jax.Array, layout: Layout | None = None
    ) -> tuple[jax.Array, jax.Array, cache_lib.Cache]:
        """Writes the tokens, then looks up the row that the slots visible to each token select."""
        if layout is None:
            layout = tree_lib.chain_layout(cache.length, tokens.shape[1], cache.num_slots)
        remembered, cache = _remember(cache, tokens)
        weights = jnp.asarray(token_weights(cache.num_slots, 7))[layout.key_positions]
        # The weight of a token also depends on the position of the query, so that a wrong one shows.
        weights = weights[:, None, :] + layout.positions[:, :, None]
        source = cache.cross_keys[0].sum((1, 2, 3)).astype(jnp.int32)
        key = jnp.where(layout.visible, (remembered + 1)[:, None, :] * weights, 0).sum(-1) + source[:, None]
        features = (key % NUM_CONTEXTS).astype(self.table.dtype)[..., None]
        return self.logits(features), features, cache

    def logits(self, features: jax.Array) -> jax.Array:
        """The table's rows."""
        return jnp.asarray(self.table)[features[..., 0].astype(jnp.int32)]


class ToyHeads(struct.PyTreeNode):
    """Heads for drafters on the target's features; a feature is the index of a row, as in `ToyNetwork`.

    Attributes:
      table: as in `ToyNetwork`.
    """

    table: jax.Array

    feature_layers = ()
    num_features = 1
    cache_sharding = None

    @property
    def params(self) -> jax.Array:
        """The table."""
        return self.table

    def check(self, target: Network) -> None:
        """Accepts every toy."""

    def ahead(self, features: jax.Array, depth: int) -> jax.Array:
        """Returns logits `[B, depth, V]`: another row for each position."""
        steps = 31 * (1 + jnp.arange(depth))[None, :]
        return jnp.asarray(self.table)[(features.astype(jnp.int32) + steps) % NUM_CONTEXTS]

    def init_cache(self, encoded: jax.Array, source_mask: jax.Array, num_slots: int) -> cache_lib.Cache:
        """See `toy_cache`."""
        return toy_cache(self.table.dtype, encoded, source_mask, num_slots)

    def hidden(self, features: jax.Array) -> jax.Array:
        """As they are: `[B, N, 1]`."""
        return features

    def decode(
        self, cache: cache_lib.Cache, hidden: jax.Array, tokens: jax.Array, layout: Layout, num_masks: int = 0
    ) -> tuple[jax.Array, cache_lib.Cache]:
        """Writes a number for each pair and mask, then sums those visible to each, weighted by position."""
        pairs = (17 * hidden[..., 0].astype(jnp.int32) + tokens + 1) % NUM_CONTEXTS
        masks = 500 + jnp.arange(num_masks, dtype=pairs.dtype)[None]
        masks = jnp.broadcast_to(masks, (len(pairs), num_masks))
        remembered, cache = _remember(cache, jnp.concatenate([pairs, masks], axis=1))
        weights = jnp.asarray(token_weights(cache.num_slots, 7))[layout.key_positions]
        seen = jnp.where(layout.visible, (remembered * weights)[:, None], 0).sum(-1)
        source = cache.cross_keys[0].sum((1, 2, 3)).astype(jnp.int32)[:, None]
        outputs = (seen + 13 * layout.positions + source) % NUM_CONTEXTS
        return outputs.astype(self.table.dtype)[..., None], cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns rows of the table, `[B, N, V]`."""
        return jnp.asarray(self.table)[hidden[..., 0].astype(jnp.int32)]


# ---- oracles


class OracleNetwork(Network):
    """A network whose next token depends on the last one only; a feature is a token.

    Attributes:
      follows: `[V] int32`, the token after each token.
    """

    follows: jax.Array

    encoded_width = 1

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.follows.shape[0]

    def encode(self, source_ids: jax.Array, source_mask: jax.Array) -> jax.Array:
        """Returns zeros."""
        return jnp.zeros((*source_ids.shape, 1))

    def init_cache(self, encoded: jax.Array, source_mask: jax.Array, num_slots: int) -> cache_lib.Cache:
        """See `toy_cache`."""
        return toy_cache(jnp.float32, encoded, source_mask, num_slots)

    def decode(
        self, cache: cache_lib.Cache, tokens: jax.Array, layout: Layout | None = None
    ) -> tuple[jax.Array, jax.Array, cache_lib.Cache]:
        """Returns the logits of the token after each token."""
        features = tokens[..., None].astype(jnp.float32)
        return self.logits(features), features, cache.replace(length=cache.length + tokens.shape[1])

    def logits(self, features: jax.Array) -> jax.Array:
        """Returns nearly one-hot logits."""
        following = jnp.asarray(self.follows)[features[..., 0].astype(jnp.int32)]
        return 20 * jax.nn.one_hot(following, self.vocab_size)


class OracleHeads(struct.PyTreeNode):
    """Heads that know the next tokens of an `OracleNetwork`.

    Attributes:
      oracle: the target.
    """

    oracle: OracleNetwork

    feature_layers = ()
    num_features = 1
    cache_sharding = None

    @property
    def params(self) -> OracleNetwork:
        """The target's."""
        return self.oracle

    def check(self, target: Network) -> None:
        """Accepts its target."""

    def ahead(self, features: jax.Array, depth: int) -> jax.Array:
        """Returns logits `[B, depth, V]`."""
        token, levels = features[:, None], []
        for _ in range(depth):
            token = self._next(token)
            levels.append(self.oracle.logits(token))
        return jnp.concatenate(levels, axis=1)

    def init_cache(self, encoded: jax.Array, source_mask: jax.Array, num_slots: int) -> cache_lib.Cache:
        """That of the target."""
        return self.oracle.init_cache(encoded, source_mask, num_slots)

    def hidden(self, features: jax.Array) -> jax.Array:
        """As they are: `[B, N, 1]`."""
        return features

    def decode(
        self, cache: cache_lib.Cache, hidden: jax.Array, tokens: jax.Array, layout: Layout, num_masks: int = 0
    ) -> tuple[jax.Array, cache_lib.Cache]:
        """Returns the tokens of the pairs; each mask is one token further than the last visible pair."""
        cache = cache.replace(length=cache.length + tokens.shape[1] + num_masks)
        outputs = [tokens[..., None].astype(jnp.float32)]
        if num_masks:
            num_new = layout.positions[:, tokens.shape[1]] - layout.positions[:, 0]
            last = jnp.take_along_axis(outputs[0], jnp.maximum(num_new - 1, 0)[:, None, None], axis=1)
            for _ in range(num_masks):
                last = self._next(last)
                outputs.append(last)
        return jnp.concatenate(outputs, axis=1), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """That of the target."""
        return self.oracle.logits(hidden)

    def _next(self, features: jax.Array) -> jax.Array:
        """Returns the tokens after tokens `[B, N, 1]`."""
        return jnp.asarray(self.oracle.follows)[features.astype(jnp.int32)].astype(jnp.float32)


# ---- the target's distribution, in numpy, from its table


def distribution(
    logits: np.ndarray,
    tokens: list[int],
    config: GenerationConfig,
    num_new: int,
    eos_ids: tuple[int, ...] = (),
) -> np.ndarray:
    """Returns the distribution `[V] float64` of logits `[V]` under options, after `tokens`.

    It is independent of `sampling.distribution`, and sorts.

    Args:
      logits: of the next token.
      tokens: all tokens of the decoder so far.
      config: the options.
      num_new: number of generated tokens among `tokens`.
      eos_ids: the end tokens.
    """
    logits = logits.astype(np.float64)
    for i, bias in (config.logit_bias or {}).items():
        logits[i] += np.float32(bias)
    logits[list(config.suppress_tokens)] = -np.inf
    if config.repetition_penalty is not None:
        seen = np.unique(tokens)
        penalty = float(np.float32(config.repetition_penalty))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    counts = np.bincount(tokens[len(tokens) - num_new :], minlength=len(logits))
    if config.frequency_penalty is not None:
        logits -= np.float32(config.frequency_penalty) * counts
    if config.presence_penalty is not None:
        logits -= np.float32(config.presence_penalty) * (counts > 0)
    size, text = config.no_repeat_ngram_size, tuple(tokens)
    for i in range(len(logits)):
        longer = (*text, i)
        earlier = [text[k : k + size] for k in range(len(text) - size + 1)]
        if (size and longer[-size:] in earlier) or any(
            longer[-len(word) :] == tuple(word) for word in config.bad_words_ids
        ):
            logits[i] = -np.inf
    if config.min_new_tokens is not None and num_new < config.min_new_tokens:
        logits[list(eos_ids)] = -np.inf
    if num_new == 0:
        logits[list(config.begin_suppress_tokens)] = -np.inf
    if config.logits_processor is not None:
        history = History(np.array([[num_new]]), np.array([[tokens]]), np.array([[len(tokens)]]))
        with jax.enable_x64(True):
            logits = np.asarray(config.logits_processor(jnp.asarray(logits)[None, None], history))[0, 0]
    temperature = config.temperature
    if temperature is None:
        temperature = 0.0 if (config.top_k, config.top_p, config.min_p) == (None, None, None) else 1.0
    if temperature < sampling.GREEDY_BELOW:
        return np.eye(len(logits))[logits.argmax()]
    weights = np.exp((logits - logits.max()) / np.float64(np.float32(temperature)))
    probs = weights / weights.sum()
    order = np.argsort(-probs, kind="stable")
    if config.top_k is not None:
        probs[order[config.top_k :]] = 0
    if config.top_p is not None and config.top_p < 1:
        mass_before = np.cumsum(probs[order]) - probs[order]
        probs[order[mass_before >= np.float32(config.top_p) * probs.sum()]] = 0
    if config.min_p is not None:
        probs[probs < np.float32(config.min_p) * probs.max()] = 0
    return probs / probs.sum()


def context_key(source: np.ndarray, tokens: list[int]) -> int:
    """Returns the index of the row that a toy network looks up after `tokens`."""
    weights = token_weights(len(tokens), 7) + len(tokens) - 1
    parts = (np.array(source) + 1) @ token_weights(len(source), 5) + (np.array(tokens) + 1) @ weights
    return int(parts) % NUM_CONTEXTS


def conditional(
    target: ToyNetwork,
    source: np.ndarray,
    tokens: list[int],
    config: GenerationConfig,
    num_prefix: int = 1,
    eos_ids: tuple[int, ...] = (),
) -> np.ndarray:
    """Returns probabilities `[num_ids] float64` of the token after `tokens`, the first `num_prefix` given."""
    logits = np.asarray(target.table)[context_key(source, tokens)][: target.num_ids]
    return distribution(logits, tokens, config, len(tokens) - num_prefix, eos_ids)


def target_distribution(
    target: ToyNetwork,
    source: np.ndarray,
    num_tokens: int,
    config: GenerationConfig,
    prefix: tuple[int, ...] = (0,),
) -> dict[tuple[int, ...], float]:
    """Returns the probability of each sequence of `num_tokens` tokens, or fewer if it ends.

    If `config.eos_ids` is None, no token ends a sequence.
    """
    eos_ids = tuple(config.eos_ids or ())
    outputs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, probability in outputs.items():
            if tokens and tokens[-1] in eos_ids:
                longer[tokens] = probability
                continue
            chances = conditional(target, source, [*prefix, *tokens], config, len(prefix), eos_ids)
            longer |= {(*tokens, int(i)): probability * float(chances[i]) for i in np.flatnonzero(chances)}
        outputs = longer
    return outputs
