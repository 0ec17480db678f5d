"""How to optimise: the update rule and its learning rate over time."""

import dataclasses

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Optimization:
    """How to optimise.

    Attributes:
      optimizer: "adafactor" (parameter-scaled updates, Shazeer and Stern 2018) or "adamw".
      learning_rate: the peak; for Adafactor relative to each parameter's root mean square.
      warmup_steps, num_steps: linear warm-up from zero, then `decay` until `num_steps`.
      decay: "constant", "rsqrt" (falls as 1/sqrt(step)), "cosine" or "linear" (both to zero).
      weight_decay: of AdamW; norms are left alone.
      max_grad_norm: clipping by the global norm.
      num_accumulated: parts into which a batch is cut, one in memory at a time. The update is
        that of the whole batch.

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
        for name, known in (
            ("optimizer", ("adafactor", "adamw")),
            ("decay", ("constant", "rsqrt", "cosine", "linear")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: use one of {', '.join(known)}")
        if self.num_accumulated < 1:
            raise ValueError(f"num_accumulated={self.num_accumulated}: must be at least 1")

    def schedule(self) -> optax.Schedule:
        """The learning rate as a function of the step count."""
        peak, warmup = self.learning_rate, self.warmup_steps
        rest, base = max(self.num_steps - warmup, 1), max(warmup, 1)
        after_warmup: optax.Schedule = {
            "constant": optax.constant_schedule(peak),
            # `join_schedules` also asks for counts below zero, and drops the answer.
            "rsqrt": lambda count: peak * jnp.sqrt(base / (jnp.maximum(count, 0) + base)),
            "cosine": optax.cosine_decay_schedule(peak, rest),
            "linear": optax.linear_schedule(peak, 0.0, rest),
        }[self.decay]
        return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after_warmup], [warmup])

    def build(self) -> optax.GradientTransformation:
        """The optax chain: clipping, then the update rule."""
        if self.optimizer == "adafactor":
            rule = optax.adafactor(self.schedule(), multiply_by_parameter_scale=True)
        else:
            rule = optax.adamw(self.schedule(), weight_decay=self.weight_decay, mask=_is_matrix)
        return optax.chain(optax.clip_by_global_norm(self.max_grad_norm), rule)


def _is_matrix(params: optax.Params) -> optax.Params:
    return jax.tree.map(lambda x: x.ndim > 1, params)
