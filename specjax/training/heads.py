"""Training heads on a frozen target: the target's outputs on each text, and the objective.

Axes: B rows, S source length, N target length, D positions ahead, F width of the features, R ids that are
drafted, V vocabulary.
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

DECAY = 0.8  # of the weights of positions further ahead (Medusa; EAGLE-3, section 3.2)


def make_teacher(target: T5Network, feature_layers: tuple[int, ...] = ()) -> Callable[[Arrays], Arrays]:
    """Returns a function that adds the target's outputs to a batch.

    "target_logits" `[B, N, V] float32` before each target token, ids that do not exist left out; of the pair
    that ends before it "inputs" `[B, N]` and "features" `[B, N, F]`, zero in the first; and "encoded"
    `[B, S, M]`.
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
    """Returns the cross-entropy with the target's distributions, at all positions ahead, of taught batches.

    A position d further counts 0.8^d. Where not all ids are drafted, the others are left out of the sum.
    """

    def loss(params: Params, part: Arrays, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        del key
        logits, p, valid = _by_depth(network.replace(params=params), part)
        log_q = jax.nn.log_softmax(logits, axis=-1)
        entropies = -(p * log_q).sum(-1)  # [B, D, N]
        count = jnp.maximum(valid.sum((0, 2)), 1)
        means = jnp.where(valid, entropies, 0.0).sum((0, 2)) / count
        weights = DECAY ** np.arange(network.num_steps)
        return (means * weights).sum() / weights.sum(), means[0]

    return loss


def make_agreement(
    network: HeadsNetwork,
) -> Callable[[Params, Iterable[Arrays]], tuple[np.ndarray, np.ndarray]]:
    """Returns `(params, taught batches) -> mean chances of acceptance` by position ahead, `[D]` twice.

    The tokens between are taken as they are in the batch. At temperature 1, the sum of min(p, q); at
    temperature 0, the share of positions whose argmaxes agree.
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
            raise ValueError("`batches` must hold more target tokens; give at least one that is long enough")
        return overlap / count, agree / count

    return agreement


def _by_depth(network: HeadsNetwork, batch: Arrays) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns logits `[B, D, N, R]` of the heads, the target's probabilities of the same ids, which count."""
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
    if network.config.kind == "medusa":  # which predicts nothing before the first feature
        valid = valid.at[:, :, 0].set(False)
    return logits, _shifted(p, network.num_steps), valid


def _shifted(values: jax.Array, depth: int) -> jax.Array:
    """Returns `[B, D, N, ...]`: entry [d, i] is `values` `[B, N, ...]` at i + d, zero beyond the end."""
    num = values.shape[1]
    padded = jnp.pad(values, [(0, 0), (0, depth)] + [(0, 0)] * (values.ndim - 2))
    return jnp.stack([padded[:, d : d + num] for d in range(depth)], axis=1)
