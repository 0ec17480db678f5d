"""The options of a request: read from a checkpoint, the same as transformers, the same with any drafter."""

import dataclasses
import itertools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import GenerationConfig, decode
from specjax.drafters import ModelDrafter, ModelTreeDrafter
from specjax.models import convert, t5
from tests.decode_t5_test import bigram_network
from tests.tiny_t5 import CONFIG, DRAFT_CONFIG, random_params

V = CONFIG.vocab_size


def read(directory, **found):
    (directory / "generation_config.json").write_text(json.dumps(found))
    return GenerationConfig.from_pretrained(directory)


# ---- generation_config.json


def test_from_pretrained_takes_supported_options(tmp_path):
    """As of a CNN/DailyMail checkpoint; lengths count the start token there."""
    with pytest.warns(
        UserWarning, match="num_beams=4, length_penalty=2.0, early_stopping=True, which spec"
    ) as found:
        config = read(
            tmp_path,
            num_beams=4,
            length_penalty=2.0,
            early_stopping=True,
            no_repeat_ngram_size=3,
            min_length=56,
            max_length=142,
            suppress_tokens=[5, 6],
            begin_suppress_tokens=[7],
            bad_words_ids=[[8], [9, 10]],
            repetition_penalty=1.2,
            eos_token_id=[1, 3],
            sequence_bias=[[[4], -1.5]],
            stop_strings="###",
            temperature=0.7,  # not read without do_sample
            decoder_start_token_id=0,
            transformers_version="5.24.0",
        )
    assert len(found) == 1
    assert (config.max_new_tokens, config.min_new_tokens, config.no_repeat_ngram_size) == (141, 55, 3)
    assert (config.suppress_tokens, config.begin_suppress_tokens) == ([5, 6], [7])
    assert config.bad_words_ids == [[8], [9, 10]] and config.logit_bias == {4: -1.5}
    assert (config.temperature, config.repetition_penalty, config.eos_ids) == (0.0, 1.2, (1, 3))
    assert config.stop_strings == ("###",) and config.is_greedy
    config.to_options(2, config.eos_ids, V, V)


def test_from_pretrained_samples_as_transformers_does(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = read(tmp_path, do_sample=True, max_new_tokens=7, max_length=20, num_beams=1, eos_token_id=1)
        assert (config.temperature, config.top_k, config.top_p) == (1.0, 50, None)
        assert (config.max_new_tokens, config.eos_ids) == (7, (1,))
        config = read(
            tmp_path, do_sample=True, temperature=0.3, top_k=0, top_p=0.9, no_repeat_ngram_size=None
        )
        assert (config.temperature, config.top_k, config.top_p) == (0.3, None, 0.9)
        assert config.no_repeat_ngram_size == 0


def test_from_pretrained_raises_without_a_valid_file(tmp_path):
    with pytest.raises(ValueError, match="has no generation_config.json: give a checkpoint that has one"):
        GenerationConfig.from_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="`do_sample` of generation_config.json must be true or false, got 'no'"
    ):
        read(tmp_path, do_sample="no")
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match="generation_config.json"):
        GenerationConfig.from_pretrained(tmp_path)


# ---- what raises, what costs nothing


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(no_repeat_ngram_size=-1), "`no_repeat_ngram_size` must be one whole number"),
        (dict(no_repeat_ngram_size=[2, 3]), "`no_repeat_ngram_size` must be one whole number for all rows"),
        (dict(logit_bias=[1, 2]), "`logit_bias` must map ids to numbers"),
        (dict(logit_bias={V: 1.0}), rf"`logit_bias` must hold ids in 0..{V - 1}, got {V}"),
        (
            dict(logit_bias={3: np.nan}),
            "`logit_bias` must be a number below inf for each id, got nan for id 3",
        ),
        (dict(logit_bias={3: np.inf}), "`logit_bias` must be a number below inf"),
        (dict(suppress_tokens=[-1]), "`suppress_tokens` must be a list of ids"),
        (dict(suppress_tokens=[2.5]), "`suppress_tokens` must be a list of ids"),
        (dict(suppress_tokens=range(V)), "`suppress_tokens` must leave a token"),
        (dict(begin_suppress_tokens=[V]), "`begin_suppress_tokens` must hold ids in"),
        (dict(no_repeat_ngram_size=10**12), "`no_repeat_ngram_size` must be one whole number"),
        (dict(bad_words_ids=5), "`bad_words_ids` must be a list of sequences of ids, got 5"),
        (dict(bad_words_ids=np.array([[3, V]])), "`bad_words_ids` must hold ids in"),
        (dict(bad_words_ids=[[]]), "`bad_words_ids` must be sequences of ids, none empty"),
        (dict(bad_words_ids=[3]), "`bad_words_ids` must be a list of ids"),
        (dict(bad_words_ids=[[3, V]]), "`bad_words_ids` must hold ids in"),
        (dict(presence_penalty=np.inf), "`presence_penalty` must be"),
        (
            dict(frequency_penalty=[1.0, 2.0, 3.0]),
            r"`frequency_penalty` must be one number or one per row \(2\)",
        ),
        (dict(logits_processor=3), "`logits_processor` must be a function"),
    ],
)
def test_prepare_raises_for_an_invalid_option_by_name(options, words):
    network = t5.T5Network(convert.shapes(CONFIG), CONFIG)
    with pytest.raises(ValueError, match=words):
        decode.prepare(network, np.ones((2, 3), int), np.ones((2, 3), bool), **options)


def test_options_that_change_nothing_are_not_in_the_program():
    network = bigram_network(CONFIG, 0)
    given = (np.ones((2, 3), int), np.ones((2, 3), bool))
    neutral = GenerationConfig(
        temperature=0.5,
        repetition_penalty=1.0,
        presence_penalty=[0.0, 0.0],
        frequency_penalty=0.0,
        no_repeat_ngram_size=0,
        logit_bias={},
        suppress_tokens=(),
        bad_words_ids=[[1]],  # the end token alone
        top_p=1.0,
        min_p=0.0,
        min_new_tokens=0,
    )
    texts = []
    for config in (GenerationConfig(temperature=0.5), neutral.without_neutral(), neutral):
        request = decode.prepare(network, *given, config=config, max_new_tokens=5)
        texts.append(decode.jitted_generate.lower(*request).as_text())
    assert texts[0] == texts[1] != texts[2]
    # A temperature that was left out stays what it was without the filters that are dropped.
    assert GenerationConfig(top_p=1.0).without_neutral().temperature == 1.0
    assert GenerationConfig(repetition_penalty=1.0).without_neutral().temperature == 0.0


# ---- the same with any drafter


def keeps_parity(logits, history):
    """An even id follows an odd one, and the other way round."""
    last = jnp.take_along_axis(history.tokens, history.length[..., None] - 1, axis=-1)
    same = (jnp.arange(logits.shape[-1])[None, None] - last) % 2 == 0
    return jnp.where(same, logits - 2.0, logits)


MIXTURES = {
    "lists": dict(
        no_repeat_ngram_size=2,
        bad_words_ids=[[5], [7, 8], [3, 9, 4]],
        begin_suppress_tokens=[9, 11],
        presence_penalty=0.7,
        frequency_penalty=0.4,
        logit_bias={6: 2.0, 1: -3.0},
        suppress_tokens=[12],
    ),
    "own function": dict(logits_processor=keeps_parity, min_new_tokens=4),
}


def drafter_of(kind):
    draft = bigram_network(DRAFT_CONFIG, 1)
    return ModelDrafter(draft, 2) if kind == "chain" else ModelTreeDrafter(draft, (2, 1))


@pytest.mark.parametrize(
    ("name", "temperature", "kind"),
    [
        ("lists", 0.0, "tree"),
        ("lists", 0.8, "chain"),
        ("own function", 0.0, "chain"),
        ("own function", 0.8, "tree"),
    ],
)
def test_200_sources_decode_alike_with_and_without_drafters(name, temperature, kind):
    """At temperature 0 the ids are the same; above it, emitted tokens satisfy the options too."""
    target, rng = bigram_network(CONFIG, 0), np.random.default_rng(3)
    sources, mask = rng.integers(2, V, (200, 9)), np.arange(9)[None] < rng.integers(2, 10, 200)[:, None]
    options = dict(max_new_tokens=16, temperature=temperature, seed=5) | MIXTURES[name]
    run = lambda drafter: decode.generate(target, sources, mask, drafter=drafter, **options)  # noqa: E731
    drafters = [drafter_of(kind)] if temperature else [None, drafter_of(kind)]
    outputs = [jax.tree.map(np.asarray, run(drafter)) for drafter in drafters]
    for output in outputs:
        np.testing.assert_array_equal(output.tokens, outputs[0].tokens)
        for row, length in zip(output.tokens, output.length, strict=True):
            check(name, [0, *row[:length].tolist()])
    accepted = outputs[-1].stats.accepted.sum(0)
    assert accepted.all() and len(np.unique(outputs[0].tokens)) > 15


def check(name, ids):
    """Asserts that ids satisfy the options of a mixture."""
    if name == "lists":
        pairs = list(itertools.pairwise(ids))
        assert len(set(pairs)) == len(pairs)
        assert not {5, 12} & set(ids) and (7, 8) not in pairs and ids[1] not in (9, 11)
        assert (3, 9, 4) not in list(zip(ids, ids[1:], ids[2:], strict=False))
    else:
        assert len(ids) > 4


def test_row_without_a_token_left_ends():
    """Without repeated unigrams each id occurs once, and the start token not again."""
    target = bigram_network(CONFIG, 0)
    options = dict(no_repeat_ngram_size=1, max_new_tokens=V + 5, eos_ids=[])
    given = (np.ones((2, 3), int), np.ones((2, 3), bool))
    output = decode.generate(target, *given, drafter=drafter_of("chain"), **options)
    assert output.length.tolist() == [V - 1] * 2 and output.finish_reason.tolist() == [3, 3]


# ---- the same as transformers


@pytest.mark.parametrize(
    "options",
    [
        dict(no_repeat_ngram_size=1),
        dict(no_repeat_ngram_size=2),
        dict(no_repeat_ngram_size=3, repetition_penalty=1.3),
        dict(suppress_tokens=[3, 7, 8], begin_suppress_tokens=[1, 5]),
        dict(bad_words_ids=[[4], [1], [6, 7], [0, 11], [2, 3, 3]]),
        dict(sequence_bias=[[[4], 2.0], [[5], -4.0]], min_new_tokens=5, repetition_penalty=1.5),
        dict(min_length=8, no_repeat_ngram_size=2, repetition_penalty=0.7),
    ],
    ids=str,
)
def test_greedy_ids_are_those_of_transformers(torch_model, tmp_path, options):
    """With the options read from generation_config.json on both sides."""
    model, network = torch_model
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    ids = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    given = transformers.GenerationConfig(max_length=17, **ids, **options)
    given.save_pretrained(tmp_path)
    sources = np.random.default_rng(7).integers(2, V, (12, 6))
    config = GenerationConfig.from_pretrained(tmp_path)
    assert config.max_new_tokens == 16
    output = decode.generate(network, sources, np.ones(sources.shape, bool), config=config)
    expected = model.generate(torch.tensor(sources), generation_config=given).numpy()[:, 1:]
    np.testing.assert_array_equal(np.asarray(output.tokens)[:, : expected.shape[1]], expected)
    assert len(np.unique(expected)) >= 10


@pytest.fixture(scope="module")
def torch_model(tmp_path_factory):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("model")
    config = dataclasses.replace(
        CONFIG, num_layers=2
    )  # transformers makes a cache for as many decoder layers
    params = random_params(config, 11)
    convert.save(directory, config, params)
    model = transformers.T5ForConditionalGeneration.from_pretrained(directory).eval()
    return model, t5.T5Network(params, config)
