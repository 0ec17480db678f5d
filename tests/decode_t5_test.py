"""`generate` on a tiny random T5."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax.drafters import ModelDrafter, ModelTreeDrafter
from specjax.models import t5
from specjax.round import prefill
from tests.tiny_t5 import CONFIG, DRAFT_CONFIG, abstract, matmul_operands, random_params
from tests.toy_batch import BUCKET, LIMITS, MIXED, NUM_ROWS, SEEDS, SOURCE_MASK, SOURCES, V


def bigram_network(config: t5.T5Config, seed: int) -> t5.T5Network:
    """Returns a network of random params of which target and draft share the large part of a bigram."""
    params, shared = random_params(config, seed), np.random.default_rng(9)
    embedding, head = shared.normal(size=(V, 8)), shared.normal(size=(8, V))
    params["embedding"] = params["embedding"].at[:, :8].set(3 * embedding)
    params["head"] = params["head"].at[:8].set(head)
    return t5.T5Network(params, config)


@pytest.fixture(scope="module")
def pair():
    return bigram_network(CONFIG, 0), bigram_network(DRAFT_CONFIG, 1)


def t5_generate(pair, num_draft, rows=slice(None), temperature=0.0, **options):
    target, draft = pair
    options = dict(temperature=temperature) | options
    options = dict(seed=SEEDS[rows], max_new_tokens=LIMITS[rows], length_bucket=BUCKET) | options
    if num_draft:
        options |= dict(drafter=ModelDrafter(draft, num_draft))
    output = decode.generate(target, SOURCES[rows], SOURCE_MASK[rows], **options)
    return jax.tree.map(np.asarray, output)


def test_t5_greedy_with_a_draft_of_another_width_equals_autoregressive(pair):
    plain, speculative = t5_generate(pair, 0), t5_generate(pair, 3)
    np.testing.assert_array_equal(speculative.tokens, plain.tokens)
    np.testing.assert_array_equal(speculative.finish_reason, plain.finish_reason)
    np.testing.assert_allclose(speculative.log_probs, plain.log_probs, atol=1e-5)
    assert len(np.unique(plain.tokens)) > 6  # the outputs vary
    accepted, tested = speculative.stats.accepted.sum(), speculative.stats.tested.sum()
    assert 0 < accepted < tested


def test_shared_encoder_output_equals_a_separate_encoder(pair):
    """The target as its own draft; every draft is accepted, and the encoder runs once."""
    target, _ = pair
    runs = []
    for share in (False, True):
        drafter = ModelDrafter(target, 2, share_encoder=share)
        runs.append(t5_generate(pair, 0, drafter=drafter))
    np.testing.assert_array_equal(runs[0].tokens, runs[1].tokens)
    np.testing.assert_array_equal(runs[1].stats.accepted, runs[1].stats.tested)

    def num_products(share):
        program, _ = abstract(draft_config=CONFIG)
        program = program.replace(drafter=program.drafter.replace(share_encoder=share))
        inputs = decode.prepare(target, SOURCES, SOURCE_MASK, seed=0).inputs
        jaxpr = jax.make_jaxpr(prefill)(program, **inputs).jaxpr
        return len(matmul_operands(jaxpr, []))

    # q, k, v, two of attention, o, and three of the feed-forward layer; two operands each
    assert num_products(False) - num_products(True) == 2 * 9


def test_temperature_near_zero_gives_the_greedy_ids_where_margins_are_wide(pair):
    """At temperature .01, up to the first step whose two best logits are within .5."""
    cold, greedy = t5_generate(pair, 3, temperature=0.01), t5_generate(pair, 3)
    decoder_input = np.pad(greedy.tokens[:, :-1], ((0, 0), (1, 0)))
    apply = jax.jit(lambda params, *x: t5.T5(CONFIG).apply({"params": params}, *x))
    logits = apply(pair[0].params, jnp.asarray(SOURCES), jnp.asarray(SOURCE_MASK), jnp.asarray(decoder_input))
    best = np.sort(logits)[..., -2:]
    wide = np.cumprod(best[..., 1] - best[..., 0] >= 0.5, axis=1).astype(bool)
    wide &= np.arange(BUCKET)[None] < greedy.length[:, None]
    assert wide.sum() > 10
    np.testing.assert_array_equal(cold.tokens[wide], greedy.tokens[wide])


def test_t5_tree_equals_autoregressive(pair):
    """With the relative bias of depths, in a draft of another width too."""
    plain = t5_generate(pair, 0)
    tree = t5_generate(pair, 0, drafter=ModelTreeDrafter(pair[1], (2, 2, 1)))
    np.testing.assert_array_equal(tree.tokens, plain.tokens)
    assert tree.stats.accepted.sum() > 0


def test_t5_row_equals_its_solo_run(pair):
    """Ids and statistics; log-probabilities to rounding."""
    whole = t5_generate(pair, 3, temperature=MIXED)
    for row in range(NUM_ROWS):
        solo = t5_generate(pair, 3, slice(row, row + 1), temperature=MIXED[row : row + 1])
        np.testing.assert_array_equal(solo.tokens[0], whole.tokens[row])
        np.testing.assert_allclose(solo.log_probs[0], whole.log_probs[row], atol=1e-5)
        jax.tree.map(lambda a, b, r=row: np.testing.assert_array_equal(a[0], b[r]), solo.stats, whole.stats)


def test_t5_log_probs_equal_a_teacher_forced_pass(pair):
    output = t5_generate(pair, 3, temperature=MIXED)
    decoder_input = np.pad(output.tokens[:, :-1], ((0, 0), (1, 0)))
    apply = jax.jit(lambda params, *x: t5.T5(CONFIG).apply({"params": params}, *x))
    logits = apply(pair[0].params, jnp.asarray(SOURCES), jnp.asarray(SOURCE_MASK), jnp.asarray(decoder_input))
    log_softmax = np.asarray(jax.nn.log_softmax(logits))
    expected = np.take_along_axis(log_softmax, output.tokens[..., None], -1)[..., 0]
    kept = np.arange(BUCKET)[None] < output.length[:, None]
    np.testing.assert_allclose(output.log_probs[kept], expected[kept], atol=1e-5)
