"""A tiny T5 and a draft for it: their shapes, random params, their program."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import acceptance, rounds
from specjax.drafters.model import ModelDrafter
from specjax.models import convert, t5
from specjax.types import Options
from tests.toy_batch import V

CONFIG = t5.T5Config(
    vocab_size=V,
    d_model=16,
    d_kv=4,
    d_ff=32,
    num_heads=4,
    num_layers=1,
    num_decoder_layers=2,
    gated=True,
    tied_head=False,
    scale_logits=False,
)
DRAFT_CONFIG = dataclasses.replace(CONFIG, d_model=8, num_decoder_layers=1)


def random_params(config: t5.T5Config, seed: int = 0):
    """Params as large as those that training begins with, drawn in numpy: nothing to compile."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        if name == "scale":
            return jnp.ones(leaf.shape)
        width = {"table": 1, "embedding": 1, "o": config.num_heads * config.d_kv}.get(name, leaf.shape[0])
        return jnp.asarray(rng.normal(size=leaf.shape) * width**-0.5, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, convert.shapes(config))


def abstract(config=CONFIG, draft_config=DRAFT_CONFIG, num_draft=3, bucket=16, num_source=11):
    """A program, its params and its first state, as shapes."""
    target, drafter = t5.T5Network(config), None
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    source, mask = shape((2, num_source)), jax.ShapeDtypeStruct((2, num_source), bool)
    if num_draft:
        drafter = ModelDrafter(t5.T5Network(draft_config), num_draft)
    program = rounds.Program(target, drafter, acceptance.speculative, bucket, 1, (1,), 0)
    params = rounds.AllParams(convert.shapes(config), convert.shapes(draft_config) if num_draft else None)
    inputs = dict(
        source_ids=source,
        source_mask=mask,
        prefix=shape((2, 1)),
        prefix_length=shape((2,)),
        options=Options(jax.ShapeDtypeStruct((2,), jnp.float32)),
        limit=shape((2,)),
        seeds=jax.ShapeDtypeStruct((2,), jnp.uint32),
    )
    state = jax.eval_shape(functools.partial(rounds.prefill, program), params, **inputs)
    return program, params, state


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
