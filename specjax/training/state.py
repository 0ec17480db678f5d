"""The training state and where it lies."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from specjax import sharding
from specjax.training.optimization import Optimization
from specjax.types import Params


class TrainState(struct.PyTreeNode):
    """What the next step needs.

    Attributes:
      step: steps done, `[] int32`.
      params: float32, whatever the compute dtype is.
      opt_state: of the optax chain.
      key_data: `[4] uint32`, the root of all dropout noise; constant, since the noise of a step
        is a function of it and `step`.
    """

    step: jax.Array
    params: Params
    opt_state: Any
    key_data: jax.Array

    @property
    def key(self) -> jax.Array:
        """This step's random key; of the `rbg` generator, the cheaper one."""
        return jax.random.fold_in(jax.random.wrap_key_data(self.key_data, impl="unsafe_rbg"), self.step)


def abstract_state(
    params: Params,
    optimization: Optimization,
    mesh: Mesh | None = None,
    rules: sharding.Rules = sharding.T5_RULES,
) -> TrainState:
    """Shapes, dtypes and placement of a state: what to restore a checkpoint onto.

    What the optimizer keeps in the shape of a parameter lies as the parameter does; the rest
    (counts, Adafactor's row and column statistics) is small and on every device.

    Args:
      params: arrays or shapes, float32.
      mesh: None: one device.
      rules: where params lie.

    Raises:
      ValueError: params that are not float32, or that the rules cannot place.
    """
    mesh = mesh or sharding.make_mesh()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.dtype != jnp.float32:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {leaf.dtype}: training keeps float32 params and "
                "casts them for the computation; load them as float32 and set the config's dtype"
            )
    transform = optimization.build()
    shapes = jax.eval_shape(lambda params: _new_state(params, transform, 0), params)
    everywhere = sharding.replicated(mesh)
    placement = sharding.param_shardings(params, mesh, rules)
    opt_placement = optax.tree.map_params(
        transform,
        lambda leaf, param, place: place if leaf.shape == param.shape else everywhere,
        shapes.opt_state,
        params,
        placement,
        transform_non_params=lambda leaf: everywhere,
    )
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        shapes.replace(step=everywhere, params=placement, opt_state=opt_placement, key_data=everywhere),
    )


def init_state(
    params: Params,
    optimization: Optimization,
    *,
    seed: int,
    mesh: Mesh | None = None,
    rules: sharding.Rules = sharding.T5_RULES,
) -> TrainState:
    """The state before the first step; `params` are copied, so they stay usable.

    Args: and Raises: as of `abstract_state`; `seed` is the dropout noise's.
    """
    placement = jax.tree.map(lambda x: x.sharding, abstract_state(params, optimization, mesh, rules))
    params = jax.device_put(params, placement.params, may_alias=False)  # the step donates its state
    transform = optimization.build()
    return jax.jit(lambda params: _new_state(params, transform, seed), out_shardings=placement)(params)


def _new_state(params: Params, transform: optax.GradientTransformation, seed: int) -> TrainState:
    key_data = jax.random.key_data(jax.random.key(seed, impl="unsafe_rbg"))
    return TrainState(jnp.zeros((), jnp.int32), params, transform.init(params), key_data)
