"""A small target, a draft and an EAGLE layer on disk, and what is decoded with them on a mesh.

For tests/mesh_test.py, and for the processes that it starts.
"""

import json
import pathlib
from unittest import mock

import jax
import numpy as np
import safetensors.numpy

import specjax
from specjax import drafters, loading, sharding
from specjax.models import convert, heads, heads_io, t5
from specjax.types import Drafter
from tests.text_model import PIECES, Letters

CONFIG = t5.T5Config(48, 16, 4, 32, 8, 1, 1, gated=True, tied_head=False, scale_logits=False)
# Eight rows, so that eight devices divide them; lengths differ, and so will what is accepted.
PROMPTS = ["translate this.", "a b", "the cat sat", "x", "another one here", "yes. no.", "zebra", "q r s t u"]
NUM_NEW = [9, 12, 5, 12, 12, 7, 12, 12]
# What is decoded: a drafter, and temperatures. One program is greedy, the other has rows of both kinds.
MIXED = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
RUNS = {
    "model, greedy": ("model", 0.0),
    "model, mixed": ("model", MIXED),
    "tree, mixed": ("tree", MIXED),
    "eagle, greedy": ("eagle", 0.0),
}


def write(directory: pathlib.Path) -> None:
    """A target in two shards with an index, a draft that often agrees with it, an EAGLE layer."""
    rng = np.random.default_rng(0)
    draw = lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) * 0.4  # noqa: E731
    target = jax.tree.map(draw, convert.shapes(CONFIG))
    draft = jax.tree.map(lambda leaf: leaf + 0.1 * draw(leaf), target)
    for name, params in (("target", target), ("draft", draft)):
        convert.save(directory / name, CONFIG, params)
    split(directory / "target")
    config = heads.HeadsConfig("eagle", 2, d_model=16, d_kv=4, d_ff=32, num_heads=2, feature_layers=(0,))
    network = t5.T5Network(target, CONFIG)
    heads_io.save(directory / "eagle", jax.jit(lambda x: heads_io.init(config, x, 0))(network), network)


def split(directory: pathlib.Path) -> None:
    """Turns a checkpoint of one file into two shards and their index."""
    whole = directory / convert.WEIGHTS
    tensors = safetensors.numpy.load_file(whole)
    names = sorted(tensors)
    shards = {f"model-{i + 1}-of-2.safetensors": names[i::2] for i in range(2)}
    for file, members in shards.items():
        safetensors.numpy.save_file({name: tensors[name] for name in members}, directory / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (directory / convert.INDEX).write_text(json.dumps(index))
    whole.unlink()


def load(directory: pathlib.Path, mesh=None, rules=sharding.T5_RULES) -> loading.Model:
    """`specjax.load` in float32, with a tokenizer of letters."""
    tokenizer = Letters([*PIECES, *map(str, range(CONFIG.vocab_size - len(PIECES)))])
    with mock.patch.object(loading, "load_tokenizer", lambda _: tokenizer):
        return specjax.load(directory, "float32", mesh, rules)


def load_drafter(directory: pathlib.Path, target: loading.Model, name: str) -> Drafter:
    """Returns a drafter: "model" is divided as its target is, "tree" is replicated, "eagle" is heads."""
    if name == "eagle":
        return drafters.eagle(specjax.load_heads(directory / "eagle", target), 2)
    if name == "tree":
        draft = load(directory / "draft", target.mesh, sharding.REPLICATED)
        return drafters.tree_from_model(draft, (2, 1))
    return drafters.from_model(load(directory / "draft", target.mesh), 2)


def decode(directory: pathlib.Path, mesh, names, **options) -> dict:
    """Returns the outputs of some of `RUNS`, as JSON holds them."""
    target = load(directory / "target", mesh)
    found = {}
    for name in names:
        kind, temperature = RUNS[name]
        rule = specjax.acceptance.multi_round if kind == "tree" else specjax.acceptance.speculative
        output = specjax.generate(
            target,
            PROMPTS,
            drafter=load_drafter(directory, target, kind),
            rule=rule,
            max_new_tokens=NUM_NEW,
            seed=7,
            temperature=temperature,
            **options,
        )
        found[name] = {
            "ids": output.token_ids,
            "reasons": output.finish_reasons,
            "accepted": output.stats.accepted.sum(1).tolist(),
            "log_probs": np.concatenate(output.log_probs).tolist(),
        }
    return found
