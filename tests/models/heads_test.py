"""Heads on a tiny T5: what they draft in the engine is what they were trained to say."""

import dataclasses
import functools

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
from specjax.request import prepare
from specjax.training import heads as heads_training
from tests.tiny_t5 import random_params

TARGET = t5.T5Config(24, 16, 4, 32, 4, 2, 3)
IDS = tuple(range(1, 24, 2))
SOURCE = np.array([[5, 6, 7, 1, 0], [9, 3, 8, 2, 1]])
MASK = SOURCE != 0
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
def target_params():
    return jax.tree.map(lambda x: 2 * x, random_params(TARGET))


def network_and_params(name, target_params):
    network = HeadsNetwork(CONFIGS[name], TARGET)
    heads = jax.jit(lambda params: heads_io.init(network, params, 1))(target_params)
    rng = np.random.default_rng(2)
    heads = jax.tree.map(lambda x: x + jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), heads)
    return network, {"heads": heads, "frozen": network.frozen(target_params)}


def drafter_of(network):
    kind = network.config.kind
    if kind == "medusa":
        return MedusaDrafter(network, (1, 1, 1))
    return EagleDrafter(network, 3) if kind == "eagle" else OnePassDrafter(network, 3)


@functools.partial(jax.jit, static_argnums=0)
def proposed(drafter, params, state):
    return drafter.propose(params, state.drafter_state, state.context, None)[0]


@functools.partial(jax.jit, static_argnums=0)
def unrolled(network, params, *inputs):
    """Logits `[B, D, N, V]` of teacher-forced heads."""
    return network.module.apply({"params": params["heads"]}, params["frozen"], *inputs, method="unroll")


def drafts_of_rounds(drafter, params, target_params, num_new=24):
    """`(tokens committed before a round, what was drafted in it)` of both rows, and the whole texts."""
    prepared = prepare(
        t5.T5Network(TARGET),
        target_params,
        SOURCE,
        MASK,
        drafter=drafter,
        drafter_params=params,
        max_new_tokens=num_new,
        seed=0,
        eos_ids=(),
    )
    program, all_params, inputs = prepared
    state = decode.jitted_prefill(program, all_params, **inputs)
    found = []
    while bool(state.running.all()):
        draft = proposed(drafter, all_params.drafter, state)
        found += [
            (row, int(state.context.length[row]), draft.tokens[row].tolist())
            for row in range(2)
            if draft.num_drafted[row]
        ]
        state = decode.jitted_step(program, all_params, state, sampled=False)
    return found, np.asarray(state.context.tokens), np.asarray(state.stats.accepted)


@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_are_what_unroll_says_of_the_same_text(name, target_params):
    """Caches, positions and masks of drafting against those of training, position by position."""
    network, params = network_and_params(name, target_params)
    found, texts, _ = drafts_of_rounds(drafter_of(network), params, target_params)
    assert len(found) > 6
    target_ids = jnp.asarray(texts[:, 1:25])
    batch = dict(source_ids=jnp.asarray(SOURCE), source_mask=jnp.asarray(MASK), target_ids=target_ids)
    teacher = heads_training.make_teacher(t5.T5(TARGET), target_params, network.feature_layers)
    batch = teacher(batch)
    inputs = (batch["features"],)
    if network.config.kind != "medusa":
        inputs += (batch["inputs"], batch["encoded"], batch["source_mask"])
    said = np.asarray(unrolled(network, params, *inputs).argmax(-1))  # [B, D, N]
    if network.config.draft_ids:
        said = np.array(IDS)[said]
    compared = np.zeros(3, int)
    for row, length, tokens in found:
        pair = length - 1  # the newest
        for depth, token in enumerate(tokens):
            true = texts[row, length : length + depth].tolist()
            if network.config.kind == "eagle" and tokens[:depth] != true:
                break  # from here on the draft went another way than the text
            assert token == said[row, depth, pair]
            compared[depth] += 1
    assert compared[0] > 6 and (network.config.kind == "eagle" or compared[2] > 6)


def test_eagle_steps_are_compared_beyond_the_first(target_params):
    """The test above reaches deeper steps where drafts are right: trained, they are."""
    network, params = network_and_params("eagle", target_params)
    batch, steps = _taught(network, target_params), 60
    objective = heads_training.objective(network, params["frozen"])
    grad = jax.jit(jax.value_and_grad(lambda p: objective(p, batch, jax.random.key(0))[0]))
    heads, losses = params["heads"], []
    for _ in range(steps):
        loss, gradient = grad(heads)
        heads = jax.tree.map(lambda p, g: p - 0.3 * g / (1e-3 + jnp.abs(g).max()) * 0.1, heads, gradient)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    _, _, accepted = drafts_of_rounds(EagleDrafter(network, 3), params | {"heads": heads}, target_params)
    _, _, before = drafts_of_rounds(EagleDrafter(network, 3), params, target_params)
    assert accepted.sum() > before.sum()


def _taught(network, target_params):
    plain = decode.generate(
        t5.T5Network(TARGET), target_params, SOURCE, MASK, max_new_tokens=12, seed=0, eos_ids=()
    )
    ids = plain.tokens[:, :12]
    batch = dict(
        source_ids=jnp.asarray(SOURCE),
        source_mask=jnp.asarray(MASK),
        target_ids=ids,
        target_mask=jnp.ones(ids.shape, bool),
    )
    return heads_training.make_teacher(t5.T5(TARGET), target_params, network.feature_layers)(batch)


@pytest.mark.parametrize("name", CONFIGS)
def test_output_is_the_targets_whatever_the_heads_say(name, target_params):
    network, params = network_and_params(name, target_params)
    request = dict(max_new_tokens=np.array([12, 9]), seed=0, eos_ids=())
    plain = decode.generate(t5.T5Network(TARGET), target_params, SOURCE, MASK, **request)
    drafters = [drafter_of(network)]
    if network.config.kind == "eagle":
        drafters.append(EagleTreeDrafter(network, 5, 3, 2))
    for drafter in drafters:
        spec = decode.generate(
            t5.T5Network(TARGET),
            target_params,
            SOURCE,
            MASK,
            drafter=drafter,
            drafter_params=params,
            **request,
        )
        np.testing.assert_array_equal(plain.tokens, spec.tokens)


def test_medusa_begins_as_the_targets_own_head(target_params):
    for name in ("medusa", "medusa, few ids"):
        network = HeadsNetwork(CONFIGS[name], TARGET)
        params = {"heads": heads_io.init(network, target_params, 0), "frozen": network.frozen(target_params)}
        features = jax.random.normal(jax.random.key(3), (2, 16))
        expected = t5.T5Network(TARGET).head(target_params, features[:, None])[:, 0]
        found = network.ahead(params, features, 3)
        kept = list(IDS) if network.config.draft_ids else slice(None)
        for depth in range(3):
            np.testing.assert_allclose(found[:, depth, kept], expected[:, kept], rtol=1e-4, atol=1e-5)


def test_heads_on_disk(target_params, tmp_path):
    network, params = network_and_params("eagle, narrow, few ids, fused", target_params)
    heads_io.save(tmp_path, network.config, params["heads"], target_params)
    again, loaded = heads_io.load(tmp_path, TARGET, target_params)
    assert again == network and hash(again) == hash(network)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a.astype(jnp.bfloat16), b),
        params["heads"],
        loaded["heads"],
    )
    assert loaded["frozen"]["embedding"] is target_params["embedding"]
    other = jax.tree.map(lambda x: x * 1.5, target_params)
    with pytest.raises(ValueError, match="were trained for another target"):
        heads_io.load(tmp_path, TARGET, other)
    (tmp_path / "heads.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="damaged"):
        heads_io.load(tmp_path, TARGET, target_params)
    (tmp_path / "heads.json").write_text("{}")
    with pytest.raises(ValueError, match="train_heads"):
        heads_io.load(tmp_path, TARGET, target_params)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(d_model=8), "as wide as the target"),
        (dict(draft_ids=(30,)), r"0\.\.23"),
        (dict(kind="medusa", feature_layers=(0,)), "last one only"),
    ],
)
def test_heads_that_do_not_fit_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(CONFIGS["eagle"], **changes).check(TARGET)


def test_feature_layers_leave_logits_alone(target_params):
    plain, fused = t5.T5Network(TARGET), t5.T5Network(TARGET, (0, 2))
    encoded = plain.encode(target_params, SOURCE, MASK)
    cache = plain.init_cache(target_params, encoded, MASK, 5)
    one, other = (n.decode(target_params, cache, jnp.asarray(SOURCE)) for n in (plain, fused))
    np.testing.assert_array_equal(one[0], other[0])
    np.testing.assert_array_equal(one[1], other[1][..., :16])
    assert other[1].shape == (2, 5, 48)
    np.testing.assert_allclose(jnp.square(other[1][..., 16:32]).mean(-1), 1, rtol=1e-3)
