"""The arms of a distillation: an objective and the sequences it is trained on, in step with each other."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import struct

from specjax.loading import Model
from specjax.models import t5
from specjax.training import distillation, loop, losses
from specjax.training.optimization import Optimization
from specjax.training.state import TrainState


class Arms(struct.PyTreeNode):
    """One training state per arm, in step with each other."""

    states: dict[str, TrainState]

    @property
    def step(self) -> jax.Array:
        return next(iter(self.states.values())).step


def parse(arm: str) -> tuple[str, str]:
    """ "forward_kl:target" -> ("forward_kl", "target").

    Raises:
      ValueError: an unknown objective or kind of sequences.
    """
    objective, _, sequences = arm.partition(":")
    objectives = ["likelihood", *losses.DIVERGENCES]
    if objective not in objectives or sequences not in ("data", "target", "draft"):
        raise ValueError(
            f"--arms={arm}: give OBJECTIVE:SEQUENCES, from {', '.join(objectives)} and data, target, draft"
        )
    return objective, sequences


def make_step(
    target: Model,
    draft: Model,
    names: Sequence[str],
    max_new_tokens: int,
    optimization: Optimization,
    like: TrainState,
) -> Any:
    """A step of the arms of these names: `(Arms, batch) -> (Arms, mean loss)`.

    A batch holds the data's own targets as "target_ids", and the target's outputs as "generated_ids".

    Args:
      max_new_tokens: of what a draft samples.
      optimization, like: of every arm.
    """
    module = t5.T5(dataclasses.replace(draft.config, dropout_rate=0.0))
    num_ids = target.num_ids
    teacher = distillation.make_teacher(target.module, target.params, num_ids)
    on_policy = distillation.make_on_policy(draft.network, max_new_tokens, num_ids)
    parsed = {arm: parse(arm) for arm in names}
    steps = {
        objective: loop.make_step(
            loop.likelihood(module)
            if objective == "likelihood"
            else distillation.divergence_from_target(module, losses.DIVERGENCES[objective]),
            optimization,
            like,
        )
        for objective, _ in parsed.values()
    }
    needs = {sequences for objective, sequences in parsed.values() if objective != "likelihood"}

    def step(arms: Arms, batch: dict[str, Any]) -> tuple[Arms, jax.Array]:
        sources = {name: batch[name] for name in ("source_ids", "source_mask")}
        own = sources | {name: batch[name] for name in ("target_ids", "target_mask")}
        other = sources | {"target_ids": batch["generated_ids"], "target_mask": batch["generated_mask"]}
        taught = {"data": own, "target": other}
        taught = {kind: teacher(values) if kind in needs else values for kind, values in taught.items()}
        states, total = {}, 0.0
        for arm, (objective, sequences) in parsed.items():
            state = arms.states[arm]
            if sequences == "draft":
                values = on_policy(state.params, own, int(state.step))
                values = values if objective == "likelihood" else teacher(values)
            else:
                values = dict(taught[sequences])
            if objective == "likelihood":
                values.pop("target_logits", None)
            states[arm], loss = steps[objective](state, values)
            total += loss / len(parsed)
        return Arms(states), total

    return step
