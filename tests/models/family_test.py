"""Every T5 family as it is stored, against transformers: ids, logits, greedy tokens, drafts."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import specjax
from experiments.lib import synthetic
from specjax import convert_checkpoint, decode, drafters, sharding
from specjax.drafters.eagle import EagleDrafter
from specjax.drafters.model import ModelDrafter
from specjax.loading import Model
from specjax.models import convert, heads, heads_io, quantize, t5
from specjax.training import loop, state
from tests.models.families import DECODER, FAMILIES, write, write_json, write_madlad
from tests.tiny_t5 import random_params
from tests.training import tiny

# A UMT5: a table in each of two and two layers.
UMT5 = t5.T5Config(
    24, 16, 4, 32, 4, 2, 2, gated=True, tied_head=False, scale_logits=False, bias_in_every_layer=True
)
PROMPTS = ["def add(a, b): return a", "a man rides two dogs run on the grass"]
NUM_NEW = 12
# Tied and not, with ids of its own, and with a table in every layer: other families draft as these do.
DRAFTED = ("T5 v1.0", "MADLAD-400", "UMT5")


class Reference:
    """The same directory in transformers."""

    def __init__(self, directory, family):
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        kind = getattr(transformers, f"{family.kind}ForConditionalGeneration")
        self.model = kind.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        rows = [self.tokenizer(prompt).input_ids for prompt in PROMPTS]
        width = max(map(len, rows))
        self.ids = np.array([row + [0] * (width - len(row)) for row in rows])
        self.mask = np.arange(width) < np.array([[len(row)] for row in rows])
        beyond = list(range(len(self.tokenizer), self.model.config.vocab_size))
        with torch.no_grad():
            found = self.model.generate(
                torch.tensor(self.ids),
                attention_mask=torch.tensor(self.mask).long(),
                max_new_tokens=NUM_NEW,
                do_sample=False,
                suppress_tokens=beyond or None,
            )
            self.decoder_input = found[:, :-1]
            self.logits = self.model(
                input_ids=torch.tensor(self.ids),
                attention_mask=torch.tensor(self.mask).long(),
                decoder_input_ids=self.decoder_input,
            ).logits.numpy()
        end = self.model.generation_config.eos_token_id
        self.tokens = [row[: row.index(end) + 1] if end in row else row for row in found[:, 1:].tolist()]


def shallow(target):
    """A draft of the same family: the target's own first layers."""
    config = dataclasses.replace(target.config, num_layers=1, num_decoder_layers=1)
    params = {name: target.params[name] for name in convert.shapes(config)}
    return Model(t5.T5Network(params, config), target.tokenizer)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_decodes_as_in_transformers(tmp_path, name):
    family, directory = FAMILIES[name], tmp_path / "model"
    pytest.importorskip("torch")
    write(directory, family)
    reference = Reference(directory, family)
    if family.is_legacy:
        with pytest.raises(ValueError, match="python -m specjax.convert_checkpoint"):
            specjax.load(directory)
        convert_checkpoint.convert_checkpoint(directory, tmp_path / "converted")
        directory = tmp_path / "converted"
    target = specjax.load(directory, "float32")

    assert target.tokenizer.get_vocab() == reference.tokenizer.get_vocab()
    text = "a <extra_id_1> man </s> def é"
    assert target.tokenizer(text).input_ids == reference.tokenizer(text).input_ids

    given = (jnp.asarray(np.asarray(x)) for x in (reference.ids, reference.mask, reference.decoder_input))
    logits = jax.jit(t5.T5(target.config).apply)({"params": target.params}, *given)
    np.testing.assert_allclose(logits, reference.logits, rtol=1e-4, atol=1e-4)

    plain = specjax.generate(target, PROMPTS, max_new_tokens=NUM_NEW)
    assert plain.token_ids == reference.tokens
    assert all(len(set(row)) >= 5 for row in plain.token_ids), plain.token_ids
    if name in DRAFTED:
        drafter = drafters.from_model(shallow(target), num_draft=2)
        drafted = specjax.generate(target, PROMPTS, drafter=drafter, max_new_tokens=NUM_NEW)
        assert drafted.token_ids == plain.token_ids and int(drafted.stats.num_drafted.sum()) > 0


def test_madlad_loads_with_its_own_ids(tmp_path):
    """Without torch: no `shared.weight`, padding 1, end 2, start 0, a language as one token."""
    family = FAMILIES["MADLAD-400"]
    config = dataclasses.replace(convert.config_from_hf(family.keys), num_layers=1, num_decoder_layers=1)
    convert.save(tmp_path, config, random_params(config))
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    tensors[DECODER] = tensors.pop("shared.weight")
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_json(tmp_path / "config.json", family.keys | {"num_layers": 1, "num_decoder_layers": 1})
    (tmp_path / "generation_config.json").unlink()
    write_madlad(tmp_path)
    target = specjax.load(tmp_path)
    found = (target.config.pad_id, target.config.start_id, target.network.eos_ids)
    assert found == (1, 0, (2,)) and not target.config.tied_head and not target.config.scale_logits
    ids = target.tokenizer("<2de> a man").input_ids
    assert target.tokenizer.convert_tokens_to_ids("<2de>") in ids and ids[-1] == 2
    output = specjax.generate(target, ["<2de> a man", "<2pt> two"], max_new_tokens=4)
    assert all(0 < len(row) <= 4 and max(row) < len(target.tokenizer) for row in output.token_ids)


# ---- a bias in every layer, with all else that works on a T5


@pytest.fixture(scope="module")
def umt5():
    params = random_params(UMT5)
    for name in params:  # so that a wrong table shows
        if "_bias" in name:
            params[name] = {"table": 3 * params[name]["table"]}
    return t5.T5Network(params, UMT5)


def greedy(network, drafter=None):
    source = np.array([[5, 6, 7, 1, 0, 9], [9, 3, 8, 2, 1, 0]])
    mask = np.array([[True] * 6, [True] * 5 + [False]])
    found = decode.generate(network, source, mask, drafter=drafter, max_new_tokens=10, eos_ids=())
    return np.asarray(found.tokens)


def test_umt5_round_trips_with_its_model_type(umt5, tmp_path):
    convert.save(tmp_path, UMT5, umt5.params)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "umt5"
    config, params = convert.load(tmp_path)
    assert config == UMT5
    jax.tree.map(np.testing.assert_array_equal, params, umt5.params)


def test_umt5_decodes_with_any_drafter(umt5):
    plain = greedy(umt5)
    assert all(len(set(row)) >= 5 for row in plain.tolist())
    int8 = ModelDrafter(quantize.QuantizedNetwork.of(umt5), 2)
    config = heads.HeadsConfig("eagle", 2, d_model=16, d_kv=4, d_ff=32, num_heads=2, feature_layers=(1,))
    shapes = jax.eval_shape(lambda network: heads_io.init(config, network, 0).params, umt5)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.3, jnp.float32), shapes)
    eagle = EagleDrafter(heads.HeadsNetwork.of(config, umt5, params), 2)
    for drafter in (int8, eagle):
        np.testing.assert_array_equal(greedy(umt5, drafter), plain)


def test_umt5_computes_the_same_on_a_mesh(umt5):
    mesh = sharding.make_mesh(1, 2)
    places = sharding.param_shardings(umt5.params, mesh)
    assert places["decoder_bias_1"]["table"].spec == jax.P(None, "model")
    params = jax.device_put(umt5.params, places)
    ids = jnp.array([[5, 6, 7, 1], [9, 3, 8, 2]])
    run = jax.jit(lambda params: t5.T5(UMT5).apply({"params": params}, ids, ids > 1, ids))
    np.testing.assert_allclose(run(params), run(umt5.params), rtol=1e-5, atol=1e-5)


def test_training_moves_every_table_of_umt5():
    config = dataclasses.replace(UMT5, num_layers=1)
    before = state.init_state(random_params(config), tiny.OPTIMIZATION, seed=0)
    old = jax.tree.map(np.array, before.params)
    step = loop.make_step(loop.likelihood(t5.T5(config)), tiny.OPTIMIZATION, before)
    after = tiny.train(step, before, 2).params
    names = [name for name in after if "_bias" in name]
    assert len(names) == 3 and all((after[name]["table"] != old[name]["table"]).any() for name in names)


def test_synthetic_params_of_umt5_are_those_of_its_checkpoints():
    made = jax.eval_shape(lambda: synthetic.network(UMT5, seed=0).params)
    assert jax.tree.map(lambda x: x.shape, made) == jax.tree.map(lambda x: x.shape, convert.shapes(UMT5))
