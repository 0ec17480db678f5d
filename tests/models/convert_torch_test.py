"""Checkpoints against torch, live: it reads what was written, and is read."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

from specjax import convert_checkpoint, loading
from specjax.models import convert, t5
from tests.models.checkpoints import GOLDEN, HERE, NAMES, TIED_HEADS, TINY, assert_same_model, random_params
from tests.models.families import write_byt5, write_llama, write_roberta, write_spiece


@pytest.fixture(scope="module")
def torch_side():
    """The module that writes the golden files; skips where torch is not installed."""
    pytest.importorskip("torch")
    sys.path.insert(0, str(HERE))
    try:
        import make_golden
    finally:
        sys.path.remove(str(HERE))
    return make_golden


def _logits(config, params, given):
    arguments = (jnp.asarray(given[name]) for name in ("source_ids", "source_mask", "decoder_input"))
    return jax.jit(t5.T5(config).apply)({"params": params}, *arguments)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_a_fresh_torch_model(torch_side, tmp_path, name):
    model = torch_side.build(name, seed=17)
    model.save_pretrained(tmp_path)
    given = torch_side.inputs(model.config.vocab_size, seed=18)
    config, params = convert.load(tmp_path, dtype="float32")
    assert config.tied_head is config.scale_logits is (name == "v1_0")
    expected = torch_side.run(model, given)["logits"]
    np.testing.assert_allclose(_logits(config, params, given), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", TIED_HEADS)
def test_torch_reads_what_was_saved_to_the_same_logits_with_no_key_missing(torch_side, tmp_path, head):
    transformers = pytest.importorskip("transformers")
    config = dataclasses.replace(TINY, gated=head != "tied, scaled", **TIED_HEADS[head])
    params = random_params(config)
    convert.save(tmp_path, config, params)
    model, info = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    given = torch_side.inputs(config.vocab_size, seed=19)
    expected = torch_side.run(model.eval(), given)["logits"]
    np.testing.assert_allclose(_logits(config, params, given), expected, rtol=1e-5, atol=1e-5)
    assert model.generation_config.decoder_start_token_id == config.start_id

    model.save_pretrained(tmp_path / "again")  # as version 5 writes it
    assert_same_model(convert.load(tmp_path / "again"), (config, params))


def test_mt5_saved_by_torch_gives_torchs_logits(torch_side, tmp_path):
    transformers = pytest.importorskip("transformers")
    hf_config = transformers.MT5Config(
        vocab_size=48, d_model=16, d_kv=8, d_ff=24, num_heads=3, num_layers=1, decoder_start_token_id=0
    )
    model = transformers.MT5ForConditionalGeneration(hf_config).eval()
    model.save_pretrained(tmp_path)
    given = torch_side.inputs(48, seed=20)
    config, params = convert.load(tmp_path, dtype="float32")
    args = {
        key: torch_side.torch.tensor(given[name])
        for key, name in (
            ("input_ids", "source_ids"),
            ("attention_mask", "source_mask"),
            ("decoder_input_ids", "decoder_input"),
        )
    }
    expected = model(**args).logits.detach().numpy()
    np.testing.assert_allclose(_logits(config, params, given), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["whole", "old", "shards", "copy only"])
def test_pytorch_model_bin_is_converted(torch_side, tmp_path, kind):
    """As PyTorch writes it, as it wrote it before 1.6, and in shards; the output in shards of its own."""
    torch = pytest.importorskip("torch")
    source, output, lines = tmp_path / "source", tmp_path / "output", []
    shutil.copytree(GOLDEN / "v1_1", source)
    stored = safetensors.numpy.load_file(source / "model.safetensors")
    tensors = {name: torch.tensor(value) for name, value in stored.items()}
    for copy in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        tensors[copy] = tensors["shared.weight"]  # as in the files on the hub
    (source / "model.safetensors").unlink()
    if kind == "shards":
        names = sorted(tensors)
        files = {f"pytorch_model-{i}.bin": names[i::2] for i in range(2)}
        for file, some in files.items():
            torch.save({name: tensors[name] for name in some}, source / file)
        weight_map = {name: file for file, some in files.items() for name in some}
        (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        if kind == "copy only":  # as `save_model` leaves it
            del tensors["shared.weight"], tensors["encoder.embed_tokens.weight"]
        new = kind != "old"
        torch.save(tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    convert_checkpoint.convert_checkpoint(source, output, shard_gb=0.00002, report=lines.append)
    assert any("loaded whole" in line for line in lines) == (kind == "old")
    assert len(list(output.glob("model-*.safetensors"))) > 1 and not list(tmp_path.glob(".output*"))
    assert_same_model(convert.load(output), convert.load(GOLDEN / "v1_1"))


@pytest.mark.parametrize("write", [write_roberta, write_spiece, write_llama, write_byt5])
def test_a_converted_checkpoint_keeps_its_tokenizer(torch_side, tmp_path, write):
    """CodeT5 has vocab.json and merges.txt; others spiece.model, here with tokens that were added."""
    torch = pytest.importorskip("torch")
    source, output = tmp_path / "source", tmp_path / "output"
    source.mkdir()
    write(source)
    shutil.copy(GOLDEN / "v1_1" / "config.json", source)
    if write is write_spiece:
        size = len(loading.load_tokenizer(source))
        added = {"[NEW1]": size, "[NEW2]": size + 1}
        (source / "added_tokens.json").write_text(json.dumps(added))
    stored = safetensors.numpy.load_file(GOLDEN / "v1_1" / "model.safetensors")
    torch.save({name: torch.tensor(value) for name, value in stored.items()}, source / "pytorch_model.bin")
    convert_checkpoint.convert_checkpoint(source, output)
    before, after = loading.load_tokenizer(source), loading.load_tokenizer(output)
    assert before.get_vocab() == after.get_vocab() and len(after) > 40
    text = "def add(a, [NEW2] b): <extra_id_1> \u00e9 man </s> rides"
    assert before(text).input_ids == after(text).input_ids
    if write is write_spiece:
        assert size + 1 in after(text).input_ids


def test_what_cannot_be_converted_is_stated(torch_side, tmp_path):
    with pytest.raises(ValueError, match="has no pytorch_model.bin; give a directory that has them"):
        convert_checkpoint.convert_checkpoint(GOLDEN / "v1_0", tmp_path / "none")
    with pytest.raises(ValueError, match="`output` must be a new directory, got .*, which exists"):
        convert_checkpoint.convert_checkpoint(GOLDEN / "v1_0", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_that_errors_name_converts(torch_side, tmp_path):
    torch = pytest.importorskip("torch")
    source, output = tmp_path / "source", tmp_path / "output"
    shutil.copytree(GOLDEN / "v1_1", source)
    stored = safetensors.numpy.load_file(source / "model.safetensors")
    torch.save({name: torch.tensor(value) for name, value in stored.items()}, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError) as error:
        convert.load(source)
    (command,) = re.findall("`python (.*)`", str(error.value))
    command = [sys.executable, *command.replace("DIRECTORY", str(output)).split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1])
    assert done.returncode == 0 and f"wrote {output}" in done.stdout, done.stderr
    assert_same_model(convert.load(output), convert.load(GOLDEN / "v1_1"))
    again = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1])
    assert again.returncode == 1 and again.stderr.startswith("`output` must be a new directory")
