"""A tiny random T5 that reads and writes letters, for the tests of what takes strings."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from specjax.loading import Model
from specjax.models import convert, t5

PIECES = ["<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz ."]
CONFIG = t5.T5Config(len(PIECES), 16, 4, 32, 4, 1, 1, gated=True, tied_head=False, scale_logits=False)
PROMPTS = ["translate this.", "a b"]


class Letters:
    """A tokenizer of one id a letter, with the methods that specjax uses."""

    def __init__(self, pieces=PIECES):
        self.pieces = list(pieces)

    def __call__(self, texts, add_special_tokens=True, verbose=True):
        one = lambda text: [self.pieces.index(c) for c in text] + [1] * add_special_tokens  # noqa: E731
        ids = one(texts) if isinstance(texts, str) else [one(text) for text in texts]
        return types.SimpleNamespace(input_ids=ids)

    def batch_decode(self, rows, skip_special_tokens=False):
        first = 3 if skip_special_tokens else 0
        return ["".join(self.pieces[i] for i in row if i >= first) for row in rows]

    def decode(self, row, skip_special_tokens=False):
        return self.batch_decode([row], skip_special_tokens)[0]

    def __len__(self):
        return len(self.pieces)

    def get_vocab(self):
        return {piece: i for i, piece in enumerate(self.pieces)}


def random_model(seed: int, tokenizer=None) -> Model:
    """Returns a T5 whose outputs vary, and that takes nothing to compile."""
    rng = np.random.default_rng(seed)
    draw = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.5, jnp.float32)  # noqa: E731
    params = jax.tree.map(draw, convert.shapes(CONFIG))
    return Model(t5.T5Network(params, CONFIG), tokenizer or Letters())
