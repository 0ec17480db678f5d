"""T5Gemma 1 and 2 against transformers, position by position, and in the engine against themselves."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import specjax
from specjax import api, decode, sharding, tree
from specjax import cache as cache_lib
from specjax.drafters import EagleDrafter, ModelDrafter, ModelTreeDrafter
from specjax.models import convert, families, heads_io, quantize
from specjax.models.heads import HeadsConfig, HeadsNetwork
from specjax.models.t5gemma import T5Gemma, T5GemmaNetwork
from specjax.types import Tree
from tests.models import t5gemma_models
from tests.models.t5gemma_models import (
    GOLDEN,
    IMAGE_END,
    VERSIONS,
    V,
    config,
    draft_of,
    random_network,
    silent,
)

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
NUM_SOURCE, NUM_TOKENS, NUM_SLOTS = 17, 18, 26
LENGTHS = np.array([17, 11, 4])
MASK = np.arange(NUM_SOURCE)[None] < LENGTHS[:, None]
RNG = np.random.default_rng(0)
SOURCES = np.where(MASK, RNG.integers(3, V, MASK.shape), 0)
SOURCES[0, 2] = IMAGE_END
TOKENS = RNG.integers(3, V, (3, NUM_TOKENS))
TOKENS[:, 0] = 2
PARENTS = np.array([[0, 0, 1, 1, 3, 2], [0, 1, 2, 2, 0, 5], [0, 0, 0, 2, 4, 5]])


class Reference:
    """A model of transformers, its checkpoint in bfloat16 or not, and what specjax reads of it."""

    def __init__(self, version: int, directory):
        self.torch = pytest.importorskip("torch")
        self.model = t5gemma_models.torch_model(version)
        self.model.save_pretrained(directory)
        self.directory = directory
        read, params = silent(convert.load, directory, "float32")
        self.network = T5GemmaNetwork(params, read)

    def logits(self, sources, mask, tokens) -> np.ndarray:
        tensor = self.torch.tensor
        with self.torch.no_grad():
            output = self.model(
                input_ids=tensor(sources),
                attention_mask=tensor(mask).long(),
                decoder_input_ids=tensor(tokens),
                decoder_attention_mask=self.torch.ones(tokens.shape, dtype=self.torch.long),
            )
        return output.logits.numpy()


@pytest.fixture(scope="module", params=VERSIONS, ids=["1", "2"])
def reference(request, tmp_path_factory) -> Reference:
    return Reference(request.param, tmp_path_factory.mktemp("t5gemma"))


def empty_cache(network):
    run = jax.jit(lambda n: n.init_cache(n.encode(SOURCES, MASK), jnp.asarray(MASK), NUM_SLOTS))
    return run(network)


# ---- parity with transformers


def test_logits_with_the_cache_equal_transformers_position_by_position(reference):
    """Calls of different widths, each row then rolled back to a length of its own and fed again."""
    expected = reference.logits(SOURCES, MASK, TOKENS)
    assert np.abs(expected).max() > 2  # beyond where the cap does nothing
    step = jax.jit(lambda network, cache, tokens: network.decode(cache, tokens)[::2])
    cache, start = empty_cache(reference.network), 0
    for width in (5, 1, 1, 3, 1, 5, 1, 1):
        logits, cache = step(reference.network, cache, TOKENS[:, start : start + width])
        np.testing.assert_allclose(logits, expected[:, start : start + width], **TOLERANCE)
        start += width
    back = np.array([3, 9, 13])
    rows = np.arange(3)[:, None]
    columns = back[:, None] + np.arange(5)[None]
    logits, _ = step(reference.network, cache_lib.rollback(cache, jnp.asarray(back)), TOKENS[rows, columns])
    np.testing.assert_allclose(logits, expected[rows, columns], **TOLERANCE)


def test_logits_of_tree_nodes_equal_transformers_on_the_path_to_each(reference):
    """Windows and rotations are of text positions: nodes lie further on in the cache than in the text."""
    num_text, num_nodes = 12, PARENTS.shape[1]
    nodes = np.random.default_rng(1).integers(3, V, PARENTS.shape)
    topology = Tree(jnp.asarray(PARENTS), jnp.ones(PARENTS.shape, bool), num_nodes)

    @jax.jit
    def run(network, cache):
        start = jnp.full(3, num_text - 1)
        cache = network.decode(cache, TOKENS[:, : num_text - 1])[2]
        call = np.concatenate([TOKENS[:, num_text - 1 : num_text], nodes], axis=1)
        logits, _, cache = network.decode(cache, call, tree.layout(topology, start, NUM_SLOTS))
        # Kept: the deepest node's path, behind the root; then one more token after it.
        path = jnp.asarray([[2, 6, 0], [1, 2, 4], [2, 4, 0]])
        kept = cache_lib.keep_path(cache, start, path)
        length = jnp.asarray([num_text + 2, num_text + 3, num_text + 2])
        after = network.decode(cache_lib.rollback(kept, length), TOKENS[:, -1:])[0]
        return logits, after

    logits, after = run(reference.network, empty_cache(reference.network))
    paths = []
    for row, parents in enumerate(PARENTS):
        for node in range(num_nodes):
            path = [node]
            while parents[path[0]]:
                path.insert(0, parents[path[0]] - 1)
            paths.append((row, node + 1, [*TOKENS[row, :num_text], *nodes[row, path]]))
    for length in {len(text) for *_, text in paths}:
        alike = [one for one in paths if len(one[2]) == length]
        rows = [row for row, *_ in alike]
        expected = reference.logits(SOURCES[rows], MASK[rows], np.array([text for *_, text in alike]))
        found = np.stack([logits[row, place] for row, place, _ in alike])
        np.testing.assert_allclose(found, expected[:, -1], **TOLERANCE)
    for row, kept in enumerate(([1, 5], [0, 1, 3], [1, 3])):
        text = np.array([[*TOKENS[row, :num_text], *nodes[row, kept], TOKENS[row, -1]]])
        expected = reference.logits(SOURCES[[row]], MASK[[row]], text)
        np.testing.assert_allclose(after[row], expected[0, -1:], **TOLERANCE)


def test_greedy_tokens_of_50_sources_equal_transformers(reference):
    rng, limit = np.random.default_rng(2), 14
    mask = np.arange(12)[None] < rng.integers(1, 13, 50)[:, None]
    sources = np.where(mask, rng.integers(3, V - 1, mask.shape), 0)
    tensor = reference.torch.tensor
    with reference.torch.no_grad():
        expected = reference.model.generate(
            tensor(sources), attention_mask=tensor(mask).long(), max_new_tokens=limit, do_sample=False
        )[:, 1:].numpy()
    output = decode.generate(reference.network, sources, mask, max_new_tokens=limit)
    np.testing.assert_array_equal(output.tokens[:, : expected.shape[1]], expected)
    assert len(np.unique(expected)) >= 20


def test_what_specjax_writes_transformers_reads_as_the_same_model(reference, tmp_path):
    import transformers

    network = reference.network
    convert.save(tmp_path, network.config, network.params)
    again, params = silent(convert.load, tmp_path, "float32")
    assert again == network.config
    jax.tree.map(np.testing.assert_array_equal, params, network.params)
    kind = type(reference.model).__name__
    model = getattr(transformers, kind).from_pretrained(tmp_path, attn_implementation="eager").eval()
    expected, reference.model = reference.logits(SOURCES, MASK, TOKENS), model
    np.testing.assert_allclose(reference.logits(SOURCES, MASK, TOKENS), expected, rtol=1e-6, atol=1e-6)
    assert model.generation_config.decoder_start_token_id == 2


@pytest.mark.parametrize("version", VERSIONS)
def test_logits_equal_those_that_transformers_gave(version):
    """Without torch: a checkpoint in bfloat16 that it wrote, computed in float32.

    Later tokens do not reach an earlier position.
    """
    read, params = silent(convert.load, GOLDEN / f"t5gemma_{version}", "float32")
    with np.load(GOLDEN / f"t5gemma_{version}.npz") as golden:
        given = [golden[name] for name in ("source_ids", "source_mask", "decoder_input")]
        apply = jax.jit(lambda params, *given: T5Gemma(read).apply({"params": params}, *given))
        logits = apply(params, *given)
        np.testing.assert_allclose(logits, golden["logits"], **TOLERANCE)
        middle = given[2].shape[1] // 2
        other = given[2].copy()
        other[:, middle:] = 3
        changed = apply(params, *given[:2], other)
        np.testing.assert_array_equal(changed[:, :middle], logits[:, :middle])
        assert (changed[:, middle:] != logits[:, middle:]).any()


# ---- checkpoints


def test_a_sharded_file_in_bfloat16_with_other_names_is_read(tmp_path):
    """As the hub has version 2, and as newer transformers name its tensors; one notice about vision."""
    golden = GOLDEN / "t5gemma_2"
    tensors = safetensors.numpy.load_file(golden / "model.safetensors")
    assert {x.dtype.name for x in tensors.values()} == {"bfloat16"}
    of_encoder = ("embed_tokens", "layers", "norm")
    for part in of_encoder:
        old, new = f"model.encoder.{part}", f"model.encoder.text_model.{part}"
        tensors = {name.replace(old, new): x for name, x in tensors.items()}
    tensors["lm_head.out_proj.weight"] = tensors["model.encoder.text_model.embed_tokens.weight"]
    names = sorted(tensors)
    files = {f"model-{i + 1}-of-3.safetensors": names[i::3] for i in range(3)}
    for file, members in files.items():
        safetensors.numpy.save_file({name: tensors[name] for name in members}, tmp_path / file)
    index = {"weight_map": {name: file for file, members in files.items() for name in members}}
    (tmp_path / convert.INDEX).write_text(json.dumps(index))
    (tmp_path / "config.json").write_text((golden / "config.json").read_text())
    with pytest.warns(UserWarning, match="the vision part of this T5Gemma 2 is not loaded") as notices:
        read, params = convert.load(tmp_path, "bfloat16")
    assert len(notices) == 1
    expected, original = silent(convert.load, golden, "bfloat16")
    assert read == expected and read.tied_head
    jax.tree.map(np.testing.assert_array_equal, params, original)


def test_a_tensor_that_is_missing_or_left_over_is_named(tmp_path):
    golden = GOLDEN / "t5gemma_1"
    tensors = safetensors.numpy.load_file(golden / "model.safetensors")
    tensors["model.decoder.layers.0.other"] = tensors.pop("model.encoder.norm.weight")
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((golden / "config.json").read_text())
    named = "missing: model.encoder.norm.weight; left over: model.decoder.layers.0.other"
    with pytest.raises(ValueError, match=named):
        convert.load(tmp_path)


def test_sources_begin_as_gemmas_tokenizer_begins_them_and_are_cut_where_it_ends_none(tmp_path):
    from tokenizers import processors
    from transformers import GemmaTokenizer

    shutil.copytree(GOLDEN / "t5gemma_1", tmp_path, dirs_exist_ok=True)
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *"abcdefghijklmnop", "ab"]
    tokenizer = GemmaTokenizer(vocab={x: i for i, x in enumerate(pieces)}, merges=[("a", "b")])
    begin = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer.backend_tokenizer.post_processor = begin
    tokenizer.save_pretrained(tmp_path)
    target = specjax.load(tmp_path, "float32")
    assert target.num_ids == len(pieces) and target.tokenizer("ab d").input_ids == [2, 22, 5, 9]
    prompts = ["abcd e f ijk", "d"]
    ids, mask = api.encode_sources(target, [prompt[:6] for prompt in prompts])
    np.testing.assert_array_equal(ids[mask], [2, 22, 8, 9, 5, 10, 2, 9])
    cut = specjax.generate(target, prompts, max_new_tokens=6, max_source_length=6, truncate=True)
    plain = decode.generate(target.network, ids, mask, max_new_tokens=6)
    assert cut.token_ids == [row[:n].tolist() for row, n in zip(plain.tokens, plain.length, strict=True)]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention_bias": True}, "attention_bias of the decoder is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' of the decoder is not supported"),
        ({"hidden_activation": "tanh"}, "`hidden_activation` must be .*, got gelu_pytorch_tanh, tanh"),
        ({"head_dim": None}, "config.json lacks head_dim of its decoder"),
        ({"layer_types": ["full_attention"]}, "layer_types of the decoder must name 2 known layers"),
    ],
)
def test_a_config_that_is_not_supported_is_named(change, named):
    given = t5gemma_models.hf_config(1) | {"model_type": "t5gemma"}
    given["decoder"] = given["decoder"] | change
    with pytest.raises(ValueError, match=named):
        convert.config_from_hf(given)


def test_end_tokens_of_instruction_tuned_models_are_read():
    ids = {"eos_token_id": [1, 107], "bos_token_id": 2}
    read = convert.config_from_hf(t5gemma_models.hf_config(1) | {"model_type": "t5gemma"} | ids)
    network = families.network({}, read)
    assert (network.eos_ids, network.start_id, network.pad_id) == ((1, 107), 2, 0)


def test_presets_have_the_published_sizes():
    def num_params(name):
        return sum(int(np.prod(t.shape)) for t in convert.tensor_names(families.PRESETS[name]))

    published = {"t5gemma-s-s": 312_517_632, "t5gemma-b-b": 591_490_560}
    assert {name: num_params(name) for name in published} == published
    billions = {name: round(num_params(name) / 1e9, 1) for name in families.PRESETS if "gemma" in name}
    assert billions == {
        "t5gemma-s-s": 0.3,
        "t5gemma-b-b": 0.6,
        "t5gemma-l-l": 1.2,
        "t5gemma-ml-ml": 2.2,
        "t5gemma-xl-xl": 3.8,
        "t5gemma-2b-2b": 5.6,
        "t5gemma-9b-2b": 12.3,
        "t5gemma-9b-9b": 20.3,
        "t5gemma-2-270m-270m": 0.4,
        "t5gemma-2-1b-1b": 1.7,
        "t5gemma-2-4b-4b": 7.1,
    }


def test_keys_and_values_of_fewer_heads_than_devices_are_whole():
    shapes = convert.shapes(dataclasses.replace(config(1), vocab_size=V))
    mesh = sharding.make_mesh(1, 2)
    placed = sharding.param_shardings(shapes, mesh)
    attention = {side: placed[f"{side}_layers_0"]["attention"] for side in ("encoder", "decoder")}
    assert all("model" in place.spec for place in attention["decoder"].values())
    # Three heads of keys on two devices, six of queries.
    assert "model" in attention["encoder"]["q"].spec and "model" not in attention["encoder"]["k"].spec
    divided, whole = sharding.of_cache(mesh, num_heads=2), sharding.of_cache(mesh, num_heads=3)
    assert divided.shard_shape((4, 2, 8, 8)) == (4, 1, 8, 8)
    assert whole.shard_shape((4, 3, 8, 8)) == (4, 3, 8, 8)
    logits = jnp.ones((2, 1, V))
    assert sharding.keep_whole(logits, whole) is logits  # of a network that is divided all the same


# ---- training


@pytest.mark.parametrize("version", VERSIONS)
def test_a_loss_has_a_gradient_in_every_parameter(version):
    """By teacher forcing, with dropout."""
    network = random_network(dataclasses.replace(config(version), dropout_rate=0.1))
    module, batch = network.module, (SOURCES, jnp.asarray(MASK), TOKENS)

    def loss(params):
        noise = {"dropout": jax.random.key(0)}
        logits = module.apply({"params": params}, *batch, False, rngs=noise)
        return jax.nn.logsumexp(logits, axis=-1).sum()

    for path, gradient in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(network.params)):
        assert jnp.isfinite(gradient).all() and jnp.abs(gradient).max() > 0, path


# ---- the engine


# What drafters ask of a network, each once: a cache of its own, a tree, weights in eight bits, features of
# a layer. How they draft does not depend on the family.
DRAFTERS = {
    "chain": lambda target: ModelDrafter(draft_of(target), 2),
    "tree": lambda target: ModelTreeDrafter(draft_of(target), (2, 1)),
    "int8": lambda target: ModelDrafter(quantize.QuantizedNetwork.of(target), 2),
    "eagle": lambda target: EagleDrafter(heads_of(target, feature_layers=(0,)), 2),
}


def heads_of(target: T5GemmaNetwork, **options) -> HeadsNetwork:
    shape = HeadsConfig("eagle", 3, target.config.d_model, 4, 16, 2, **options)
    shape.check(target.config)
    params = jax.jit(lambda target: heads_io.init(shape, target, 0).params)(target)
    return HeadsNetwork.of(shape, target, params)


@functools.cache
def target_of(version: int) -> T5GemmaNetwork:
    return random_network(config(version))


@functools.cache
def plain_tokens(version: int) -> np.ndarray:
    return generate(target_of(version)).tokens


def generate(target, drafter=None, **options):
    options = dict(max_new_tokens=14, eos_ids=(), length_bucket=14) | options
    return jax.tree.map(np.asarray, decode.generate(target, SOURCES, MASK, drafter=drafter, **options))


CASES = [(1, "int8"), (1, "tree"), (2, "chain"), (2, "eagle")]


@pytest.mark.slow
@pytest.mark.parametrize(("version", "name"), CASES)
def test_every_drafter_gives_the_tokens_of_autoregressive_decoding(version, name):
    target, tokens = target_of(version), plain_tokens(version)
    output = generate(target, DRAFTERS[name](target))
    np.testing.assert_array_equal(output.tokens, tokens)
    assert len(np.unique(tokens)) > 6
    assert output.stats.num_drafted.sum() > 0
    if name != "eagle":
        assert output.stats.accepted.sum() > 0


@pytest.mark.slow
def test_on_a_mesh_tokens_are_those_of_one_device():
    """Queries are sharded over two devices; their one head of keys and the draft are replicated."""
    shape = config(2)
    sides = {
        name: dataclasses.replace(getattr(shape, name), num_kv_heads=1) for name in ("encoder", "decoder")
    }
    target, mesh = random_network(dataclasses.replace(shape, **sides)), sharding.make_mesh(1, 2)

    def placed(network, rules):
        params = jax.device_put(network.params, sharding.param_shardings(network.params, mesh, rules))
        place = sharding.of_cache(mesh, rules, num_heads=1)
        return network.replace(params=params, cache_sharding=place)

    divided = placed(target, sharding.T5_RULES)
    attention = divided.params["decoder_layers_0"]["attention"]
    assert attention["k"].is_fully_replicated and not attention["q"].is_fully_replicated
    draft = placed(draft_of(target), sharding.REPLICATED)
    output = generate(divided, ModelDrafter(draft, 2))
    np.testing.assert_array_equal(output.tokens, generate(target).tokens)
    assert output.stats.accepted.sum() > 0
