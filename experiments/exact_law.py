"""The exact output law of a drafter and a rule: the library's own rounds, every outcome enumerated.

Nothing here repeats the algorithm. `rounds.prefill` and `rounds.one_round` run as they are, on a
network small enough that all outcomes of all draws of a round fit along the batch axis. Rows carry
their probability; their caches travel from round to round, so a wrong roll-back changes the law.

Axes: B rows, K drafts, V vocabulary, T cache slots, S source length.
"""

import collections
import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import acceptance, rounds, sampling
from specjax import cache as cache_lib
from specjax import tree as tree_lib
from specjax.controller import AdaptiveDrafter
from specjax.drafters.around import Around
from specjax.drafters.eagle import EagleTreeDrafter
from specjax.drafters.lookahead import LookaheadDrafter
from specjax.drafters.medusa import MedusaDrafter
from specjax.drafters.prompt_lookup import PromptLookupDrafter
from specjax.draws import Stream
from specjax.sampling import Sampling
from specjax.staged import StagedDrafter
from specjax.types import Context, Draft, Drafter, Draws, Layout, Round

NUM_CONTEXTS = 1009  # a prime: rows of a table
NUM_ROWS = 16384  # of every call that they suffice for: calls of one shape compile their primitives once
GARBAGE = 99.0  # what slots hold before anything is written


def token_weights(num: int, base: int) -> np.ndarray:
    """What a token at each of `num` positions counts for in the key of a context."""
    return np.array([pow(base, position + 1, NUM_CONTEXTS) for position in range(num)], np.int64)


def toy_cache(
    params: jax.Array, encoded: jax.Array, source_mask: jax.Array, num_slots: int
) -> cache_lib.Cache:
    """One layer, one head, one number a slot."""
    keys = jnp.full((len(encoded), 1, 1, num_slots), GARBAGE, params.dtype)
    cross, length = encoded[:, None], jnp.zeros(len(encoded), jnp.int32)
    return cache_lib.Cache((keys,), (keys.swapaxes(2, 3),), length, (cross,), (cross,), source_mask)


@dataclasses.dataclass(frozen=True)
class ToyNetwork:
    """A network whose logits are a table row chosen by the source and every token so far.

    Implements `types.Network`. Tokens are remembered in a `cache.Cache` (as keys, and the source
    as cross keys), so what is computed is what the cache holds. Params: see `random_table`.
    """

    vocab_size: int
    encoded_width: int = 1

    def encode(self, params: jax.Array, source_ids: jax.Array, source_mask: jax.Array) -> jax.Array:
        """Each source token's part of the key: `[B, S, 1]`, zero at padding."""
        weights = jnp.asarray(token_weights(source_ids.shape[1], 5), params.dtype)[None, :]
        return jnp.where(source_mask, (source_ids + 1) * weights, 0)[..., None].astype(params.dtype)

    def init_cache(
        self, params: jax.Array, encoded: jax.Array, source_mask: jax.Array, num_slots: int
    ) -> cache_lib.Cache:
        """See `toy_cache`."""
        return toy_cache(params, encoded, source_mask, num_slots)

    def decode(
        self, params: jax.Array, cache: cache_lib.Cache, tokens: jax.Array, layout: Layout | None = None
    ) -> tuple[jax.Array, jax.Array, cache_lib.Cache]:
        """Writes the tokens, then looks up what the slots that each token sees spell."""
        if layout is None:
            layout = tree_lib.chain_layout(cache.length, tokens.shape[1], cache.num_slots)
        keys = cache_lib.write(cache.keys[0], tokens[:, :, None, None], cache.length, slots_last=True)
        weights = jnp.asarray(token_weights(cache.num_slots, 7))[layout.key_positions]
        # A token counts as the place of the query says too, which a wrong position would change.
        weights = weights[:, None, :] + layout.positions[:, :, None]
        spelled = (keys[:, 0, 0].astype(jnp.int32) + 1)[:, None, :] * weights
        source = cache.cross_keys[0].sum((1, 2, 3)).astype(jnp.int32)
        key = jnp.where(layout.visible, spelled, 0).sum(-1) + source[:, None]
        features = (key % NUM_CONTEXTS).astype(params.dtype)[..., None]
        cache = cache.replace(
            keys=(keys,), values=(keys.swapaxes(2, 3),), length=cache.length + tokens.shape[1]
        )
        return self.head(params, features), features, cache

    def head(self, params: jax.Array, features: jax.Array) -> jax.Array:
        """The table's rows."""
        return params[features[..., 0].astype(jnp.int32)]


def random_table(seed: int, vocab_size: int, spread: float = 1.0, dtype: Any = np.float32) -> np.ndarray:
    """Logits `[NUM_CONTEXTS, V]` of a toy network."""
    return (spread * np.random.default_rng(seed).normal(size=(NUM_CONTEXTS, vocab_size))).astype(dtype)


@dataclasses.dataclass(frozen=True)
class ArgmaxDrafter(Around):
    """Proposes what another drafter proposes greedily, whatever the temperature: its q is one-hot."""

    def init(self, params: Any, context: Context, prefix_width: int) -> Any:
        return self.inner.init(params, context, prefix_width)

    def propose(self, params: Any, state: Any, context: Context, draws: Draws | None) -> tuple[Draft, Any]:
        del draws
        return self.inner.propose(params, state, context, None)

    def commit(self, params: Any, state: Any, round: Round) -> Any:
        return self.inner.commit(params, state, round)


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


NOT_DRAWN = (ArgmaxDrafter, PromptLookupDrafter, MedusaDrafter, EagleTreeDrafter, LookaheadDrafter)


def round_script(drafter: Drafter | None, vocab_size: int) -> dict[int, np.ndarray]:
    """Each stream's outcomes: all combinations of what a round may draw, `[V^N * 2^N * V]` of a model's."""
    sizes = _stream_sizes(drafter, vocab_size)
    combinations = np.array(list(itertools.product(*map(range, sizes.values())))).T
    return dict(zip(sizes, combinations, strict=True))


def _stream_sizes(drafter: Drafter | None, vocab_size: int) -> dict[int, int]:
    """Each stream of a round and how many outcomes it has."""
    if isinstance(drafter, AdaptiveDrafter):
        return _stream_sizes(drafter.inner, vocab_size)
    num_draft = 0 if drafter is None else drafter.num_draft
    if isinstance(drafter, LookaheadDrafter):  # its window is not judged
        num_draft = drafter.num_candidate_nodes
    sizes = {int(Stream.ACCEPT.at(i)): 2 for i in range(num_draft)} | {int(Stream.NEXT.at(0)): vocab_size}
    if isinstance(drafter, StagedDrafter):  # at most K inner rounds, whose streams are drafts outside
        inner = _stream_sizes(drafter.inner, vocab_size)
        span = len(Stream) * (drafter.inner.num_draft + 1)
        drafts = {
            int(Stream.DRAFT.at(index * span + stream)): size
            for index in range(num_draft)
            for stream, size in inner.items()
        }
        return drafts | sizes
    if not isinstance(drafter, NOT_DRAWN):
        sizes = {int(Stream.DRAFT.at(i)): vocab_size for i in range(num_draft)} | sizes
    return sizes


class Law(NamedTuple):
    """The probability of each emitted sequence; expected counts of drafts; rows that were run."""

    probability: dict[tuple[int, ...], float]
    num_tested: float
    num_accepted: float
    num_rows: int


def exact_law(
    program: rounds.Program,
    params: rounds.AllParams,
    source: np.ndarray,
    num_tokens: int,
    options: Sampling,
    prefix: np.ndarray | None = None,
    limit: int | None = None,
    num_ids: int | None = None,
) -> Law:
    """The law of the first `num_tokens` tokens that `rounds.one_round`, repeated, emits.

    Args:
      program, params: of toys and their tables; `prefix_width` is that of `prefix`.
      source: `[S]` ids.
      num_tokens: rounds run until every outcome is that long or has ended.
      options: one number each; at temperature 0 the sampled program still runs, on one-hot
        distributions.
      prefix: `[P]` decoder input so far; None: the start token 0.
      limit: the row's `max_new_tokens`; None: the length bucket, never reached here.
      num_ids: ids that exist; None: all.
    """
    script = round_script(program.drafter, num_ids or program.target.vocab_size)
    per_state = len(script[int(Stream.NEXT.at(0))])
    num_states = max(1, NUM_ROWS // per_state)
    rows = np.arange(max(per_state, NUM_ROWS))
    script = {stream: outcomes[rows % per_state] for stream, outcomes in script.items()}
    probability: dict[tuple[int, ...], float] = collections.defaultdict(float)
    num_tested = num_accepted = num_rows = 0
    params = jax.tree.map(jnp.asarray, params)
    with jax.disable_jit():
        states = first_state(program, params, source, options, prefix, limit, num_ids)
        weights = np.ones(1)
        while len(weights):
            after_all, weight_all = [], []
            for first in range(0, len(weights), num_states):
                state_of = first + rows // per_state
                index = np.minimum(state_of, len(weights) - 1)
                used = (state_of == index) & (rows < num_states * per_state)
                before = jax.tree.map(lambda x, i=index: x[i], states)
                after, chance = _scripted_round(program, params, before, script)
                weight = np.where(used, weights[index], 0.0) * chance
                num_tested += weight @ (after.stats.tested - before.stats.tested).sum(1)
                num_accepted += weight @ (after.stats.accepted - before.stats.accepted).sum(1)
                num_rows += int(used.sum())
                after_all.append(jax.tree.map(lambda x, alive=weight > 0: x[alive], after))
                weight_all.append(weight[weight > 0])
            states = jax.tree.map(lambda *x: np.concatenate(x), *after_all)
            states, weights = _collect(states, np.concatenate(weight_all), num_tokens, probability)
    return Law(dict(probability), num_tested, num_accepted, num_rows)


def first_state(
    program: rounds.Program,
    params: rounds.AllParams,
    source: np.ndarray,
    options: Sampling,
    prefix: np.ndarray | None,
    limit: int | None,
    num_ids: int | None = None,
) -> rounds.LoopState:
    """The state after the prefill, one row."""
    prefixes = None if prefix is None else np.asarray(prefix)[None]
    inputs = prefill_inputs(program, np.asarray(source)[None], options, prefixes, None, limit, num_ids)
    return jax.tree.map(np.asarray, rounds.prefill(program, params, **inputs))


def prefill_inputs(
    program: rounds.Program,
    sources: np.ndarray,
    options: Sampling,
    prefixes: np.ndarray | None = None,
    prefix_length: np.ndarray | None = None,
    limit: int | None = None,
    num_ids: int | None = None,
) -> dict[str, Any]:
    """What `rounds.prefill` takes: of sources `[B, S]` and prefixes `[B, P]`, their seeds 0, 1, ...

    `prefix_length` is `[B]`, None: all P; the others are as in `exact_law`.
    """
    num_rows = len(sources)
    prefixes = np.zeros((num_rows, 1)) if prefixes is None else prefixes
    prefix_length = np.full(num_rows, prefixes.shape[1]) if prefix_length is None else prefix_length
    limit = program.length_bucket if limit is None else limit
    return dict(
        source_ids=jnp.asarray(sources, jnp.int32),
        source_mask=jnp.ones(sources.shape, bool),
        prefix=jnp.asarray(prefixes, jnp.int32),
        prefix_length=jnp.asarray(prefix_length, jnp.int32),
        options=options.lay_out(num_rows, program.eos_ids, num_ids),
        limit=jnp.full(num_rows, limit, jnp.int32),
        seeds=jnp.arange(num_rows, dtype=jnp.uint32),
    )


def _scripted_round(
    program: rounds.Program, params: rounds.AllParams, before: rounds.LoopState, script: dict[int, np.ndarray]
) -> tuple[rounds.LoopState, np.ndarray]:
    """Each row's state after a round that falls as the script tells, and the chance that it does so."""
    draws = ScriptedDraws(script)
    after = rounds.one_round(program, params, jax.tree.map(jnp.asarray, before), draws)
    draws_all = acceptance.is_lossless(program.rule) and len(program.widths) == 1
    draws_all &= not isinstance(program.drafter, StagedDrafter)
    if draws.unused and draws_all:
        raise ValueError(
            f"streams {set(draws.unused)} were never drawn from; a drafter that draws nothing "
            "belongs into NOT_DRAWN"
        )
    # Outcomes of what was not drawn stand beside each other: each row counts as its share of them.
    num_alike = math.prod(int(outcomes.max()) + 1 for outcomes in draws.unused.values())
    return jax.tree.map(np.asarray, after), draws.probability / num_alike


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


# ---- the same law in numpy, from the target's table alone


def context_key(source: np.ndarray, tokens: list[int]) -> int:
    """The table row of a source and all decoder tokens so far."""
    weights = token_weights(len(tokens), 7) + len(tokens) - 1
    parts = (np.array(source) + 1) @ token_weights(len(source), 5) + (np.array(tokens) + 1) @ weights
    return int(parts) % NUM_CONTEXTS


def conditional(
    table: np.ndarray,
    source: np.ndarray,
    tokens: list[int],
    options: Sampling,
    num_prefix: int = 1,
    eos_ids: tuple[int, ...] = (),
    num_ids: int | None = None,
) -> np.ndarray:
    """The distribution `[num_ids] float64` of the token after `tokens`, `num_prefix` of them given."""
    logits = table[context_key(source, tokens)][:num_ids]
    return distribution(logits, tokens, options, len(tokens) - num_prefix, eos_ids)


def distribution(
    logits: np.ndarray, tokens: list[int], options: Sampling, num_new: int, eos_ids: tuple[int, ...] = ()
) -> np.ndarray:
    """What options make of logits `[V]` after `tokens`, `num_new` of them generated: `[V] float64`.

    Written apart from `sampling.process`, and by sorting.
    """
    logits = logits.astype(np.float64)
    if options.repetition_penalty is not None:
        seen = np.unique(tokens)
        penalty = float(np.float32(options.repetition_penalty))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    if options.min_new_tokens is not None and num_new < options.min_new_tokens:
        logits[list(eos_ids)] = -np.inf
    if sampling.is_greedy(options.temperature):
        return np.eye(len(logits))[logits.argmax()]
    weights = np.exp((logits - logits.max()) / np.float64(np.float32(options.temperature)))
    probs = weights / weights.sum()
    order = np.argsort(-probs, kind="stable")
    if options.top_k is not None:
        probs[order[options.top_k :]] = 0
    if options.top_p is not None and options.top_p < 1:
        mass_before = np.cumsum(probs[order]) - probs[order]
        probs[order[mass_before >= np.float32(options.top_p) * probs.sum()]] = 0
    if options.min_p is not None:
        probs[probs < np.float32(options.min_p) * probs.max()] = 0
    return probs / probs.sum()


def target_law(
    table: np.ndarray,
    source: np.ndarray,
    num_tokens: int,
    options: Sampling,
    prefix: np.ndarray | None = None,
    eos_ids: tuple[int, ...] = (),
    num_ids: int | None = None,
) -> dict[tuple[int, ...], float]:
    """The law of the first tokens of the target alone: the product of its conditionals."""
    start = [0] if prefix is None else [int(token) for token in prefix]
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, weight in law.items():
            if tokens and tokens[-1] in eos_ids:
                longer[tokens] = weight
                continue
            chances = conditional(table, source, [*start, *tokens], options, len(start), eos_ids, num_ids)
            longer |= {(*tokens, int(i)): weight * float(chances[i]) for i in np.flatnonzero(chances)}
        law = longer
    return law


def law_error(law: dict[tuple[int, ...], float], other: dict[tuple[int, ...], float]) -> float:
    """The largest difference of a probability between two laws."""
    return max(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in law.keys() | other.keys())


def divergence(law: dict[tuple[int, ...], float], other: dict[tuple[int, ...], float]) -> float:
    """KL(law || other) in nats; infinite where `other` lacks what `law` has."""
    if any(law[key] > 0 and other.get(key, 0.0) == 0 for key in law):
        return float("inf")
    return sum(p * float(np.log(p / other[key])) for key, p in law.items() if p > 0)
