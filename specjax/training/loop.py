"""The one training loop: a jitted step, validation, checkpoints, progress.

Axes: B rows, S source length, N target length, V vocabulary.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from specjax import data
from specjax.training import losses

Params = Any


@dataclasses.dataclass(frozen=True)
class Optimization:
    """How to optimise.

    Attributes:
      optimizer: "adafactor" (parameter-scaled updates, Shazeer and Stern 2018) or "adamw".
      learning_rate: the peak; for Adafactor relative to each parameter's root mean square.
      warmup_steps, num_steps: linear warm-up, then a cosine to zero at `num_steps`.
      weight_decay: of AdamW.
      max_grad_norm: clipping by the global norm.
      label_smoothing: of the cross-entropy.
    """

    optimizer: str = "adafactor"
    learning_rate: float = 2e-2
    warmup_steps: int = 300
    num_steps: int = 2000
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    label_smoothing: float = 0.1

    def build(self) -> optax.GradientTransformation:
        """The optax chain.

        Raises:
          ValueError: an unknown optimizer.
        """
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, self.learning_rate, self.warmup_steps, max(self.num_steps, self.warmup_steps + 1)
        )
        clip = optax.clip_by_global_norm(self.max_grad_norm)
        if self.optimizer == "adafactor":
            return optax.chain(clip, optax.adafactor(schedule, multiply_by_parameter_scale=True))
        if self.optimizer == "adamw":
            return optax.chain(clip, optax.adamw(schedule, weight_decay=self.weight_decay))
        raise ValueError(f"optimizer={self.optimizer!r}: use 'adafactor' or 'adamw'")


class TrainState(struct.PyTreeNode):
    """What the next step needs: step count `[] int32`, params, optimizer state."""

    step: jax.Array
    params: Params
    opt_state: Any


def init_state(params: Params, optimization: Optimization) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimization.build().init(params))


def make_step(
    module: Any, optimization: Optimization, seed: int
) -> Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, jax.Array]]:
    """The jitted training step `(state, batch) -> (state, mean loss in nats)`.

    The dropout noise of a step is a function of `seed` and the step count, so a resumed run
    repeats an uninterrupted one. It comes from the `rbg` generator, the cheaper one. Recompiles
    per batch shape.
    """
    transform = optimization.build()
    root = jax.random.key(seed, impl="unsafe_rbg")

    def loss_fn(params: Params, batch: dict[str, jax.Array], key: jax.Array) -> Any:
        logits = teacher_forced_logits(module, params, batch, dropout_key=key)
        return losses.cross_entropy(
            logits, batch["target_ids"], batch["target_mask"], optimization.label_smoothing
        )

    def step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, jax.Array]:
        key = jax.random.fold_in(root, state.step)
        (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, batch, key)
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), loss

    return jax.jit(step, donate_argnums=0)


def teacher_forced_logits(
    module: Any, params: Params, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None
) -> jax.Array:
    """Logits `[B, N, V] float32` that predict `target_ids`, given all tokens before each."""
    start = jnp.full_like(batch["target_ids"][:, :1], module.config.start_id)
    decoder_input = jnp.concatenate([start, batch["target_ids"][:, :-1]], axis=1)
    noise = {} if dropout_key is None else {"rngs": {"dropout": dropout_key}}
    return module.apply(
        {"params": params}, batch["source_ids"], batch["source_mask"], decoder_input,
        dropout_key is None, **noise,
    )  # fmt: skip


def make_evaluate(module: Any) -> Callable[[Params, Iterable[data.Batch]], float]:
    """A function `(params, batches) -> mean loss in nats per token`, without dropout."""

    @jax.jit
    def total(params: Params, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits = teacher_forced_logits(module, params, batch)
        _, mean = losses.cross_entropy(logits, batch["target_ids"], batch["target_mask"])
        count = batch["target_mask"].sum()
        return mean * count, count

    def evaluate(params: Params, batches: Iterable[data.Batch]) -> float:
        # Each result is waited for: dozens of computations in flight can starve a CPU's thread pool.
        totals = [jax.device_get(total(params, dataclasses.asdict(batch))) for batch in batches]
        return float(sum(loss for loss, _ in totals) / sum(count for _, count in totals))

    return evaluate


class Progress(struct.PyTreeNode):
    """What a person wants to know after some steps.

    Attributes:
      step: steps done.
      loss: mean training loss since the last report, nats per token.
      tokens_per_s: target tokens per second since the last report, compilation included.
    """

    step: int
    loss: float
    tokens_per_s: float


def run(
    state: TrainState, step: Callable, batches: Iterator[data.Batch], num_steps: int,
    report_every: int, on_report: Callable[[TrainState, Progress], bool],
) -> TrainState:  # fmt: skip
    """Steps until `num_steps` in all, reporting every `report_every` steps and at the end.

    `on_report` may evaluate, save, print; it returns False to stop early.
    """
    done = int(state.step)
    while done < num_steps:
        started, loss_sum, num_tokens, first = time.perf_counter(), 0.0, 0, done
        while done < num_steps and (done == first or done % report_every):
            batch = next(batches)
            state, loss = step(state, dataclasses.asdict(batch))
            loss_sum += float(loss)
            num_tokens += int(batch.target_mask.sum())
            done += 1
        rate = num_tokens / (time.perf_counter() - started)
        if not on_report(state, Progress(done, loss_sum / (done - first), rate)):
            break
    return state
