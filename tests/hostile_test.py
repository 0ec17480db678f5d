"""Invalid input raises an error that names it, and leaves no partial file."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

import specjax
from specjax import acceptance, drafters, sharding
from specjax.drafters import ModelDrafter
from specjax.models import convert, heads, heads_io
from tests.text_model import CONFIG, PROMPTS, Letters, random_model

NAN = float("nan")

# name -> (what is changed in a call of `generate`, words of the message)
CALLS = {
    "target that was not loaded": (dict(target="t5-small"), "`target` must be.*got 't5-small'"),
    "no prompts": (dict(prompts=None), "`prompts` must be a non-empty list.*got None"),
    "number as prompts": (dict(prompts=3), "`prompts` must be.*got 3"),
    "bytes among prompts": (dict(prompts=[b"a"]), "non-empty list of strings"),
    "draft in place of a drafter": (
        dict(drafter=random_model(1)),
        "`drafter` must be.*drafters.from_model.*Model",
    ),
    "drafter by name": (dict(drafter="eagle"), "`drafter` must be one of specjax.drafters.*got 'eagle'"),
    "rule by name": (dict(rule="block"), "`rule` must be one of specjax.acceptance.*got 'block'"),
    "options as a dict": (dict(config={"top_p": 0.9}), "`config` must be a GenerationConfig, got {'top_p'"),
    "number as options": (dict(config=0.7), "`config` must be a GenerationConfig, got 0.7"),
    "text as a limit": (dict(max_new_tokens="5"), "`max_new_tokens` must be a whole number, got '5'"),
    "half a token": (dict(max_new_tokens=1.5), "`max_new_tokens` must be a whole number, got 1.5"),
    "limits of another batch": (dict(max_new_tokens=[1, 2, 3]), "`max_new_tokens` must be.*shape"),
    "text as a seed": (dict(seed="x"), "`seed` must be whole numbers.*got 'x'"),
    "negative seed": (dict(seed=-1), "`seed` must be whole numbers in 0.*got -1"),
    "seed of 33 bits": (dict(seed=2**32), "`seed` must be whole numbers in 0"),
    "seeds of another batch": (dict(seed=[1, 2, 3]), "`seed` must be one seed or one per row.*shape"),
    "half a sample": (dict(num_samples=1.5), "`num_samples` must be a whole number"),
    "text as a temperature": (dict(temperature="hot"), "`temperature` must be a number, got 'hot'"),
    "nan as a temperature": (dict(temperature=NAN), "`temperature` must be.*got nan"),
    "endless temperature": (dict(temperature=np.inf), "`temperature` must be.*got inf"),
    "top_p of 0": (dict(top_p=0.0), "`top_p` must be above 0.*got 0.0"),
    "top_p of 2": (dict(top_p=2.0), "`top_p` must be.*got 2.0"),
    "top_k of 0": (dict(top_k=0), "`top_k` must be at least 1.*got 0"),
    "half of top_k": (dict(top_k=2.5), "`top_k` must be a whole number, got 2.5"),
    "negative min_p": (dict(min_p=-0.1), "`min_p` must be.*got -0.1"),
    "penalty of 0": (dict(repetition_penalty=0.0), "`repetition_penalty` must be.*got 0.0"),
    "greedy rule that samples": (
        dict(rule=acceptance.greedy, temperature=1.0, drafter=drafters.prompt_lookup(2)),
        "`rule` must be lossless above temperature 0, got greedy",
    ),
    "beams": (dict(num_beams=4), "`num_beams` is not supported"),
    "another library's option": (dict(max_length=9), "`max_length` is not.*did you mean `max_new_tokens`"),
    "misspelt option": (dict(stopp="a"), "`stopp` is not supported.*did you mean `stop`"),
    "end token that does not exist": (dict(eos_ids=[99]), r"`eos_ids` must be.*got \[99\]"),
    "text as end tokens": (dict(eos_ids="</s>"), "`eos_ids` must be.*got </s>"),
    "empty stop": (dict(stop=[""]), "`stop` must be"),
    "number as a stop": (dict(stop=5), "`stop` must be.*got 5"),
    "class as a rule": (dict(rule=acceptance.Lenient), "`rule` must be.*Lenient"),
    "keys of another batch": (dict(seed=jax.random.split(jax.random.key(0), 3)), "`seed` must be one seed"),
    "prefixes of another batch": (dict(decoder_prefix=["a"] * 3), "`decoder_prefix` must be.*got 3 entries"),
    "source that is too long": (dict(prompts=["a" * 600]), r"prompts\[0\] must have at most.*got 601"),
}


@pytest.fixture(scope="module")
def target():
    return random_model(0)


@pytest.mark.parametrize("name", CALLS)
def test_generate_raises_for_invalid_arguments(target, name):
    changes, words = CALLS[name]
    with pytest.raises(ValueError, match=words):
        specjax.generate(**(dict(target=target, prompts=PROMPTS, max_new_tokens=4) | changes))


# name -> (a function, words)
OTHERS = {
    "draft that was not loaded": (lambda: drafters.from_model("t5-small"), "`draft` must be.*got 't5-small'"),
    "text as K": (lambda: drafters.from_model(random_model(1), "5"), "`num_draft` must be.*got '5'"),
    "half of K": (lambda: drafters.prompt_lookup(2.5), "`num_draft` must be a whole number.*got 2.5"),
    "tree of nothing": (
        lambda: drafters.tree_from_model(random_model(1), ()),
        r"`branching` must be.*got \(\)",
    ),
    "tree with a bare level": (
        lambda: drafters.tree_from_model(random_model(1), (2, 0)),
        r"`branching` must be.*got \(2, 0\)",
    ),
    "n-grams upside down": (lambda: drafters.prompt_lookup(3, 1, 2), "got min_ngram=2, max_ngram=1"),
    "heads that were not loaded": (lambda: drafters.eagle("captions-eagle"), "`heads` must be loaded heads"),
    "lookahead by unigrams": (lambda: drafters.lookahead(5, 1, 3), "`ngram`.*got 5, 1 and 3"),
    "inner drafter that is none": (lambda: drafters.staged(random_model(1), 3), "`inner` must be.*got 3"),
    "text as a tree": (lambda: drafters.tree_from_model(random_model(1), "3x2"), "`branching` must.*'3x2'"),
    "half an n-gram": (lambda: drafters.prompt_lookup(4, 2.5), "`max_ngram` must be a whole number, got 2.5"),
    "costs without K": (lambda: drafters.adaptive(drafters.prompt_lookup(4), [1.5]), "`costs` must be"),
    "eight bits twice": (lambda: specjax.int8(specjax.int8(random_model(0))), "`model` must be"),
    "half a mesh": (lambda: sharding.make_mesh(1.5, 1), "1.5"),
    "mesh by its numbers": (lambda: specjax.load("anything", mesh=(2, 4)), r"`mesh` must be.*\(2, 4\)"),
    "number as a model": (lambda: specjax.load(3), "`name_or_directory` must be.*3"),
    "options of a text": (lambda: specjax.GenerationConfig(seeds=3), "unexpected keyword argument 'seeds'"),
    "drafter that must not be skipped": (
        lambda: drafters.adaptive(drafters.lookahead(), {24: 1.5}),
        "`drafter` must be able to skip rounds",
    ),
    "confidence of copies": (
        lambda: drafters.adaptive(drafters.prompt_lookup(4), {4: 1.5}, min_confidence=0.5),
        "`min_confidence` must be left out for PromptLookupDrafter",
    ),
    "costs of another K": (
        lambda: drafters.adaptive(drafters.prompt_lookup(4), {3: 1.5}),
        "must be the drafter's num_draft=4",
    ),
    "costs of nothing": (
        lambda: drafters.adaptive(drafters.prompt_lookup(4), {4: 0.0}),
        "`costs` must be above 0",
    ),
    "chance of acceptance above 1": (
        lambda: drafters.adaptive(drafters.prompt_lookup(4), {4: 1.5}, prior_alpha=1.5),
        "`prior_alpha` must be.*got 1.5",
    ),
    "mesh of nothing": (lambda: sharding.make_mesh(0, 1), "0"),
    "mesh of a million": (lambda: sharding.make_mesh(1000, 1000), "must be at most 2, the number of devices"),
    "lenience above 1": (lambda: acceptance.Lenient(1.5), "`lenience` must be.*1.5"),
    "rows in batches of none": (
        lambda: specjax.generate_all(random_model(0), PROMPTS, batch_size=0),
        "`batch_size` must be.*got 0",
    ),
    "refilling more than there are": (
        lambda: specjax.generate_all(random_model(0), PROMPTS, batch_size=2, num_refilled=4),
        "`num_refilled` must divide batch_size=2, got 4",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_factories_raise_for_invalid_arguments(name):
    make, words = OTHERS[name]
    with pytest.raises((ValueError, TypeError), match=words):
        make()


@pytest.fixture(scope="module")
def eagle():
    """Heads, and the network of the target that they are for."""
    config = heads.HeadsConfig("eagle", 2, d_model=16, d_kv=4, d_ff=32, num_heads=2)
    other = random_model(3).network
    return jax.jit(heads_io.init, static_argnums=(0, 2))(config, other, 0), other


@pytest.fixture
def saved(tmp_path, eagle):
    """A checkpoint with a tokenizer's files left out, and heads for another target."""
    convert.save(tmp_path / "model", CONFIG, random_model(0).params)
    heads_io.save(tmp_path / "heads", *eagle)
    return tmp_path


def _cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _set(path: pathlib.Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# name -> (what is done to the folder, what is loaded, words)
FILES = {
    "no such folder": (lambda f: None, "nowhere/at/all", "no directory"),
    "a file": (lambda f: None, "model/config.json", "is a file: give the directory"),
    "empty folder": (lambda f: (f / "empty").mkdir(), "empty", "has no config.json"),
    "config that is no JSON": (lambda f: _cut(f / "model/config.json"), "model", "is not valid JSON"),
    "config of another model": (
        lambda f: _set(f / "model/config.json", model_type="bert"),
        "model",
        "model_type 'bert'",
    ),
    "config of another size": (
        lambda f: _set(f / "model/config.json", d_model=12),
        "model",
        "config.json states",
    ),
    "half a checkpoint": (lambda f: _cut(f / "model/model.safetensors"), "model", "truncated or corrupt"),
    "no weights": (
        lambda f: (f / "model/model.safetensors").unlink(),
        "model",
        "neither model.safetensors nor",
    ),
    "no tokenizer": (lambda f: None, "model", "no tokenizer in"),
    "text as a mesh's folder": (lambda f: shutil.rmtree(f / "model"), "model", "no directory"),
}


@pytest.mark.parametrize("name", FILES)
def test_load_raises_for_invalid_files(saved, name):
    change, path, words = FILES[name]
    change(saved)
    with pytest.raises(ValueError, match=words):
        specjax.load(saved / path)


def test_load_heads_raises_for_another_target_and_for_damage(saved, target):
    with pytest.raises(ValueError, match="were trained for another target"):
        specjax.load_heads(saved / "heads", target)
    with pytest.raises(ValueError, match="does not contain heads of the format"):
        specjax.load_heads(saved / "nowhere", target)
    _cut(saved / "heads" / heads_io.WEIGHTS)
    with pytest.raises(ValueError, match="delete it|damaged|corrupt"):
        specjax.load_heads(saved / "heads", random_model(3))


def test_generate_all_raises_for_an_unwritable_journal(saved, target):
    """The journal's folder is a file, or the journal a folder: raises before decoding."""
    (saved / "file").write_text("mine")
    for journal in (saved / "file" / "journal", saved / "heads"):
        with pytest.raises(ValueError, match="journal|cannot be written"):
            specjax.generate_all(target, PROMPTS, batch_size=2, journal=journal)
    with pytest.raises(ValueError, match="is not a journal of outputs"):  # no line end: not even a header
        specjax.generate_all(target, PROMPTS, batch_size=2, journal=saved / "file")
    assert (saved / "file").read_text() == "mine"


def test_generate_all_with_an_invalid_argument_writes_no_journal(target, tmp_path):
    with pytest.raises(ValueError, match="`temperature` must be"):
        specjax.generate_all(target, PROMPTS, batch_size=2, temperature=-1.0, journal=tmp_path / "journal")
    assert not (tmp_path / "journal").exists()


def test_generate_raises_for_a_different_tokenizer(target):
    other = random_model(1, Letters([*"<>?", *"abcdefghijklmnopqrstuvwxyz .!"]))
    with pytest.raises(ValueError, match="the draft's tokenizer must be the target's"):
        specjax.generate(target, PROMPTS, drafter=drafters.from_model(other, 2))


class Misshapen(ModelDrafter):
    """A custom drafter whose q has another vocabulary size."""

    def propose(self, state, context, draws, max_length):
        draft, state = super().propose(state, context, draws, max_length)
        return draft.replace(probs=draft.probs[..., :-1]), state


def test_a_draft_of_the_wrong_shape_is_named(target):
    shapes = rf"\(2, 2, {CONFIG.vocab_size}\), got \(2, 2, {CONFIG.vocab_size - 1}\)"
    with pytest.raises(ValueError, match=f"`probs` drafted by Misshapen must have shape {shapes}"):
        specjax.generate(target, PROMPTS[:2], drafter=Misshapen(target.network, 2), temperature=1.0)
