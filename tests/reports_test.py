"""Defects reported for similar systems: a minimal input of each, and the right value."""

import json
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import specjax
from specjax import data, decode, drafters, hub, loading, texts
from specjax.models import convert, t5
from tests import text_model
from tests.models.checkpoints import TINY, assert_same_model, random_params
from tests.text_model import Letters, random_model


@pytest.fixture
def directory(tmp_path):
    """An untied checkpoint without tokenizer."""
    config = convert.T5Config(**{**vars(TINY), "tied_head": False, "scale_logits": False})
    convert.save(tmp_path / "model", config, random_params(config))
    return tmp_path / "model"


def rename(directory, changes):
    """Writes the tensors again under other names; None leaves one out."""
    path = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    renamed = {changes.get(name, name): tensor for name, tensor in tensors.items()}
    renamed.pop(None, None)
    safetensors.numpy.save_file(renamed, path)


def edit(path, **changes):
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(found | changes))


@pytest.mark.parametrize("alias", ["decoder.embed_tokens.weight", "encoder.embed_tokens.weight"])
def test_the_embedding_is_found_under_the_name_of_a_copy(directory, alias):
    """MADLAD-400, and what `safetensors.torch.save_model` writes."""
    whole = convert.load(directory)
    rename(directory, {"shared.weight": alias})
    assert_same_model(convert.load(directory), whole)
    assert not whole[0].tied_head


def test_a_tied_head_may_be_the_only_copy_of_the_embedding(tmp_path):
    convert.save(tmp_path, TINY, random_params(TINY))
    whole = convert.load(tmp_path)
    rename(tmp_path, {"shared.weight": "lm_head.weight"})
    assert_same_model(convert.load(tmp_path), whole)


def test_special_ids_of_the_generation_config_hold(directory):
    edit(directory / "generation_config.json", decoder_start_token_id=7, eos_token_id=[1, 20], num_beams=4)
    config, params = convert.load(directory)
    assert (config.start_id, config.eos_id, config.other_eos_ids) == (7, 1, (20,))
    network = specjax.models.t5.T5Network(params, config)
    assert network.eos_ids == (1, 20) and network.start_id == 7


def test_several_end_tokens_stand_in_config_json_too_and_are_written_back(directory, tmp_path):
    edit(directory / "config.json", eos_token_id=[1, 20])
    (directory / "generation_config.json").unlink(missing_ok=True)
    config, params = convert.load(directory)
    convert.save(tmp_path / "again", config, params)
    assert convert.load(tmp_path / "again")[0] == config and config.other_eos_ids == (20,)


@pytest.mark.parametrize("sizes", [(40, 48), (48, 40)])
def test_draft_and_target_may_be_padded_differently(sizes):
    """Only ids of the smaller vocabulary are drafted."""
    networks = []
    for seed, size in enumerate(sizes):
        config = convert.T5Config(size, 16, 4, 32, 4, 1, 1, gated=True, tied_head=False, scale_logits=False)
        params = random_params(config, seed)
        networks.append(specjax.models.t5.T5Network(params, config))
    target, draft = networks
    if sizes[0] > sizes[1]:
        target = target.with_vocabulary(texts.Vocabulary("digest", {i: str(i) for i in range(40)}))
    ids, mask = np.array([[5, 7, 9], [3, 1, 0]]), np.array([[1, 1, 1], [1, 1, 0]], bool)
    plain = decode.generate(target, ids, mask, max_new_tokens=12)
    ours = decode.generate(target, ids, mask, drafter=drafters.ModelDrafter(draft, 3), max_new_tokens=12)
    np.testing.assert_array_equal(ours.tokens, plain.tokens)
    assert int(ours.stats.num_drafted.sum()) > 0 and int(ours.tokens.max()) < 40


def test_a_stop_string_may_be_a_special_token():
    class Special(Letters):
        all_special_tokens = ("</s>", "<unk>")

    model = random_model(1, Special())
    plain = specjax.generate(model, ["a b", "dog"], max_new_tokens=8, eos_ids=())
    stop = texts.stop_at(Special(), ["<unk>"])
    assert stop([5, 2, 6], 0) == 2 and texts.stop_at(Special(), ["b"])([5, 2, 4], 0) == 3
    assert len(plain.texts) == 2


def test_load_tokenizer_raises_without_vocabulary_files(tmp_path):
    edit(tmp_path / "tokenizer_config.json", tokenizer_class="T5Tokenizer", extra_ids=100)
    with pytest.raises(ValueError, match="it needs tokenizer.json, or spiece.model, or vocab.json"):
        loading.load_tokenizer(tmp_path)
    edit(tmp_path / "tokenizer_config.json", tokenizer_class="ByT5Tokenizer", extra_ids=0)
    assert len(loading.load_tokenizer(tmp_path)("ab").input_ids) == 3


def test_options_of_the_hub_are_passed_on(monkeypatch):
    from transformers.utils import hub

    asked = []

    def cached_file(source, name, **options):
        asked.append((source, name, options))
        raise OSError("no such revision")

    monkeypatch.setattr(hub, "cached_file", cached_file)
    with pytest.raises(ValueError, match="could be fetched from the hub: no such revision"):
        specjax.load("someone/model", revision="v2", subfolder="target", token="secret")
    ((source, name, options),) = asked
    assert (source, name, options["revision"], options["subfolder"]) == (
        "someone/model",
        "config.json",
        "v2",
        "target",
    )
    with pytest.raises(ValueError, match="`revison` is not an option of load; the options are dtype"):
        specjax.load("someone/model", revison="v2")


def test_generate_raises_for_an_id_without_an_embedding():
    """Tokens were added, and the model was not resized."""
    added = Letters([*text_model.PIECES, *"01"])
    with pytest.raises(ValueError, match=r"prompts\[1\] has the id 32, .* 31 embeddings .* 33 ids"):
        specjax.generate(random_model(1, added), ["a", "b 1"])
    with pytest.raises(ValueError, match=r"`source_ids` must be in 0..30 .*, got -100"):
        decode.generate(random_model(1).network, np.array([[5, -100]]), np.ones((1, 2), bool))
    padded = decode.generate(  # padding may be anything
        random_model(1).network, np.array([[5, -100]]), np.array([[True, False]]), max_new_tokens=3
    )
    assert int(padded.length[0]) >= 1


def test_generate_raises_for_prompts_that_are_not_valid_text():
    model = random_model(1)
    with pytest.raises(ValueError, match="`prompts` must be a non-empty list of strings"):
        specjax.generate(model, {"text": ["a"]})
    for generate in (specjax.generate, specjax.generate_all):
        with pytest.raises(ValueError, match=r"prompts\[1\] must be Unicode text, got half of a sur"):
            generate(model, ["ok", "ok \ud83d"])


def test_generate_warns_of_equal_greedy_samples():
    with pytest.warns(UserWarning, match="`num_samples`=2 equal samples: set a temperature"):
        output = specjax.generate(random_model(1), ["a b"], num_samples=2, max_new_tokens=4)
    assert output.texts[0] == output.texts[1]


def test_a_dtype_of_jax_is_taken(directory):
    assert convert.load(directory, jnp.bfloat16)[0].dtype == "bfloat16"
    with pytest.raises(ValueError, match="`dtype` must be one of float32, bfloat16, float16, got 'int32'"):
        convert.load(directory, jnp.int32)


def test_a_carriage_return_ends_a_line(tmp_path):
    (tmp_path / "old.txt").write_bytes(b"one\rtwo\r\nthree\n")
    assert data.read_lines(tmp_path / "old.txt") == ["one", "two", "three"]


def test_load_reads_all_files_from_a_subfolder(tmp_path, directory):
    """Config, weights and tokenizer of it, not of the directory around it."""
    other = convert.T5Config(**{**vars(TINY), "d_ff": 20})
    convert.save(tmp_path / "model" / "inner", other, random_params(other))
    edit(tmp_path / "model" / "inner" / "tokenizer_config.json", tokenizer_class="ByT5Tokenizer", extra_ids=0)
    assert specjax.load(tmp_path / "model", subfolder="inner").config.d_ff == 20
    assert convert.load(directory)[0].d_ff == TINY.d_ff


def test_generate_raises_for_a_prefix_id_without_an_embedding():
    with pytest.raises(ValueError, match="`decoder_prefix` has the id 32, but the model has 31 embeddings"):
        specjax.generate(random_model(1, Letters([*text_model.PIECES, *"01"])), ["a"], decoder_prefix="1")


def test_generate_works_with_debug_nans_and_transfer_guard(directory):
    """Rows without calls or drafts have nan on purpose; ids go in and out."""
    edit(directory / "tokenizer_config.json", tokenizer_class="ByT5Tokenizer", extra_ids=0)
    model, drafter = random_model(1), drafters.from_model(random_model(2), num_draft=2)
    with jax.debug_nans(True), jax.transfer_guard("disallow"):
        assert specjax.load(directory).params["embedding"].shape == (TINY.vocab_size, TINY.d_model)
        stats = specjax.generate(model, ["a b", "dog"], max_new_tokens=5, temperature=[0, 1]).stats
        assert np.isnan(stats.alpha).all() and np.isnan(stats.total().alpha).all()
        assert (stats.tau == 1).all() and (stats.accepted_per_round == 0).all()
        many = specjax.generate_all(model, ["a b", "dog"], batch_size=2, drafter=drafter, max_new_tokens=3)
        assert (many.stats.tau >= 1).all() and not np.isnan(many.stats.alpha).any()


def test_generate_raises_before_tracing_if_memory_is_too_small():
    for limit, words in ((1_000_000_000, "of 2 rows would take [0-9,]+ GiB of"), (10**12, "at most 2.1")):
        with pytest.raises(ValueError, match=f"`max_new_tokens` must .*{words}"):
            specjax.generate(random_model(1), ["a b", "dog"], max_new_tokens=limit)
    config = t5.PRESETS["t5-11b"]
    abstract = t5.T5Network(convert.shapes(config), config)
    with pytest.raises(ValueError, match="the cache of 8 rows would take 2,?[0-9]+ GiB"):
        decode.check_memory(abstract, 8, 512, 100_000)
    decode.check_memory(abstract, 8, 512, 1024)


def test_without_network_the_hub_is_not_waited_for(monkeypatch):
    """Its client would retry for 20 s, for each file, silently or not."""

    def unknown(*about):
        raise OSError("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)
    assert hub.reachable({"revision": "v2"}) == {"revision": "v2", "local_files_only": True}
    with pytest.raises(
        ValueError, match="nobody/nothing has no config.json locally or on the hub .or the hub"
    ):
        specjax.load("nobody/nothing")
    monkeypatch.setattr(hub.urllib.request, "getproxies", lambda: {"https": "proxy"})
    assert hub.reachable({"revision": "v2"}) == {"revision": "v2"}
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *about: [])
    assert hub.reachable({}) == {}
