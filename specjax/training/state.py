"""The training state: its optimizer and its shardings."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from specjax import sharding
from specjax.types import Params


@dataclasses.dataclass(frozen=True)
class Optimization:
    """The optimizer, its learning-rate schedule, and gradient accumulation.

    Attributes:
      optimizer: "adafactor" (parameter-scaled updates, Shazeer and Stern 2018) or "adamw".
      learning_rate: the peak; for Adafactor relative to each parameter's root mean square.
      warmup_steps, num_steps: linear warm-up from zero, then `decay` until `num_steps`.
      decay: "constant", "rsqrt" (falls as 1/sqrt(step)), "cosine" or "linear" (both to zero).
      weight_decay: of AdamW; norms are excluded.
      max_grad_norm: gradients are clipped to this global norm.
      num_accumulated: micro-batches of a step, one in memory at a time. The update is that of the
        full batch.

    Raises:
      ValueError: an unknown name, or a number out of its range.
    """

    optimizer: str = "adafactor"
    learning_rate: float = 2e-2
    warmup_steps: int = 300
    num_steps: int = 2000
    decay: str = "cosine"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    num_accumulated: int = 1

    def __post_init__(self) -> None:
        for name, value, known in (
            ("optimizer", self.optimizer, ("adafactor", "adamw")),
            ("decay", self.decay, ("constant", "rsqrt", "cosine", "linear")),
        ):
            if value not in known:
                raise ValueError(f"`{name}` must be one of {', '.join(known)}, got {value!r}")
        if self.num_accumulated < 1:
            raise ValueError(f"`num_accumulated` must be at least 1, got {self.num_accumulated}")

    def schedule(self) -> optax.Schedule:
        """Returns the learning rate as a function of the step count."""
        peak, warmup = self.learning_rate, self.warmup_steps
        rest, base = max(self.num_steps - warmup, 1), max(warmup, 1)
        after_warmup: optax.Schedule = {
            "constant": optax.constant_schedule(peak),
            # `join_schedules` also evaluates this below zero, and discards the result.
            "rsqrt": lambda count: peak * jnp.sqrt(base / (jnp.maximum(count, 0) + base)),
            "cosine": optax.cosine_decay_schedule(peak, rest),
            "linear": optax.linear_schedule(peak, 0.0, rest),
        }[self.decay]
        return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after_warmup], [warmup])

    def build(self) -> optax.GradientTransformation:
        """Returns the optax chain: clipping, then the update rule."""
        if self.optimizer == "adafactor":
            rule = optax.adafactor(self.schedule(), multiply_by_parameter_scale=True)
        else:
            is_matrix = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
            rule = optax.adamw(self.schedule(), weight_decay=self.weight_decay, mask=is_matrix)
        return optax.chain(optax.clip_by_global_norm(self.max_grad_norm), rule)


class TrainState(struct.PyTreeNode):
    """The state that a training step updates.

    Attributes:
      step: steps done, `[] int32`.
      params: float32, whatever the compute dtype is.
      opt_state: of the optax chain.
      key_data: `[4] uint32`, the seed of all dropout noise; constant, since a step's noise is a
        function of it and `step`.
    """

    step: jax.Array
    params: Params
    opt_state: Any
    key_data: jax.Array

    @property
    def key(self) -> jax.Array:
        """The random key of this step, of the `unsafe_rbg` generator, a cheaper one."""
        return jax.random.fold_in(jax.random.wrap_key_data(self.key_data, impl="unsafe_rbg"), self.step)


def abstract_state(
    params: Params,
    optimization: Optimization,
    mesh: Mesh | None = None,
    rules: sharding.Rules = sharding.T5_RULES,
) -> TrainState:
    """Returns shapes, dtypes and shardings of a state, to restore a checkpoint with.

    Optimizer state of a parameter's shape is sharded as the parameter is; the rest (counts, Adafactor's
    row and column statistics) is small and replicated.

    Args:
      params: arrays or shapes, float32.
      mesh: None: one device.
      rules: the partition rules of the params.

    Raises:
      ValueError: a parameter is not float32, or `rules` cannot shard it.
    """
    mesh = mesh or sharding.make_mesh()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.dtype != jnp.float32:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} must be float32, got {leaf.dtype}; load float32 params "
                "and set the config's dtype, to which they are cast for the computation"
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
    """Returns the state before the first step; `params` are copied, so they stay usable.

    Args and Raises as in `abstract_state`; `seed` is that of the dropout noise.
    """
    placement = jax.tree.map(lambda x: x.sharding, abstract_state(params, optimization, mesh, rules))
    params = jax.device_put(params, placement.params, may_alias=False)  # the step donates its state
    transform = optimization.build()
    return jax.jit(lambda params: _new_state(params, transform, seed), out_shardings=placement)(params)


def _new_state(params: Params, transform: optax.GradientTransformation, seed: int) -> TrainState:
    key_data = jax.random.key_data(jax.random.key(seed, impl="unsafe_rbg"))
    return TrainState(jnp.zeros((), jnp.int32), params, transform.init(params), key_data)
