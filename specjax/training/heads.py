"""Training of draft heads on a frozen target: the target's outputs on each text, and the objective.

Axes: B rows, S source length, N target length, D positions ahead, F width of the features, M width of the
encoder output, R ids that can be drafted, V vocabulary.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.heads import HeadsNetwork
from specjax.models.t5 import T5Network
from specjax.training.loop import Arrays, Objective, decoder_input
from specjax.types import Params

DECAY = 0.8  # of the loss weight, per position ahead (Medusa; EAGLE-3, section 3.2)


def make_teacher(target: T5Network, feature_layers: tuple[int, ...] = ()) -> Callable[[Arrays], Arrays]:
    """Returns a function that adds the target's outputs to a batch.

    For target token i: "target_logits" `[B, N, V] float32`, which predict it (padding ids are cut off);
    "inputs" `[B, N]`, the decoder input before it; "features" `[B, N, F]`, those of the input one position
    earlier (zeros for i = 0). And "encoded" `[B, S, M]`.
    """

    @jax.jit
    def forward(target: T5Network, batch: Arrays) -> Arrays:
        inputs = decoder_input(target.module, batch["target_ids"])
        encoded = target.encode(batch["source_ids"], batch["source_mask"])
        cache = target.init_cache(encoded, batch["source_mask"], 0)
        logits, features, _ = target.decode(cache, inputs)
        features = jnp.pad(features, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        logits = logits[..., : target.num_ids]
        return {"target_logits": logits, "inputs": inputs, "features": features, "encoded": encoded}

    with_features = target.with_features(feature_layers)
    return lambda batch: batch | forward(with_features, batch)


def objective(network: HeadsNetwork) -> Objective:
    """Returns the objective of heads: cross-entropy with the target's distributions at all positions ahead.

    Batches come from `make_teacher`. Position d, from 0, has the weight 0.8^d. With a reduced draft
    vocabulary, the sum is over its ids only.
    """

    def loss(params: Params, part: Arrays, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        del key
        logits, p, valid = _by_depth(network.replace(params=params), part)
        log_q = jax.nn.log_softmax(logits, axis=-1)
        cross_entropy = -(p * log_q).sum(-1)  # [B, D, N]
        count = jnp.maximum(valid.sum((0, 2)), 1)
        means = jnp.where(valid, cross_entropy, 0.0).sum((0, 2)) / count
        weights = DECAY ** np.arange(network.num_steps)
        return (means * weights).sum() / weights.sum(), means[0]

    return loss


def make_agreement(
    network: HeadsNetwork,
) -> Callable[[Params, Iterable[Arrays]], tuple[np.ndarray, np.ndarray]]:
    """Returns `(params, batches) -> (expected alpha at temperature 1, at temperature 0)`, `[D]` each.

    Batches come from `make_teacher`; intermediate tokens are the batch's. Means by position ahead: the sum
    of min(p, q) at temperature 1, the share of positions whose argmaxes agree at temperature 0.
    """

    @jax.jit
    def total(network: HeadsNetwork, batch: Arrays) -> Any:
        logits, p, valid = _by_depth(network, batch)
        q = jax.nn.softmax(logits, axis=-1)
        ids = np.array(network.config.draft_ids or range(logits.shape[-1]))
        best = _shifted(batch["target_logits"].argmax(-1), network.num_steps)
        agree = jnp.asarray(ids)[logits.argmax(-1)] == best
        mean = lambda x: jnp.where(valid, x, 0).sum((0, 2))  # noqa: E731
        return mean(jnp.minimum(p, q).sum(-1)), mean(agree), valid.sum((0, 2))

    def agreement(params: Params, batches: Iterable[Arrays]) -> tuple[np.ndarray, np.ndarray]:
        sums = [jax.device_get(total(network.replace(params=params), batch)) for batch in batches]
        overlap, agree, count = (np.sum([x[i] for x in sums], axis=0) for i in range(3))
        if not count.all():
            raise ValueError(
                f"`batches` must have target tokens at all {network.num_steps} positions ahead, got {count} "
                "by position; give longer targets"
            )
        return overlap / count, agree / count

    return agreement


def _by_depth(network: HeadsNetwork, batch: Arrays) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the heads' logits, the target's probabilities (both `[B, D, N, R]`), and a mask of both."""
    inputs: tuple = (batch["features"],)
    if network.config.kind != "medusa":
        inputs += (batch["inputs"], batch["encoded"], batch["source_mask"])
    logits = network.unroll(*inputs)
    p = jax.nn.softmax(batch["target_logits"], axis=-1)
    if network.config.draft_ids:
        p = p[..., np.array(network.config.draft_ids)]
    else:
        logits = logits[..., : p.shape[-1]]
    valid = _shifted(batch["target_mask"], network.num_steps)
    if network.config.kind == "medusa":  # no prediction before the first feature
        valid = valid.at[:, :, 0].set(False)
    return logits, _shifted(p, network.num_steps), valid


def _shifted(values: jax.Array, depth: int) -> jax.Array:
    """Returns `[B, D, N, ...]`: entry [d, i] is `values` `[B, N, ...]` at i + d, zero beyond the end."""
    num = values.shape[1]
    padded = jnp.pad(values, [(0, 0), (0, depth)] + [(0, 0)] * (values.ndim - 2))
    return jnp.stack([padded[:, d : d + num] for d in range(depth)], axis=1)
