"""Enumerated cases: drafters, rules and options on toy networks that are small enough to enumerate.

`DRAFTERS` has a line for each drafter, which adds its enumerated cases and its tests with an oracle.
`experiments.losslessness` reports all cases; the tests run most of them.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.exactness import enumeration, toys
from experiments.exactness.enumeration import Outputs, Rounds, Sequences
from experiments.exactness.toys import ToyHeads, ToyNetwork
from specjax import acceptance, decode
from specjax.decode import Request
from specjax.drafters import (
    AdaptiveDrafter,
    DrafterWrapper,
    EagleDrafter,
    EagleTreeDrafter,
    LookaheadDrafter,
    MedusaDrafter,
    ModelDrafter,
    ModelTreeDrafter,
    NgramDrafter,
    NgramTable,
    OnePassDrafter,
    PromptLookupDrafter,
    StagedDrafter,
    learn_ngram,
)
from specjax.generation_config import GenerationConfig
from specjax.types import AcceptanceRule, Context, Draft, Drafter, Draws, History, Network, State


class Toys(NamedTuple):
    """Parts of drafters: a draft model, a model that drafts for it, and heads on the target."""

    draft: Network
    helper: Network
    heads: Any


class ToyDrafter(NamedTuple):
    """A drafter made of toys.

    Attributes:
      make: takes toys and K, the maximum number of accepted drafts per round.
      warm_up: tokens that a row must have emitted before the drafter can know the next ones; more than one if
        it learns from the output; None: it never knows them.
    """

    make: Callable[[Toys, int], Drafter]
    warm_up: int | None = 1


def bigrams(draft: Network) -> NgramTable:
    """Returns a table of random text in the vocabulary of a draft, in the precision of the case."""
    text = np.random.default_rng(4).integers(draft.vocab_size, size=30)
    dtype = jax.eval_shape(draft.logits, jax.ShapeDtypeStruct((1, 1, 1), np.float32)).dtype
    table = learn_ngram([text], draft.vocab_size, max_successors=2)
    return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == np.float32 else x, table)


# ---- drafters: a new one needs a line here

DRAFTERS = {
    "model": ToyDrafter(lambda toys, k: ModelDrafter(toys.draft, k)),
    "model tree": ToyDrafter(lambda toys, k: ModelTreeDrafter(toys.draft, (2, *[1] * (k - 1)))),
    "staged": ToyDrafter(lambda toys, k: StagedDrafter(toys.draft, ModelDrafter(toys.helper, k - 1), k)),
    "staged lookup": ToyDrafter(lambda toys, k: StagedDrafter(toys.draft, PromptLookupDrafter(2), k)),
    "lookup": ToyDrafter(lambda toys, k: PromptLookupDrafter(k, max_ngram=2), warm_up=12),
    "ngram": ToyDrafter(lambda toys, k: NgramDrafter(bigrams(toys.draft), k), warm_up=None),
    "lookahead": ToyDrafter(lambda toys, k: LookaheadDrafter(k, k + 1, k - 1), warm_up=12),
    "medusa": ToyDrafter(lambda toys, k: MedusaDrafter(toys.heads, (2, *[1] * (k - 1)))),
    "eagle": ToyDrafter(lambda toys, k: EagleDrafter(toys.heads, k)),
    "eagle tree": ToyDrafter(lambda toys, k: EagleTreeDrafter(toys.heads, k + 1, k, 2)),
    "one pass": ToyDrafter(lambda toys, k: OnePassDrafter(toys.heads, k)),
}


class ArgmaxDrafter(DrafterWrapper):
    """Proposes greedily with another drafter at any temperature, so that q is one-hot."""

    def propose(
        self, state: State, context: Context, draws: Draws | None, max_length: jax.Array | None
    ) -> tuple[Draft, State]:
        """Draws nothing."""
        return self.inner.propose(state, context, None, max_length)


def adapted(drafter: Drafter) -> AdaptiveDrafter:
    """Returns a drafter of adaptive length, with costs for which every length occurs."""
    lengths: tuple[int, ...] = (0, drafter.num_draft)
    if not drafter.drafts_trees:
        lengths = tuple(range(drafter.num_draft + 1))
    costs = (1.0, 1.5) if drafter.drafts_trees else (1.0, 1.25, 1.7, 2.2)[: len(lengths)]
    return AdaptiveDrafter(drafter, lengths, costs, decay=0.5, prior_alpha=0.6, prior_weight=0.5)


# ---- a case

SOURCE = np.array([1, 0, 0])
NUM_TOKENS = 12  # slots for output, more than any row emits


def options(**given: Any) -> GenerationConfig:
    """Returns a config, by default at temperature .6, without end tokens and far from the limit."""
    return GenerationConfig(**dict(temperature=0.6, max_new_tokens=NUM_TOKENS, eos_ids=()) | given)


WARM = options()


@dataclasses.dataclass(frozen=True)
class Case:
    """An enumerated case.

    Attributes:
      make: makes the drafter; None from it is autoregressive decoding.
      rule, config: as in `decode.generate`.
      num_tokens: length of the sequences whose distribution is compared.
      prefix: decoder input.
      vocab_size, num_ids: sizes of the target's vocabulary, with and without padding.
      draft_vocab_size: size of the draft's vocabulary, if padded differently.
      seed: seed of the tables.
      dtype: dtype of the tables.
    """

    make: Callable[[Toys], Drafter | None] = lambda toys: ModelDrafter(toys.draft, 2)
    rule: AcceptanceRule = acceptance.speculative
    config: GenerationConfig = WARM
    num_tokens: int = 4
    prefix: tuple[int, ...] = (0,)
    vocab_size: int = 3
    num_ids: int | None = None
    draft_vocab_size: int | None = None
    seed: int = 0
    dtype: Any = np.float64

    @property
    def target(self) -> ToyNetwork:
        """The target."""
        return ToyNetwork(self._table(0), self.num_ids)

    def drafter(self, twin: bool = False) -> Drafter | None:
        """Returns the drafter; with `twin` its draft model is the target."""
        draft = self._table(0) if twin else self._table(1, self.draft_vocab_size)
        helper = self._table(2, self.draft_vocab_size)
        return self.make(Toys(ToyNetwork(draft), ToyNetwork(helper), ToyHeads(self._table(1))))

    def _table(self, which: int, vocab_size: int | None = None) -> np.ndarray:
        return toys.random_table(self.seed + which, vocab_size or self.vocab_size, dtype=self.dtype)

    def request(self, twin: bool = False, sources: np.ndarray = SOURCE[None]) -> Request:
        """Returns the request of the case."""
        return decode.prepare(
            self.target,
            sources,
            np.ones(sources.shape, bool),
            drafter=self.drafter(twin),
            rule=self.rule,
            config=self.config,
            prefix=np.tile(self.prefix, (len(sources), 1)),
            length_bucket=NUM_TOKENS,
        )

    def precision(self) -> contextlib.AbstractContextManager:
        """Returns the context in which JAX has the precision of the tables."""
        return jax.enable_x64(True) if self.dtype is np.float64 else contextlib.nullcontext()

    def outputs(self, rounds: Rounds | None = None, twin: bool = False) -> Outputs:
        """Returns the output distribution of `rounds`; None: the library's, enumerated once and cached."""
        if rounds is None:
            return _outputs(self, twin)
        with self.precision():
            return rounds.outputs(self.request(twin), self.num_tokens)

    def expected(self) -> Sequences:
        """Returns the target's distribution, computed in numpy."""
        num_tokens = min(self.num_tokens, int(self.config.max_new_tokens))
        return toys.target_distribution(self.target, SOURCE, num_tokens, self.config, self.prefix)

    def error(self, rounds: Rounds | None = None, twin: bool = False) -> float:
        """Returns the largest difference in probability between the output and the target's distribution."""
        return enumeration.largest_error(self.outputs(rounds, twin).probability, self.expected())

    @property
    def bar(self) -> float:
        """The error below which the case passes."""
        return 1e-12 if self.dtype is np.float64 else 1e-6

    def num_wrong_greedy(self, rounds: Rounds | None = None) -> int:
        """Returns how many of four greedy rows differ from the target's argmax path."""
        sources = np.array([[1, 1, 0], [0, 1, 0], [1, 1, 1], [0, 0, 1]])
        config = dataclasses.replace(self.config, temperature=0.0, max_new_tokens=self.num_tokens)
        request = dataclasses.replace(self, config=config).request(sources=sources)
        num_wrong = 0
        for source, tokens in zip(sources, (rounds or library_rounds()).greedy(request), strict=True):
            (path,) = toys.target_distribution(self.target, source, self.num_tokens, config, self.prefix)
            num_wrong += path != tuple(tokens)
        return num_wrong


@functools.cache
def library_rounds() -> Rounds:
    """Returns the library's own rounds."""
    return Rounds()


@functools.cache
def _outputs(case: Case, twin: bool) -> Outputs:
    return case.outputs(library_rounds(), twin)


# ---- all cases


def of(name: str, num_draft: int = 2) -> Callable[[Toys], Drafter]:
    """Returns a function that makes a drafter of `DRAFTERS`."""
    return lambda toys: DRAFTERS[name].make(toys, num_draft)


RULES = {rule.name: rule for rule in (acceptance.speculative, acceptance.block, acceptance.multi_round)}
LOSSY = {"Lenient(0.5)": acceptance.Lenient(0.5), "Typical()": acceptance.Typical()}


def pulls_back(logits: jax.Array, history: History) -> jax.Array:
    """Makes the last token but one likelier, as a logits processor of a user may."""
    assert history.tokens is not None and history.length is not None
    place = jnp.maximum(history.length - 2, 0)[..., None]
    earlier = jnp.take_along_axis(jnp.asarray(history.tokens), place, axis=-1)
    return logits + 1.25 * jax.nn.one_hot(earlier[..., 0], logits.shape[-1], dtype=logits.dtype)


ALL: dict[str, Any] = dict(
    temperature=0.7,
    top_k=3,
    top_p=0.8,
    min_p=0.2,
    repetition_penalty=1.5,
    presence_penalty=0.3,
    frequency_penalty=-0.2,
    no_repeat_ngram_size=3,
    logit_bias={0: 0.5},
    bad_words_ids=((1, 0, 1),),
    logits_processor=pulls_back,
    min_new_tokens=2,
)
EVERYTHING = Case(
    config=options(**ALL, eos_ids=(2, 3)), vocab_size=5, num_ids=4, prefix=(0, 2, 1), num_tokens=3
)
OPTIONS = {
    "temperature 0.6": Case(),
    "temperature 1": Case(config=options(temperature=1.0)),
    "temperature 0": Case(config=options(temperature=0.0)),
    "top-k": Case(config=options(temperature=1.0, top_k=2)),
    "top-p": Case(config=options(temperature=1.0, top_p=0.7)),
    "min-p": Case(config=options(temperature=1.0, min_p=0.4)),
    "repetition penalty": Case(config=options(temperature=1.0, repetition_penalty=1.7), prefix=(0, 0, 2)),
    "presence and frequency": Case(
        config=options(temperature=1.0, presence_penalty=0.8, frequency_penalty=0.6), prefix=(0, 0, 2)
    ),
    "no repeated 2-gram": Case(config=options(temperature=1.0, no_repeat_ngram_size=2)),
    "bad words": Case(
        config=options(temperature=1.0, bad_words_ids=((1,), (2, 0), (0, 2, 2))), vocab_size=4, num_tokens=3
    ),
    "bias, suppressed ids": Case(
        config=options(logit_bias={0: 0.7}, suppress_tokens=(3,), begin_suppress_tokens=(1,)), vocab_size=4
    ),
    "logits processor": Case(config=options(temperature=1.0, logits_processor=pulls_back)),
    "minimum length": Case(config=options(temperature=1.0, min_new_tokens=2, eos_ids=(2,))),
    "end token inside the draft": Case(config=options(eos_ids=(2,))),
    "limit cuts the draft": Case(config=options(max_new_tokens=3)),
    "prefix, end tokens, all options": EVERYTHING,
    "padded vocabularies": Case(vocab_size=5, draft_vocab_size=4, num_ids=3, num_tokens=3),
    "float32": Case(config=options(eos_ids=(2,)), dtype=np.float32),
}
# Other sizes of drafters, and other ways to draw.
SIZES = {
    "1 draft of 4": Case(of("model", 1), vocab_size=4),
    "2 drafts of 4": Case(vocab_size=4, num_tokens=3),
    "3 drafts of 2": Case(of("model", 3), vocab_size=2, num_tokens=5),
    "3 drafts of 3": Case(of("model", 3), config=options(eos_ids=(2,))),
    "2 argmax drafts": Case(lambda toys: ArgmaxDrafter(ModelDrafter(toys.draft, 2))),
    "0 to 2 drafts by history and confidence": Case(
        lambda toys: adapted(ModelDrafter(toys.draft, 2, min_confidence=0.45))
    ),
    "2 copies, repetition penalty": Case(
        of("lookup"), config=options(temperature=1.0, repetition_penalty=1.7), prefix=(0, 0, 2)
    ),
    "2 copies, some of padding ids": Case(of("lookup"), num_ids=2),
    "2 staged, end token, limit, minimum length": Case(
        of("staged"), config=options(temperature=1.0, min_new_tokens=1, eos_ids=(1,), max_new_tokens=3)
    ),
    "a model's 2x1x1 or none": Case(
        lambda toys: adapted(ModelTreeDrafter(toys.draft, (2, 1, 1))),
        config=options(max_new_tokens=4),
        vocab_size=2,
    ),
    "EAGLE-2, 5 nodes": Case(lambda toys: EagleTreeDrafter(toys.heads, 5, 2, 2), num_tokens=3),
    "lookahead, 1 column": Case(lambda toys: LookaheadDrafter(1, 3, 1, 3), vocab_size=2, num_tokens=6),
    "lookahead, padded vocabulary": Case(lambda toys: LookaheadDrafter(1, 3, 1, 3), num_ids=2, num_tokens=5),
}
WAYS: dict[str, Callable[..., Callable[[Toys], Drafter]]] = {
    "with replacement": lambda *branching: lambda toys: ModelTreeDrafter(toys.draft, branching, True),
    "without replacement": lambda *branching: lambda toys: ModelTreeDrafter(toys.draft, branching),
    "top-k children": lambda *branching: lambda toys: ArgmaxDrafter(ModelTreeDrafter(toys.draft, branching)),
}
BRANCHINGS = {
    "chain drafted as a tree": ((1, 1), Case()),
    "2": ((2,), Case()),
    "3 of 4": ((3,), Case(vocab_size=4, num_tokens=3)),
    "2x1": ((2, 1), Case(num_tokens=3, config=options(eos_ids=(2,)))),
    "2x1, all options": ((2, 1), EVERYTHING),
    "1x2": ((1, 2), Case()),
}
Key = tuple[str, str, str]  # rule, drafter, options


@functools.cache
def all_cases() -> dict[Key, Case]:
    """Returns every lossless rule with every drafter and option that it supports."""
    cases: dict[Key, Case] = {("none", "autoregressive", "temperature 0.6"): Case(lambda toys: None)}

    def add(drafter: str, options: str, case: Case, **changed: Any) -> None:
        case = dataclasses.replace(case, **changed)
        made = case.drafter()
        for name, rule in RULES.items():
            if name == "multi_round" or not (made and made.drafts_trees):
                cases[name, drafter, options] = dataclasses.replace(case, rule=rule)

    for name, case in OPTIONS.items():
        add("chain of 2", name, case)
        add("tree 2, with replacement", name, case, make=WAYS["with replacement"](2))
        add("tree 2, without replacement", name, case, make=WAYS["without replacement"](2))
    ended = OPTIONS["end token inside the draft"]
    for drafter in DRAFTERS:
        make = of(drafter)
        add(drafter, "end token", ended, make=make)
        add(drafter, "all options", EVERYTHING, make=make, draft_vocab_size=4)
        made = dataclasses.replace(ended, make=make).drafter()
        if made is not None and made.can_skip:
            add(drafter, "adaptive", ended, make=lambda toys, make=make: adapted(make(toys)))
    for drafter, case in SIZES.items():
        add(drafter, "its own", case)
    for branching, (numbers, case) in BRANCHINGS.items():
        for way, make in WAYS.items():
            add(f"tree {branching}, {way}", "its own", case, make=make(*numbers))
    return cases


def lossy_cases() -> dict[Key, Case]:
    """Returns a case for each lossy rule, whose distribution must differ."""
    return {(name, "chain of 2", "temperature 0.6"): Case(rule=rule) for name, rule in LOSSY.items()}
