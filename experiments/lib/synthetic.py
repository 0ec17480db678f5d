"""Models of any shape with random weights, and forced acceptance: for benchmarks, not for sampling.

Times do not depend on the values of the weights.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import acceptance, decode
from specjax.drafters.base import DrafterWrapper
from specjax.draws import Stream
from specjax.models import families, t5
from specjax.types import AcceptanceResult, AcceptanceRule, Context, Draft, Draws, Network


def default_dtype() -> str:
    """Returns the default dtype of weights and computation: float32 on CPU, bfloat16 elsewhere."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def network(config: families.Config, seed: int) -> t5.T5Network:
    """Returns a network with initial params, made on the device in the dtype of the config."""
    ids = jnp.zeros((1, 8), jnp.int32)

    @jax.jit
    def init(key: jax.Array) -> Any:
        params = families.module(config).init(key, ids, ids == 0, ids)["params"]
        return jax.tree.map(lambda x: x.astype(config.dtype), params)

    return families.network(init(jax.random.key(seed)), config)


def request(target: Network, size: tuple[int, int], **options: Any) -> decode.Request:
    """Returns a request of random source tokens `[B, S]` = `size` that runs to its limit.

    Args:
      target: the network.
      size: (B, S).
      options: other options of `decode.prepare`.
    """
    source = np.random.default_rng(0).integers(2, target.vocab_size, size)
    return decode.prepare(target, source, np.ones(size, bool), eos_ids=(), **options)


@dataclasses.dataclass(frozen=True)
class Forced(AcceptanceRule):
    """A rule for benchmarks, not a sampler: computes `rule`, but accepts each draft with probability `alpha`.

    Attributes:
      rule: the rule to compute.
      alpha: probability in [0, 1] that a draft is accepted if all before it are.
    """

    rule: AcceptanceRule
    alpha: float

    def __call__(self, draws: Draws, draft: Draft, target_probs: jax.Array) -> AcceptanceResult:
        """Returns the result of the rule with a forced number of accepted drafts."""
        result = self.rule(draws, draft, target_probs)
        num_draft = draft.tokens.shape[1]
        chance = jnp.full(draft.tokens.shape, self.alpha)
        # Streams beyond those of the round, which the rule does not use.
        accepted = draws.accept(Stream.ACCEPT.at(num_draft + 1 + jnp.arange(num_draft)), chance)
        forced = acceptance.leading_run(accepted, draft.num_drafted)
        # Never true, but the compiler cannot know that, so it keeps the computation of the rule.
        impossible = result.num_accepted > num_draft
        return result._replace(num_accepted=jnp.where(impossible, result.num_accepted, forced))


class ForcedDrafter(DrafterWrapper):
    """A drafter for benchmarks: computes `inner`, then proposes `tokens`, known from an earlier run.

    It is for greedy programs, which run no rule: they emit the target's tokens, and accept each draft as
    `forced_tokens` drew it. The decoder's prefix must be the start token only.

    Attributes:
      tokens: `[B, T]`, the draft for each token of the output.
    """

    tokens: jax.Array

    def propose(
        self, state: Any, context: Context, draws: Draws | None, max_length: jax.Array | None
    ) -> tuple[Draft, Any]:
        draft, state = self.inner.propose(state, context, draws, max_length)
        index = context.length[:, None] - 1 + jnp.arange(self.num_draft)[None, :]
        known = jnp.take_along_axis(self.tokens, index, axis=1, mode="clip")
        # Never true, but the compiler cannot know that, so it keeps the computation of `inner`.
        impossible = (draft.num_drafted > self.num_draft)[:, None]
        return draft.replace(tokens=jnp.where(impossible, draft.tokens, known)), state


def forced_tokens(outputs: Sequence[Sequence[int]], alpha: float, num_ids: int, seed: int) -> jax.Array:
    """Returns `[B, T]`: at each position the target's token with probability `alpha`, otherwise another id.

    Args:
      outputs: greedy outputs of the target, all of one length.
      alpha: probability in [0, 1].
      num_ids: size of the vocabulary.
      seed: seed of the draws.
    """
    known = np.asarray(outputs)
    kept = np.random.default_rng(seed).random(known.shape) < alpha
    return jnp.asarray(np.where(kept, known, (known + 1) % num_ids), jnp.int32)
