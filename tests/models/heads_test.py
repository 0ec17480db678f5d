"""Heads on a tiny T5: what they draft in the engine is what they were trained to predict."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax.drafters.eagle import EagleDrafter, EagleTreeDrafter
from specjax.drafters.medusa import MedusaDrafter
from specjax.drafters.one_pass import OnePassDrafter
from specjax.models import heads_io, t5
from specjax.models.heads import HeadsConfig, HeadsNetwork
from specjax.training import heads as heads_training
from tests.tiny_t5 import random_network

TARGET = t5.T5Config(24, 16, 4, 32, 4, 2, 3)
IDS = tuple(range(1, 24, 2))
SOURCE = np.array([[5, 6, 7, 1, 0], [9, 3, 8, 2, 1]])
MASK = SOURCE != 0
NUM_NEW = 24
CONFIGS = {
    "medusa": HeadsConfig("medusa", 3, 16),
    "medusa, few ids": HeadsConfig("medusa", 3, 16, draft_ids=IDS),
    "eagle": HeadsConfig("eagle", 3, 16, 4, 32, 4),
    "eagle, narrow, few ids, fused": HeadsConfig(
        "eagle", 3, 8, 4, 16, 2, num_layers=2, draft_ids=IDS, feature_layers=(0, 1)
    ),
    "one_pass": HeadsConfig("one_pass", 3, 16, 4, 32, 4),
    "one_pass, narrow, few ids": HeadsConfig("one_pass", 3, 8, 4, 16, 2, draft_ids=IDS),
}


@pytest.fixture(scope="module")
def target():
    network = random_network(TARGET)
    return network.replace(params=jax.tree.map(lambda x: 2 * x, network.params))


def autoregressive_tokens(target):
    return decode.generate(target, SOURCE, MASK, max_new_tokens=NUM_NEW, eos_ids=()).tokens[:, :NUM_NEW]


def random_heads(name, target):
    params = jax.jit(lambda target: heads_io.init(CONFIGS[name], target, 1).params)(target)
    rng = np.random.default_rng(2)
    params = jax.tree.map(lambda x: x + jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), params)
    return HeadsNetwork.of(CONFIGS[name], target, params)


def drafter_of(network):
    kind = network.config.kind
    if kind == "medusa":
        return MedusaDrafter(network, (1, 1, 1))
    return EagleDrafter(network, 3) if kind == "eagle" else OnePassDrafter(network, 3)


@jax.jit
def proposed(drafter, state):
    return drafter.propose(state.drafter_state, state.context, None, None)[0]


def drafts_of_rounds(drafter, target, num_new=NUM_NEW):
    """`(row, tokens committed before a round, its drafts)`, texts, their lengths, accepted drafts."""
    program, inputs = decode.prepare(
        target, SOURCE, MASK, drafter=drafter, max_new_tokens=num_new, eos_ids=()
    )
    state = decode.jitted_prefill(program, **inputs)
    found = []
    while bool(state.running.all()):
        draft = proposed(program.drafter, state)
        found += [
            (row, int(state.context.length[row]), draft.tokens[row].tolist())
            for row in range(2)
            if draft.num_drafted[row]
        ]
        state = decode.jitted_step(program, state, sampled=False)
    lengths = np.asarray(state.context.length)
    return found, np.asarray(state.context.tokens), lengths, np.asarray(state.stats.accepted)


# Ids of their own and the target's differ in the same way for each kind.
@pytest.fixture(
    scope="module",
    params=["medusa, few ids", "eagle", "eagle, narrow, few ids, fused", "one_pass, narrow, few ids"],
)
def drafted(request, target):
    """Returns heads and `drafts_of_rounds` with them."""
    network = random_heads(request.param, target)
    return network, *drafts_of_rounds(drafter_of(network), target)


def test_drafts_equal_unroll_of_the_same_text(drafted, target):
    """Caches, positions and masks of drafting against those of training, position by position."""
    network, found, texts, _, _ = drafted
    assert len(found) > 6
    target_ids = jnp.asarray(texts[:, 1:25])
    batch = dict(source_ids=jnp.asarray(SOURCE), source_mask=jnp.asarray(MASK), target_ids=target_ids)
    batch = heads_training.make_teacher(target, network.feature_layers)(batch)
    inputs = (batch["features"],)
    if network.config.kind != "medusa":
        inputs += (batch["inputs"], batch["encoded"], batch["source_mask"])
    unroll = jax.jit(lambda network, inputs: network.unroll(*inputs))
    predicted = np.asarray(unroll(network, inputs).argmax(-1))  # [B, D, N]
    if network.config.draft_ids:
        predicted = np.array(IDS)[predicted]
    compared = np.zeros(3, int)
    for row, length, tokens in found:
        pair = length - 1  # the newest
        for depth, token in enumerate(tokens):
            true = texts[row, length : length + depth].tolist()
            if network.config.kind == "eagle" and tokens[:depth] != true:
                break  # from here on the draft went another way than the text
            assert token == predicted[row, depth, pair]
            compared[depth] += 1
    assert compared[0] > 6 and (network.config.kind == "eagle" or compared[2] > 6)


def test_eagle_steps_are_compared_beyond_the_first(target):
    """The test above reaches deeper steps where drafts are right: trained, they are."""
    network = random_heads("eagle", target)
    batch, steps = _taught(network, target), 60
    objective = heads_training.objective(network)
    grad = jax.jit(jax.value_and_grad(lambda p: objective(p, batch, jax.random.key(0))[0]))
    params, losses = network.params, []
    for _ in range(steps):
        loss, gradient = grad(params)
        params = jax.tree.map(lambda p, g: p - 0.3 * g / (1e-3 + jnp.abs(g).max()) * 0.1, params, gradient)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    *_, accepted = drafts_of_rounds(EagleDrafter(network.replace(params=params), 3), target)
    *_, before = drafts_of_rounds(EagleDrafter(network, 3), target)
    assert accepted.sum() > before.sum()


def _taught(network, target):
    ids = autoregressive_tokens(target)
    batch = dict(
        source_ids=jnp.asarray(SOURCE),
        source_mask=jnp.asarray(MASK),
        target_ids=ids,
        target_mask=jnp.ones(ids.shape, bool),
    )
    return heads_training.make_teacher(target, network.feature_layers)(batch)


def test_output_is_the_targets_whatever_the_heads_draft(drafted, target):
    _, _, texts, lengths, _ = drafted
    baseline = autoregressive_tokens(target)
    assert lengths.max() == 1 + NUM_NEW and lengths.min() > 6
    for text, length, tokens in zip(texts, lengths, baseline, strict=True):
        assert text[1:length].tolist() == tokens[: length - 1].tolist()


def test_output_is_the_targets_whatever_tree_the_heads_draft(target):
    drafter = EagleTreeDrafter(random_heads("eagle, narrow, few ids, fused", target), 4, 2, 2)
    request = dict(max_new_tokens=np.array([12, 9]), eos_ids=())
    output = decode.generate(target, SOURCE, MASK, drafter=drafter, **request)
    baseline = autoregressive_tokens(target)
    assert output.stats.num_drafted.min() > 0
    for tokens, limit, expected in zip(output.tokens, (12, 9), baseline, strict=True):
        assert tokens[:limit].tolist() == expected[:limit].tolist()


def test_medusa_begins_as_the_targets_own_head(target):
    for name in ("medusa", "medusa, few ids"):
        network = heads_io.init(CONFIGS[name], target, 0)
        features = jax.random.normal(jax.random.key(3), (2, 16))
        expected = target.logits(features[:, None])[:, 0]
        found = network.ahead(features, 3)
        kept = list(IDS) if network.config.draft_ids else slice(None)
        for depth in range(3):
            np.testing.assert_allclose(found[:, depth, kept], expected[:, kept], rtol=1e-4, atol=1e-5)


def test_heads_on_disk(target, tmp_path):
    network = random_heads("eagle, narrow, few ids, fused", target)
    heads_io.save(tmp_path, network, target)
    again = heads_io.load(tmp_path, target)
    structure, same = jax.tree.structure(network), jax.tree.structure(again)
    assert same == structure and hash(same) == hash(structure)  # they share programs
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a.astype(jnp.bfloat16), b), network.params, again.params
    )
    assert again.frozen["embedding"] is target.params["embedding"]
    other = target.replace(params=jax.tree.map(lambda x: x * 1.5, target.params))
    with pytest.raises(ValueError, match="were trained for another target"):
        heads_io.load(tmp_path, other)
    (tmp_path / "heads.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="damaged"):
        heads_io.load(tmp_path, target)
    (tmp_path / "heads.json").write_text("{}")
    with pytest.raises(ValueError, match="train_heads"):
        heads_io.load(tmp_path, target)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(d_model=8), "`d_model` must be the target's"),
        (dict(draft_ids=(30,)), r"0\.\.23"),
        (dict(kind="medusa", feature_layers=(0,)), "last layer only"),
    ],
)
def test_heads_that_do_not_fit_raise(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIGS["eagle"], **changes).check(TARGET)


def test_feature_layers_leave_logits_alone(target):
    run = jax.jit(lambda n: n.decode(n.init_cache(n.encode(SOURCE, MASK), MASK, 5), jnp.asarray(SOURCE))[:2])
    one, other = run(target), run(target.with_features((0, 2)))
    np.testing.assert_array_equal(one[0], other[0])
    np.testing.assert_array_equal(one[1], other[1][..., :16])
    assert other[1].shape == (2, 5, 48)
    np.testing.assert_allclose(jnp.square(other[1][..., 16:32]).mean(-1), 1, rtol=1e-3)
