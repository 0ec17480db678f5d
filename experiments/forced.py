"""For benchmarks, not for sampling: a rule, and a drafter, whose acceptance is set by hand."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import acceptance
from specjax.drafters.around import Around
from specjax.draws import Stream
from specjax.types import AcceptanceRule, Context, Draft, Draws, Params, Round, Verdict


@dataclasses.dataclass(frozen=True)
class Forced:
    """Not a sampler: computes `rule`, then keeps drafts by coins of chance `alpha` instead.

    Attributes:
      rule: whose work is done.
      alpha: in [0, 1], the chance of each draft while all before it were kept.
    """

    rule: AcceptanceRule
    alpha: float

    def __call__(self, draws: Draws, draft: Draft, target_probs: jax.Array) -> Verdict:
        """A verdict whose token is the rule's own and whose length is not."""
        verdict = self.rule(draws, draft, target_probs)
        num_rows, num_draft = draft.tokens.shape
        chance = jnp.full((num_rows, num_draft), self.alpha)
        # Streams beyond those of the round: the coins are not the rule's.
        coins = draws.accept(Stream.ACCEPT.at(num_draft + 1 + jnp.arange(num_draft)), chance)
        forced = acceptance.leading_run(coins, draft.num_drafted)
        # Never true, which the compiler cannot know: the rule's own count has to be computed.
        impossible = verdict.num_accepted > num_draft
        return verdict._replace(num_accepted=jnp.where(impossible, verdict.num_accepted, forced))


class ForcedParams(NamedTuple):
    """Of a `ForcedDrafter`.

    Attributes:
      inner: params of the drafter whose work is done.
      tokens: `[B, T]`, what to draft as each token of the output.
    """

    inner: Params
    tokens: jax.Array


def forced_tokens(outputs: Sequence[Sequence[int]], alpha: float, num_ids: int, seed: int) -> jax.Array:
    """What the target says at each position by a coin of chance `alpha`, else another id: `[B, T]`.

    Args:
      outputs: the target's own greedy output, of one length.
    """
    known = np.asarray(outputs)
    kept = np.random.default_rng(seed).random(known.shape) < alpha
    return jnp.asarray(np.where(kept, known, (known + 1) % num_ids), jnp.int32)


@dataclasses.dataclass(frozen=True)
class ForcedDrafter(Around):
    """Not a drafter: computes `inner`, then proposes what it was told to, known from an earlier run.

    For greedy programs, in which no rule is asked: they emit the target's own tokens, and each draft
    is accepted by the coin that `forced_tokens` threw. The decoder's prefix is the start token alone.
    """

    def init(self, params: ForcedParams, context: Context, prefix_width: int) -> Any:
        """That of `inner`."""
        return self.inner.init(params.inner, context, prefix_width)

    def propose(
        self, params: ForcedParams, state: Any, context: Context, draws: Draws | None
    ) -> tuple[Draft, Any]:
        """The draft of `inner` with its tokens replaced."""
        draft, state = self.inner.propose(params.inner, state, context, draws)
        index = context.length[:, None] - 1 + jnp.arange(self.num_draft)[None, :]
        told = jnp.take_along_axis(params.tokens, index, axis=1, mode="clip")
        # Never true, which the compiler cannot know: the drafts of `inner` have to be computed.
        impossible = (draft.num_drafted > self.num_draft)[:, None]
        return draft.replace(tokens=jnp.where(impossible, draft.tokens, told)), state

    def commit(self, params: ForcedParams, state: Any, round: Round) -> Any:
        """That of `inner`."""
        return self.inner.commit(params.inner, state, round)
