"""Training losses: means over valid tokens, so padding changes nothing."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def cross_entropy(
    logits: jax.Array, targets: jax.Array, mask: jax.Array, label_smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean negative log-likelihood of the target tokens, in nats.

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


Divergence = Callable[[jax.Array, jax.Array], jax.Array]  # log p, log q `[..., V]` -> nats `[...]`


def forward_kl(target: jax.Array, draft: jax.Array) -> jax.Array:
    """Returns KL(p || q), which is mode-covering."""
    return (jnp.exp(target) * (target - draft)).sum(-1)


def reverse_kl(target: jax.Array, draft: jax.Array) -> jax.Array:
    """Returns KL(q || p), which is mode-seeking."""
    return (jnp.exp(draft) * (draft - target)).sum(-1)


def jensen_shannon(target: jax.Array, draft: jax.Array) -> jax.Array:
    """Returns the mean of KL(p || m) and KL(q || m) with m = (p + q) / 2."""
    middle = jnp.logaddexp(target, draft) - jnp.log(2.0)
    return 0.5 * (forward_kl(target, middle) + forward_kl(draft, middle))


def total_variation(target: jax.Array, draft: jax.Array) -> jax.Array:
    """Returns half the sum of |p - q|: 1 minus the acceptance rate (Leviathan et al. 2023, theorem 3.5)."""
    return 0.5 * jnp.abs(jnp.exp(target) - jnp.exp(draft)).sum(-1)


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
}


def distillation(
    divergence: Divergence, target_logits: jax.Array, draft_logits: jax.Array, mask: jax.Array
) -> jax.Array:
    """Returns the mean divergence of the draft's from the target's distributions over valid tokens.

    DistillSpec (Zhou et al. 2023, section 3), at temperature 1.

    Args:
      divergence: one of `DIVERGENCES`.
      target_logits, draft_logits: `[B, N, V] float32`, given the same tokens.
      mask: `[B, N] bool`, True at valid tokens.
    """
    log_probs = (jax.nn.log_softmax(logits, axis=-1) for logits in (target_logits, draft_logits))
    return jnp.where(mask, divergence(*log_probs), 0.0).sum() / jnp.maximum(mask.sum(), 1)


def acceptance_chances(target_logits: jax.Array, draft_logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the probability that the token-wise rule accepts a draft at each position.

    Returns:
      `[B, N] float32` twice: at temperature 1, the sum over tokens of min(p, q) (Leviathan et al. 2023,
      theorem 3.5); at temperature 0, 1 where the argmaxes agree and 0 elsewhere.
    """
    p, q = (jax.nn.softmax(logits, axis=-1) for logits in (target_logits, draft_logits))
    agree = target_logits.argmax(-1) == draft_logits.argmax(-1)
    return jnp.minimum(p, q).sum(-1), agree.astype(p.dtype)


def acceptance_of(target_logits: jax.Array, draft_logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the probability that an emitted token was an accepted draft: min(1, q / p).

    The token-wise rule emits x as an accepted draft with probability min(p(x), q(x)), and in total with
    probability p(x). Given the complete output, these events are independent.

    Args:
      target_logits, draft_logits: `[B, N, V]`, before each token.
      tokens: `[B, N]`.

    Returns:
      `[B, N] float32`.
    """
    log_p, log_q = (
        jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[..., None], axis=-1)[..., 0]
        for logits in (target_logits, draft_logits)
    )
    return jnp.exp(jnp.minimum(0.0, log_q - log_p))
