"""Examples on the shipped pair: load, generate, stream, a drafter and a logits function of your own.

python scripts/examples.py  # about half a minute on two CPU cores
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

import specjax

CHECKPOINTS = pathlib.Path(__file__).parents[1] / "experiments" / "checkpoints"
PROMPTS = ["A man rides a bicycle.", "Two dogs play in the snow."]


# 1. Load a target and a draft: two directories in Hugging Face's format, or two names on the hub.
target = specjax.load(CHECKPOINTS / "captions-target")
draft = specjax.load(CHECKPOINTS / "captions-draft")
drafter = specjax.drafters.from_model(draft, num_draft=5)

# 2. Generate. Greedy speculative decoding returns the tokens of autoregressive decoding.
autoregressive = specjax.generate(target, PROMPTS, max_new_tokens=32)
speculative = specjax.generate(target, PROMPTS, max_new_tokens=32, drafter=drafter)
assert speculative.token_ids == autoregressive.token_ids
print("generate:", *speculative.texts, sep="\n  ")
print("  mean tokens per target call, by row:", [round(float(tau), 2) for tau in speculative.stats.tau])

# 3. Stream the text of one prompt while it is decoded.
print("stream:\n  ", end="")
for piece in specjax.stream(target, PROMPTS[0], max_new_tokens=32, drafter=drafter, temperature=1.0, seed=1):
    print(piece, end="", flush=True)
print()


# 4. A drafter of your own: a frozen pytree that proposes tokens. The target verifies all of them, so a bad
# proposal costs time and never changes the output.
class CopyDrafter(specjax.types.Drafter):
    """Proposes the source's own tokens, in their order, for outputs that repeat the source."""

    num_draft: int = struct.field(pytree_node=False)  # static: it is part of the compiled shapes

    def init(self, context: specjax.types.Context, prefix_width: int) -> None:
        """Keeps no state between rounds."""

    def propose(
        self, state: None, context: specjax.types.Context, draws: Any, max_length: Any
    ) -> tuple[specjax.types.Draft, None]:
        """Returns `[B, K]` tokens; without `probs` each is proposed with certainty."""
        # The committed tokens begin with the start token, so the next output token has index length - 1.
        index = context.length[:, None] - 1 + jnp.arange(self.num_draft)[None, :]
        tokens = jnp.take_along_axis(context.source_ids, index, axis=1, mode="clip")
        return specjax.types.Draft(tokens, jnp.full_like(context.length, self.num_draft), probs=None), None

    def commit(self, state: None, round: specjax.types.Round) -> None:
        """Keeps no state between rounds."""


own = specjax.generate(target, PROMPTS, max_new_tokens=32, drafter=CopyDrafter(3))
assert own.token_ids == autoregressive.token_ids
print("own drafter: the same tokens")


# 5. A logits function of your own, applied to the target and the draft alike: pure, and traced by JAX.
UNWANTED = jnp.asarray(target.tokenizer("fährt spielen", add_special_tokens=False).input_ids)


def without_unwanted(logits: jax.Array, history: specjax.types.History) -> jax.Array:
    """Returns logits `[B, N, V]` that forbid some ids among the first eight new tokens of each row."""
    early = (history.num_new < 8)[:, :, None]
    unwanted = jnp.zeros(logits.shape[-1], bool).at[UNWANTED].set(True)[None, None, :]
    return jnp.where(early & unwanted, -jnp.inf, logits)


expected = specjax.generate(target, PROMPTS, max_new_tokens=32, logits_processor=without_unwanted)
output = specjax.generate(
    target, PROMPTS, max_new_tokens=32, logits_processor=without_unwanted, drafter=drafter
)
assert output.token_ids == expected.token_ids
print("own logits function:", *output.texts, sep="\n  ")
