"""Token-level `generate`: checks and lays out the arguments, then runs rounds in a loop.

Everything from the prompt to the last token is one XLA program with fixed shapes. Its parts are also compiled
separately, for loops that run on the host.

Axes: B rows, K drafts, V vocabulary, T token slots, S source length, P width of the decoder prefix.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import acceptance, draws, sampling, sharding
from specjax.generation_config import GenerationConfig, per_row, row_seeds
from specjax.round import LoopState, Program, Stats, end_rows, one_round, prefill
from specjax.types import AcceptanceRule, Drafter, Network

LENGTH_BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

OnRound = Callable[[list[list[int]]], None]
# (ids emitted so far, how many of them before this round) -> how many to keep if the row ends, else None
StopAt = Callable[[list[int], int], int | None]


class Generation(struct.PyTreeNode):
    """What `generate` returns.

    Attributes:
      tokens: `[B, bucket]` emitted ids, without start token and prefix, end token included; the pad id
        beyond `length`.
      log_probs: `[B, bucket] float32`, log softmax of the target's raw logits at each token; 0 beyond.
      processed_log_probs: `[B, bucket] float32`, log of the distribution sampled from (0 for greedy
        rows, whose distribution is one-hot); 0 beyond.
      length: `[B]` number of emitted ids.
      finish_reason: `[B]`, a `round.FinishReason`.
      stats: counts per row.
    """

    tokens: jax.Array
    log_probs: jax.Array
    processed_log_probs: jax.Array
    length: jax.Array
    finish_reason: jax.Array
    stats: Stats


class Request(NamedTuple):
    """A checked request: the arguments of the jitted functions below.

    Attributes:
      program: networks, rule and sizes.
      inputs: keyword arguments of `round.prefill`.
    """

    program: Program
    inputs: dict[str, Any]


@jax.transfer_guard("allow")  # transfers are intended here, whatever the user's setting
def generate(
    target: Network,
    source_ids: jax.Array | np.ndarray,
    source_mask: jax.Array | np.ndarray,
    *,
    drafter: Drafter | None = None,
    rule: AcceptanceRule = acceptance.speculative,
    config: GenerationConfig | None = None,
    prefix: jax.Array | np.ndarray | None = None,
    prefix_length: jax.Array | np.ndarray | None = None,
    length_bucket: int | None = None,
    on_round: OnRound | None = None,
    stop_at: StopAt | None = None,
    **options: Any,
) -> Generation:
    """Decodes a batch in one compiled program, speculatively if a drafter is given.

    The output has the target's distribution whatever the drafter is (Leviathan et al. 2023);
    at temperature 0 it is the target's greedy output. May be called under the user's own
    `jax.jit`, with `length_bucket` given.

    Args:
      target: the target network; its params are not donated.
      source_ids: `[B, S] int32`.
      source_mask: `[B, S] bool`, True at real tokens.
      drafter: proposes tokens; None: autoregressive decoding.
      rule: the acceptance rule where the temperature is above zero (see `acceptance`).
      config: the generation options; None: the defaults of `GenerationConfig`.
      prefix: `[B, P] int32` decoder input so far, start token first; None: only the start token.
      prefix_length: `[B]` in 1..P; None: P.
      length_bucket: slots for output, at least `max_new_tokens` (cut to it under jit). Static; None: the
        smallest bucket that holds `max_new_tokens`.
      on_round: called after every round with the ids that each row emitted in it; the loop then
        runs on the host, one jitted round at a time. Not under jit.
      stop_at: called after every round for each row that emitted tokens, with all its ids and their number
        before the round; returns how many to keep if the row ends there, else None. The loop then runs on
        the host as well.
      **options: fields of `GenerationConfig`, which override those of `config`.

    Returns:
      A `Generation`.

    Raises:
      ValueError: an invalid argument; the message states its value and a remedy.
    """
    config = resolve(config, options, ("prefix", "prefix_length", "length_bucket", "on_round", "stop_at"))
    if config.stop_strings:
        raise ValueError(
            f"`stop` needs a tokenizer, got {config.stop!r} at token level; pass `stop_at`, or use "
            "specjax.generate"
        )
    request = prepare(
        target,
        source_ids,
        source_mask,
        drafter=drafter,
        rule=rule,
        config=config.without_neutral(),
        prefix=prefix,
        prefix_length=prefix_length,
        length_bucket=length_bucket,
    )
    return generate_requested(request, on_round, stop_at)


@jax.transfer_guard("allow")  # transfers are intended here, whatever the user's setting
def generate_requested(
    request: Request, on_round: OnRound | None = None, stop_at: StopAt | None = None
) -> Generation:
    """Decodes a request whose arguments are checked; see `generate`."""
    program, inputs = request
    for name, function in {"on_round": on_round, "stop_at": stop_at}.items():
        if function is not None and not callable(function):
            raise ValueError(f"`{name}` must be a function, got {function!r:.80}")
    if on_round is None and stop_at is None:
        return jitted_generate(program, inputs)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(request)):
        raise ValueError("`on_round` and `stop_at` must be left out under jit: they run on the host")
    state = run_on_host(program, jitted_prefill(program, **inputs), 0, on_round, stop_at)
    return jitted_finish(program, state)


# ---- the loop


def run(program: Program, state: LoopState, max_running: jax.typing.ArrayLike = 0) -> LoopState:
    """Runs rounds until at most `max_running` rows are running; with 0, until every row has ended.

    Greedy batches have a loop of their own, which draws nothing and computes no distribution.
    """

    def loop(sampled: bool, state: LoopState) -> LoopState:
        body = functools.partial(step, program, sampled=sampled)
        with jax.named_scope("sampled" if sampled else "greedy"):
            return jax.lax.while_loop(lambda state: state.running.sum() > max_running, body, state)

    if program.sampled is not None:
        return loop(program.sampled, state)
    any_sampled = ~sampling.is_greedy(state.context.options.temperature).all()
    return jax.lax.cond(any_sampled, functools.partial(loop, True), functools.partial(loop, False), state)


def step(program: Program, state: LoopState, sampled: bool) -> LoopState:
    """Runs one round with its own keys; `sampled` is static, False for the greedy program."""
    return one_round(program, state, round_draws(state, sampled))


def round_draws(state: LoopState, sampled: bool) -> draws.KeyDraws | None:
    """Returns the keys of the next round; None in the greedy program."""
    return draws.KeyDraws.of_round(state.seeds, state.stats.num_rounds) if sampled else None


def finish(program: Program, state: LoopState) -> Generation:
    """Extracts the result from the loop's state."""
    start = state.context.length - state.stats.num_emitted
    index = start[:, None] + jnp.arange(program.length_bucket)[None, :]
    log_probs = jnp.take_along_axis(state.log_probs, index[..., None], axis=1)
    return Generation(
        tokens=jnp.take_along_axis(state.context.tokens, index, axis=1),
        log_probs=log_probs[..., 0],
        processed_log_probs=log_probs[..., 1],
        length=state.stats.num_emitted,
        finish_reason=state.finish_reason,
        stats=state.stats,
    )


@jax.jit
def jitted_generate(program: Program, inputs: dict[str, Any]) -> Generation:
    """Runs a request from prefill to result in one compiled program."""
    return finish(program, run(program, prefill(program, **inputs)))


# The same parts compiled separately: for loops on the host, and for timing.
jitted_prefill = jax.jit(prefill)
jitted_run = jax.jit(run)
jitted_finish = jax.jit(finish)
jitted_step = jax.jit(step, static_argnames="sampled")
jitted_end_rows = jax.jit(end_rows)


def rounds_on_host(
    program: Program, state: LoopState, max_running: int = 0, stop_at: StopAt | None = None
) -> Iterator[tuple[LoopState, LoopState]]:
    """Runs `run` one jitted round at a time; yields the states before and after each round."""
    sampled = program.sampled
    if sampled is None:
        sampled = bool((~sampling.is_greedy(state.context.options.temperature)).any())
    while int(state.running.sum()) > max_running:
        before = state
        state = jitted_step(program, state, sampled=sampled)
        if stop_at is not None:
            state = _apply_stop(program, before, state, stop_at)
        yield before, state


def run_on_host(
    program: Program,
    state: LoopState,
    max_running: int,
    on_round: OnRound | None = None,
    stop_at: StopAt | None = None,
) -> LoopState:
    """Runs `run` from the host; see `generate` for `on_round` and `stop_at`."""
    for before, state in rounds_on_host(program, state, max_running, stop_at):  # noqa: B020
        if on_round is not None:
            on_round(emitted(before, state))
    return state


def emitted(before: LoopState, after: LoopState) -> list[list[int]]:
    """Returns the ids that each row emitted between two states."""
    tokens, start, end = sharding.fetch((after.context.tokens, before.context.length, after.context.length))
    return [row[a:b].tolist() for row, a, b in zip(tokens, start, end, strict=True)]


def _apply_stop(program: Program, before: LoopState, after: LoopState, stop_at: StopAt) -> LoopState:
    """Calls `stop_at` for each row that emitted tokens, and ends the row where it returns a count."""
    tokens, length, num_before, num_after = sharding.fetch(
        (after.context.tokens, after.context.length, before.stats.num_emitted, after.stats.num_emitted)
    )
    kept, ended = num_after.copy(), np.zeros(len(num_after), bool)
    for row in np.flatnonzero(num_after > num_before):
        emitted = tokens[row, length[row] - num_after[row] : length[row]].tolist()
        end = stop_at(emitted, int(num_before[row]))
        if end is None:
            continue
        if not num_before[row] < end <= num_after[row]:
            raise ValueError(
                f"`stop_at` must return a count in {num_before[row] + 1}..{num_after[row]}, got {end}"
            )
        kept[row], ended[row] = end, True
    if not ended.any():
        return after
    return jitted_end_rows(program, before, after, kept, ended)


# ---- arguments, checked once


@jax.transfer_guard("allow")  # transfers are intended here, whatever the user's setting
def prepare(
    target: Network,
    source_ids: jax.Array | np.ndarray,
    source_mask: jax.Array | np.ndarray,
    *,
    drafter: Drafter | None = None,
    rule: AcceptanceRule = acceptance.speculative,
    config: GenerationConfig | None = None,
    prefix: jax.Array | np.ndarray | None = None,
    prefix_length: jax.Array | np.ndarray | None = None,
    length_bucket: int | None = None,
    **options: Any,
) -> Request:
    """Checks the arguments of `generate` and lays them out, one entry per row."""
    num_rows = _check_sources(source_ids, source_mask, target.vocab_size)
    config = resolve(config, options)
    limit = per_row("max_new_tokens", config.max_new_tokens, num_rows, jnp.int32)
    bucket = _check_bucket(config.max_new_tokens, length_bucket)
    eos_ids = _check_eos_ids(target, config)
    # Padding rows of the vocabulary are cut off, since a draft may be padded to another size.
    num_ids = target.num_ids or target.vocab_size
    row_options = config.to_options(num_rows, eos_ids, num_ids, target.vocab_size)
    if drafter is not None:
        _check_drafter(target, drafter)
        target = target.with_features(drafter.feature_layers)
    rule = _check_rule(rule, drafter, row_options.temperature)
    prefix, prefix_length = _check_prefix(prefix, prefix_length, num_rows, target.start_id)
    check_memory(target, num_rows, np.shape(source_ids)[1], bucket)
    inputs = dict(
        source_ids=jnp.asarray(source_ids, jnp.int32),
        source_mask=jnp.asarray(source_mask, bool),
        prefix=prefix,
        prefix_length=prefix_length,
        options=row_options,
        limit=jnp.minimum(limit, bucket),  # a traced limit was not checked
        seeds=row_seeds(config.seed, num_rows),
    )
    if target.mesh is not None:
        inputs = sharding.place_rows(inputs, target.mesh, num_rows)
    temperature = row_options.temperature
    is_traced = isinstance(temperature, jax.core.Tracer)
    sampled = None if is_traced else bool((np.asarray(temperature) >= sampling.GREEDY_BELOW).any())
    return Request(Program(target, drafter, rule, bucket, prefix.shape[1], eos_ids, sampled), inputs)


def resolve(
    config: GenerationConfig | None, options: dict[str, Any], also: Sequence[str] = ()
) -> GenerationConfig:
    """Returns `config`, or the defaults, updated with `options`.

    Args:
      also: further argument names of the caller, for suggestions.

    Raises:
      ValueError: `config` is not a `GenerationConfig`, or an option is unknown.
    """
    if config is not None and not isinstance(config, GenerationConfig):
        raise ValueError(f"`config` must be a GenerationConfig, got {config!r:.80}")
    return (config or GenerationConfig()).updated(options, ("drafter", "rule", *also))


def _check_sources(source_ids: Any, source_mask: Any, vocab_size: int) -> int:
    """Checks sources and returns B. Traced ids are not checked: an invalid one reads some other embedding."""
    shape = np.shape(source_ids)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"`source_ids` must have shape [B, S], with B and S at least 1, got {shape}")
    if np.shape(source_mask) != shape:
        raise ValueError(
            f"`source_mask` must have the shape of `source_ids`, {shape}, got {source_mask.shape}"
        )
    if not isinstance(source_ids, jax.core.Tracer) and not isinstance(source_mask, jax.core.Tracer):
        real = np.asarray(source_ids)[np.asarray(source_mask, bool)]
        wrong = real[(real < 0) | (real >= vocab_size)]
        if len(wrong):
            raise ValueError(
                f"`source_ids` must be in 0..{vocab_size - 1} where `source_mask` is True, got {wrong[0]}"
            )
    return shape[0]


def _check_eos_ids(target: Network, config: GenerationConfig) -> tuple[int, ...]:
    """Returns the end tokens of the config if given, else those of the target."""
    if config.eos_ids is None:
        return target.eos_ids
    ids = np.asarray(config.eos_ids, int if np.shape(config.eos_ids) == (0,) else None)
    vocab_size = target.vocab_size
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not np.all((ids >= 0) & (ids < vocab_size)):
        raise ValueError(
            f"`eos_ids` must be a list of whole numbers in 0..{vocab_size - 1}, got {config.eos_ids}"
        )
    return tuple(ids.tolist())


def _check_drafter(target: Network, drafter: Drafter) -> None:
    """Raises a ValueError if a drafter cannot draft for a target."""
    if not isinstance(drafter, Drafter):
        raise ValueError(
            f"`drafter` must be one of specjax.drafters, such as drafters.from_model(draft, 5), got "
            f"{drafter!r:.80}"
        )
    if drafter.num_draft < 1:
        raise ValueError(
            f"`num_draft` must be at least 1, got {drafter.num_draft}; drafter=None decodes autoregressively"
        )
    drafter.check(target)
    both = [
        [x for x in jax.tree.leaves(one) if not isinstance(x, jax.core.Tracer)] for one in (target, drafter)
    ]
    ours, theirs = map(sharding.mesh_of, both)  # traced params have no devices
    if all(both) and ours != theirs:
        raise ValueError(
            f"`drafter` must be on the target's mesh, {ours or 'one device'}, got {theirs or 'one device'}; "
            "load the draft with mesh=target.mesh (and rules=sharding.REPLICATED if it is small), and heads "
            "with `load_heads`"
        )


def _check_rule(rule: AcceptanceRule, drafter: Drafter | None, temperature: jax.Array) -> AcceptanceRule:
    """Checks and returns the rule; without a drafter it is `speculative`, which then draws from p."""
    if not isinstance(rule, AcceptanceRule):
        raise ValueError(
            f"`rule` must be one of specjax.acceptance, such as acceptance.speculative, got {rule!r}"
        )
    if drafter is not None and drafter.drafts_trees and not rule.verifies_trees:
        raise ValueError(f"`rule` must verify trees for this drafter, got {rule.name}; use multi_round")
    if rule == acceptance.greedy and (
        isinstance(temperature, jax.core.Tracer) or not sampling.is_greedy(temperature).all()
    ):
        raise ValueError(
            f"`rule` must be lossless above temperature 0, got greedy with temperature {temperature}; use "
            "speculative"
        )
    return acceptance.speculative if drafter is None else rule


def _check_prefix(
    prefix: Any, prefix_length: Any, num_rows: int, start_id: int
) -> tuple[jax.Array, jax.Array]:
    """Checks the decoder prefix; returns ids `[B, P]` and lengths `[B]`."""
    if prefix is None:
        prefix = jnp.full((num_rows, 1), start_id, jnp.int32)
    shape = np.shape(prefix)
    if len(shape) != 2 or shape[0] != num_rows or shape[1] < 1:
        raise ValueError(
            f"`prefix` must have shape [B, P] with B = {num_rows} and the start token first, got {shape}"
        )
    if prefix_length is None:
        prefix_length = jnp.full(num_rows, shape[1], jnp.int32)
    if not isinstance(prefix_length, jax.core.Tracer):
        lengths = np.asarray(prefix_length)
        if lengths.shape != (num_rows,) or lengths.min() < 1 or lengths.max() > shape[1]:
            raise ValueError(
                f"`prefix_length` must be one per row, each in 1..{shape[1]}, got {prefix_length}"
            )
    return jnp.asarray(prefix, jnp.int32), jnp.asarray(prefix_length, jnp.int32)


def length_bucket(longest: int) -> int:
    """Returns the smallest of `LENGTH_BUCKETS` that holds `longest` tokens, else `longest` itself."""
    return next((size for size in LENGTH_BUCKETS if size >= longest), longest)


def check_memory(target: Network, num_rows: int, num_source: int, max_new_tokens: int) -> None:
    """Raises a ValueError if the target's cache alone exceeds the memory of its devices.

    Outputs that fit in `LENGTH_BUCKETS` are not checked.

    Args:
      target: its params may be shapes only.
      num_rows, num_source: B, S.
      max_new_tokens: of the longest output.
    """
    if max_new_tokens <= LENGTH_BUCKETS[-1]:
        return

    def cache(target: Network, source_ids: jax.Array, source_mask: jax.Array) -> Any:
        encoded = target.encode(source_ids, source_mask)
        return target.init_cache(encoded, source_mask, max_new_tokens)

    sources = [jax.ShapeDtypeStruct((num_rows, num_source), dtype) for dtype in (jnp.int32, bool)]
    leaves = jax.tree.leaves(jax.eval_shape(cache, target, *sources))
    needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    placed = [x for x in jax.tree.leaves(target) if isinstance(x, jax.Array)]
    traced = [x for x in placed if isinstance(x, jax.core.Tracer)]
    available = sharding.memory_bytes(placed[0].devices() if placed and not traced else jax.devices()[:1])
    if available is not None and needed > available:
        raise ValueError(
            f"`max_new_tokens` must fit in memory, got {max_new_tokens}: the cache of {num_rows} rows would "
            f"take {needed / 2**30:,.0f} GiB of {available / 2**30:,.0f}; lower it"
        )


def _check_bucket(max_new_tokens: Any, bucket: int | None) -> int:
    """Checks `length_bucket` and returns the number of output slots."""
    if isinstance(max_new_tokens, jax.core.Tracer):
        if bucket is None:
            raise ValueError("`length_bucket` must be given when `max_new_tokens` is traced, got None")
        return bucket
    longest = int(np.max(np.asarray(max_new_tokens)))
    if bucket is not None and longest > bucket:
        raise ValueError(f"`length_bucket` must be at least max_new_tokens, {longest}, got {bucket}")
    return bucket or length_bucket(longest)
