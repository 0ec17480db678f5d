"""N-gram tables as drafters: a look-up in place of a network.

Leviathan et al. 2023, section 4 and table 3: q of a unigram or bigram model costs nothing, so that even a
low acceptance pays. Bigrams are smoothed by absolute discounting (Ney, Essen and Kneser 1994), backed off
to unigrams; both are learned from token ids and kept as arrays.

Axes: B rows, K drafts, V vocabulary, M successors kept per token.
"""

import os
import pathlib
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import struct

from specjax.drafters import chain
from specjax.drafters.model import check_num_draft
from specjax.drafters.pairs import check_whole
from specjax.types import Context, Draft, Drafter, Draws, Network, Round
from specjax.writing import write_whole

FORMAT = "specjax ngram 1"


class NgramTable(struct.PyTreeNode):
    """The log-probabilities of a unigram (M = 0) or bigram model; each row of q sums to one.

    Attributes:
      log_unigram: `[V] float32`, log-probability of every token.
      successors: `[V, M] int32`, the most likely tokens after each; padded with V.
      log_successors: `[V, M] float32`, their log-probabilities.
      log_backoff: `[V] float32`, added to the `log_unigram` of all other tokens after each.
    """

    log_unigram: jax.Array
    successors: jax.Array
    log_successors: jax.Array
    log_backoff: jax.Array

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.log_unigram.shape[0]

    def logits(self, tokens: jax.Array) -> jax.Array:
        """Returns log q `[B, V]` of what follows `tokens` `[B]`."""
        others = self.log_unigram[None, :] + self.log_backoff[tokens][:, None]
        rows = jnp.arange(len(tokens))[:, None]
        return others.at[rows, self.successors[tokens]].set(self.log_successors[tokens], mode="drop")


class NgramDrafter(Drafter):
    """A drafter of chains of K tokens from a table.

    Attributes:
      table: the n-gram table.
      num_draft: K.
      min_confidence: a row stops when q is less confident; see `chain.draft_chain`.
    """

    table: NgramTable
    num_draft: int = struct.field(pytree_node=False)
    min_confidence: float = struct.field(pytree_node=False, default=0.0)

    def with_min_confidence(self, min_confidence: float) -> Drafter:
        """Returns the drafter with this threshold."""
        return self.replace(min_confidence=min_confidence)

    def check(self, target: Network) -> None:
        """Raises a ValueError if the table has fewer ids than the target."""
        existing = target.num_ids or target.vocab_size
        if self.table.vocab_size < existing:
            raise ValueError(
                f"`table` must contain the target's {existing} ids, got {self.table.vocab_size}; "
                "learn one from texts in the target's tokens"
            )

    def init(self, context: Context, prefix_width: int) -> None:
        """Returns no state: q depends only on the last token."""
        del context, prefix_width

    def propose(
        self, state: None, context: Context, draws: Draws | None, max_length: jax.Array | None
    ) -> tuple[Draft, None]:
        """Makes K look-ups, or stops when no row drafts another token."""
        del state
        last, _ = context.last_tokens(1)
        after = lambda tokens: self.table.logits(tokens[:, 0])[:, None]  # noqa: E731
        feed = lambda carry, token: (after(token), carry)  # noqa: E731
        return chain.draft_chain(
            after(last), None, feed, context, draws, self.num_draft, max_length, self.min_confidence
        )

    def commit(self, state: None, round: Round) -> None:
        """Does nothing: there is no state."""
        del state, round


def learn(
    texts: Iterable[Sequence[int]],
    vocab_size: int,
    order: int = 2,
    max_successors: int = 64,
    start_id: int = 0,
    discount: float = 0.75,
) -> NgramTable:
    """Returns a table learned from the unigram and bigram counts of texts.

    Args:
      texts: the ids of each text, the end token last, without the start token.
      vocab_size: V.
      order: 1 for unigrams, 2 for bigrams.
      max_successors: M; rarer successors have their backed-off unigram probability.
      start_id: the id before the first token of a text.
      discount: subtracted from the count of each bigram, in 0..1.

    Raises:
      ValueError: no text, ids beyond V, or numbers out of their range.
    """
    check_whole(vocab_size=vocab_size, max_successors=max_successors)
    if order not in (1, 2) or not 0 < discount < 1:
        raise ValueError(f"`order` must be 1 or 2 and `discount` in 0..1, got {order} and {discount}")
    rows = [np.asarray(text, np.int64) for text in texts if len(text)]
    if not rows:
        raise ValueError("`texts` must hold at least one text that is not empty")
    following = np.concatenate(rows)
    invalid = following[(following < 0) | (following >= vocab_size)]
    if invalid.size:
        raise ValueError(f"`texts` must hold ids in 0..{vocab_size - 1}, got {invalid[0]}")
    counts = np.bincount(following, minlength=vocab_size) + 1.0  # add one: every token is possible
    unigram = counts / counts.sum()
    num_kept = max_successors if order == 2 else 0
    successors = np.full((vocab_size, num_kept), vocab_size, np.int32)
    bigram, backoff = np.zeros((vocab_size, num_kept)), np.ones(vocab_size)
    if num_kept:
        before = np.concatenate([[start_id, *row[:-1]] for row in rows]).astype(np.int64)
        pairs, times = np.unique(before * vocab_size + following, return_counts=True)
        before, following = np.divmod(pairs, vocab_size)
        total = np.bincount(before, times, vocab_size)
        order_of_pairs = np.lexsort((-times, before))  # by token, the most frequent successor first
        before, following, times = (x[order_of_pairs] for x in (before, following, times))
        rank = np.arange(len(before)) - np.searchsorted(before, before)
        is_kept = rank < num_kept
        before, following, times, rank = (x[is_kept] for x in (before, following, times, rank))
        share = (times - discount) / total[before]
        backoff -= np.bincount(before, share, vocab_size)
        successors[before, rank] = following
        bigram[before, rank] = share + backoff[before] * unigram[following]
    with np.errstate(divide="ignore"):  # log 0 at the padding
        logs = [np.log(x).astype(np.float32) for x in (unigram, bigram, backoff)]
    return NgramTable(*map(jnp.asarray, (logs[0], successors, logs[1], logs[2])))


def save(path: str | os.PathLike, table: NgramTable) -> None:
    """Writes a table as safetensors, atomically."""
    arrays = {name: np.asarray(value) for name, value in vars(table).items()}
    write = lambda part: safetensors.numpy.save_file(arrays, part, {"format": FORMAT})  # noqa: E731
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole({path: write})


def load(path: str | os.PathLike) -> NgramTable:
    """Reads what `save` wrote.

    Raises:
      ValueError: the file is missing, damaged, or not an n-gram table.
    """
    try:
        with safetensors.safe_open(os.fspath(path), "numpy") as file:
            found = (file.metadata() or {}).get("format")
            arrays = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{os.fspath(path)} is not a readable n-gram table ({error})") from error
    if found != FORMAT:
        raise ValueError(f"{os.fspath(path)} must be an n-gram table ({FORMAT}), got format {found!r}")
    return NgramTable(**{name: jnp.asarray(value) for name, value in arrays.items()})


def ngram(table: NgramTable | str | os.PathLike, num_draft: int = 5) -> NgramDrafter:
    """Returns a drafter of chains from a unigram or bigram table (Leviathan et al. 2023, section 4).

    Args:
      table: a table from `drafters.learn_ngram`, or a file that `drafters.save_ngram` wrote.
      num_draft: K, tokens per round.

    Raises:
      ValueError: `num_draft` is below 1, or the file cannot be read.
    """
    check_num_draft(num_draft)
    if not isinstance(table, NgramTable | str | os.PathLike):
        raise ValueError(f"`table` must be a table from drafters.learn_ngram, or a file, got {table!r:.80}")
    return NgramDrafter(table if isinstance(table, NgramTable) else load(table), num_draft)
