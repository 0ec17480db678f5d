"""Training losses: means over valid tokens, so padding changes nothing."""

import jax
import jax.numpy as jnp


def cross_entropy(
    logits: jax.Array, targets: jax.Array, mask: jax.Array, label_smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Mean negative log-likelihood of the target tokens, in nats.

    Args:
      logits: `[B, N, V] float32`.
      targets: `[B, N] int32`, the token that follows each position.
      mask: `[B, N] bool`, True at real targets.
      label_smoothing: mass in [0, 1) spread evenly over the vocabulary (Szegedy et al. 2016).

    Returns:
      The smoothed loss to minimise and the plain one to report, both scalars.
    """
    log_normaliser = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    plain = log_normaliser - picked
    smooth = log_normaliser - logits.mean(-1)
    count = jnp.maximum(mask.sum(), 1)
    mean = lambda x: jnp.where(mask, x, 0.0).sum() / count  # noqa: E731
    return mean((1 - label_smoothing) * plain + label_smoothing * smooth), mean(plain)
