"""Expected speed-ups, from the paper's formulas and from measured parts, and memory.

Leviathan et al. 2023 (arXiv 2211.17192). All NumPy; arguments broadcast.

Symbols: alpha, accepted over tested drafts; K, drafts per round; tau, mean tokens per target call; c, v and
o, the times of a draft step, of a target call on K + 1 tokens, and of the rest of a round, each divided by
the time of a decoding step (a target call on one token).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

ArrayLike = Any


def expected_tokens(alpha: ArrayLike, num_draft: ArrayLike) -> np.ndarray:
    """Returns tokens per target call for independent acceptances: (1 - alpha^(K+1)) / (1 - alpha).

    Equation 1. At alpha = 1 it is K + 1. For alpha = .8 and K = 5 it is 3.69 tokens, of which 2.69 are
    accepted drafts:

    >>> expected_tokens(0.8, 5).round(2).item()
    3.69
    """
    alpha, num_draft = np.asarray(alpha, float), np.asarray(num_draft)
    below = np.where(alpha == 1, 0.5, alpha)
    return np.where(alpha != 1, (1 - below ** (num_draft + 1)) / (1 - below), num_draft + 1.0)


def expected_tokens_by_position(accepted: ArrayLike, tested: ArrayLike) -> float:
    """Returns tokens per target call from the measured acceptance rate of each position.

    Equation 1 without the assumption that all positions have the same rate: 1 + sum_i prod_{j <= i} a_j with
    a_j = accepted_j / tested_j. It differs from tau by the rounds that ended early.

    Args:
      accepted, tested: `[K]`, the counts `Stats.accepted` and `Stats.tested`.
    """
    accepted, tested = np.asarray(accepted, float), np.asarray(tested, float)
    return float(1 + np.cumprod(accepted / np.maximum(tested, 1)).sum())


def predicted_speedup(
    tau: ArrayLike, num_draft: ArrayLike, c: ArrayLike, v: ArrayLike = 1.0, o: ArrayLike = 0.0
) -> np.ndarray:
    """Returns tau / (v + K c + o), which is Theorem 3.8 for tau of `expected_tokens`, v = 1 and o = 0.

    >>> predicted_speedup(expected_tokens(0.75, 7), 7, c=0.02).round(1).item()  # Table 4, EnDe, T5-small
    3.2
    """
    tau, num_draft = np.asarray(tau, float), np.asarray(num_draft)
    return tau / (np.asarray(v) + num_draft * np.asarray(c) + np.asarray(o))


def operations_factor(alpha: ArrayLike, num_draft: ArrayLike, c_hat: ArrayLike = 0.0) -> np.ndarray:
    """Returns the operations of speculative decoding divided by those of autoregressive decoding.

    Theorem 3.11: (1 - alpha) (K c_hat + K + 1) / (1 - alpha^(K+1)).

    Args:
      c_hat: operations of a draft step divided by those of a target step; 0 in Table 1.
    """
    num_draft = np.asarray(num_draft)
    return (num_draft * np.asarray(c_hat) + num_draft + 1) / expected_tokens(alpha, num_draft)


class BestLength(NamedTuple):
    """The best K and its speed-up; 0 and 1 if no K is faster than autoregressive decoding."""

    num_draft: np.ndarray
    speedup: np.ndarray


def best_num_draft(alpha: ArrayLike, c: ArrayLike, slope: ArrayLike = 0.0, limit: int = 100) -> BestLength:
    """Returns the K in 0..limit with the largest expected speed-up, for independent acceptances.

    Args:
      alpha, c: see the symbols above.
      slope: slope of the target call's time, v(K) = 1 + slope K; 0 in the paper.
      limit: the largest K considered (with c = slope = 0, longer is always better).

    >>> best_num_draft(0.75, c=0.02).num_draft.item()
    9
    """
    alpha, c, slope = np.broadcast_arrays(*(np.asarray(x, float)[..., None] for x in (alpha, c, slope)))
    lengths = np.arange(limit + 1)
    speedups = predicted_speedup(expected_tokens(alpha, lengths), lengths, c, 1 + slope * lengths)
    return BestLength(speedups.argmax(-1), speedups.max(-1))


def expected_calls(chances: np.ndarray, num_draft: int) -> float:
    """Returns the expected number of target calls for a given output.

    Unlike equation 1 it accounts for where in an output drafts are rejected and where the output ends. Given
    the output, acceptances are independent; `training.losses.acceptance_of` returns their probabilities.

    Args:
      chances: `[N]`, probability that a draft is accepted at each token of the output, whose last token ends
        it.
      num_draft: K; 0 gives N.
    """
    num_tokens = len(chances)
    calls = np.zeros(num_tokens + num_draft + 2)  # from each token on; zero beyond the end
    for start in range(num_tokens - 1, -1, -1):
        # A round drafts K tokens, but at most one fewer than are left, and emits one more than it accepts.
        run = chances[start : start + min(num_draft, num_tokens - start - 1)]
        reached = np.concatenate([[1.0], np.cumprod(run)])
        exactly = reached * np.append(1 - run, 1.0)
        calls[start] = 1 + exactly @ calls[start + 1 : start + 1 + len(exactly)]
    return float(calls[0])


def expected_tau(chances: Sequence[np.ndarray], num_draft: int) -> float:
    """Returns tokens per target call over several outputs; see `expected_calls`."""
    return sum(map(len, chances)) / sum(expected_calls(one, num_draft) for one in chances)


class Memory(NamedTuple):
    """Memory of decoding in bytes, by use.

    Attributes:
      params: all weights.
      cache: keys and values of the decoder's tokens.
      cross: keys and values of the encoder output.
      logits: logits of one call and their distribution, in float32.
    """

    params: int
    cache: int
    cross: int
    logits: int

    @property
    def total(self) -> int:
        return sum(self)


def memory(
    config: Any,
    *,
    num_params: int,
    batch_size: int,
    num_source: int,
    num_slots: int,
    num_new: int,
    bytes_per_number: int = 4,
) -> Memory:
    """Returns the memory of one model.

    Args:
      config: its shape (`families.Config`).
      num_params: number of weights, each of `bytes_per_number` bytes.
      batch_size, num_source, num_slots: B, S, T.
      num_new: N, tokens of a decoder call: K + 1 for a target, 1 for a draft.
    """
    sizes = batch_size, config.num_kv_heads, config.vocab_size, num_source, num_slots, num_new
    return _memory(config, num_params * bytes_per_number, *sizes, bytes_per_number)


def _memory(
    config: Any,
    num_bytes: int,
    rows: int,
    heads: int,
    vocab_size: int,
    num_source: int,
    num_slots: int,
    num_new: int,
    itemsize: int,
) -> Memory:
    """Returns the memory of weights, cache and logits of these sizes."""
    width = 2 * rows * config.num_decoder_layers * heads * config.d_kv * itemsize
    logits = 2 * rows * num_new * vocab_size * 4
    return Memory(num_bytes, width * num_slots, width * num_source, logits)


class Call(NamedTuple):
    """The cost of a decoder call.

    Attributes:
      weights, cache, cross: bytes read: weights, keys and values of tokens, and those of the encoder output.
      operations: multiplications and additions.
    """

    weights: float
    cache: float
    cross: float
    operations: float

    def seconds(self, bandwidth: float, operations_per_second: float) -> float:
        """Returns a lower bound of the time: that of reading or of computing, whichever is longer (roofline).

        Args:
          bandwidth: bytes per second of all devices together.
          operations_per_second: operations per second of all devices together.
        """
        return max(
            (self.weights + self.cache + self.cross) / bandwidth, self.operations / operations_per_second
        )


def decoder_call(
    config: Any, *, num_new: int, batch_size: int, num_source: int, num_cached: int, bytes_per_number: int
) -> Call:
    """Returns the cost of one call of a decoder and its head.

    The kernels of cross-attention keys and values are read once per source and not counted.

    Args:
      config: its shape (`families.Config`).
      num_new: N, tokens of the call.
      batch_size, num_source, num_cached: B, S, tokens in the cache.
    """
    inner, layers = config.num_heads * config.d_kv, config.num_decoder_layers
    of_keys = config.num_kv_heads * config.d_kv
    # The kernels of queries and outputs of each attention, and of keys and values of the tokens.
    attention = 2 * inner * (2 if config.has_cross_kernels else 1) + 2 * of_keys
    per_layer = config.d_model * (attention + (3 if config.gated else 2) * config.d_ff)
    weights = layers * per_layer + config.d_model * config.vocab_size
    cached, crossed = (2 * batch_size * layers * of_keys * length for length in (num_cached, num_source))
    attended = 2 * num_new * (cached + crossed) * (inner // of_keys)
    reads = [float(number * bytes_per_number) for number in (weights, cached, crossed)]
    return Call(reads[0], reads[1], reads[2], float(2 * batch_size * num_new * weights + attended))


def memory_per_device(
    config: Any,
    params: Any,
    cache_sharding: Any,
    *,
    batch_size: int,
    num_source: int,
    num_slots: int,
    num_new: int,
) -> Memory:
    """Returns the memory of one model on each device of a mesh; shapes suffice.

    Args:
      config: its shape (`families.Config`).
      params: arrays or their shapes, each with its sharding (`loading.outline`).
      cache_sharding: sharding of keys and values `[B, H, ...]` (`sharding.of_cache`). Logits are divided like
        the embedding.
      batch_size, num_source, num_slots, num_new: as in `memory`; B of all devices together.
    """
    rows, heads = cache_sharding.shard_shape((batch_size, config.num_kv_heads))
    embedding = params["embedding"]
    vocab_size, _ = embedding.sharding.shard_shape(embedding.shape)
    num_bytes, itemsize = 0, 0
    for leaf in jax.tree.leaves(params):
        itemsize = leaf.dtype.itemsize
        num_bytes += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return _memory(config, num_bytes, rows, heads, vocab_size, num_source, num_slots, num_new, itemsize)
