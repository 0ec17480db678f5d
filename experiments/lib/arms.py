"""The arms of a comparison: requests of the same sources with and without a drafter, and their outputs."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from rich.console import Console

from experiments.lib import progress
from specjax import GenerationConfig, acceptance, api, decode, sampling, sharding
from specjax.decode import Generation, Request
from specjax.loading import Model
from specjax.round import Stats
from specjax.types import AcceptanceRule, Drafter

T = TypeVar("T")


def requests(
    target: Model,
    drafter: Drafter | None,
    sources: Sequence[str],
    *,
    batch_size: int,
    config: GenerationConfig,
    rule: AcceptanceRule = acceptance.speculative,
    truncate: bool = False,
) -> list[Request]:
    """Returns one checked request per batch; the last batch is filled up with copies of the last source.

    All sources are padded to one width, so that there is one program to compile. The seed of a source is
    `config.seed` plus its index (modulo 2^32), at any batch size.
    """
    sources = [*sources, *[sources[-1]] * (-len(sources) % batch_size)]
    ids, mask = api.encode_sources(target, sources, truncate)
    batches = np.arange(len(sources)).reshape(-1, batch_size)
    common = dict(drafter=drafter, rule=rule, config=config)
    return [
        decode.prepare(target.network, ids[rows], mask[rows], seed=(rows + config.seed) % 2**32, **common)
        for rows in batches
    ]


def decode_one(request: Request) -> Generation:
    """Runs prefill and loop as two programs, so that the loop can be timed separately."""
    program, inputs = request
    return decode.jitted_finish(program, decode.jitted_run(program, decode.jitted_prefill(program, **inputs)))


def decode_all(batches: Sequence[Request], num_rows: int, label: str, console: Console) -> Generation:
    """Decodes every batch with a progress bar; returns the first `num_rows` rows as one `Generation`."""
    tracked = progress.track(batches, len(batches), label, console)
    return joined([sharding.fetch(decode_one(request)) for request in tracked], num_rows)


def joined(parts: Sequence[T], num_rows: int | None = None) -> T:
    """Joins pytrees of rows `[B, ...]`, and keeps the first `num_rows` rows (None: all)."""
    return jax.tree.map(lambda *rows: np.concatenate(rows)[:num_rows], *parts)


def counted(batches: Sequence[Request], num_rows: int | None = None) -> tuple[Stats, int]:
    """Returns the summed stats of the first `num_rows` rows (None: all), and the number of rounds run.

    A round serves all rows of its batch, so a batch has as many rounds as its slowest row.
    """
    stats = [sharding.fetch(decode_one(request).stats) for request in batches]
    return joined(stats, num_rows).total(), sum(int(s.num_rounds.max()) for s in stats)


class Arm(NamedTuple):
    """Checked requests and their outputs, one row per source.

    Attributes:
      batches: requests of one size and one temperature.
      generation: a row for each source, without those that fill up the last batch.
      first_s: seconds of the first call, compilation included; None: not measured.
    """

    batches: Sequence[Request]
    generation: Generation
    first_s: float | None = None

    @property
    def batch_size(self) -> int:
        """Rows of a request."""
        return len(self.batches[0].inputs["limit"])

    @property
    def sampled(self) -> bool:
        """Whether decoding is sampled (not greedy)."""
        return not sampling.is_greedy(sharding.fetch(self.batches[0].inputs["options"].temperature)).all()
