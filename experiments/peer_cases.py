"""What the peers are compared on: a checkpoint pair and sentences, or a shape with random weights."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import specjax
from experiments import arms, columns, forced, shapes
from specjax import decode, drafters
from specjax.models import convert, t5
from specjax.request import Request, prepare
from specjax.texts import check_tokenizers


@dataclasses.dataclass(frozen=True)
class Case:
    """One target, its sources, and our own requests.

    Attributes:
      name: for the table.
      directory: of the target, in Hugging Face's format.
      draft_directory: of the draft model; None where no draft would be accepted by itself.
      config: of the target.
      sources: ids of each source, no padding.
      max_new_tokens: limit of a row.
      plain: a request a source, of the target alone.
      speculative: the same with each drafter, by its column.
      lengths: K of each column that is a chain of the draft model.
    """

    name: str
    directory: str
    draft_directory: str | None
    config: t5.T5Config
    sources: Sequence[np.ndarray]
    max_new_tokens: int
    plain: list[Request]
    speculative: dict[str, list[Request]]
    lengths: Sequence[int]


def of_pair(directory: str, draft_directory: str, texts: Sequence[str], max_new_tokens: int) -> Case:
    """The checkpoints in these directories; drafters as --num_draft says."""
    target, draft = specjax.load(directory), specjax.load(draft_directory)
    check_tokenizers(target.tokenizer, draft.tokenizer)
    common = dict(batch_size=1, sampling=None, max_new_tokens=max_new_tokens, seed=0)
    plain = arms.requests(target, None, texts, **common)
    speculative = {
        f"specjax, draft model, K = {column}" if column.isdecimal() else f"specjax, {column}": arms.requests(
            target, columns.drafter(target, draft, column), texts, **common
        )
        for column in columns.columns()
    }
    sources = [np.asarray(r.inputs["source_ids"])[np.asarray(r.inputs["source_mask"])] for r in plain]
    return Case(
        pathlib.Path(directory).name,
        directory,
        draft_directory,
        target.config,
        sources,
        max_new_tokens,
        plain,
        speculative,
        lengths(),
    )


def lengths() -> list[int]:
    """K of each column of --num_draft that is a plain number."""
    return [int(column) for column in columns.columns() if column.isdecimal()]


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
    """A shape with random weights, written into `folder`; every row runs to its limit.

    A random draft guesses nothing: our drafts are forced, which is a benchmark and not a sampler.
    """
    config = shapes.shape(name, shapes.default_dtype())
    params = varied(config, shapes.random_params(config, 0))
    convert.save(folder, config, params)
    size = (num_sources, source_length)
    sources = np.random.default_rng(0).integers(3, config.vocab_size, size, np.int32)
    network = t5.T5Network(config)

    def request(row: int, **options: Any) -> Request:
        return prepare(
            network,
            params,
            sources[row, None],
            np.ones((1, source_length), bool),
            seed=0,
            max_new_tokens=max_new_tokens,
            eos_ids=(config.eos_id,),
            **options,
        )

    plain = [request(row) for row in range(num_sources)]
    said = [np.asarray(decode.jitted_generate(*r).tokens)[0, :max_new_tokens] for r in plain]
    draft = shapes.shape(draft_name, config.dtype, config)
    draft_params = shapes.random_params(draft, 1)
    speculative = {}
    for num_draft in lengths():
        drafter = forced.ForcedDrafter(drafters.ModelDrafter(t5.T5Network(draft), num_draft))
        told = [forced.forced_tokens([ids], alpha, config.vocab_size, row) for row, ids in enumerate(said)]
        speculative[f"specjax, draft {draft_name}, K = {num_draft}, forced to alpha {alpha:g}"] = [
            request(row, drafter=drafter, drafter_params=forced.ForcedParams(draft_params, tokens))
            for row, tokens in enumerate(told)
        ]
    return Case(name, str(folder), None, config, sources, max_new_tokens, plain, speculative, lengths())


def varied(config: t5.T5Config, params: Any) -> Any:
    """Random params whose greedy output varies with source and position, and never ends, in any library.

    As they are drawn, a head that is the embedding has each token say itself again; so embeddings are made
    small. What would then be alike for all tokens drowns what is not: attention is made smaller still, and
    a half of each ReLU's outputs is subtracted rather than added. The end token's embedding is zero: so is
    its logit, below the largest of thousands.
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
