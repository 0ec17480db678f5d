"""The compiled program: what it holds, what it costs, where it lowers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.exactness import toys
from specjax import decode
from specjax.drafters import ModelDrafter
from tests.tiny_t5 import CONFIG, DRAFT_CONFIG, abstract, matmul_operands
from tests.toy_batch import (
    BUCKET,
    DRAFT_TABLE,
    LIMITS,
    NUM_ROWS,
    SOURCE_MASK,
    SOURCES,
    TABLE,
    TOY,
    V,
    argmax_path,
    emitted,
)


def test_program_does_not_grow_with_the_length():
    """A loop, not an unrolled sequence of rounds."""
    short, long = (len(decode.jitted_run.lower(*abstract(bucket=n)).as_text()) for n in (16, 128))
    assert abs(long / short - 1) < 0.05


def test_traces_with_64_bit_types_enabled():
    """Counts and positions stay int32, so that a loop's state keeps its types."""
    with jax.enable_x64(True):
        jax.eval_shape(decode.run, *abstract())


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("what", ["run", "step"])
def test_lowers_for_accelerators(platform, what):
    if what == "run":
        traced = decode.jitted_run.trace(*abstract())
    else:
        traced = decode.jitted_step.trace(*abstract(), sampled=True)
    assert "stablehlo" in traced.lower(lowering_platforms=(platform,)).as_text()


def test_loop_computes_no_cross_attention_keys():
    """The encoder output `[B, S, M]` enters no product after the prefill."""
    jaxpr = jax.make_jaxpr(decode.run)(*abstract(num_source=11)).jaxpr
    operands = matmul_operands(jaxpr, [])
    assert (2, 4, 11, 4) in operands  # the cached cross keys are read: the walk goes inside the loop
    widths = (CONFIG.d_model, DRAFT_CONFIG.d_model)
    assert not [shape for shape in operands if len(shape) == 3 and 11 in shape and shape[-1] in widths]


def test_step_without_drafts_costs_what_a_decoding_step_costs():
    """FLOPs within 2 % of a hand-written step with its log-probabilities."""
    config = dataclasses.replace(CONFIG, vocab_size=1000, d_model=64, d_ff=128, d_kv=16)
    program, state = abstract(config, num_draft=0)

    def plain(target, cache, token):
        logits, _, cache = target.decode(cache, token)
        token = logits.argmax(-1).astype(jnp.int32)
        log_prob = jnp.take_along_axis(logits, token[..., None], -1)[..., 0]
        return token, log_prob - jax.nn.logsumexp(logits, axis=-1), cache

    token = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    by_hand = jax.jit(plain).lower(program.target, state.cache, token).cost_analysis()["flops"]
    ours = decode.jitted_step.lower(program, state, sampled=False).cost_analysis()["flops"]
    assert ours <= 1.02 * by_hand


def test_works_under_the_users_own_jit():
    @jax.jit
    def run(table, sources, mask, limit, temperature, seed):
        return decode.generate(
            toys.ToyNetwork(table),
            sources,
            mask,
            max_new_tokens=limit,
            temperature=temperature,
            seed=seed,
            length_bucket=BUCKET,
            eos_ids=(),
        )

    output = run(jnp.asarray(TABLE), SOURCES, SOURCE_MASK, jnp.asarray(LIMITS), 0.0, 0)
    for row in range(NUM_ROWS):
        assert emitted(jax.tree.map(np.asarray, output), row) == argmax_path(row)[: LIMITS[row]]


# ---- compilation


def test_two_compilations_serve_all_prompts_seeds_temperatures_and_lengths():
    """One for greedy batches, one for all others. And an equal drafter built anew compiles nothing."""
    before = decode.jitted_generate._cache_size()
    rng = np.random.default_rng(0)
    for call, temperature in enumerate((0.0, [0.3, 0.0, 1.2], 0.5, 0.0, [0.0, 0.0, 0.1])):
        decode.generate(
            toys.ToyNetwork(jnp.asarray(TABLE)),
            rng.integers(0, V, (3, 6)),
            np.ones((3, 6), bool),
            drafter=ModelDrafter(toys.ToyNetwork(jnp.asarray(DRAFT_TABLE)), 2),
            temperature=temperature,
            max_new_tokens=[4 + call, 16, 9],
            seed=call,
        )
    assert decode.jitted_generate._cache_size() == before + 2


def test_params_stay_usable():
    """They are not donated."""
    for _ in range(2):
        decode.generate(TOY, SOURCES, SOURCE_MASK, seed=0, max_new_tokens=16, eos_ids=())
    assert not TOY.table.is_deleted()
