"""A checked request: everything that a generation needs, laid out one entry per row.

Axes: B rows, S source length, P width of the decoder prefix.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import acceptance, sharding
from specjax.program import AllParams, Program
from specjax.sampling import GREEDY_BELOW, Sampling, per_row
from specjax.types import AcceptanceRule, Drafter, Network, Params

LENGTH_BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


class Request(NamedTuple):
    """A checked request: what the jitted functions of `decode` take.

    Attributes:
      program: static.
      params: of target and drafter.
      inputs: keyword arguments of `rounds.prefill`.
    """

    program: Program
    params: AllParams
    inputs: dict[str, Any]


def prepare(
    target: Network,
    target_params: Params,
    source_ids: jax.Array | np.ndarray,
    source_mask: jax.Array | np.ndarray,
    *,
    drafter: Drafter | None = None,
    drafter_params: Params = None,
    rule: AcceptanceRule = acceptance.speculative,
    sampling: Sampling | None = None,
    max_new_tokens: jax.typing.ArrayLike = 64,
    seed: jax.typing.ArrayLike,
    prefix: jax.Array | None = None,
    prefix_length: jax.Array | None = None,
    length_bucket: int | None = None,
    eos_ids: Sequence[int] = (1,),
    pad_id: int = 0,
    start_id: int = 0,
    num_ids: int | None = None,
) -> Request:
    """Checks the arguments of `decode.generate` (described there) and lays them out."""
    num_rows = _check_sources(source_ids, source_mask)
    check_kinds(drafter, rule, sampling)
    limit = per_row("max_new_tokens", max_new_tokens, num_rows, jnp.int32)
    length_bucket = _length_bucket(max_new_tokens, length_bucket)
    limit = jnp.minimum(limit, length_bucket)  # a traced one may be over it
    eos_ids = _check_ids(eos_ids, target.vocab_size)
    if num_ids is not None and not 1 <= num_ids <= target.vocab_size:
        raise ValueError(f"num_ids={num_ids}: must be in 1..{target.vocab_size}, the vocabulary's rows")
    sampling = Sampling(temperature=0.0) if sampling is None else sampling
    options = sampling.lay_out(num_rows, eos_ids, num_ids)
    if drafter is not None:
        _check_drafter(target, drafter, num_ids)
        layers = getattr(getattr(drafter, "network", None), "feature_layers", ())
        if layers:  # what the drafter reads of the target
            target = target.with_features(layers)  # type: ignore[attr-defined]
    rule = _check_rule(rule, drafter, sampling.temperature)
    prefix, prefix_length = _lay_out_prefix(prefix, prefix_length, num_rows, start_id)
    program = Program(
        target=target,
        drafter=drafter,
        rule=rule,
        length_bucket=length_bucket,
        prefix_width=prefix.shape[1],
        eos_ids=eos_ids,
        pad_id=pad_id,
    )
    inputs = dict(
        source_ids=jnp.asarray(source_ids, jnp.int32),
        source_mask=jnp.asarray(source_mask, bool),
        prefix=prefix,
        prefix_length=prefix_length,
        options=options,
        limit=limit,
        seeds=row_seeds(seed, num_rows),
    )
    _check_mesh(target_params, drafter_params)
    of_cache = getattr(target, "cache_sharding", None)
    if of_cache is not None:
        inputs = sharding.place_rows(inputs, of_cache.mesh, num_rows)
    return Request(program, AllParams(target_params, drafter_params), inputs)


def _check_sources(source_ids: Any, source_mask: Any) -> int:
    shape = np.shape(source_ids)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"source_ids has shape {shape}: give [B, S], B and S at least 1")
    if np.shape(source_mask) != shape:
        raise ValueError(
            f"source_mask has shape {np.shape(source_mask)}, source_ids {shape}: make them equal"
        )
    return shape[0]


def check_kinds(drafter: Any, rule: Any, sampling: Any) -> None:
    """Refuses what is no drafter, no rule, or no options.

    Raises:
      ValueError: it is named.
    """
    if drafter is not None and not hasattr(drafter, "propose"):
        raise ValueError(
            f"drafter={drafter!r:.80}: give None or a drafter, such as drafters.ModelDrafter(...)"
        )
    if not callable(rule) or isinstance(rule, type):
        raise ValueError(f"rule={rule!r}: give one of specjax.acceptance, such as acceptance.speculative")
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ValueError(f"sampling={sampling!r}: give None (greedy) or Sampling(temperature=...)")


def _lay_out_prefix(
    prefix: Any, prefix_length: Any, num_rows: int, start_id: int
) -> tuple[jax.Array, jax.Array]:
    """`[B, P]` and `[B]`, checked."""
    if prefix is None:
        prefix = jnp.full((num_rows, 1), start_id, jnp.int32)
    shape = np.shape(prefix)
    if len(shape) != 2 or shape[0] != num_rows or shape[1] < 1:
        raise ValueError(
            f"prefix has shape {shape}: give [B, P] with B = {num_rows} and the start token first"
        )
    if prefix_length is None:
        prefix_length = jnp.full(num_rows, shape[1], jnp.int32)
    if not isinstance(prefix_length, jax.core.Tracer):
        lengths = np.asarray(prefix_length)
        if lengths.shape != (num_rows,) or lengths.min() < 1 or lengths.max() > shape[1]:
            raise ValueError(f"prefix_length={prefix_length}: give one per row, each in 1..{shape[1]}")
    return jnp.asarray(prefix, jnp.int32), jnp.asarray(prefix_length, jnp.int32)


def _check_rule(rule: AcceptanceRule, drafter: Drafter | None, temperature: Any) -> AcceptanceRule:
    if getattr(drafter, "drafts_trees", False) and not acceptance.judges_trees(rule):
        name = getattr(rule, "__name__", rule)
        raise ValueError(f"rule={name} judges chains, and the drafter drafts trees: use rule=multi_round")
    if rule is not acceptance.greedy:
        return rule if drafter else acceptance.speculative  # nothing to judge: tokens are drawn from p
    if isinstance(temperature, jax.core.Tracer) or np.any(np.asarray(temperature) >= GREEDY_BELOW):
        raise ValueError(
            f"rule=greedy with temperature={temperature}: it is not a sampler; use rule=speculative"
        )
    return acceptance.speculative  # never reached: a greedy batch compares ids


def _check_ids(eos_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    ids = np.asarray(eos_ids, int if len(np.shape(eos_ids)) == 1 and not len(eos_ids) else None)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not np.all((ids >= 0) & (ids < vocab_size)):
        raise ValueError(f"eos_ids={eos_ids}: give a list of whole numbers in 0..{vocab_size - 1}")
    return tuple(ids.tolist())


def _check_drafter(target: Network, drafter: Drafter, num_ids: int | None) -> None:
    if drafter.num_draft < 1:
        raise ValueError(f"num_draft={drafter.num_draft}: must be at least 1; drafter=None decodes plainly")
    theirs, ours = getattr(drafter, "network", target).vocab_size, target.vocab_size
    if theirs != ours and (num_ids is None or theirs < num_ids):
        raise ValueError(
            f"the draft has a vocabulary of {theirs}, the target of {ours}: a draft must share the target's "
            "tokenizer and vocabulary; if they differ in padding only, num_ids says how many ids exist"
        )
    if getattr(drafter, "share_encoder", False):
        theirs, ours = drafter.network.encoded_width, target.encoded_width  # type: ignore[attr-defined]
        if theirs != ours:
            raise ValueError(
                f"share_encoder=True, but the draft is {theirs} wide and the target's encoder output {ours}: "
                "share_encoder=False gives the draft an encoder of its own"
            )


def _check_mesh(target_params: Params, drafter_params: Params) -> None:
    """Refuses params on two meshes; traced ones lie where the caller has put them."""
    both = [
        [x for x in jax.tree.leaves(params) if not isinstance(x, jax.core.Tracer)]
        for params in (target_params, drafter_params)
    ]
    ours, theirs = map(sharding.mesh_of, both)
    if all(both) and ours != theirs:
        raise ValueError(
            f"the drafter's params lie on {theirs or 'one device'}, the target's on {ours or 'one'}: load "
            "the draft with mesh=target.mesh (and rules=sharding.REPLICATED where it is small), heads with "
            "`load_heads`"
        )


def _length_bucket(max_new_tokens: Any, length_bucket: int | None) -> int:
    if isinstance(max_new_tokens, jax.core.Tracer):
        if length_bucket is None:
            raise ValueError("length_bucket=None: under jit give it, since max_new_tokens is traced")
        return length_bucket
    longest = int(np.max(np.asarray(max_new_tokens)))
    if length_bucket is None:
        return next((size for size in LENGTH_BUCKETS if size >= longest), longest)
    if longest > length_bucket:
        raise ValueError(f"max_new_tokens={longest} is over length_bucket={length_bucket}: raise the bucket")
    return length_bucket


def row_seeds(seed: Any, num_rows: int) -> jax.Array:
    """`[B] uint32`: the seeds given, or one per row made from a single one.

    Raises:
      ValueError: seeds that are not whole numbers in 0..2^32 - 1, or not one or `num_rows`.
    """
    if not isinstance(seed, jax.core.Tracer):
        if hasattr(seed, "dtype") and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
            raise ValueError(f"seed={seed}: give whole numbers, not a key")
        array = np.asarray(seed)
        if array.dtype.kind not in "iu" or not np.all((array >= 0) & (array < 2**32)):
            raise ValueError(f"seed={seed!r}: give whole numbers in 0..2^32 - 1")
        seed = array.astype(np.uint32)
    seed = jnp.asarray(seed).astype(jnp.uint32)
    if seed.shape == (num_rows,):
        return seed
    if seed.shape != ():
        raise ValueError(f"seed has shape {seed.shape}: give one integer, or one per prompt ({num_rows})")
    return jax.vmap(functools.partial(_derived_seed, seed))(jnp.arange(num_rows))


def _derived_seed(seed: jax.Array, index: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), index)
    return jax.random.bits(key, dtype=jnp.uint32)
