"""Acceptance rules: they accept a path of a draft and choose the token after it.

Axes: B rows, K drafts of a chain, N nodes of a tree, V vocabulary. p is the target's distribution,
q the draft's.

A rule is called with (draws, draft, target_probs): it uses the streams ACCEPT and NEXT of `draws`, and
`target_probs` `[B, N + 1, V]` is p after each token of the call. The greedy program calls `match_argmax` with
the target's argmax ids instead. At most `draft.num_drafted` tokens are accepted.

| rule | verifies | distribution of the output |
| --- | --- | --- |
| `speculative` | chains, and trees through `multi_round` | the target's |
| `block` | chains | the target's |
| `multi_round` | trees and chains | the target's |
| `greedy` | chains and trees, at temperature 0 | the target's argmax |
| `Lenient`, `Typical` | chains; chains and trees | a different one (lossy) |
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax import tree as tree_lib
from specjax.draws import Stream
from specjax.types import AcceptanceResult, AcceptanceRule, Draft, Draws

# ---- chains


@dataclasses.dataclass(frozen=True)
class Speculative(AcceptanceRule):
    """The token-wise rule: the output has exactly the distribution p (Leviathan et al. 2023, algorithm 1).

    Draft i is accepted with probability min(1, p_i(x) / q_i(x)) if all drafts before it were accepted. The
    next token is drawn from the residual max(p - q, 0), or from p if nothing was rejected. Trees are verified
    by `multi_round`, which extends the rule to several candidates.
    """

    is_lossless = True
    verifies_trees = True
    name = "speculative"

    def __call__(self, draws: Draws, draft: Draft, target_probs: jax.Array) -> AcceptanceResult:
        """See the class."""
        if draft.tree is not None:
            return MultiRound()(draws, draft, target_probs)
        return _token_wise(draws, draft, target_probs, lenience=1.0)


speculative = Speculative()


@dataclasses.dataclass(frozen=True)
class Lenient(AcceptanceRule):
    """Lossy, not distribution-preserving: accepts with probability min(1, p / (lenience * q)).

    Leviathan et al. 2023, appendix A.5. The residual is unchanged, so no token becomes more than
    1 / lenience times as likely as under p. Chains only. Note: for greedy rows p and q are one-hot, and
    lenience has no effect.

    Attributes:
      lenience: in (0, 1]; 1 is the lossless rule.

    Raises:
      ValueError: lenience is out of range.
    """

    lenience: float

    def __post_init__(self) -> None:
        if not 0 < self.lenience <= 1:
            raise ValueError(
                f"`lenience` must be above 0 and at most 1, got {self.lenience}; 1 is the lossless rule"
            )

    @property
    def is_lossless(self) -> bool:
        """Whether lenience is 1, which makes it the token-wise rule."""
        return self.lenience == 1

    def __call__(self, draws: Draws, draft: Draft, target_probs: jax.Array) -> AcceptanceResult:
        """See the class."""
        return _token_wise(draws, draft, target_probs, self.lenience)


def _token_wise(draws: Draws, draft: Draft, target_probs: jax.Array, lenience: float) -> AcceptanceResult:
    """Accepts each draft with probability p / (lenience * q) and keeps the leading run of accepted ones."""
    num_draft = draft.tokens.shape[1]
    p, q = _at_drafts(draft, target_probs)
    probability = p / jnp.where(q > 0, lenience * q, 1.0)  # above 1: always accepted
    accepted = draws.accept(Stream.ACCEPT.at(jnp.arange(num_draft)), probability)
    num_accepted = leading_run(accepted, draft.num_drafted)
    next_token = draws.choose(Stream.NEXT.at(0), next_weights(draft, target_probs, num_accepted))
    return AcceptanceResult(num_accepted, next_token)


def leading_run(accepted: jax.Array, num_drafted: jax.Array) -> jax.Array:
    """Returns `[B]`, the number of leading True in the first `num_drafted` of `accepted` `[B, K]`."""
    proposed = jnp.arange(accepted.shape[1])[None, :] < num_drafted[:, None]
    return jnp.cumprod((accepted & proposed).astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32)


def _draft_probs(draft: Draft, like: jax.Array) -> jax.Array:
    """Returns q of a chain, `[B, K, V]`; it is one-hot if the drafts are deterministic."""
    if draft.probs is not None:
        return draft.probs
    return jax.nn.one_hot(draft.tokens, like.shape[-1], dtype=like.dtype)


def next_weights(
    draft: Draft, target_probs: jax.Array, num_accepted: jax.Array, ratio: jax.Array | None = None
) -> jax.Array:
    """Returns the weights `[B, V]` of the token after the accepted ones of a chain.

    They are the residual max(ratio p - q, 0) after a rejection, and p for the bonus token. `ratio` `[B]` is
    the joint ratio of block verification; None: 1, as in the token-wise rule.
    """
    target = _at_position(target_probs, num_accepted)
    num_draft = draft.tokens.shape[1]
    if num_draft == 0:
        return target
    index = jnp.minimum(num_accepted, num_draft - 1)
    if draft.probs is None:
        drafted = jax.nn.one_hot(_at_position(draft.tokens, index), target.shape[-1], dtype=target.dtype)
    else:
        drafted = _at_position(draft.probs, index)
    was_rejected = num_accepted < draft.num_drafted
    return sampling.residual(target, jnp.where(was_rejected[:, None], drafted, 0.0), ratio)


def _at_drafts(draft: Draft, target_probs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns p and q `[B, K]` of each draft of a chain."""
    p = _at_tokens(target_probs[:, : draft.tokens.shape[1]], draft.tokens)
    return p, jnp.ones_like(p) if draft.probs is None else _at_tokens(draft.probs, draft.tokens)


def _at_tokens(probs: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the probabilities `[B, K]` of `tokens` `[B, K]` under `probs` `[B, K, V]`."""
    return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]


def _at_position(values: jax.Array, position: jax.Array) -> jax.Array:
    """Returns each row's entry `[B, ...]` of `values` `[B, N, ...]` at its `position` `[B]`."""
    return values[jnp.arange(values.shape[0]), position]


@dataclasses.dataclass(frozen=True)
class Block(AcceptanceRule):
    """Block verification: lossless, and accepts no fewer drafts (Sun et al. 2024, algorithm 2).

    The first i drafts are accepted together, by their joint ratio b_i = min(1, b_{i-1} p_i / q_i): for every
    i a Bernoulli draw accepts with probability h_i, and the largest i that accepts decides, whatever the
    draws of smaller ones. With w_i = max(b_i p_{i+1} - q_{i+1}, 0) and Z_i its sum, h_i is
    Z_i / (Z_i + 1 - b_i), or b_i at the last draft. The next token is drawn from w_i. Chains only.
    """

    is_lossless = True
    name = "block"

    def __call__(self, draws: Draws, draft: Draft, target_probs: jax.Array) -> AcceptanceResult:
        """See the class."""
        num_draft = draft.tokens.shape[1]
        p, q = _at_drafts(draft, target_probs)
        ratio = p / jnp.where(q > 0, q, 1.0)
        joint = [jnp.ones_like(target_probs[:, 0, 0])]
        for i in range(num_draft):
            joint.append(jnp.minimum(1.0, joint[-1] * ratio[:, i]))
        b = jnp.stack(joint, axis=1)  # [B, K + 1]
        chance = _block_chances(draft, target_probs, b)
        kept = draws.accept(Stream.ACCEPT.at(jnp.arange(num_draft)), chance)
        positions = jnp.arange(1, num_draft + 1)[None, :]
        kept = kept & (positions <= draft.num_drafted[:, None])
        num_accepted = jnp.where(kept, positions, 0).max(axis=1, initial=0).astype(jnp.int32)
        weights = next_weights(draft, target_probs, num_accepted, _at_position(b, num_accepted))
        return AcceptanceResult(num_accepted, draws.choose(Stream.NEXT.at(0), weights))


block = Block()


def _block_chances(draft: Draft, target_probs: jax.Array, b: jax.Array) -> jax.Array:
    """Returns h_1..h_K `[B, K]`, the probabilities of accepting i drafts, for joint ratios b_0..b_K."""
    q = _draft_probs(draft, target_probs)
    mass = jnp.maximum(b[:, 1:-1, None] * target_probs[:, 1:-1] - q[:, 1:], 0.0).sum(-1)  # Z_1..Z_{K-1}
    slack = mass + 1 - b[:, 1:-1]
    inner = jnp.where(slack > 0, mass / jnp.where(slack > 0, slack, 1.0), 1.0)
    inner = jnp.concatenate([inner, b[:, -1:]], axis=1)[:, : b.shape[1] - 1]
    is_last = jnp.arange(1, b.shape[1])[None, :] == draft.num_drafted[:, None]
    return jnp.where(is_last, b[:, 1:], inner)


# ---- trees


class _Walk(NamedTuple):
    """The state of each row's walk down a tree: its call position, and the remaining p and q `[B, V]`."""

    position: jax.Array
    num_accepted: jax.Array
    path: jax.Array
    p: jax.Array
    q: jax.Array | None

    def step(self, accepted: jax.Array, node: jax.typing.ArrayLike) -> "_Walk":
        """Moves to `node` where it was `accepted` `[B] bool`; the caller updates p and q."""
        position = jnp.asarray(node, jnp.int32) + 1
        here = accepted[:, None] & (jnp.arange(self.path.shape[1])[None, :] == self.num_accepted[:, None])
        return self._replace(
            position=jnp.where(accepted, position, self.position),
            num_accepted=self.num_accepted + accepted,
            path=jnp.where(here, position, self.path),
        )


@dataclasses.dataclass(frozen=True)
class MultiRound(AcceptanceRule):
    """Recursive rejection over the children of a node: the output distribution p, for trees and chains.

    With replacement: SpecInfer (Miao et al. 2024, algorithm 2). Without: recursive rejection (Jeon et al.
    2024, arXiv 2402.14160) and Sequoia (Chen et al. 2024, arXiv 2402.12374).
    At a node, P = p and Q = q. Each child x, in the order drawn, is accepted with probability P(x) / Q(x).
    If it is rejected, P becomes max(P - Q, 0), normalised, and, for siblings drawn without replacement, x is
    removed from Q. If no child is accepted, the next token is drawn from P. The Q of a deterministic child
    is one-hot.
    """

    is_lossless = True
    verifies_trees = True
    name = "multi_round"

    def __call__(self, draws: Draws, draft: Draft, target_probs: jax.Array) -> AcceptanceResult:
        """See the class."""
        tree = tree_lib.of(draft)
        num_rows, num_nodes = draft.tokens.shape
        rows = jnp.arange(num_rows)

        def verify(node: jax.Array, walk: _Walk) -> _Walk:
            """Verifies one node in the rows whose walk is at its parent."""
            token = draft.tokens[:, node]
            offered = (tree.parents[:, node] == walk.position) & tree.valid[:, node]
            hot = jax.nn.one_hot(token, walk.p.shape[1], dtype=walk.p.dtype)
            q = hot if walk.q is None else walk.q
            at_token = q[rows, token]
            chance = walk.p[rows, token] / jnp.where(at_token > 0, at_token, 1.0)
            passed = draws.accept(Stream.ACCEPT.at(node)[None], jnp.where(offered, chance, 0.0)[:, None])[
                :, 0
            ]
            accepted, rejected = (offered & passed)[:, None], (offered & ~passed)[:, None]
            left = jnp.where(rejected, _normalised(sampling.residual(walk.p, q)), walk.p)
            p = jnp.where(accepted, target_probs[:, node + 1], left)
            if draft.probs is None:
                return walk.step(accepted[:, 0], node)._replace(p=p)
            if not draft.with_replacement:
                q = jnp.where(rejected, _normalised(q.at[rows, token].set(0.0)), q)
            q = jnp.where(accepted, draft.probs[:, jnp.minimum(node + 1, draft.probs.shape[1] - 1)], q)
            return walk.step(accepted[:, 0], node)._replace(p=p, q=q)

        walk = _start(draft, target_probs)
        if num_nodes:  # `jax.disable_jit` rejects a loop of no steps
            walk = jax.lax.fori_loop(0, num_nodes, verify, walk)
        path = None if draft.tree is None else walk.path
        return AcceptanceResult(walk.num_accepted, draws.choose(Stream.NEXT.at(0), walk.p), path)


multi_round = MultiRound()


def _start(draft: Draft, target_probs: jax.Array) -> _Walk:
    zero = jnp.zeros_like(draft.num_drafted)
    q = None if draft.probs is None or not draft.tokens.shape[1] else draft.probs[:, 0]
    return _Walk(zero, zero, jnp.zeros((len(zero), draft.max_depth), jnp.int32), target_probs[:, 0], q)


def _normalised(weights: jax.Array) -> jax.Array:
    """Returns `weights` `[B, V]` divided by their sum; rows of zeros stay zero."""
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1.0)


@dataclasses.dataclass(frozen=True)
class Typical(AcceptanceRule):
    """Lossy, not distribution-preserving: accepts drafts that are likely enough under the target.

    Medusa (Cai et al. 2024, section 2.3.1): a draft x passes if p(x) > min(epsilon, delta exp(-H(p))), where
    H is the entropy in nats. The longest path on which all drafts pass is accepted, and the next token is the
    target's most likely one.

    Attributes:
      epsilon: hard threshold, in (0, 1).
      delta: factor of the threshold that depends on the entropy, above 0.

    Raises:
      ValueError: one of them is out of range.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    verifies_trees = True

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 1:
            raise ValueError(f"`epsilon` must be between 0 and 1, got {self.epsilon}")
        if not 0 < self.delta < math.inf:
            raise ValueError(f"`delta` must be above 0 and finite, got {self.delta}")

    def __call__(self, draws: Draws, draft: Draft, target_probs: jax.Array) -> AcceptanceResult:
        """See the class; no random draws."""
        del draws
        tree = tree_lib.of(draft)
        entropy = -(target_probs * jnp.log(jnp.maximum(target_probs, 1e-30))).sum(-1)  # [B, N + 1]
        threshold = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
        p = _at_tokens(jnp.take_along_axis(target_probs, tree.parents[..., None], axis=1), draft.tokens)
        passed = (p > jnp.take_along_axis(threshold, tree.parents, axis=1)) & tree.valid
        return _longest(draft, passed, sampling.argmax(target_probs))


@dataclasses.dataclass(frozen=True)
class Greedy(AcceptanceRule):
    """The rule at temperature 0, where p is one-hot and all lossless rules agree.

    For callers who require that nothing is sampled: with this rule a temperature above 0 raises a ValueError.
    The greedy program itself calls `match_argmax`.
    """

    is_lossless = True
    verifies_trees = True
    name = "greedy"

    def __call__(self, draws: Draws, draft: Draft, target_probs: jax.Array) -> AcceptanceResult:
        """See the class; no random draws."""
        del draws
        return match_argmax(draft, sampling.argmax(target_probs))


greedy = Greedy()


def match_argmax(draft: Draft, target_ids: jax.Array) -> AcceptanceResult:
    """Verifies a draft at temperature 0: p and q are one-hot, so ids are compared without random draws.

    Args:
      draft: a chain or a tree; `probs` is not read.
      target_ids: `[B, N + 1]`, the target's argmax after each token of the call.
    """
    if draft.tree is None:
        num_accepted = leading_run(draft.tokens == target_ids[:, :-1], draft.num_drafted)
        return AcceptanceResult(num_accepted, _at_position(target_ids, num_accepted))
    of_parent = jnp.take_along_axis(target_ids, draft.tree.parents, axis=1)
    return _longest(draft, (draft.tokens == of_parent) & draft.tree.valid, target_ids)


def _longest(draft: Draft, passed: jax.Array, target_ids: jax.Array) -> AcceptanceResult:
    """Accepts the longest path on which all nodes `passed` `[B, N]` (the first of equals)."""
    above = tree_lib.ancestors(tree_lib.of(draft))
    whole = jnp.pad(tree_lib.whole(above, passed), ((0, 0), (1, 0)), constant_values=True)
    depth = tree_lib.depths_of(above)
    num_accepted = jnp.where(whole, depth, -1).max(1)
    last = jnp.argmax(whole & (depth == num_accepted[:, None]), axis=1)
    on_path = _at_position(above, last)  # [B, N + 1]
    path = None
    if draft.tree is not None:
        # Each depth occurs once on the path, so a masked sum finds its call position.
        wanted = jnp.arange(1, draft.max_depth + 1)[None, :, None]
        found = on_path[:, None] & (depth[:, None] == wanted)
        path = jnp.where(found, jnp.arange(depth.shape[1])[None, None, :], 0).sum(-1, dtype=jnp.int32)
    return AcceptanceResult(num_accepted, _at_position(target_ids, last), path)
