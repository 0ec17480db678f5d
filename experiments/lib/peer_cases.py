"""Cases for peers: a pair of checkpoints with sources, or a shape with random weights."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import specjax
from experiments.lib import arms, columns, parse, synthetic
from specjax import GenerationConfig, decode, drafters
from specjax.decode import Request
from specjax.models import convert, t5


@dataclasses.dataclass(frozen=True)
class Case:
    """A target, its sources, and our requests.

    Attributes:
      name: name for the table.
      directory: directory of the target, in Hugging Face format.
      draft_directory: directory of the draft model; None if its drafts would never be accepted.
      config: config of the target.
      sources: ids of each source, without padding.
      max_new_tokens: maximum new tokens per row.
      autoregressive: a request for each source, without a drafter.
      speculative: a request for each source with each drafter, by the drafter's name.
    """

    name: str
    directory: str
    draft_directory: str | None
    config: t5.T5Config
    sources: Sequence[np.ndarray]
    max_new_tokens: int
    autoregressive: list[Request]
    speculative: dict[str, list[Request]]

    @property
    def lengths(self) -> list[int]:
        """K of each value of --num_draft that is a number: a chain of the draft model."""
        return [int(column) for column in columns.columns() if column.isdecimal()]


def of_pair(directory: str, draft_directory: str, texts: Sequence[str], max_new_tokens: int) -> Case:
    """Returns the case of two checkpoints, with the drafters of --num_draft."""
    target, draft = specjax.load(directory), specjax.load(draft_directory)
    common = dict(batch_size=1, config=GenerationConfig(max_new_tokens=max_new_tokens))
    autoregressive = arms.requests(target, None, texts, **common)
    speculative = {}
    for column in columns.columns():
        name = f"specjax, draft model, K = {column}" if column.isdecimal() else f"specjax, {column}"
        speculative[name] = arms.requests(target, columns.drafter(target, draft, column), texts, **common)
    sources = [
        np.asarray(r.inputs["source_ids"])[np.asarray(r.inputs["source_mask"])] for r in autoregressive
    ]
    name = pathlib.Path(directory).name
    return Case(
        name, directory, draft_directory, target.config, sources, max_new_tokens, autoregressive, speculative
    )


def of_shape(
    name: str,
    draft_name: str,
    alpha: float,
    folder: pathlib.Path,
    *,
    num_sources: int,
    source_length: int,
    max_new_tokens: int,
) -> Case:
    """Returns the case of a shape with random weights, written to `folder`; every row runs to its limit.

    Drafts of random weights are never accepted. So our drafts are forced: a benchmark and not a sampler.
    """
    config = parse.shape(name, synthetic.default_dtype())
    target = synthetic.network(config, 0)
    target = target.replace(params=varied(config, target.params))
    convert.save(folder, config, target.params)
    sources = np.random.default_rng(0).integers(3, config.vocab_size, (num_sources, source_length), np.int32)

    def request(row: int, drafter: Any = None) -> Request:
        mask = np.ones((1, source_length), bool)
        return decode.prepare(
            target, sources[row, None], mask, drafter=drafter, max_new_tokens=max_new_tokens
        )

    autoregressive = [request(row) for row in range(num_sources)]
    outputs = [np.asarray(decode.jitted_generate(*r).tokens)[0, :max_new_tokens] for r in autoregressive]
    case = Case(name, str(folder), None, config, sources, max_new_tokens, autoregressive, {})
    draft = synthetic.network(parse.shape(draft_name, config.dtype, config), 1)
    for num_draft in case.lengths:
        drafter = drafters.ModelDrafter(draft, num_draft)
        forced = [
            synthetic.forced_tokens([ids], alpha, config.vocab_size, i) for i, ids in enumerate(outputs)
        ]
        label = f"specjax, draft {draft_name}, K = {num_draft}, forced to alpha {alpha:g}"
        case.speculative[label] = [
            request(row, synthetic.ForcedDrafter(drafter, tokens)) for row, tokens in enumerate(forced)
        ]
    return case


def varied(config: t5.T5Config, params: Any) -> Any:
    """Returns random params whose greedy output varies and never ends, in any library.

    With a head that shares the embedding, random params predict the last token again; smaller embeddings
    prevent that. The parts that are the same for all tokens would then dominate, so attention outputs are
    made smaller still, and half of each ReLU's outputs is subtracted. The embedding of the end token is zero,
    and so is its logit, which is below the largest of thousands.
    """
    changed = dict(params)
    embedding = params["embedding"] * jnp.asarray(0.1, config.dtype)
    changed["embedding"] = embedding.at[config.eos_id].set(0)
    for index in range(config.num_decoder_layers):
        layer = dict(params[f"decoder_layers_{index}"])
        for part in ("attention", "cross"):
            layer[part] = {**layer[part], "o": layer[part]["o"] * jnp.asarray(0.05, config.dtype)}
        out, half = layer["feed_forward"]["wo"], config.d_ff // 2
        layer["feed_forward"] = {**layer["feed_forward"], "wo": out.at[half:].set(-out[:half])}
        changed[f"decoder_layers_{index}"] = layer
    return changed
