"""LoRA adapters in PEFT's format, against checkpoints that were merged by hand."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import specjax
from specjax import sharding
from specjax.models import convert, t5
from tests.models.checkpoints import TINY, assert_same_model, random_params

UNTIED = dataclasses.replace(TINY, num_heads=2, gated=True, tied_head=False, scale_logits=False)
ATTENTION = "encoder.block.1.layer.0.SelfAttention"
CROSS = "decoder.block.0.layer.1.EncDecAttention"
DENSE = "decoder.block.0.layer.2.DenseReluDense"
MODULES = [*(f"{ATTENTION}.{x}" for x in "qkvo"), f"{CROSS}.q", f"{CROSS}.v"]
MODULES += [f"{DENSE}.wi_0", f"{DENSE}.wi_1", f"{DENSE}.wo", "lm_head"]
RANK, ALPHA = 2, 6
SETTINGS = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "fan_in_fan_out": False, "bias": "none"}


def tensors_of(directory):
    return safetensors.numpy.load_file(directory / "model.safetensors")


def low_rank(base, modules, ranks=None):
    """Random A and B of modules, by PEFT's names on disk."""
    rng, found = np.random.default_rng(1), {}
    for module in modules:
        out, inner = base[f"{module}.weight" if module != "lm_head" else "shared.weight"].shape
        rank = (ranks or {}).get(module, RANK)
        for side, shape in (("A", (rank, inner)), ("B", (out, rank))):
            name = f"base_model.model.{module}.lora_{side}.weight"
            found[name] = rng.normal(size=shape).astype(np.float32)
    return found


def write_adapter(directory, tensors, **settings):
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))
    safetensors.numpy.save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def product(tensors, module):
    a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
    return b @ a


@pytest.fixture
def base(tmp_path):
    convert.save(tmp_path / "base", UNTIED, random_params(UNTIED))
    return tmp_path / "base"


def merged_by_hand(base, changes):
    """The model of a checkpoint whose tensors have `changes` added."""
    whole = base.parent / "merged"
    convert.save(whole, *convert.load(base))
    tensors = tensors_of(whole)
    for name, change in changes.items():
        tensors[name] = tensors[name] + change.astype(np.float32)
    safetensors.numpy.save_file(tensors, whole / "model.safetensors")
    return convert.load(whole)


def assert_close(one, other):
    assert one[0] == other[0]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), one[1], other[1])


@pytest.mark.parametrize("use_rslora", [False, True])
def test_every_target_module_is_merged(base, tmp_path, use_rslora):
    tensors = low_rank(tensors_of(base), MODULES)
    adapter = write_adapter(tmp_path / "adapter", tensors, use_rslora=use_rslora, target_modules=["q"])
    scale = ALPHA / (np.sqrt(RANK) if use_rslora else RANK)
    changes = {f"{module}.weight": product(tensors, module) * scale for module in MODULES}
    found = convert.load(base, adapter=adapter)
    assert_close(found, merged_by_hand(base, changes))
    plain = convert.load(base)[1]
    assert (plain["head"] != found[1]["head"]).any()
    np.testing.assert_array_equal(plain["embedding"], found[1]["embedding"])


def test_ranks_and_alphas_by_pattern_are_those_of_their_modules(base, tmp_path):
    """A key is the end of a name, or a regular expression of it; the first that matches holds."""
    modules = [f"{ATTENTION}.q", f"{ATTENTION}.v", f"{CROSS}.q", f"{DENSE}.wo"]
    ranks = dict(zip(modules, (4, 2, 4, 3), strict=True))
    tensors = low_rank(tensors_of(base), modules, ranks)
    adapter = write_adapter(
        tmp_path / "adapter",
        tensors,
        rank_pattern={"q": 4, r"decoder.*\.wo": 3},
        alpha_pattern={f"{CROSS}.q": 1, "v": 20},
    )
    alphas = dict(zip(modules, (ALPHA, 20, 1, ALPHA), strict=True))
    changes = {f"{m}.weight": product(tensors, m) * alphas[m] / ranks[m] for m in modules}
    assert_close(convert.load(base, adapter=adapter), merged_by_hand(base, changes))


def test_saved_modules_take_the_place_of_the_models_own(base, tmp_path):
    rng, plain = np.random.default_rng(2), tensors_of(base)
    names = ["shared.weight", "lm_head.weight", "decoder.final_layer_norm.weight"]
    new = {name: rng.normal(size=plain[name].shape).astype(np.float32) for name in names}
    on_disk = {
        "base_model.model.shared.weight": new["shared.weight"],
        "base_model.model.lm_head.modules_to_save.default.weight": new["lm_head.weight"],  # old versions
        "base_model.model.decoder.final_layer_norm.modules_to_save.weight": new[names[2]],
    }
    adapter = write_adapter(tmp_path / "adapter", on_disk, modules_to_save=["shared", "lm_head"])
    expected = merged_by_hand(base, {name: new[name] - plain[name] for name in names})
    assert_close(convert.load(base, adapter=adapter), expected)


def test_what_is_saved_beside_an_adapted_head_is_its_base(base, tmp_path):
    """PEFT saves the embedding, and the head before the adapter, where the head is a target."""
    plain = tensors_of(base)
    tensors = low_rank(plain, ["lm_head"])
    resized = {
        "base_model.model.lm_head.base_layer.weight": plain["lm_head.weight"] + 1.0,
        "base_model.model.shared.weight": plain["shared.weight"] - 1.0,
    }
    adapter = write_adapter(tmp_path / "adapter", tensors | resized)
    changes = {
        "lm_head.weight": 1.0 + product(tensors, "lm_head") * (ALPHA / RANK),
        "shared.weight": np.float32(-1.0),
    }
    assert_close(convert.load(base, adapter=adapter), merged_by_hand(base, changes))


def test_an_adapted_tied_head_leaves_the_embedding_as_it_is(tmp_path):
    """As the adapted model computes before it is merged; one tensor cannot be both."""
    config = dataclasses.replace(UNTIED, tied_head=True, scale_logits=True)
    base = tmp_path / "base"
    convert.save(base, config, random_params(config))
    tensors = low_rank(tensors_of(base), ["lm_head"])
    adapter = write_adapter(tmp_path / "adapter", tensors)
    found, params = convert.load(base, adapter=adapter)
    assert (found.tied_head, found.scale_logits) == (False, True)
    embedding = convert.load(base)[1]["embedding"]
    np.testing.assert_array_equal(params["embedding"], embedding)
    change = product(tensors, "lm_head") * (ALPHA / RANK)
    np.testing.assert_allclose(params["head"], (np.asarray(embedding) + change).T, rtol=1e-6, atol=1e-6)
    convert.save(tmp_path / "again", found, params)
    assert_same_model(convert.load(tmp_path / "again"), (found, params))


def test_sums_are_rounded_once(base, tmp_path):
    """Of a bfloat16 checkpoint and a bfloat16 adapter, in float32, then to the compute dtype."""
    config, params = convert.load(base)
    convert.save(tmp_path / "half", config, params, dtype="bfloat16")
    tensors = {name: x.astype(jnp.bfloat16) for name, x in low_rank(tensors_of(base), MODULES[:1]).items()}
    adapter = write_adapter(tmp_path / "adapter", tensors)
    name = f"{MODULES[0]}.weight"
    exact = {key: x.astype(np.float32) for key, x in tensors.items()}
    whole = tensors_of(tmp_path / "half")[name].astype(np.float32) + product(exact, MODULES[0]) * 3.0
    found = convert.load(tmp_path / "half", "bfloat16", adapter=adapter)[1]["encoder_layers_1"]["attention"]
    ours = np.asarray(found["q"].astype(jnp.float32)).reshape(config.d_model, -1).T
    np.testing.assert_array_equal(ours, whole.astype(jnp.bfloat16).astype(np.float32))


def test_parts_of_a_mesh_are_merged_alike(base, tmp_path):
    tensors = low_rank(tensors_of(base), MODULES)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    (base / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0}')
    whole = specjax.load(base, adapter=adapter)
    divided = specjax.load(base, mesh=sharding.make_mesh(1, 2), adapter=str(adapter))
    assert divided.params["head"].sharding.spec == jax.P(None, "model")
    jax.tree.map(np.testing.assert_array_equal, whole.params, divided.params)
    assert isinstance(whole.network, t5.T5Network) and not whole.config.tied_head


def _without(name):
    return lambda tensors: {key: x for key, x in tensors.items() if name not in key}


def _rename(old, new):
    return lambda tensors: {key.replace(old, new): x for key, x in tensors.items()}


def _shorter(tensors):
    return {key: x[:, :-1] if key.endswith("lora_A.weight") else x for key, x in tensors.items()}


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (_rename(".q.", ".wq."), {}, f"does not fit the model: the model has no {ATTENTION}.wq.weight"),
        (
            _rename("block.1", "block.9"),
            {},
            "the model has no encoder.block.9.layer.0.SelfAttention.q.weight",
        ),
        (_rename(f"{ATTENTION}.q.lora_A.weight", "shared.lora_embedding_A"), {}, "lacks lora_A of .*\\.q"),
        (_shorter, {}, r"SelfAttention.q.weight must have the model's shape \(8, 8\), got \(8, 7\)"),
        (_without("lora_B"), {}, f"lacks lora_B of {ATTENTION}.q: copy it again"),
        (dict, {"r": 4}, "adapter_config.json states rank 4"),
        (
            dict,
            {"use_dora": True},
            "has use_dora .*is not supported: merge it with PEFT's `merge_and_unload`",
        ),
        (dict, {"peft_type": "IA3"}, "has peft_type IA3, which is not supported"),
        (dict, {"init_lora_weights": "pissa_niter_4"}, "has init_lora_weights pissa_niter_4 .it changes"),
        (_without("lora"), {}, "has no tensors"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused(base, tmp_path, change, settings, message):
    tensors = change(low_rank(tensors_of(base), [f"{ATTENTION}.q"]))
    adapter = write_adapter(tmp_path / "adapter", tensors, **settings)
    with pytest.raises(ValueError, match=message):
        convert.load(base, adapter=adapter)


def test_a_tensor_of_another_kind_is_named(base, tmp_path):
    tensors = low_rank(tensors_of(base), [f"{ATTENTION}.q"])
    tensors["base_model.model.shared.lora_embedding_A"] = np.ones((2, 24), np.float32)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    with pytest.raises(ValueError, match="the model has no base_model.model.shared.lora_embedding_A"):
        convert.load(base, adapter=adapter)


def test_missing_files_of_an_adapter_are_named(base, tmp_path):
    with pytest.raises(ValueError, match="`adapter` must be a directory or a hub id, got 3"):
        specjax.load(base, adapter=3)
    empty = tmp_path / "adapter"
    empty.mkdir()
    with pytest.raises(ValueError, match="which lacks adapter_config.json; copy it again"):
        convert.load(base, adapter=empty)
    (empty / "adapter_config.json").write_text(json.dumps(SETTINGS))
    (empty / "adapter_model.bin").touch()
    with pytest.raises(ValueError, match="lacks adapter_model.safetensors; .* safe_serialization=True"):
        convert.load(base, adapter=empty)
    (empty / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="adapter_model.safetensors is truncated or corrupt"):
        convert.load(base, adapter=empty)
