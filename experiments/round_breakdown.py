"""Where the time of a round goes: the networks, choosing drafts, accepting them, the rest.

  python -m experiments.round_breakdown --flagfile=configs/round_breakdown.flags

Each part runs 30 times in one program, on a state in the middle of a generation; parts take turns. What is
not a network is measured with networks that look their logits up: the same round, the same shapes. What the
parts cost each other is the whole round less their sum.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import struct

from experiments import measure, progress, results, shapes, start
from specjax import decode, drafters
from specjax.judge import judge
from specjax.models import t5
from specjax.program import AllParams, LoopState, Program
from specjax.request import Request
from specjax.sampling import Sampling, is_greedy
from specjax.types import Draft

_TARGET = flags.DEFINE_string("target", "t5-small", "Shape of the target; see `walltime`.")
_DRAFTS = flags.DEFINE_list("draft", ["1x64"], "Shapes of drafts, two rows each: greedy and sampled.")
_SOURCE = flags.DEFINE_integer("source_length", 64, "Source tokens.", lower_bound=1)
_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Slots for output.", lower_bound=0)
_NUM_DRAFT = flags.DEFINE_integer("num_draft", 5, "K.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 15, "Timed turns of each part.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json, table.md and round_breakdown.png.")

NUM_STORED = 64  # positions of stored logits: each call reads on, so that no call repeats the one before
PARTS = ("draft_network", "target_network", "choose_drafts", "accept", "commit", "each_other")


class StoredCache(struct.PyTreeNode):
    """`length` `[B]` as of any cache; `calls` counts them."""

    length: jax.Array
    calls: jax.Array


@dataclasses.dataclass(frozen=True)
class StoredNetwork:
    """`types.Network` without the work: params are logits `[B, NUM_STORED, V]`, from which calls read."""

    vocab_size: int
    encoded_width: int

    def encode(self, params: jax.Array, source_ids: jax.Array, source_mask: jax.Array) -> jax.Array:
        return jnp.zeros((*source_ids.shape, self.encoded_width), params.dtype)

    def init_cache(
        self, params: jax.Array, encoded: jax.Array, mask: jax.Array, num_slots: int
    ) -> StoredCache:
        return StoredCache(jnp.zeros(len(encoded), jnp.int32), jnp.zeros((), jnp.int32))

    def decode(
        self, params: jax.Array, cache: StoredCache, tokens: jax.Array, layout: Any = None
    ) -> tuple[jax.Array, jax.Array, StoredCache]:
        num_new = tokens.shape[1]
        start = cache.calls % (NUM_STORED - num_new)
        logits = jax.lax.dynamic_slice_in_dim(params, start, num_new, axis=1)
        features = jnp.full((*tokens.shape, self.encoded_width), start, params.dtype)
        return logits, features, StoredCache(cache.length + num_new, cache.calls + 1)

    def head(self, params: jax.Array, features: jax.Array) -> jax.Array:
        start = features[0, 0, 0].astype(jnp.int32)
        return jax.lax.dynamic_slice_in_dim(params, start, features.shape[1], axis=1)


def judge_again(program: Program, sampled: bool, params: AllParams, state: LoopState) -> LoopState:
    """Distributions, rule, log-probabilities; the draft is what was committed last."""
    keys = decode.round_draws(state, sampled)
    context, k = state.context, program.num_draft
    tokens, _ = context.last_tokens(k)
    tokens = jnp.minimum(tokens + state.cache.calls, program.target.vocab_size - 1)
    probs = jax.nn.softmax(params.drafter[:, :k]) if sampled else None  # once: it does not change
    draft = Draft(tokens, jnp.full_like(context.length, k), probs)
    judged = judge(program, k, params.target, state.cache, context, draft, keys)
    used = judged.emitted.sum() + judged.log_probs.sum().astype(jnp.int32)
    return state.replace(
        cache=judged.cache.replace(length=state.cache.length),
        seeds=state.seeds + used.astype(state.seeds.dtype),
        stats=state.stats.replace(num_rounds=state.stats.num_rounds + 1),
    )


def parts(request: Request, sampled: bool, repeats: int) -> dict[str, float]:
    """Seconds of a plain step, of a round, and of its parts."""
    program, params, inputs = request
    config, small = program.target.config, program.drafter.network.config
    stored = dataclasses.replace(
        program,
        target=StoredNetwork(config.vocab_size, config.d_model),
        drafter=dataclasses.replace(program.drafter, network=StoredNetwork(small.vocab_size, small.d_model)),
    )
    rng = np.random.default_rng(0)
    size = (len(inputs["limit"]), NUM_STORED, config.vocab_size)
    logits = [jnp.asarray(rng.normal(size=size), jnp.float32) for _ in range(2)]
    runs = {"real": (program, params), "stored": (stored, AllParams(*logits))}
    arms: dict[str, Callable[[], Any]] = {}
    for name, (one, its) in runs.items():
        state = decode.jitted_step(one, its, decode.jitted_prefill(one, its, **inputs), sampled=sampled)
        bodies = {
            "round": functools.partial(measure.round_again, one, sampled),
            "draft": functools.partial(measure.draft_again, one, sampled),
            "verify": functools.partial(measure.verify_again, one, one.num_draft + 1),
        }
        if name == "stored":
            bodies["judge"] = functools.partial(judge_again, one, sampled)
        arms |= {f"{name} {part}": measure.repeated(body, its, state) for part, body in bodies.items()}
    took = measure.medians(arms, repeats)
    found = {
        "draft_network": took["real draft"] - took["stored draft"],
        "target_network": took["real verify"] - took["stored verify"],
        "choose_drafts": took["stored draft"],
        "accept": took["stored judge"],
        "commit": took["stored round"] - took["stored draft"] - took["stored judge"],
    }
    return found | {"each_other": took["real round"] - sum(found.values()), "round": took["real round"]}


def plot(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """A bar a row, its parts side by side."""
    figure, axis = results.subplots(1, 1, figsize=(10, 1.5 + 0.5 * len(rows)))
    names = [f"{row['target']}, {row['draft']}, T = {row['temperature']}" for row in rows]
    left = np.zeros(len(rows))
    for part in PARTS:
        share = np.array([max(row[f"{part}_ms"], 0) for row in rows])
        axis.barh(names, share, left=left, label=part.replace("_", " "))
        left += share
    axis.invert_yaxis()
    axis.set(xlabel="milliseconds of a round")
    axis.legend(fontsize=8, ncol=3, loc="upper center", bbox_to_anchor=(0.4, -0.25))
    results.save_figure(figure, path)


def main(argv: list[str]) -> None:
    del argv
    console = start.console()
    target = shapes.shape(_TARGET.value, shapes.default_dtype())
    params = shapes.random_params(target, 0)
    grid = [(name, temperature) for name in _DRAFTS.value for temperature in (0.0, 1.0)]
    rows = []
    for name, temperature in progress.track(grid, len(grid), "timing parts", console):
        small = shapes.shape(name, target.dtype, target)
        drafter = drafters.ModelDrafter(t5.T5Network(small), _NUM_DRAFT.value)
        request = shapes.request(
            target,
            params,
            (1, _SOURCE.value),
            _NEW_TOKENS.value,
            drafter=drafter,
            drafter_params=shapes.random_params(small, 1),
            sampling=Sampling(temperature=temperature),
            seed=0,
        )
        took = parts(request, not is_greedy(temperature), _REPEATS.value)
        networks = took["draft_network"] + took["target_network"]
        apart = took["choose_drafts"] + took["accept"] + took["commit"]
        rows.append(
            {
                "target": _TARGET.value,
                "draft": name,
                "num_draft": _NUM_DRAFT.value,
                "temperature": temperature,
            }
            | {"round_ms": 1e3 * took["round"]}
            | {f"{part}_ms": 1e3 * took[part] for part in PARTS}
            | {"not_networks": apart / took["round"], "all_but_networks": 1 - networks / took["round"]}
        )
    results.show(console, f"a round on {results.hardware()}, milliseconds", rows)
    if _OUTPUT.value:
        results.write(_OUTPUT.value, "round_breakdown", rows)
        plot(pathlib.Path(_OUTPUT.value) / "round_breakdown.png", rows)
        console.print(f"wrote results.json, table.md and round_breakdown.png into {_OUTPUT.value}")


if __name__ == "__main__":
    start.run(main)
