"""The training loop: a jitted step, validation, progress, early stopping.

Axes: B rows, S source length, N target length, V vocabulary.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from specjax import data, sharding
from specjax.training import losses
from specjax.training.state import Optimization, TrainState
from specjax.types import Params

Arrays = dict[str, Any]  # the fields of a `data.Batch`
Step = Callable[[TrainState, Arrays], tuple[TrainState, jax.Array]]
# (params, part of a batch, dropout key) -> the loss to minimise and the one to report, means over
# the part's valid tokens
Objective = Callable[[Params, Arrays, jax.Array], tuple[jax.Array, jax.Array]]


def decoder_input(module: Any, target_ids: jax.Array) -> jax.Array:
    """Returns the decoder input for `target_ids` `[B, N]`: the start token, then all ids but the last."""
    start = jnp.full_like(target_ids[:, :1], module.config.start_id)
    return jnp.concatenate([start, target_ids[:, :-1]], axis=1)


def teacher_forced_logits(
    module: Any, params: Params, batch: Arrays, dropout_key: jax.Array | None = None
) -> jax.Array:
    """Returns logits `[B, N, V] float32` that predict `target_ids`, given all tokens before each."""
    noise = {} if dropout_key is None else {"rngs": {"dropout": dropout_key}}
    return module.apply(
        {"params": params},
        batch["source_ids"],
        batch["source_mask"],
        decoder_input(module, batch["target_ids"]),
        dropout_key is None,
        **noise,
    )


def likelihood(module: Any, label_smoothing: float = 0.0) -> Objective:
    """Returns the negative log-likelihood of the target tokens: smoothed to minimise, plain to report.

    Raises:
      ValueError: `label_smoothing` is not in [0, 1).
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"`label_smoothing` must be at least 0 and below 1, got {label_smoothing}")

    def objective(params: Params, part: Arrays, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = teacher_forced_logits(module, params, part, dropout_key=key)
        return losses.cross_entropy(logits, part["target_ids"], part["target_mask"], label_smoothing)

    return objective


def make_gradients(
    objective: Objective, optimization: Optimization
) -> Callable[[Params, Arrays, jax.Array], tuple[jax.Array, Params]]:
    """Returns `(params, batch, key) -> (mean loss to report, gradients of the loss to minimise)`.

    The batch is split into `num_accumulated` parts. Each adds its share of the mean over all valid
    tokens, so the sum equals that of the full batch, however valid tokens are distributed over the parts.
    """
    num_parts = optimization.num_accumulated

    def loss_share(params: Params, part: Arrays, key: jax.Array, num_tokens: jax.Array) -> Any:
        minimised, reported = objective(params, part, key)
        share = part["target_mask"].sum() / num_tokens
        return minimised * share, reported * share

    def gradients(params: Params, batch: Arrays, key: jax.Array) -> tuple[jax.Array, Params]:
        # Row r goes to part r mod num_parts, so that each part has rows of every device.
        parts = jax.tree.map(lambda x: x.reshape(-1, num_parts, *x.shape[1:]).swapaxes(0, 1), batch)
        num_tokens = jnp.maximum(batch["target_mask"].sum(), 1)

        def add(sums: Any, inputs: Any) -> Any:
            part, key = inputs
            (_, loss), grads = jax.value_and_grad(loss_share, has_aux=True)(params, part, key, num_tokens)
            return jax.tree.map(jnp.add, sums, (loss, grads)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        return jax.lax.scan(add, zeros, (parts, jax.random.split(key, num_parts)))[0]

    return gradients


def make_step(objective: Objective, optimization: Optimization, like: TrainState) -> Step:
    """Returns the jitted training step `(state, batch) -> (state, mean loss to report)`.

    The state is donated: use the returned one. The dropout noise is a function of the state, so a
    resumed run equals an uninterrupted one. Recompiles per batch shape.

    Args:
      like: a state or an `abstract_state`: the step runs on its devices and keeps its shardings.

    Raises (the step):
      ValueError: the rows of a batch cannot be divided over the devices and parts.
    """
    transform, gradients = optimization.build(), make_gradients(objective, optimization)
    placement = jax.tree.map(lambda x: x.sharding, like)
    mesh = placement.step.mesh

    def step(state: TrainState, batch: Arrays) -> tuple[TrainState, jax.Array]:
        loss, grads = gradients(state.params, batch, state.key)
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), loss

    jitted = jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(placement, sharding.by_row(mesh)),
        out_shardings=(placement, sharding.replicated(mesh)),
    )

    def checked(state: TrainState, batch: Arrays) -> tuple[TrainState, jax.Array]:
        num_rows, num_devices = len(batch["source_ids"]), mesh.shape["data"]
        if num_rows % (num_devices * optimization.num_accumulated):
            raise ValueError(
                f"`batch` must have a multiple of {num_devices * optimization.num_accumulated} rows "
                f"(num_accumulated={optimization.num_accumulated} parts on {num_devices} data-parallel "
                f"devices), got {num_rows}"
            )
        return jitted(state, batch)

    return checked


def make_evaluate(module: Any, mesh: Mesh | None = None) -> Callable[[Params, Iterable[data.Batch]], float]:
    """Returns `(params, batches) -> mean loss in nats per token`, without dropout.

    Args:
      mesh: that of the params; None: one device.

    Raises (the function):
      ValueError: no batch holds a target token.
    """
    rows = sharding.by_row(mesh or sharding.make_mesh())

    @jax.jit
    def total(params: Params, batch: Arrays) -> tuple[jax.Array, jax.Array]:
        logits = teacher_forced_logits(module, params, batch)
        _, mean = losses.cross_entropy(logits, batch["target_ids"], batch["target_mask"])
        count = batch["target_mask"].sum()
        return mean * count, count

    def place(array: np.ndarray) -> jax.Array:
        """Adds masked rows up to a multiple of the data-parallel devices."""
        missing = -len(array) % rows.mesh.shape["data"]
        return jax.device_put(np.pad(array, ((0, missing), (0, 0))), rows)

    def evaluate(params: Params, batches: Iterable[data.Batch]) -> float:
        # Waits for each result: dozens of computations in flight can starve a CPU's thread pool.
        totals = [
            jax.device_get(total(params, jax.tree.map(place, dataclasses.asdict(batch)))) for batch in batches
        ]
        num_tokens = sum(count for _, count in totals)
        if num_tokens == 0:
            raise ValueError("`batches` must hold a target token, got none; give at least one example")
        return float(sum(loss for loss, _ in totals) / num_tokens)

    return evaluate


@dataclasses.dataclass(frozen=True)
class Best:
    """The best validation result so far.

    Attributes:
      larger_is_better: True for BLEU, False for a loss.
      step, value: of the best; None before the first.
      num_worse: number of results since then; none is better.
    """

    larger_is_better: bool
    step: int | None = None
    value: float | None = None
    num_worse: int = 0

    def update(self, step: int, value: float) -> "Best":
        """Returns the best after one more result. A tie or a NaN is not better."""
        if self.value is None:
            better = value == value
        else:
            better = value > self.value if self.larger_is_better else value < self.value
        if better:
            return dataclasses.replace(self, step=step, value=value, num_worse=0)
        return dataclasses.replace(self, num_worse=self.num_worse + 1)

    def should_stop(self, patience: int) -> bool:
        """Returns whether the last `patience` results were not better; False if `patience` is 0."""
        return 0 < patience <= self.num_worse


class Progress(NamedTuple):
    """A report on the steps since the last one.

    Attributes:
      step: steps done.
      loss: mean training loss since the last report, nats per token.
      tokens_per_s: target tokens per second since the last report, compilation included.
    """

    step: int
    loss: float
    tokens_per_s: float


def run(
    state: TrainState,
    step: Step,
    batches: Iterator[data.Batch],
    num_steps: int,
    report_every: int,
    on_report: Callable[[TrainState, Progress], bool],
) -> TrainState:
    """Trains up to step `num_steps`; reports every `report_every` steps and at the end.

    `on_report` may evaluate, save, print; it returns False to stop early. The state that it
    receives is donated to the next step.

    Raises:
      FloatingPointError: the loss is not finite.
    """
    done = int(state.step)
    while done < num_steps:
        started, loss_sum, num_tokens, first = time.perf_counter(), 0.0, 0, done
        while done < num_steps and (done == first or done % report_every):
            batch = next(batches)
            state, loss = step(state, dataclasses.asdict(batch))
            done += 1
            loss_sum += float(loss)
            if not math.isfinite(loss_sum):
                raise FloatingPointError(
                    f"the training loss is {float(loss)} at step {done}: lower the learning rate or lengthen "
                    "the warm-up, and resume from the last checkpoint"
                )
            num_tokens += int(batch.target_mask.sum())
        rate = num_tokens / (time.perf_counter() - started)
        if not on_report(state, Progress(done, loss_sum / (done - first), rate)):
            break
    return state
