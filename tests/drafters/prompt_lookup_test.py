"""Prompt lookup: which occurrence wins, where its continuation ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.exactness import toys
from specjax import decode, drafters
from specjax.drafters import PromptLookupDrafter
from specjax.generation_config import GenerationConfig
from specjax.types import Context

NUM_SLOTS = 12


def proposals(rows, num_draft=3, **settings):
    """(tokens proposed) of rows of (source ids, committed ids)."""
    width = max(len(source) for source, _ in rows)
    pad = lambda ids, size: [*ids, *[0] * (size - len(ids))]  # noqa: E731
    context = Context(
        tokens=jnp.array([pad(ids, NUM_SLOTS) for _, ids in rows]),
        length=jnp.array([len(ids) for _, ids in rows]),
        prefix_length=jnp.ones(len(rows), jnp.int32),
        source_ids=jnp.array([pad(source, width) for source, _ in rows]),
        source_mask=jnp.array([[i < len(source) for i in range(width)] for source, _ in rows]),
        encoded=jnp.zeros((len(rows), width, 1)),
        options=GenerationConfig().to_options(len(rows)),
        remaining=jnp.full(len(rows), 9),
    )
    drafter = PromptLookupDrafter(num_draft, **settings)
    draft, _ = jax.jit(lambda: drafter.propose(None, context, None, None))()
    return [row[:count].tolist() for row, count in zip(draft.tokens, draft.num_drafted, strict=True)]


def test_the_longest_match_wins_then_the_source_then_the_first():
    assert proposals(
        [
            ([5, 6, 7, 8, 1], [0, 5, 6]),  # two tokens agree
            ([6, 9, 5, 6, 7, 1], [0, 5, 6]),  # the later one is longer
            ([6, 9, 6, 8, 1], [0, 6]),  # the first of two
            ([6, 9, 1], [0, 6, 4, 6]),  # as long in the output: the source
            ([6, 9, 1], [0, 3, 6, 4, 3, 6]),  # longer in the output
            ([5, 6, 1], [0, 7]),  # none
        ]
    ) == [[7, 8, 1], [7, 1], [9, 6, 8], [9, 1], [4, 3, 6], []]


def test_a_draft_ends_where_source_or_output_do():
    assert proposals([([7, 8, 9], [0, 8]), ([7, 8], [0, 8]), ([3, 3], [0, 5, 6, 5])], num_draft=5) == [
        [9],
        [],  # nothing follows in the source
        [6, 5],
    ]


def test_matches_do_not_cross_from_the_source_into_the_output_or_into_padding():
    # "9 | 0" of source end and start token would continue with 4.
    assert proposals([([5, 9], [0, 0]), ([5, 9, 0, 4], [9, 0])], max_ngram=2, min_ngram=2) == [[], [4]]


@pytest.mark.parametrize("max_ngram", [1, 3])
def test_it_equals_a_plain_search(max_ngram):
    random = np.random.default_rng(max_ngram)
    rows = [
        (random.integers(0, 4, random.integers(1, 9)).tolist(), [0, *random.integers(0, 4, 7).tolist()])
        for _ in range(50)
    ]
    expected = []
    for source, output in rows:
        best: list[int] = []
        for size in range(max_ngram, 0, -1):
            suffix = output[-size:]
            for text in (source, output):
                for i in range(len(text) - size):
                    if text[i : i + size] == suffix and not best:
                        best = text[i + size : i + size + 3]
        expected.append(best)
    assert proposals(rows, max_ngram=max_ngram) == expected


class Cycle(toys.ToyNetwork):
    """A target that emits 2, 3, 4, 2, 3, 4, ... for any source."""

    def decode(self, cache, tokens, layout=None):
        _, features, cache = super().decode(cache, tokens, layout)
        return 9.0 * jax.nn.one_hot(jnp.where(tokens == 4, 2, jnp.maximum(tokens, 1) + 1), 5), features, cache


def test_an_output_that_repeats_itself_is_accepted_to_the_last():
    done = decode.generate(
        Cycle(jnp.asarray(toys.random_table(0, 5))),
        np.array([[0, 0]]),
        np.ones((1, 2), bool),
        max_new_tokens=24,
        seed=0,
        eos_ids=(),
        drafter=PromptLookupDrafter(3),
    )
    np.testing.assert_array_equal(done.tokens[0, :24], np.tile([2, 3, 4], 8))
    # Four rounds until the first repetition, then K + 1 tokens each.
    assert int(done.stats.num_rounds[0]) == 4 + 5 and int(done.stats.accepted.sum()) == 15


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="`num_draft` must be a whole number of at least 1, got 0"):
        drafters.prompt_lookup(0)
    with pytest.raises(ValueError, match="got min_ngram=4, max_ngram=3"):
        drafters.prompt_lookup(4, min_ngram=4)
