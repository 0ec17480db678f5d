"""What is enumerated: drafters, rules and sampling options on toy networks small enough for it.

`experiments.losslessness` reports all of them; the tests run them too.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import exact_law
from experiments.toy_heads import ToyHeads
from specjax import acceptance, decode, rounds
from specjax.controller import AdaptiveDrafter
from specjax.drafters.eagle import EagleDrafter, EagleTreeDrafter
from specjax.drafters.lookahead import LookaheadDrafter
from specjax.drafters.medusa import MedusaDrafter
from specjax.drafters.model import ModelDrafter
from specjax.drafters.model_tree import ModelTreeDrafter
from specjax.drafters.one_pass import OnePassDrafter
from specjax.drafters.prompt_lookup import PromptLookupDrafter
from specjax.sampling import Sampling
from specjax.staged import StagedDrafter, StagedParams
from specjax.types import AcceptanceRule, Drafter

SOURCE = np.array([2, 1, 0])
WARM = Sampling(temperature=0.6)


NUM_SLOTS = 20  # of every case, since eager primitives are compiled once for each shape


@dataclasses.dataclass(frozen=True)
class Case:
    """An enumeration.

    Attributes:
      rule: gives the rule; called late, so that a fault planted in it is the one that runs.
      branching: of a drafted tree; a chain has ones only; empty: plain decoding.
      is_tree: whether a chain is drafted as a tree.
      with_replacement: how siblings are drawn.
      deterministic: argmax (top-k) drafts, whose q is one-hot.
      kind: what drafts: "model"; "lookup" (copies); "staged" (a model, for which another drafts); "medusa",
        "eagle", "eagle_tree", "one_pass", "lookahead".
      adaptive: whether rows draft 0 to K tokens, or a tree or none, as their history says.
      min_confidence: of an adaptive one.
      draft_vocab_size: where the draft's vocabulary is padded to another size.
      num_tokens: length of the sequences whose law is compared.
    """

    rule: Callable[[], AcceptanceRule] = lambda: acceptance.speculative
    options: Sampling = WARM
    vocab_size: int = 3
    branching: tuple[int, ...] = (1, 1)
    is_tree: bool = False
    with_replacement: bool = False
    deterministic: bool = False
    kind: str = "model"
    adaptive: bool = False
    min_confidence: float = 0.0
    num_tokens: int = 4
    prefix: tuple[int, ...] = (0,)
    eos_ids: tuple[int, ...] = ()
    limit: int | None = None
    num_ids: int | None = None
    draft_vocab_size: int | None = None
    dtype: type = np.float64

    def drafter(self) -> Drafter | None:
        """A toy model behind a real drafter."""
        network = exact_law.ToyNetwork(self.draft_vocab_size or self.vocab_size)
        if not self.branching:
            return None
        num_draft = len(self.branching)
        heads = ToyHeads(self.vocab_size)
        others: dict[str, Callable[[], Drafter]] = {
            "lookup": lambda: PromptLookupDrafter(num_draft, max_ngram=2),
            "medusa": lambda: MedusaDrafter(heads, self.branching),
            "eagle": lambda: EagleDrafter(heads, num_draft),
            "eagle_tree": lambda: EagleTreeDrafter(heads, num_draft, max_depth=2, num_expanded=2),
            "one_pass": lambda: OnePassDrafter(heads, num_draft),
            "lookahead": lambda: LookaheadDrafter(num_draft, ngram=3, num_candidates=1, pool_size=3),
            "staged": lambda: StagedDrafter(network, num_draft, ModelDrafter(network, 1)),
        }
        drafter: Any = ModelDrafter(network, num_draft)
        if self.is_tree or set(self.branching) != {1}:
            drafter = ModelTreeDrafter(network, self.branching, self.with_replacement)
        if self.kind in others:
            drafter = others[self.kind]()
        if self.adaptive:  # with these numbers every length occurs
            lengths, costs = tuple(range(num_draft + 1)), (1.0, 1.25, 1.7, 2.2)[: num_draft + 1]
            if getattr(drafter, "drafts_trees", False):
                lengths, costs = (0, drafter.num_draft), (1.0, 1.5)
            if self.min_confidence:
                drafter = dataclasses.replace(drafter, min_confidence=self.min_confidence)
            return AdaptiveDrafter(drafter, lengths, costs, decay=0.5, prior_alpha=0.6, prior_weight=0.5)
        return exact_law.ArgmaxDrafter(drafter) if self.deterministic else drafter

    def program(self) -> rounds.Program:
        """What runs."""
        target, drafter = exact_law.ToyNetwork(self.vocab_size), self.drafter()
        bucket = NUM_SLOTS - 1 - len(self.prefix) - (drafter.num_draft if drafter else 0)
        return rounds.Program(target, drafter, self.rule(), bucket, len(self.prefix), self.eos_ids, 0)

    def params(self, twin: bool = False) -> rounds.AllParams:
        """Tables of target and draft; the same one for both if `twin`."""
        sizes = (self.vocab_size, self.draft_vocab_size or self.vocab_size)
        tables = [exact_law.random_table(seed, size, dtype=self.dtype) for seed, size in enumerate(sizes)]
        draft = tables[0] if twin else tables[1]
        inner = exact_law.random_table(2, sizes[1], dtype=self.dtype)
        if self.kind == "staged":
            return rounds.AllParams(tables[0], StagedParams(draft, inner))
        return rounds.AllParams(tables[0], draft)

    def run(self, twin: bool = False) -> exact_law.Law:
        """The law of the real rounds."""
        with jax.enable_x64(True) if self.dtype is np.float64 else contextlib.nullcontext():
            return exact_law.exact_law(
                self.program(),
                self.params(twin),
                SOURCE,
                self.num_tokens,
                self.options,
                np.array(self.prefix),
                self.limit,
                self.num_ids,
            )

    def target_law(self) -> dict[tuple[int, ...], float]:
        """The law of the target alone, in numpy."""
        num_tokens = min(self.num_tokens, self.limit or self.num_tokens)
        return exact_law.target_law(
            self.params().target,
            SOURCE,
            num_tokens,
            self.options,
            np.array(self.prefix),
            self.eos_ids,
            self.num_ids,
        )

    def error(self, twin: bool = False) -> float:
        """The largest difference of a probability between the two."""
        return exact_law.law_error(self.run(twin).probability, self.target_law())

    def greedy_paths(self) -> list[tuple[list[int], list[int]]]:
        """What the greedy program emits for four sources, beside the target's argmax path."""
        program, tables, prefix = self.program(), self.params(), np.array(self.prefix)
        options = dataclasses.replace(self.options, temperature=0.0)
        params = jax.tree.map(jnp.asarray, tables)
        limit = min(self.num_tokens, self.limit or self.num_tokens)
        pairs = []
        for source in np.array([[2, 1, 0], [0, 1, 2], [1, 1, 1], [2, 0, 2]]):
            with jax.disable_jit():
                state = exact_law.first_state(program, params, source, options, prefix, limit, self.num_ids)
                state = jax.tree.map(jnp.asarray, state)
                while bool(state.running.any()):
                    state = rounds.one_round(program, params, state, None)
            (path,) = exact_law.target_law(
                tables.target, source, limit, options, prefix, self.eos_ids, self.num_ids
            )
            done = decode.finish(program, state)
            pairs.append((done.tokens[0, : done.length[0]].tolist(), list(path)))
        return pairs

    @property
    def has_twin(self) -> bool:
        """Whether a draft equal to the target is accepted always: one of a model, that draws from its q."""
        return self.kind in ("model", "staged") and not self.deterministic

    @property
    def bar(self) -> float:
        """The largest error of a probability that passes, in the precision of the case."""
        return 1e-12 if self.dtype is np.float64 else 1e-6


RULES: dict[str, Callable[[], AcceptanceRule]] = {
    "speculative": lambda: acceptance.speculative,
    "block": lambda: acceptance.block,
    "multi_round": lambda: acceptance.multi_round,
}
LOSSY: dict[str, Callable[[], AcceptanceRule]] = {
    "Lenient(0.5)": lambda: acceptance.Lenient(0.5),
    "Typical()": lambda: acceptance.Typical(),
}
ALL_OPTIONS = Sampling(
    temperature=0.7, top_k=3, top_p=0.8, min_p=0.2, repetition_penalty=1.5, min_new_tokens=2
)
OPTIONS: dict[str, Case] = {
    "temperature 0.6": Case(),
    "temperature 1": Case(options=Sampling()),
    "temperature 0": Case(options=Sampling(temperature=0.0)),
    "top-k": Case(options=Sampling(top_k=2)),
    "top-p": Case(options=Sampling(top_p=0.7)),
    "min-p": Case(options=Sampling(min_p=0.4)),
    "repetition penalty": Case(options=Sampling(repetition_penalty=1.7), prefix=(0, 2)),
    "minimum length": Case(options=Sampling(min_new_tokens=2), eos_ids=(2,)),
    "end token inside the draft": Case(eos_ids=(2,)),
    "limit cuts the draft": Case(limit=3),
    "prefix, end tokens, all options": Case(
        options=ALL_OPTIONS, vocab_size=4, prefix=(0, 2, 1), eos_ids=(2, 3), num_tokens=3
    ),
    "padded vocabularies": Case(vocab_size=5, draft_vocab_size=4, num_ids=3, num_tokens=3),
    "float32": Case(dtype=np.float32, eos_ids=(2,)),
}
CHAINS: dict[str, Case] = {
    "1 draft of 4": Case(vocab_size=4, branching=(1,)),
    "2 drafts of 4": Case(vocab_size=4, num_tokens=3),
    "3 drafts of 2": Case(vocab_size=2, branching=(1, 1, 1), num_tokens=5),
    "3 drafts of 3": Case(branching=(1, 1, 1), eos_ids=(2,)),
    "2 argmax drafts": Case(deterministic=True),
}
OTHERS: dict[str, Case] = {
    "2 copies": Case(kind="lookup"),
    "2 copies, end token": Case(kind="lookup", eos_ids=(2,)),
    "2 copies, repetition penalty": Case(
        kind="lookup", options=Sampling(repetition_penalty=1.7), prefix=(0, 2)
    ),
    "2 copies, some of ids that do not exist": Case(kind="lookup", num_ids=2, vocab_size=3),
    "0 to 2 drafts by history": Case(adaptive=True, eos_ids=(2,), num_tokens=5),
    "0 to 2 drafts by history and confidence": Case(adaptive=True, min_confidence=0.45),
    "0 to 2 of an EAGLE layer": Case(kind="eagle", adaptive=True, num_tokens=5),
    "0 to 2 in one pass": Case(kind="one_pass", adaptive=True, num_tokens=5),
    "0 or 2 staged": Case(kind="staged", adaptive=True, vocab_size=2, num_tokens=5),
    "2 of an EAGLE layer": Case(kind="eagle", eos_ids=(2,)),
    "2 of an EAGLE layer, prefix": Case(kind="eagle", prefix=(0, 2)),
    "2 in one pass": Case(kind="one_pass", eos_ids=(2,)),
    "2 in one pass, all options": Case(
        kind="one_pass", options=ALL_OPTIONS, vocab_size=4, prefix=(0, 2, 1), eos_ids=(2, 3), num_tokens=3
    ),
    "2 staged": Case(kind="staged", vocab_size=2, num_tokens=5),
    "2 staged, end token, limit, minimum length": Case(
        kind="staged", vocab_size=2, eos_ids=(1,), limit=3, options=Sampling(min_new_tokens=1)
    ),
    "2 staged, repetition penalty": Case(
        kind="staged", vocab_size=2, options=Sampling(repetition_penalty=1.7), prefix=(0, 1)
    ),
}
TREES_OF_OTHERS: dict[str, Case] = {
    "a model's 2x1 or none": Case(branching=(2, 1), adaptive=True, vocab_size=2, num_tokens=5),
    "a model's 2x1x1 or none": Case(branching=(2, 1, 1), adaptive=True, vocab_size=2, num_tokens=4, limit=4),
    "EAGLE-2, padded vocabulary": Case(
        kind="eagle_tree", branching=(1, 1, 1), vocab_size=4, num_ids=3, num_tokens=3
    ),
    "lookahead, padded vocabulary": Case(
        kind="lookahead", branching=(1,), num_tokens=5, vocab_size=3, num_ids=2
    ),
    "Medusa 2x1 or none": Case(kind="medusa", branching=(2, 1), adaptive=True, num_tokens=5),
    "EAGLE-2, 3 nodes or none": Case(kind="eagle_tree", branching=(1, 1, 1), adaptive=True, num_tokens=5),
    "Medusa 2x1": Case(kind="medusa", branching=(2, 1), eos_ids=(2,)),
    "Medusa 2, padded vocabulary": Case(kind="medusa", branching=(2,), vocab_size=4, num_ids=3),
    "EAGLE-2, 3 nodes": Case(kind="eagle_tree", branching=(1, 1, 1), eos_ids=(2,)),
    "EAGLE-2, 5 nodes": Case(kind="eagle_tree", branching=(1,) * 5, num_tokens=3),
    "lookahead, 1 column": Case(kind="lookahead", branching=(1,), num_tokens=6, vocab_size=2),
    "lookahead, 2 columns": Case(kind="lookahead", branching=(1, 1), num_tokens=5, vocab_size=2),
}
TREES: dict[str, Case] = {
    "chain drafted as a tree": Case(is_tree=True),
    "2": Case(branching=(2,)),
    "3 of 4": Case(branching=(3,), vocab_size=4, num_tokens=3),
    "2x1": Case(branching=(2, 1), num_tokens=3, eos_ids=(2,)),
    "2x1, all options": Case(
        branching=(2, 1),
        num_tokens=3,
        eos_ids=(2,),
        prefix=(0, 2),
        options=Sampling(
            temperature=0.7, top_k=2, top_p=0.95, min_p=0.1, repetition_penalty=1.5, min_new_tokens=2
        ),
    ),
    "1x2": Case(branching=(1, 2), num_tokens=4),
}


def all_cases() -> dict[tuple[str, str, str], Case]:
    """(rule, drafter, options) -> case; every lossless rule with every option that it can meet."""
    cases = {("none", "plain decoding", "temperature 0.6"): Case(branching=())}
    for rule, give in RULES.items():
        cases |= {
            (rule, "chain of 2", name): dataclasses.replace(case, rule=give) for name, case in OPTIONS.items()
        }
        cases |= {
            (rule, name, "temperature 0.6"): dataclasses.replace(case, rule=give)
            for name, case in (CHAINS | OTHERS).items()
        }
    cases |= {
        ("multi_round", name, "temperature 0.6"): dataclasses.replace(case, rule=RULES["multi_round"])
        for name, case in TREES_OF_OTHERS.items()
    }
    how = {"with replacement": dict(with_replacement=True), "without replacement": {}}
    for kind, change in how.items():
        tree_options = {name: dataclasses.replace(case, branching=(2,)) for name, case in OPTIONS.items()}
        cases |= {
            ("multi_round", f"tree 2, {kind}", name): dataclasses.replace(
                case, rule=RULES["multi_round"], **change
            )
            for name, case in tree_options.items()
        }
    for kind, change in (how | {"top-k children": dict(deterministic=True)}).items():
        cases |= {
            ("multi_round", f"tree {name}, {kind}", "its own"): dataclasses.replace(
                case, rule=RULES["multi_round"], **change
            )
            for name, case in TREES.items()
        }
    return cases


def lossy_cases() -> dict[tuple[str, str, str], Case]:
    """The rules that say that they are lossy, and must be seen to be."""
    return {(rule, "chain of 2", "temperature 0.6"): Case(rule=give) for rule, give in LOSSY.items()}
