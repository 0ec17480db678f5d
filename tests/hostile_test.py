"""What is asked for wrongly is refused with a sentence that names it; nothing is left half-written."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

import specjax
from specjax import acceptance, controller, drafters, sharding
from specjax.drafters.model import ModelDrafter
from specjax.models import convert, heads, heads_io
from tests.text_model import CONFIG, PROMPTS, Letters, random_model

NAN = float("nan")
Sampling = specjax.Sampling

# name -> (what is changed in a call of `generate`, words of the message)
CALLS = {
    "target that was not loaded": (dict(target="t5-small"), "target='t5-small': load it first"),
    "no prompts": (dict(prompts=None), "prompts=None: give a non-empty list"),
    "number as prompts": (dict(prompts=3), "prompts=3"),
    "bytes among prompts": (dict(prompts=[b"a"]), "non-empty list of strings"),
    "draft in place of a drafter": (dict(drafter=random_model(1)), "drafter=Model.*drafters.from_model"),
    "drafter by name": (dict(drafter="eagle"), "drafter='eagle': give what specjax.drafters make"),
    "rule by name": (dict(rule="block"), "rule='block': give one of specjax.acceptance"),
    "options as a dict": (dict(sampling={"top_p": 0.9}), "sampling={'top_p': 0.9}: give None"),
    "number as options": (dict(sampling=0.7), "sampling=0.7: give None"),
    "text as a limit": (dict(max_new_tokens="5"), "max_new_tokens='5': give whole numbers"),
    "half a token": (dict(max_new_tokens=1.5), "max_new_tokens=1.5: give whole numbers"),
    "limits of another batch": (dict(max_new_tokens=[1, 2, 3]), "max_new_tokens has shape"),
    "text as a seed": (dict(seed="x"), "seed='x': give whole numbers"),
    "negative seed": (dict(seed=-1), "seed=-1: give whole numbers in 0"),
    "seed of 33 bits": (dict(seed=2**32), "give whole numbers in 0"),
    "seeds of another batch": (dict(seed=[1, 2, 3]), "seed has shape"),
    "half a sample": (dict(num_samples=1.5), "num_samples=1.5: give a whole number"),
    "no temperature": (dict(sampling=Sampling(temperature=None)), "temperature=None"),
    "text as a temperature": (dict(sampling=Sampling(temperature="hot")), "temperature='hot'"),
    "nan as a temperature": (dict(sampling=Sampling(temperature=NAN)), "temperature=nan"),
    "endless temperature": (dict(sampling=Sampling(temperature=np.inf)), "temperature=inf"),
    "top_p of 0": (dict(sampling=Sampling(top_p=0.0)), "top_p=0.0: must be above 0"),
    "top_p of 2": (dict(sampling=Sampling(top_p=2.0)), "top_p=2.0"),
    "top_k of 0": (dict(sampling=Sampling(top_k=0)), "top_k=0: must be at least 1"),
    "half of top_k": (dict(sampling=Sampling(top_k=2.5)), "top_k=2.5: give whole numbers"),
    "negative min_p": (dict(sampling=Sampling(min_p=-0.1)), "min_p=-0.1"),
    "penalty of 0": (dict(sampling=Sampling(repetition_penalty=0.0)), "repetition_penalty=0.0"),
    "greedy rule that samples": (
        dict(rule=acceptance.greedy, sampling=Sampling(), drafter=drafters.prompt_lookup(2)),
        "rule=greedy",
    ),
    "beams": (dict(num_beams=4), "num_beams: not supported"),
    "option in the wrong place": (dict(top_p=0.9), r"top_p: give them as sampling=Sampling\(top_p="),
    "end token that does not exist": (dict(eos_ids=[99]), r"eos_ids=\[99\]"),
    "text as end tokens": (dict(eos_ids="</s>"), "eos_ids=</s>"),
    "empty stop": (dict(stop=[""]), "stop"),
    "number as a stop": (dict(stop=5), "stop=5"),
    "class as a rule": (dict(rule=acceptance.Lenient), "rule=.*Lenient"),
    "key as a seed": (dict(seed=jax.random.key(0)), "give whole numbers, not a key"),
    "prefixes of another batch": (dict(decoder_prefix=["a"] * 3), "decoder_prefix has 3 entries"),
    "source that is too long": (dict(prompts=["a" * 600]), r"prompts\[0\] has 601 tokens"),
}


@pytest.fixture(scope="module")
def target():
    return random_model(0)


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_cannot_be_meant(target, name):
    changes, words = CALLS[name]
    with pytest.raises(ValueError, match=words):
        specjax.generate(**(dict(target=target, prompts=PROMPTS, max_new_tokens=4) | changes))


# name -> (a function, words)
OTHERS = {
    "draft that was not loaded": (lambda: drafters.from_model("t5-small"), "draft='t5-small': load it first"),
    "text as K": (lambda: drafters.from_model(random_model(1), "5"), "num_draft='5': must be at least 1"),
    "half of K": (lambda: drafters.prompt_lookup(2.5), "num_draft=2.5: must be at least 1"),
    "tree of nothing": (lambda: drafters.tree_from_model(random_model(1), ()), r"branching=\(\)"),
    "tree with a bare level": (
        lambda: drafters.tree_from_model(random_model(1), (2, 0)),
        r"branching=\(2, 0\)",
    ),
    "n-grams upside down": (lambda: drafters.prompt_lookup(3, 1, 2), "min_ngram=2, max_ngram=1"),
    "heads that were not loaded": (lambda: drafters.eagle("captions-eagle"), "heads='captions-eagle': load"),
    "lookahead by unigrams": (lambda: drafters.lookahead(5, 1, 3), "ngram=1"),
    "inner drafter that is none": (
        lambda: specjax.staged.from_model(random_model(1), 3),
        "inner=3: give one of",
    ),
    "text as a tree": (lambda: drafters.tree_from_model(random_model(1), "3x2"), "branching='3x2'"),
    "half an n-gram": (lambda: drafters.prompt_lookup(4, 2.5), "max_ngram=2.5"),
    "costs without K": (lambda: controller.adaptive(drafters.prompt_lookup(4), [1.5]), "costs="),
    "eight bits twice": (lambda: specjax.int8(specjax.int8(random_model(0))), "give a model as specjax.load"),
    "half a mesh": (lambda: sharding.make_mesh(1.5, 1), "data=1.5"),
    "mesh by its numbers": (lambda: specjax.load("anything", mesh=(2, 4)), r"mesh=\(2, 4\): give one of"),
    "number as a model": (lambda: specjax.load(3), "name_or_directory=3"),
    "options per prompt": (
        lambda: specjax.generate_all(random_model(0), PROMPTS, sampling=Sampling(temperature=[0.0, 1.0])),
        "temperature has shape",
    ),
    "stop of many": (lambda: specjax.generate_all(random_model(0), PROMPTS, stop="x"), "stop: not supported"),
    "costs of another K": (
        lambda: controller.adaptive(drafters.prompt_lookup(4), {3: 1.5}),
        "must be the drafter's num_draft=4",
    ),
    "costs of nothing": (lambda: controller.adaptive(drafters.prompt_lookup(4), {4: 0.0}), "must be above 0"),
    "chance of acceptance above 1": (
        lambda: controller.adaptive(drafters.prompt_lookup(4), {4: 1.5}, prior_alpha=1.5),
        "prior_alpha=1.5",
    ),
    "mesh of nothing": (lambda: sharding.make_mesh(0, 1), "data=0"),
    "mesh of a million": (lambda: sharding.make_mesh(1000, 1000), "needs 1000000 devices"),
    "lenience above 1": (lambda: acceptance.Lenient(1.5), "1.5"),
    "rows in batches of none": (
        lambda: specjax.generate_all(random_model(0), PROMPTS, batch_size=0),
        "batch_size=0: give a whole number",
    ),
    "refilling more than there are": (
        lambda: specjax.generate_all(random_model(0), PROMPTS, batch_size=2, num_refilled=4),
        "num_refilled=4",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_pieces_that_cannot_be_made(name):
    make, words = OTHERS[name]
    with pytest.raises(ValueError, match=words):
        make()


@pytest.fixture(scope="module")
def eagle():
    """A config, heads of it, and the params of the target that they are for."""
    config = heads.HeadsConfig("eagle", 2, d_model=16, d_kv=4, d_ff=32, num_heads=2)
    network, other = heads.HeadsNetwork(config, CONFIG), random_model(3)
    return config, jax.jit(lambda params: heads_io.init(network, params, 0))(other.params), other.params


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
        "the config says",
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
def test_files_that_cannot_be_read(saved, name):
    change, path, words = FILES[name]
    change(saved)
    with pytest.raises(ValueError, match=words):
        specjax.load(saved / path)


def test_heads_of_another_target_and_damaged_ones(saved, target):
    with pytest.raises(ValueError, match="were trained for another target"):
        specjax.load_heads(saved / "heads", target)
    with pytest.raises(ValueError, match="does not hold heads of the format"):
        specjax.load_heads(saved / "nowhere", target)
    _cut(saved / "heads" / heads_io.WEIGHTS)
    with pytest.raises(ValueError, match="delete it|damaged|corrupt"):
        specjax.load_heads(saved / "heads", random_model(3))


def test_outputs_that_cannot_be_written(saved, target):
    """The journal's folder is a file, or the journal a folder: said before anything is decoded."""
    (saved / "file").write_text("mine")
    for journal in (saved / "file" / "journal", saved / "heads"):
        with pytest.raises(ValueError, match="journal|cannot be written"):
            specjax.generate_all(target, PROMPTS, batch_size=2, journal=journal)
    with pytest.raises(ValueError, match="is not a journal of outputs"):  # no line end: not even a header
        specjax.generate_all(target, PROMPTS, batch_size=2, journal=saved / "file")
    assert (saved / "file").read_text() == "mine"


def test_a_refused_call_begins_no_journal(target, tmp_path):
    with pytest.raises(ValueError, match="temperature=-1"):
        specjax.generate_all(
            target, PROMPTS, batch_size=2, sampling=Sampling(temperature=-1.0), journal=tmp_path / "journal"
        )
    assert not (tmp_path / "journal").exists()


def test_vocabularies_that_do_not_match(target):
    other = random_model(1, Letters([*"<>?", *"abcdefghijklmnopqrstuvwxyz .!"]))
    with pytest.raises(ValueError, match="the draft's tokenizer differs"):
        specjax.generate(target, PROMPTS, drafter=drafters.from_model(other, 2))


@dataclasses.dataclass(frozen=True)
class Misshapen(ModelDrafter):
    """A drafter that somebody wrote: its q is of another vocabulary."""

    def propose(self, params, cache, context, draws):
        draft, cache = super().propose(params, cache, context, draws)
        return draft.replace(probs=draft.probs[..., :-1]), cache


def test_a_draft_of_the_wrong_shape_is_named(target):
    drafter = drafters.BoundDrafter(Misshapen(target.network, 2), target.params)
    words = rf"Misshapen drafted probs of shape \(2, 2, {CONFIG.vocab_size - 1}\): give"
    with pytest.raises(ValueError, match=words):
        specjax.generate(target, PROMPTS[:2], drafter=drafter, sampling=Sampling())
