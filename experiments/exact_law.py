"""The exact output law of a drafter and a rule: the library's own rounds, every outcome enumerated.

Nothing here repeats the algorithm. `rounds.prefill` and `rounds.one_round` run as they are, on a
network small enough that all outcomes of all draws of a round fit along the batch axis. Rows carry
their probability; their caches travel from round to round, so a wrong roll-back changes the law.

Axes: B rows, K drafts, V vocabulary, T cache slots, S source length.
"""

import collections
import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as cache_lib
from specjax import rounds, sampling
from specjax.sampling import Stream

NUM_CONTEXTS = 1009  # a prime: rows of a table
MAX_STATES, MAX_ROWS = 64, 8192  # of one call; calls of one shape compile their primitives once
GARBAGE = 99.0  # what slots hold before anything is written


def token_weights(num: int, base: int) -> np.ndarray:
    """What a token at each of `num` positions counts for in the key of a context."""
    return np.array([pow(base, position + 1, NUM_CONTEXTS) for position in range(num)], np.int64)


@dataclasses.dataclass(frozen=True)
class ToyNetwork:
    """A network whose logits are a table row chosen by the source and every token so far.

    Implements `types.Network`. Tokens are remembered in a `cache.Cache` (as keys, and the source
    as cross keys), so what is computed is what the cache holds. Params: see `random_table`.
    """

    vocab_size: int

    def encode(self, params: jax.Array, source_ids: jax.Array, source_mask: jax.Array) -> jax.Array:
        """Each source token's part of the key: `[B, S, 1]`, zero at padding."""
        weights = jnp.asarray(token_weights(source_ids.shape[1], 5), params.dtype)[None, :]
        return jnp.where(source_mask, (source_ids + 1) * weights, 0)[..., None].astype(params.dtype)

    def init_cache(
        self, params: jax.Array, encoded: jax.Array, source_mask: jax.Array, num_slots: int
    ) -> cache_lib.Cache:
        """One layer, one head, one number a slot."""
        empty = jnp.full((encoded.shape[0], 1, num_slots, 1), GARBAGE, params.dtype)
        cross, length = encoded[:, None], jnp.zeros(encoded.shape[:1], jnp.int32)
        return cache_lib.Cache((empty,), (empty,), length, (cross,), (cross,), source_mask)

    def decode(
        self, params: jax.Array, cache: cache_lib.Cache, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array, cache_lib.Cache]:
        """Writes the tokens, then looks up what the slots up to each position spell."""
        keys = cache_lib.write(cache.keys[0], tokens[:, :, None, None], cache.length)
        positions = cache.length[:, None] + jnp.arange(tokens.shape[1])[None, :]
        weights = jnp.asarray(token_weights(cache.num_slots, 7))[None, :]
        spelled = (keys[:, 0, :, 0].astype(jnp.int32) + 1) * weights
        visible = jnp.arange(cache.num_slots)[None, None, :] <= positions[:, :, None]
        source = cache.cross_keys[0].sum((1, 2, 3)).astype(jnp.int32)
        key = jnp.where(visible, spelled[:, None, :], 0).sum(-1) + source[:, None]
        features = (key % NUM_CONTEXTS).astype(params.dtype)[..., None]
        cache = cache.replace(keys=(keys,), values=(keys,), length=cache.length + tokens.shape[1])
        return self.head(params, features), features, cache

    def head(self, params: jax.Array, features: jax.Array) -> jax.Array:
        """The table's rows."""
        return params[features[..., 0].astype(jnp.int32)]


def random_table(seed: int, vocab_size: int, spread: float = 1.0, dtype: Any = np.float32) -> np.ndarray:
    """Logits `[NUM_CONTEXTS, V]` of a toy network."""
    return (spread * np.random.default_rng(seed).normal(size=(NUM_CONTEXTS, vocab_size))).astype(dtype)


class ScriptedDraws:
    """Draws (`types.Draws`) that fall as told, under `jax.disable_jit()`; `probability` is `[B]`."""

    def __init__(self, script: dict[int, np.ndarray]):
        self.unused = dict(script)
        self.probability = np.ones(len(next(iter(script.values()))))

    def accept(self, stream: jax.Array, probability: jax.Array) -> jax.Array:
        """Coins `[B, K]`, one stream each."""
        chance = np.clip(np.asarray(probability, np.float64), 0, 1)
        outcomes = np.zeros(chance.shape, bool)
        for column, one in enumerate(np.asarray(stream)):
            outcomes[:, column] = self._take(one)
        self._multiply(np.where(outcomes, chance, 1 - chance).prod(1))
        return jnp.asarray(outcomes)

    def choose(self, stream: jax.typing.ArrayLike, weights: jax.Array) -> jax.Array:
        """Ids `[B]`."""
        outcomes = self._take(stream)
        weights = np.asarray(weights, np.float64)
        chance = weights / weights.sum(1, keepdims=True)
        self._multiply(chance[np.arange(len(outcomes)), outcomes])
        return jnp.asarray(outcomes, jnp.int32)

    def _take(self, stream: Any) -> np.ndarray:
        if int(stream) not in self.unused:
            raise ValueError(f"stream {int(stream)}: drawn twice in one round, or not in the script")
        return self.unused.pop(int(stream))

    def _multiply(self, chance: np.ndarray) -> None:
        possible = self.probability > 0
        if not np.all(chance[possible] >= 0):  # NaN fails as well
            raise ValueError("a draw from weights that are not a distribution")
        self.probability = np.where(possible, self.probability * chance, 0.0)


def round_script(vocab_size: int, num_draft: int, num_states: int) -> dict[int, np.ndarray]:
    """Each stream's outcomes `[num_states * V^K * 2^K * V]`: all combinations, for each state."""
    each = {
        Stream.DRAFT: (vocab_size, num_draft),
        Stream.ACCEPT: (2, num_draft),
        Stream.NEXT: (vocab_size, 1),
    }
    sizes = {int(stream.at(i)): size for stream, (size, num) in each.items() for i in range(num)}
    combinations = np.array(list(itertools.product(*map(range, sizes.values())))).T
    return {stream: np.tile(row, num_states) for stream, row in zip(sizes, combinations, strict=True)}


class Law(NamedTuple):
    """The probability of each emitted sequence; expected counts of drafts; rows that were run."""

    probability: dict[tuple[int, ...], float]
    num_tested: float
    num_accepted: float
    num_rows: int


def exact_law(
    program: rounds.Program, params: rounds.AllParams, source: np.ndarray, num_tokens: int,
    temperature: float, prefix: np.ndarray | None = None, limit: int | None = None,
) -> Law:  # fmt: skip
    """The law of the first `num_tokens` tokens that `rounds.one_round`, repeated, emits.

    Args:
      program, params: of toys and their tables; `prefix_width` is that of `prefix`.
      source: `[S]` ids.
      num_tokens: rounds run until every outcome is that long or has ended.
      temperature: below 1e-5 the sampled program still runs, on one-hot distributions.
      prefix: `[P]` decoder input so far; None: the start token 0.
      limit: the row's `max_new_tokens`; None: the length bucket, never reached here.
    """
    vocab_size, num_draft = program.target.vocab_size, program.num_draft
    per_state = vocab_size ** (num_draft + 1) * 2**num_draft
    num_states = max(1, min(MAX_STATES, MAX_ROWS // per_state))
    probability: dict[tuple[int, ...], float] = collections.defaultdict(float)
    num_tested = num_accepted = num_rows = 0
    params = jax.tree.map(jnp.asarray, params)
    with jax.disable_jit():
        states, weights = first_state(program, params, source, temperature, prefix, limit), np.ones(1)
        while len(weights):
            after_all, weight_all = [], []
            for first in range(0, len(weights), num_states):
                raw = first + np.arange(num_states)
                index = np.minimum(raw, len(weights) - 1)
                weight = np.where(raw == index, weights[index], 0.0)
                before = jax.tree.map(lambda x, i=index: np.repeat(x[i], per_state, axis=0), states)
                draws = ScriptedDraws(round_script(vocab_size, num_draft, num_states))
                after = rounds.one_round(program, params, jax.tree.map(jnp.asarray, before), draws)
                if draws.unused:
                    raise ValueError(f"streams {set(draws.unused)} were never drawn from")
                after = jax.tree.map(np.asarray, after)
                weight = np.repeat(weight, per_state) * draws.probability
                num_tested += weight @ (after.stats.tested - before.stats.tested).sum(1)
                num_accepted += weight @ (after.stats.accepted - before.stats.accepted).sum(1)
                num_rows += len(weight)
                after_all.append(jax.tree.map(lambda x, alive=weight > 0: x[alive], after))
                weight_all.append(weight[weight > 0])
            states = jax.tree.map(lambda *x: np.concatenate(x), *after_all)
            states, weights = _collect(states, np.concatenate(weight_all), num_tokens, probability)
    return Law(dict(probability), num_tested, num_accepted, num_rows)


def first_state(
    program: rounds.Program, params: rounds.AllParams, source: np.ndarray, temperature: float,
    prefix: np.ndarray | None, limit: int | None,
) -> rounds.LoopState:  # fmt: skip
    """The state after the prefill, one row."""
    prefix = [0] if prefix is None else prefix
    limit = program.length_bucket if limit is None else limit
    source_ids = jnp.asarray(source, jnp.int32)[None]
    state = rounds.prefill(
        program, params, source_ids, jnp.ones(source_ids.shape, bool),
        prefix=jnp.asarray(prefix, jnp.int32)[None], prefix_length=jnp.asarray([len(prefix)], jnp.int32),
        temperature=jnp.asarray([temperature], jnp.float32), limit=jnp.asarray([limit], jnp.int32),
        seeds=jnp.zeros(1, jnp.uint32),
    )  # fmt: skip
    return jax.tree.map(np.asarray, state)


def _collect(
    states: rounds.LoopState, weights: np.ndarray, num_tokens: int, probability: dict
) -> tuple[rounds.LoopState, np.ndarray]:
    """Adds what is long enough or ended to the law; merges states of the rest that agree to the last bit.

    Counts and log-probabilities, which no later round reads, are left aside; garbage in caches is not.
    """
    emitted = states.stats.num_emitted
    done = (emitted >= num_tokens) | (states.finish_reason != 0)
    start = states.context.length - emitted
    for row in np.flatnonzero(done):
        tokens = states.context.tokens[row, start[row] :][: min(emitted[row], num_tokens)]
        probability[tuple(tokens.tolist())] += float(weights[row])
    rest = np.flatnonzero(~done)
    states, weights = jax.tree.map(lambda x: x[rest], states), weights[rest]
    if not len(rest):
        return states, weights
    read = (states.context, states.cache, states.drafter_state, states.stats.num_emitted)
    leaves = [np.ascontiguousarray(x).reshape(len(rest), -1).view(np.uint8) for x in jax.tree.leaves(read)]
    raw = np.concatenate([x for x in leaves if x.size], axis=1)
    _, first, inverse = np.unique(raw, axis=0, return_index=True, return_inverse=True)
    merged = np.bincount(inverse.reshape(-1), weights, minlength=len(first))
    return jax.tree.map(lambda x: x[first], states), merged


def context_key(source: np.ndarray, tokens: list[int]) -> int:
    """The table row of a source and all decoder tokens so far, in numpy."""
    parts = [(np.array(ids) + 1) @ token_weights(len(ids), base) for ids, base in ((source, 5), (tokens, 7))]
    return int(sum(parts)) % NUM_CONTEXTS


def conditional(table: np.ndarray, source: np.ndarray, tokens: list[int], temperature: float) -> np.ndarray:
    """The distribution `[V] float64` of the token after `tokens`, in numpy."""
    logits = table[context_key(source, tokens)].astype(np.float64)
    if temperature < sampling.GREEDY_BELOW:
        return np.eye(len(logits))[logits.argmax()]
    weights = np.exp((logits - logits.max()) / np.float64(np.float32(temperature)))
    return weights / weights.sum()


def target_law(
    table: np.ndarray, source: np.ndarray, num_tokens: int, temperature: float,
    prefix: np.ndarray | None = None, eos_ids: tuple[int, ...] = (),
) -> dict[tuple[int, ...], float]:  # fmt: skip
    """The same law from the target's table alone, in numpy: the product of its conditionals."""
    start = [0] if prefix is None else [int(token) for token in prefix]
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, weight in law.items():
            if tokens and tokens[-1] in eos_ids:
                longer[tokens] = weight
                continue
            chances = conditional(table, source, [*start, *tokens], temperature)
            longer |= {(*tokens, int(i)): weight * float(chances[i]) for i in np.flatnonzero(chances)}
        law = longer
    return law


def law_error(law: dict[tuple[int, ...], float], other: dict[tuple[int, ...], float]) -> float:
    """The largest difference of a probability between two laws."""
    return max(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in law.keys() | other.keys())
