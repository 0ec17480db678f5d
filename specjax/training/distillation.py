"""Distillation of a draft model from a frozen target: sequences, objectives, and the acceptance rate.

DistillSpec (Zhou et al. 2023). Axes: B rows, S source length, N target length, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import corpus, data, decode
from specjax.models.t5 import T5, T5Network
from specjax.training import losses
from specjax.training.loop import Arrays, Objective, teacher_forced_logits
from specjax.types import Drafter, Network, Params

Teacher = Callable[[Arrays], Arrays]


def make_teacher(target: T5Network) -> Teacher:
    """Returns a function that adds the target's logits to a batch: "target_logits" `[B, N, V] float32`.

    Padding ids of the vocabulary are cut off.
    """

    @jax.jit
    def forward(target: T5Network, batch: Arrays) -> jax.Array:
        return teacher_forced_logits(target.module, target.params, batch)[..., : target.num_ids]

    return lambda batch: batch | {"target_logits": forward(target, batch)}


def divergence_from_target(module: T5, divergence: losses.Divergence) -> Objective:
    """Returns the objective of a draft `module`: the mean divergence over valid tokens.

    Batches must contain "target_logits"; see `make_teacher`.
    """

    def objective(params: Params, part: Arrays, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = teacher_forced_logits(module, params, part, dropout_key=key)
        logits = logits[..., : part["target_logits"].shape[-1]]
        loss = losses.distillation(divergence, part["target_logits"], logits, part["target_mask"])
        return loss, loss

    return objective


def generate_targets(
    network: Network,
    pairs: Sequence[data.Pair],
    *,
    temperature: float,
    seed: int,
    max_new_tokens: int,
    batch_size: int = 64,
    drafter: Drafter | None = None,
    on_progress: Callable[[int, int], None] = lambda done, tokens: None,
) -> list[data.Pair]:
    """Returns the pairs with their targets replaced by outputs of a model, decoded by this library.

    Args:
      network: the model.
      pairs: their targets are not read.
      temperature: 0 gives greedy outputs.
      seed: of the first pair; each next pair's is one higher.
      max_new_tokens: longer outputs are truncated.
      batch_size: rows decoded together.
      drafter: for speculative decoding, which keeps the distribution, and the ids at temperature 0.
      on_progress: called with the numbers of pairs done and of tokens emitted; first with zeros.
    """

    def request(width: int, indices: Sequence[int]) -> decode.Request:
        source_ids, source_mask = data.pad([pairs[i].source for i in indices], width, network.pad_id)
        return decode.prepare(
            network,
            source_ids,
            source_mask,
            drafter=drafter,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            seed=seed + np.asarray(indices),
        )

    lengths = [len(pair.source) for pair in pairs]
    num_refilled = corpus.default_refill_size(batch_size, network.mesh)
    targets: dict[int, list[int]] = {}
    num_emitted = 0
    on_progress(0, num_emitted)
    buckets = data.source_buckets(max(lengths))
    for finished in corpus.decode_all(request, lengths, buckets, batch_size, num_refilled):
        rows = zip(finished.indices, finished.generation.tokens, finished.generation.length, strict=True)
        targets |= {int(index): tokens[:length].tolist() for index, tokens, length in rows}
        num_emitted += int(finished.generation.length.sum())
        on_progress(len(targets), num_emitted)
    return [data.Pair(pair.source, targets[i]) for i, pair in enumerate(pairs)]


def make_on_policy(draft: T5Network, max_new_tokens: int) -> Callable[[Params, Arrays, int], Arrays]:
    """Returns `(params, batch, seed) -> batch`; the new targets are the draft's samples at temperature 1."""

    def sample(params: Params, batch: Arrays, seed: int) -> Arrays:
        output = decode.generate(
            draft.replace(params=params),
            batch["source_ids"],
            batch["source_mask"],
            temperature=1.0,
            max_new_tokens=max_new_tokens,
            length_bucket=max_new_tokens,
            seed=seed,
        )
        mask = jnp.arange(max_new_tokens)[None, :] < output.length[:, None]
        return batch | {"target_ids": output.tokens, "target_mask": mask}

    return sample


def make_acceptance(
    target: T5Network, draft: T5Network
) -> Callable[[Params, Iterable[data.Batch]], tuple[float, float]]:
    """Returns `(draft params, batches) -> (expected alpha at temperature 1, at temperature 0)`.

    Both are means over valid tokens: the sum of min(p, q) at temperature 1, the share of positions whose
    argmaxes agree at temperature 0. Speculative decoding has the former as its acceptance rate if the
    batches contain samples of the target.
    """

    @jax.jit
    def total(target: T5Network, draft: T5Network, batch: Arrays) -> Any:
        logits = [
            teacher_forced_logits(network.module, network.params, batch)[..., : target.num_ids]
            for network in (target, draft)
        ]
        mask = batch["target_mask"]
        return [jnp.where(mask, x, 0).sum() for x in losses.acceptance_chances(*logits)], mask.sum()

    def acceptance(params: Params, batches: Iterable[data.Batch]) -> tuple[float, float]:
        sums, count = np.zeros(2), 0
        for batch in batches:
            found = total(target, draft.replace(params=params), dataclasses.asdict(batch))
            chances, num_tokens = jax.device_get(found)
            sums, count = sums + chances, count + int(num_tokens)
        if count == 0:
            raise ValueError("`batches` must hold a target token, got none; give at least one example")
        return float(sums[0] / count), float(sums[1] / count)

    return acceptance
