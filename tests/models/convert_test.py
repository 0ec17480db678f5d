"""Checkpoints in Hugging Face's format: read without torch, written for torch, errors by name."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from specjax.models import convert, t5
from tests.models.checkpoints import GOLDEN, HERE, NAMES, TIED_HEADS, TINY, assert_same_model, random_params


@pytest.fixture
def checkpoint(tmp_path):
    """A function that copies a golden checkpoint and edits its tensors and its config."""

    def make(name="v1_1", tensors=lambda t: t, **config):
        directory = tmp_path / f"copy_of_{name}"
        shutil.copytree(GOLDEN / name, directory)
        content = json.loads((directory / "config.json").read_text()) | config
        content = {key: value for key, value in content.items() if value is not None}
        (directory / "config.json").write_text(json.dumps(content))
        weights = tensors(safetensors.numpy.load_file(directory / "model.safetensors"))
        safetensors.numpy.save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    return make


# ---- the table of names


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({}, 47),
        ({"gated": True}, 51),
        ({"gated": True, "tied_head": False}, 52),
        ({"gated": True, "bias_in_every_layer": True}, 53),
    ],
)
def test_every_tensor_and_every_param_is_named_exactly_once(change, count):
    config = dataclasses.replace(TINY, num_decoder_layers=2, **change)
    tensors = list(convert.tensor_names(config))
    assert len({t.name for t in tensors}) == len({t.path for t in tensors}) == len(tensors) == count
    leaves = jax.tree_util.tree_flatten_with_path(random_params(config))[0]
    expected = {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
    assert {t.path: t.shape for t in tensors} == expected


@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes_are_those_that_torch_writes(name):
    config, _ = convert.load(GOLDEN / name, dtype="float32")
    with safetensors.safe_open(GOLDEN / name / "model.safetensors", framework="numpy") as file:
        written = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    assert {t.name: t.file_shape for t in convert.tensor_names(config)} == written


# ---- config.json


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("v1_0", {"tie_word_embeddings": None, "scale_decoder_outputs": None}),  # version 4
        ("v1_0", {"tie_word_embeddings": True, "scale_decoder_outputs": None}),  # version 4
        ("v1_0", {"tie_word_embeddings": True, "scale_decoder_outputs": True}),  # version 5
        ("v1_1", {"tie_word_embeddings": False, "scale_decoder_outputs": None}),  # version 4
        ("v1_1", {"tie_word_embeddings": False, "scale_decoder_outputs": False}),  # specjax
        ("v1_1", {"tie_word_embeddings": True, "scale_decoder_outputs": False}),  # version 5
    ],
)
def test_configs_of_every_transformers_version_give_the_same_model(checkpoint, name, config):
    assert_same_model(
        convert.load(checkpoint(name, **config), dtype="float32"),
        convert.load(GOLDEN / name, dtype="float32"),
    )


def test_tied_v1_1_weights_are_tied_and_not_scaled(checkpoint):
    def drop_head(tensors):
        return {key: value for key, value in tensors.items() if key != "lm_head.weight"}

    config, params = convert.load(checkpoint("v1_1", drop_head), dtype="float32")
    assert (config.tied_head, config.scale_logits) == (True, False)
    assert "head" not in params


def test_mt5_is_never_scaled():
    """Version 5 writes tie_word_embeddings true for mT5 and, unlike for T5, no scale."""
    shape = {"vocab_size": 24, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_heads": 3, "num_layers": 2}
    for tie in ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}):
        config = convert.config_from_hf({"model_type": "mt5"} | shape | tie)
        assert config.gated and not config.scale_logits


@pytest.mark.parametrize(
    ("stated", "gated", "activation"),
    [
        ({}, False, None),
        ({"feed_forward_proj": "gated-silu", "dense_act_fn": "silu", "is_gated_act": True}, True, "silu"),
        ({"feed_forward_proj": "gated-swish"}, True, "silu"),
        ({"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_pytorch_tanh"}, True, None),
        ({"feed_forward_proj": "gated-relu"}, True, "relu"),
        ({"feed_forward_proj": "gelu"}, False, "gelu"),
        ({"feed_forward_proj": "relu", "dense_act_fn": "gelu", "is_gated_act": True}, True, "gelu"),
        ({"model_type": "umt5"}, True, None),
    ],
)
def test_the_feed_forward_layer_is_that_of_transformers(stated, gated, activation):
    """What version 4 and 5 make of these keys: the derived ones hold where they are given."""
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 24, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_heads": 3, "num_layers": 2}
    config = convert.config_from_hf(shape | stated)
    assert (config.gated, config.activation) == (gated, activation)
    kind = transformers.UMT5Config if config.bias_in_every_layer else transformers.T5Config
    for written in (shape | stated, convert.config_to_hf(config)):
        theirs = kind.from_dict(dict(written))
        name = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new"}.get(
            theirs.dense_act_fn, theirs.dense_act_fn
        )
        assert theirs.is_gated_act == gated and name == (activation or ("gelu_new" if gated else "relu"))
    assert convert.config_from_hf(convert.config_to_hf(config)) == config


def test_a_config_without_a_model_type_is_known_by_its_class():
    """google/umt5-small has none."""
    shape = {"vocab_size": 24, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_heads": 3, "num_layers": 2}
    config = convert.config_from_hf({"architectures": ["UMT5ForConditionalGeneration"]} | shape)
    assert config.bias_in_every_layer and config.gated and config.scale_logits
    written = convert.config_to_hf(config)
    assert (written["model_type"], written["architectures"]) == ("umt5", ["UMT5ForConditionalGeneration"])
    assert not convert.config_from_hf(shape).bias_in_every_layer


def test_absent_keys_of_old_configs_have_the_defaults_of_v1_0():
    shape = {"vocab_size": 24, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_heads": 3, "num_layers": 5}
    config = convert.config_from_hf({"model_type": "t5", "num_decoder_layers": None} | shape)
    assert config == t5.T5Config(24, 8, 4, 12, 3, 5, 5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "codet5p"}, ["codet5p", "built from CodeGen; its 220m and 770m models", "'t5'"]),
        ({"model_type": "bart"}, ["bart", "'mt5'", "'umt5'"]),
        ({"dense_act_fn": None, "feed_forward_proj": "gated-tanh"}, ["'tanh'", "gated-tanh", "silu"]),
        ({"dense_act_fn": "swiglu"}, ["'swiglu'", "feed_forward_proj 'gated-gelu'"]),
        ({"model_type": "umt5"}, ["missing: decoder.block.1.layer.0.SelfAttention.relative_attention_bias"]),
        ({"d_kv": None}, ["d_kv", "config.json"]),
    ],
)
def test_config_of_another_model_raises_by_name(checkpoint, change, words):
    with pytest.raises(ValueError) as error:
        convert.load(checkpoint(**change))
    assert all(word in str(error.value) for word in words)


# ---- weights that fit, and weights that do not


def _copies(tensors):
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    bias = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    return tensors | {name: tensors["shared.weight"].copy() for name in names} | {bias: np.ones((32, 3))}


def test_copies_of_the_embedding_and_the_cross_bias_of_old_files_are_accepted(checkpoint):
    loaded = convert.load(checkpoint("v1_0", _copies), dtype="float32")
    assert_same_model(loaded, convert.load(GOLDEN / "v1_0", dtype="float32"))


def _rename(old, new):
    return lambda tensors: {key.replace(old, new): value for key, value in tensors.items()}


def _exchange(tensors):
    swap = {"encoder": "decoder", "decoder": "encoder"}
    return {".".join(swap.get(part, part) for part in key.split(".")): x for key, x in tensors.items()}


RELU = {"is_gated_act": None, "dense_act_fn": None, "feed_forward_proj": "relu"}
GATED = RELU | {"feed_forward_proj": "gated-gelu"}


def _several_faults(tensors):
    tensors = _copies(tensors) | {
        "extra.weight": np.ones(2),
        "decoder.embed_tokens.weight": np.ones((48, 16)),
    }
    del tensors["encoder.final_layer_norm.weight"]
    del tensors["decoder.block.1.layer.0.SelfAttention.q.weight"]
    wo = "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    return tensors | {wo: tensors[wo].T.copy()}


@pytest.mark.parametrize(
    ("name", "tensors", "config", "words"),
    [
        ("v1_1", dict, RELU, ["wi_0/wi_1", "feed_forward_proj", "gated-gelu"]),
        ("v1_0", dict, GATED, ["wi_0/wi_1", "feed_forward_proj", "relu"]),
        (
            "v1_0",
            _exchange,
            {},
            [
                "missing",
                "decoder.block.0.layer.1.EncDecAttention.q.weight",
                "left over",
                "encoder.block.0.layer.1.EncDecAttention.q.weight",
            ],
        ),
        ("umt5", dict, {"model_type": "t5"}, ["left over", 'model_type should be "umt5"']),
        ("v1_0", dict, {"num_decoder_layers": 1}, ["left over", "decoder.block.1.layer.2.layer_norm.weight"]),
        ("v1_0", dict, {"vocab_size": 50}, ["shared.weight", "(48, 16)", "(50, 16)"]),
        ("v1_1", _rename("shared.weight", "emb"), {}, ["missing: shared.weight", "left over: emb"]),
        (
            "v1_0",
            _several_faults,
            {},
            [
                "missing",
                "encoder.final_layer_norm.weight",
                "decoder.block.1.layer.0.SelfAttention.q.weight",
                "left over",
                "extra.weight",
                "DenseReluDense.wo.weight has shape (24, 16)",
                "decoder.embed_tokens.weight differs",
            ],
        ),
    ],
    ids=[
        "gated weights",
        "relu weights",
        "exchanged",
        "tables",
        "layers",
        "vocabulary",
        "renamed",
        "several",
    ],
)
def test_weights_that_do_not_fit_are_all_named(checkpoint, name, tensors, config, words):
    with pytest.raises(ValueError) as error:
        convert.load(checkpoint(name, tensors, **config))
    assert [word for word in words if word not in str(error.value)] == []


# ---- files


def test_shards_give_the_same_model_as_one_file(checkpoint):
    directory = checkpoint("v1_0")
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for index, part in enumerate((names[:20], names[20:])):
        shard = f"model-{index + 1:05}-of-00002.safetensors"
        safetensors.numpy.save_file({name: tensors[name] for name in part}, directory / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    expected = convert.load(GOLDEN / "v1_0", dtype="float32")
    assert_same_model(convert.load(directory, dtype="float32"), expected)

    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors"):
        convert.load(directory)
    index.write_text("{")
    with pytest.raises(ValueError, match=r"index\.json is not valid JSON"):
        convert.load(directory)


@pytest.mark.parametrize("keep", [0, 7, 500, -1])
def test_truncated_file_is_named_with_the_remedy(checkpoint, keep):
    path = checkpoint() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or corrupt .* copy it again"):
        convert.load(path.parent)


def test_missing_files_are_named_with_the_remedy(checkpoint, tmp_path, monkeypatch):
    def error_of(source):
        with pytest.raises(ValueError) as error:
            convert.load(source)
        return str(error.value)

    assert "no directory" in error_of(tmp_path / "absent") and "hub id" in error_of(tmp_path / "absent")
    directory = checkpoint()
    assert "give the directory" in error_of(directory / "config.json")
    (directory / "model.safetensors").unlink()
    assert "neither model.safetensors nor" in error_of(directory)
    (directory / "pytorch_model.bin").touch()
    command = f"`python -m specjax.convert_checkpoint --input={directory} --output=DIRECTORY`"
    assert command in error_of(directory) and "pip install torch" in error_of(directory)
    (directory / "config.json").unlink()
    assert "no config.json" in error_of(directory)

    def offline(*args, **kwargs):
        raise OSError("no connection")

    monkeypatch.setattr("transformers.utils.hub.cached_file", offline)
    message = error_of("someone/some-t5")
    assert "local directory" in message and "hub" in message and "no connection" in message


def test_hub_id_is_read_through_the_hubs_cache(monkeypatch):
    def cached_file(source, name, **kwargs):
        assert source == "someone/some-t5"
        path = GOLDEN / "v1_0" / name
        return str(path) if path.is_file() else None

    monkeypatch.setattr("transformers.utils.hub.cached_file", cached_file)
    assert_same_model(convert.load("someone/some-t5"), convert.load(GOLDEN / "v1_0"))


# ---- dtypes


def test_default_dtype_on_a_cpu_is_float32_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config, params = convert.load(GOLDEN / "v1_1")
    assert config.dtype == "float32"
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_float16_on_a_cpu_gives_one_warning():
    with pytest.warns(UserWarning, match="float16") as found:
        config, params = convert.load(GOLDEN / "v1_1", dtype="float16")
    assert len(found) == 1 and found[0].filename == __file__
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(config.dtype)}


def test_unknown_dtype_raises(tmp_path):
    with pytest.raises(ValueError, match=r"`dtype` must be one of .*bfloat16.*'int8'"):
        convert.load(GOLDEN / "v1_1", dtype="int8")
    with pytest.raises(ValueError, match=r"`dtype` must be one of .*bfloat16.*'int8'"):
        convert.save(tmp_path, TINY, random_params(TINY), dtype="int8")


def test_bfloat16_file_loads_without_torch_and_without_transformers(tmp_path):
    config, params = convert.load(GOLDEN / "v1_1", dtype="bfloat16")
    convert.save(tmp_path, config, params, dtype="bfloat16")
    assert_same_model(convert.load(tmp_path, dtype="bfloat16"), (config, params))
    script = (
        "import sys; from specjax.models import convert; "
        f"config, params = convert.load({str(tmp_path)!r}, 'bfloat16'); "
        "assert params['embedding'].dtype == 'bfloat16'; "
        "assert not {'torch', 'transformers', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=HERE.parents[1])


# ---- save


@pytest.mark.parametrize("head", TIED_HEADS)
@pytest.mark.parametrize(
    "form",
    [{"gated": True}, {"gated": False}, {"gated": True, "activation": "silu", "bias_in_every_layer": True}],
    ids=["v1.1", "v1.0", "umt5"],
)
def test_load_returns_what_was_saved(tmp_path, head, form):
    config = dataclasses.replace(
        TINY, **form, **TIED_HEADS[head], pad_id=3, eos_id=2, start_id=3, dropout_rate=0.25
    )
    params = random_params(config)
    convert.save(tmp_path / "deep" / "directory", config, params)
    assert_same_model(convert.load(tmp_path / "deep" / "directory", dtype="float32"), (config, params))


@pytest.mark.parametrize("head", ["tied, scaled", "tied, unscaled", "untied, unscaled"])
def test_the_rules_of_transformers_4_read_what_was_saved_to_the_same_head(tmp_path, head):
    """There one flag sets both: the head is the embedding, and its input is scaled."""
    config = dataclasses.replace(TINY, **TIED_HEADS[head])
    params = random_params(config)
    convert.save(tmp_path, config, params)
    written = json.loads((tmp_path / "config.json").read_text())
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    flag = written["tie_word_embeddings"]
    table = tensors["shared.weight" if flag else "lm_head.weight"] * (config.d_model**-0.5 if flag else 1.0)
    features = jnp.eye(config.d_model)[None]
    logits = t5.T5(config).apply({"params": params}, features, method="logits")
    np.testing.assert_allclose(logits[0], table.T, rtol=1e-6)


def test_params_that_do_not_fit_are_named_and_nothing_is_written(tmp_path):
    params = random_params(TINY)
    del params["encoder_norm"]
    params |= {"head": jnp.ones((2, 2)), "embedding": jnp.ones((2, 2))}
    with pytest.raises(ValueError, match=r"missing: encoder_norm/scale; left over: head; of .*: embedding"):
        convert.save(tmp_path / "out", TINY, params)
    assert not (tmp_path / "out").exists()


def test_failed_save_leaves_the_old_checkpoint_whole(tmp_path, monkeypatch):
    old = random_params(TINY, seed=1)
    convert.save(tmp_path, TINY, old)

    def fail(tensors, path, **kwargs):
        pathlib.Path(path).write_bytes(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.numpy, "save_file", fail)
        with pytest.raises(OSError, match="disk full"):
            convert.save(tmp_path, TINY, random_params(TINY, seed=2))
    assert_same_model(convert.load(tmp_path), (TINY, old))
    convert.save(tmp_path, TINY, random_params(TINY, seed=3))
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"config.json", "generation_config.json", "model.safetensors"}


def test_tokenizer_is_saved_beside_the_model(tmp_path):
    class Tokenizer:
        def save_pretrained(self, directory):
            pathlib.Path(directory, "spiece.model").touch()

    convert.save(tmp_path, TINY, random_params(TINY), tokenizer=Tokenizer())
    assert (tmp_path / "spiece.model").exists()
