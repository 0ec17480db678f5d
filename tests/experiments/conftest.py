"""A tiny pair and its data, for tests of experiments."""

import jax
import numpy as np
import pytest

from specjax import data
from specjax.models import convert, t5
from tests.tiny_t5 import random_params

WORDS = ["a", "man", "dog", "runs", "sits", "in", "blue", "snow", "the", "park"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Returns a directory with pairs that copy, as files of a task, and a trained tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    (folder / "multi30k").mkdir()
    lines = {}
    for split, count in (("train", 80), ("val", 16), ("test_2016_flickr", 16)):
        lines[split] = [" ".join(random.choice(WORDS, 3 + i % 3)) for i in range(count)]
        for language in ("en", "de"):
            (folder / "multi30k" / f"{split}.{language}").write_text("\n".join(lines[split]))
    data.load_or_train_tokenizer(folder / "tokenizer", lines["train"], vocab_size=24)
    return folder


@pytest.fixture(scope="session")
def pair(corpus):
    """Returns a directory with a random target and a narrower draft."""
    tokenizer = data.load_or_train_tokenizer(corpus / "tokenizer", [], 24)
    for seed, (name, d_model) in enumerate([("target", 16), ("draft", 8)]):
        config = t5.T5Config(24, d_model, 4, 16, 2, 1, 1)
        params = jax.tree.map(lambda x: 2 * x, random_params(config, seed))
        convert.save(corpus / name, config, params, tokenizer)
    return corpus
