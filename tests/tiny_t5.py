"""A tiny T5 and a draft for it: their shapes, random params, their program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax import acceptance
from specjax.drafters.model import ModelDrafter
from specjax.models import convert, t5
from specjax.round import Program, prefill
from specjax.types import Options

# V as of tests/toy_batch.py, whose sources it reads.
CONFIG = t5.T5Config(40, 16, 4, 32, 4, 1, 2, gated=True, tied_head=False, scale_logits=False)
DRAFT_CONFIG = dataclasses.replace(CONFIG, d_model=8, num_decoder_layers=1)


def random_params(config: t5.T5Config, seed: int = 0):
    """Returns params as large as those that training begins with, drawn in numpy: nothing to compile."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        if name == "scale":
            return jnp.ones(leaf.shape)
        width = {"table": 1, "embedding": 1, "o": config.num_heads * config.d_kv}.get(name, leaf.shape[0])
        return jnp.asarray(rng.normal(size=leaf.shape) * width**-0.5, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, convert.shapes(config))


def random_network(config: t5.T5Config = CONFIG, seed: int = 0) -> t5.T5Network:
    return t5.T5Network(random_params(config, seed), config)


def abstract(config=CONFIG, draft_config=DRAFT_CONFIG, num_draft=3, bucket=16, num_source=11):
    """Returns a program and its first state, as shapes."""
    network, draft = (t5.T5Network(convert.shapes(c), c) for c in (config, draft_config))
    drafter = ModelDrafter(draft, num_draft) if num_draft else None
    program = Program(network, drafter, acceptance.speculative, bucket, eos_ids=(1,))
    shape = lambda *axes, dtype=jnp.int32: jax.ShapeDtypeStruct(axes, dtype)  # noqa: E731
    inputs = dict(
        source_ids=shape(2, num_source),
        source_mask=shape(2, num_source, dtype=bool),
        prefix=shape(2, 1),
        prefix_length=shape(2),
        options=Options(shape(2, dtype=jnp.float32)),
        limit=shape(2),
        seeds=shape(2, dtype=jnp.uint32),
    )
    return program, jax.eval_shape(prefill, program, **inputs)


def matmul_operands(jaxpr, found):
    """Shapes of all that enters a product, in calls and loops too; `found` and more."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found.extend(tuple(v.aval.shape) for v in eqn.invars)
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                matmul_operands(inner, found)
    return found
