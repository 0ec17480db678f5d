"""For benchmarks, not for sampling: models of any shape with random weights, and acceptance set by hand.

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
    """Returns the dtype of weights and computation: float32 on CPU, else bfloat16."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def network(config: families.Config, seed: int) -> t5.T5Network:
    """Returns a network with initial params, made on the device in the dtype of the computation."""
    ids = jnp.zeros((1, 8), jnp.int32)

    @jax.jit
    def init(key: jax.Array) -> Any:
        params = families.module(config).init(key, ids, ids == 0, ids)["params"]
        return jax.tree.map(lambda x: x.astype(config.dtype), params)

    return families.network(init(jax.random.key(seed)), config)


def request(target: Network, size: tuple[int, int], **options: Any) -> decode.Request:
    """Returns a request of random source tokens `[B, S]` = `size` that runs to its limit.

    Args:
      options: the others of `decode.prepare`.
    """
    source = np.random.default_rng(0).integers(2, target.vocab_size, size)
    return decode.prepare(target, source, np.ones(size, bool), eos_ids=(), **options)


@dataclasses.dataclass(frozen=True)
class Forced(AcceptanceRule):
    """Not a sampler: computes `rule`, then keeps each draft with probability `alpha` instead.

    Attributes:
      rule: whose work is done.
      alpha: in [0, 1], the chance of each draft while all before it were kept.
    """

    rule: AcceptanceRule
    alpha: float

    def __call__(self, draws: Draws, draft: Draft, target_probs: jax.Array) -> AcceptanceResult:
        """Returns the rule's own token after a number of drafts that is not the rule's."""
        result = self.rule(draws, draft, target_probs)
        num_draft = draft.tokens.shape[1]
        chance = jnp.full(draft.tokens.shape, self.alpha)
        # Streams beyond those of the round: these draws are not the rule's.
        accepted = draws.accept(Stream.ACCEPT.at(num_draft + 1 + jnp.arange(num_draft)), chance)
        forced = acceptance.leading_run(accepted, draft.num_drafted)
        # Never true, which the compiler cannot know: the rule's own count has to be computed.
        impossible = result.num_accepted > num_draft
        return result._replace(num_accepted=jnp.where(impossible, result.num_accepted, forced))


class ForcedDrafter(DrafterWrapper):
    """Not a drafter: computes `inner`, then proposes `tokens`, known from an earlier run.

    For greedy programs, in which no rule runs: they emit the target's own tokens, and each draft is accepted
    as `forced_tokens` drew it. The decoder's prefix is the start token alone.

    Attributes:
      tokens: `[B, T]`, what to draft as each token of the output.
    """

    tokens: jax.Array

    def propose(
        self, state: Any, context: Context, draws: Draws | None, max_length: jax.Array | None
    ) -> tuple[Draft, Any]:
        draft, state = self.inner.propose(state, context, draws, max_length)
        index = context.length[:, None] - 1 + jnp.arange(self.num_draft)[None, :]
        known = jnp.take_along_axis(self.tokens, index, axis=1, mode="clip")
        # Never true, which the compiler cannot know: the drafts of `inner` have to be computed.
        impossible = (draft.num_drafted > self.num_draft)[:, None]
        return draft.replace(tokens=jnp.where(impossible, draft.tokens, known)), state


def forced_tokens(outputs: Sequence[Sequence[int]], alpha: float, num_ids: int, seed: int) -> jax.Array:
    """Returns `[B, T]`: the target's token at each position with probability `alpha`, else another id.

    Args:
      outputs: the target's own greedy output, of one length.
    """
    known = np.asarray(outputs)
    kept = np.random.default_rng(seed).random(known.shape) < alpha
    return jnp.asarray(np.where(kept, known, (known + 1) % num_ids), jnp.int32)
