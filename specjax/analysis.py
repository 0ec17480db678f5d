"""What speculation should bring: the paper's formulas and the one that measured parts give.

Leviathan et al. 2023 (arXiv 2211.17192). All numpy; arguments broadcast.

Symbols: alpha accepted over tested drafts; K drafts a round; tau tokens per target call; c, v, o
time of a draft step, of a target call on K + 1 tokens, and of the rest of a round, each over the
time of a plain step (a target call on one token).
"""

from typing import Any

import numpy as np

ArrayLike = Any


def expected_tokens(alpha: ArrayLike, num_draft: ArrayLike) -> np.ndarray:
    """Tokens per target call if acceptances were independent: (1 - alpha^(K+1)) / (1 - alpha).

    Equation 1. At alpha = 1 it is K + 1. For alpha .8 and K 5: 3.69 tokens, of which 2.69 are
    accepted drafts.
    """
    alpha, num_draft = np.asarray(alpha, float), np.asarray(num_draft)
    below = np.where(alpha < 1, alpha, 0.5)
    return np.where(alpha < 1, (1 - below ** (num_draft + 1)) / (1 - below), num_draft + 1.0)


def predicted_speedup(
    tau: ArrayLike, num_draft: ArrayLike, c: ArrayLike, v: ArrayLike = 1.0, o: ArrayLike = 0.0
) -> np.ndarray:
    """tau / (v + K c + o). With `expected_tokens` as tau, v = 1 and o = 0 it is Theorem 3.8."""
    tau, num_draft = np.asarray(tau, float), np.asarray(num_draft)
    return tau / (np.asarray(v) + num_draft * np.asarray(c) + np.asarray(o))
