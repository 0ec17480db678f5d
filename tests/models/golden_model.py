"""Checkpoints that torch wrote, with its activations."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import convert, t5

GOLDEN = pathlib.Path(__file__).parent / "golden"
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


class Golden:
    """A checkpoint written by torch, and torch's activations."""

    def __init__(self, name: str):
        self.config, self.params = convert.load(GOLDEN / name, dtype="float32")
        with np.load(GOLDEN / f"{name}.npz") as arrays:
            self.arrays = dict(arrays)
        self.model = t5.T5(self.config)

    def apply(self, *args, method=None):
        run = jax.jit(lambda params, args: self.model.apply({"params": params}, *args, method=method))
        return run(self.params, args)

    def encode(self):
        return self.apply(self["source_ids"], self["source_mask"], method="encode")

    def __getitem__(self, name: str) -> jax.Array:
        return jnp.asarray(self.arrays[name])
