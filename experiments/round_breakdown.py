"""Breaks the time of a round down: networks, choosing drafts, accepting them, and the rest.

  python -m experiments.round_breakdown --flagfile=configs/round_breakdown.flags

Each part runs 30 times in one program, on a state in the middle of a generation; the parts take turns. Parts
outside the networks are measured with networks that look up stored logits: the same round with the same
shapes. Accepting is making the target's distributions and running the acceptance rule. Committing is
everything after it, log-probabilities and truncation included. The interaction is the whole round less the
sum of its parts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import struct
from rich.console import Console

from experiments.lib import measure, parse, progress, results, start, synthetic
from specjax import acceptance, decode, drafters, sampling
from specjax import tree as tree_lib
from specjax.decode import Request
from specjax.round import LoopState, Program
from specjax.types import Draft, Network

_TARGET = flags.DEFINE_string("target", "t5-small", "Shape of the target; see experiments.walltime.")
_DRAFTS = flags.DEFINE_list("draft", ["1x64"], "Shapes of drafts; each has a greedy and a sampled row.")
_SOURCE = flags.DEFINE_integer("source_length", 64, "Number of source tokens.", lower_bound=1)
_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Maximum new tokens per row.", lower_bound=0)
_NUM_DRAFT = flags.DEFINE_integer("num_draft", 5, "K, drafted tokens per round.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 15, "Timed turns of each part.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "Directory for results.json, table.md and round_breakdown.png.")

NUM_STORED = 64  # positions of stored logits; each call starts at another, so that no two are the same
PARTS = ("draft_network", "target_network", "choose_drafts", "accept", "commit", "interaction")


class StoredCache(struct.PyTreeNode):
    """A cache of `StoredNetwork`: `length` `[B]` as in any cache, and the number of calls so far."""

    length: jax.Array
    calls: jax.Array


class StoredNetwork(Network):
    """A network that computes nothing: its calls read `stored` logits `[B, NUM_STORED, V]`."""

    stored: jax.Array
    encoded_width: int = struct.field(pytree_node=False)

    @property
    def vocab_size(self) -> int:
        return self.stored.shape[-1]

    def encode(self, source_ids: jax.Array, source_mask: jax.Array) -> jax.Array:
        return jnp.zeros((*source_ids.shape, self.encoded_width), self.stored.dtype)

    def init_cache(self, encoded: jax.Array, source_mask: jax.Array, num_slots: int) -> StoredCache:
        return StoredCache(jnp.zeros(len(encoded), jnp.int32), jnp.zeros((), jnp.int32))

    def decode(
        self, cache: StoredCache, tokens: jax.Array, layout: Any = None
    ) -> tuple[jax.Array, jax.Array, StoredCache]:
        num_new = tokens.shape[1]
        start = cache.calls % (NUM_STORED - num_new)
        logits = jax.lax.dynamic_slice_in_dim(self.stored, start, num_new, axis=1)
        features = jnp.full((*tokens.shape, self.encoded_width), start, self.stored.dtype)
        return logits, features, StoredCache(cache.length + num_new, cache.calls + 1)

    def logits(self, features: jax.Array) -> jax.Array:
        start = features[0, 0, 0].astype(jnp.int32)
        return jax.lax.dynamic_slice_in_dim(self.stored, start, features.shape[1], axis=1)


def accept_again(sampled: bool, program: Program, state: LoopState) -> LoopState:
    """Makes distributions and runs the rule on stored networks; the draft is the last committed tokens."""
    context, k, draws = state.context, program.num_draft, decode.round_draws(state, sampled)
    tokens, _ = context.last_tokens(k)
    tokens = jnp.minimum(tokens + state.cache.calls, program.target.vocab_size - 1)
    q = (
        jax.nn.softmax(program.drafter.network.stored[:, :k]) if sampled else None
    )  # computed once: it does not change
    draft = Draft(tokens, jnp.full_like(context.length, k), q)
    logits, _, cache = program.target.decode(state.cache, jnp.pad(tokens, ((0, 0), (1, 0))))
    history = sampling.history(context, tokens, tree_lib.before(draft))
    if draws is None:
        target_ids = sampling.argmax(sampling.adjust_logits(logits, context.options, history))
        result = acceptance.match_argmax(draft, target_ids)
    else:
        result = program.rule(draws, draft, sampling.distribution(logits, context.options, history))
    used = result.num_accepted.sum() + result.next_token.sum()  # so that the compiler removes nothing
    return state.replace(
        cache=cache.replace(length=state.cache.length),
        seeds=state.seeds + used.astype(state.seeds.dtype),
        stats=state.stats.replace(num_rounds=state.stats.num_rounds + 1),
    )


def parts(request: Request, sampled: bool, repeats: int) -> dict[str, float]:
    """Returns the seconds of a round and of its parts."""
    program, inputs = request
    rng, num_rows = np.random.default_rng(0), len(inputs["limit"])

    def stored(network: Network) -> StoredNetwork:
        logits = rng.normal(size=(num_rows, NUM_STORED, network.vocab_size))
        return StoredNetwork(jnp.asarray(logits, jnp.float32), network.encoded_width)

    target, draft = stored(program.target), stored(program.drafter.network)
    programs = {
        "real": program,
        "stored": program.replace(target=target, drafter=program.drafter.replace(network=draft)),
    }
    timed = {}
    for name, one in programs.items():
        state = decode.jitted_step(one, decode.jitted_prefill(one, **inputs), sampled=sampled)
        bodies = {
            "round": functools.partial(measure.round_again, sampled),
            "draft": functools.partial(measure.draft_again, sampled),
            "verify": functools.partial(measure.verify_again, one.num_draft + 1),
        }
        if name == "stored":
            bodies["accept"] = functools.partial(accept_again, sampled)
        timed |= {f"{name} {part}": measure.repeated(body, one, state) for part, body in bodies.items()}
    took = measure.medians(timed, repeats)
    found = {
        "draft_network": took["real draft"] - took["stored draft"],
        "target_network": took["real verify"] - took["stored verify"],
        "choose_drafts": took["stored draft"],
        "accept": took["stored accept"],
        "commit": took["stored round"] - took["stored draft"] - took["stored accept"],
    }
    return found | {"interaction": took["real round"] - sum(found.values()), "round": took["real round"]}


def plot(rows: list[dict[str, Any]]) -> Any:
    """Returns a figure: one bar per row, divided into parts."""
    figure, axis = results.subplots(1, 1, figsize=(10, 1.5 + 0.5 * len(rows)))
    names = [f"{row['target']}, {row['draft']}, T = {row['temperature']}" for row in rows]
    left = np.zeros(len(rows))
    for part in PARTS:
        share = np.array([max(row[f"{part}_ms"], 0) for row in rows])
        axis.barh(names, share, left=left, label=part.replace("_", " "))
        left += share
    axis.invert_yaxis()
    axis.set(xlabel="milliseconds per round")
    axis.legend(fontsize=8, ncol=3, loc="upper center", bbox_to_anchor=(0.4, -0.25))
    return figure


def main(console: Console) -> None:
    config = parse.shape(_TARGET.value, synthetic.default_dtype())
    target = synthetic.network(config, 0)
    grid = [(name, temperature) for name in _DRAFTS.value for temperature in (0.0, 1.0)]
    rows = []
    for name, temperature in progress.track(grid, len(grid), "timing parts", console):
        draft = synthetic.network(parse.shape(name, config.dtype, config), 1)
        drafter = drafters.ModelDrafter(draft, _NUM_DRAFT.value)
        options = dict(max_new_tokens=_NEW_TOKENS.value, temperature=temperature)
        request = synthetic.request(target, (1, _SOURCE.value), drafter=drafter, **options)
        took = parts(request, not sampling.is_greedy(temperature), _REPEATS.value)
        networks = took["draft_network"] + took["target_network"]
        apart = took["choose_drafts"] + took["accept"] + took["commit"]
        row = {"target": _TARGET.value, "draft": name, "num_draft": _NUM_DRAFT.value}
        row |= {"temperature": temperature, **{f"{part}_ms": 1e3 * took[part] for part in ("round", *PARTS)}}
        shares = {"not_networks": apart / took["round"], "all_but_networks": 1 - networks / took["round"]}
        rows.append(row | shares)
    results.show(console, f"parts of a round on {results.hardware()}", rows)
    results.save(console, _OUTPUT.value, "round_breakdown", rows, lambda: plot(rows))


if __name__ == "__main__":
    start.run(main)
