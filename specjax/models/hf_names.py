"""What Hugging Face calls the tensors and settings of a T5.

`tensor_names` is the one table of names; reading and writing walk it, so every tensor of a file is
used exactly once and every parameter is set exactly once.

Axes: V vocabulary, M model width, F feed-forward width, H heads, D head width. Torch stores a
linear layer as (out, in); the kernels here are (in, out), with H and D apart.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from specjax.models.config import T5Config

EMBEDDING, HEAD = "shared.weight", "lm_head.weight"
# Copies of the embedding that older files hold.
ALIASES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# Old files hold a bias for cross-attention, which T5 does not have.
IGNORED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)

# Attributes of `T5Config` that config.json must give; all attributes that it may give -> its key.
_REQUIRED = ("vocab_size", "d_model", "d_kv", "d_ff", "num_heads", "num_layers")
IDS = {"pad_id": "pad_token_id", "eos_id": "eos_token_id", "start_id": "decoder_start_token_id"}
_KEYS = {
    **{name: name for name in (*_REQUIRED, "num_decoder_layers", "layer_norm_epsilon", "dropout_rate")},
    "num_buckets": "relative_attention_num_buckets",
    "max_distance": "relative_attention_max_distance",
    **IDS,
}


class Tensor(NamedTuple):
    """One tensor of a checkpoint and the parameter that it is.

    Attributes:
      name: in the file.
      path: of the parameter, a key per level of the nested dict.
      kind: "same", or "transposed": the parameter is the file's tensor transposed, then reshaped.
      file_shape, shape: in the file, and of the parameter.
    """

    name: str
    path: tuple[str, ...]
    kind: str
    file_shape: tuple[int, ...]
    shape: tuple[int, ...]


def _norm(config: T5Config, name: str, *path: str) -> Tensor:
    return Tensor(f"{name}.weight", (*path, "scale"), "same", (config.d_model,), (config.d_model,))


def _attention(config: T5Config, name: str, *path: str) -> Iterator[Tensor]:
    m, h, d = config.d_model, config.num_heads, config.d_kv
    for part in "qkv":
        yield Tensor(f"{name}.{part}.weight", (*path, part), "transposed", (h * d, m), (m, h, d))
    yield Tensor(f"{name}.o.weight", (*path, "o"), "transposed", (m, h * d), (h, d, m))


def _feed_forward(config: T5Config, name: str, *path: str) -> Iterator[Tensor]:
    m, f = config.d_model, config.d_ff
    for part in ("wi_0", "wi_1") if config.gated else ("wi",):
        yield Tensor(f"{name}.{part}.weight", (*path, part), "transposed", (f, m), (m, f))
    yield Tensor(f"{name}.wo.weight", (*path, "wo"), "transposed", (m, f), (f, m))


def _stack(config: T5Config, stack: str, num_layers: int) -> Iterator[Tensor]:
    """The tensors of the encoder or of the decoder."""
    table = (config.num_buckets, config.num_heads)
    bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    yield Tensor(bias, (f"{stack}_bias", "table"), "same", table, table)
    for index in range(num_layers):
        layer, block = f"{stack}_layers_{index}", f"{stack}.block.{index}.layer"
        yield from _attention(config, f"{block}.0.SelfAttention", layer, "attention")
        yield _norm(config, f"{block}.0.layer_norm", layer, "attention_norm")
        if stack == "decoder":
            yield from _attention(config, f"{block}.1.EncDecAttention", layer, "cross")
            yield _norm(config, f"{block}.1.layer_norm", layer, "cross_norm")
        last = f"{block}.{2 if stack == 'decoder' else 1}"
        yield from _feed_forward(config, f"{last}.DenseReluDense", layer, "feed_forward")
        yield _norm(config, f"{last}.layer_norm", layer, "feed_forward_norm")
    yield _norm(config, f"{stack}.final_layer_norm", f"{stack}_norm")


def tensor_names(config: T5Config) -> Iterator[Tensor]:
    """Every tensor of a checkpoint of this shape, once; aliases of the embedding excluded."""
    v, m = config.vocab_size, config.d_model
    yield Tensor(EMBEDDING, ("embedding",), "same", (v, m), (v, m))
    yield from _stack(config, "encoder", config.num_layers)
    yield from _stack(config, "decoder", config.num_decoder_layers)
    if not config.tied_head:
        yield Tensor(HEAD, ("head",), "transposed", (v, m), (m, v))


def config_from_hf(config: dict[str, Any]) -> T5Config:
    """The network that a config.json describes, whichever transformers version wrote it.

    Up to version 4, `tie_word_embeddings` says both that the head is the embedding and that
    logits are scaled. Version 5 always writes True there and says the second, for T5, in
    `scale_decoder_outputs`; it never scales mT5.

    Args:
      config: the parsed config.json.

    Returns:
      The config in float32. `tied_head` is a guess here: the weights decide it (see `load`).
    """
    kind = config.get("model_type", "t5")
    if kind not in ("t5", "mt5"):
        reason = " (it has a relative bias in every layer)" if kind == "umt5" else ""
        raise ValueError(f"model_type {kind!r} is not supported{reason}: specjax runs 't5' and 'mt5'")
    projection = config.get("feed_forward_proj", "relu" if kind == "t5" else "gated-gelu")
    if projection not in ("relu", "gated-gelu"):
        raise ValueError(f"feed_forward_proj {projection!r} is unknown: 'relu' (v1.0) or 'gated-gelu' (v1.1)")
    absent = [key for key in _REQUIRED if config.get(key) is None]
    if absent:
        raise ValueError(f"config.json lacks {', '.join(absent)}: is this the config of a T5?")
    tied = config.get("tie_word_embeddings", True) is not False
    scaled = config.get("scale_decoder_outputs", tied if kind == "t5" else False)
    given = {name: config[key] for name, key in _KEYS.items() if config.get(key) is not None}
    given.setdefault("num_decoder_layers", given["num_layers"])
    given.setdefault("start_id", given.get("pad_id", 0))
    return T5Config(**given, gated=projection != "relu", tied_head=tied, scale_logits=bool(scaled))


def config_to_hf(config: T5Config, dtype: str = "float32") -> dict[str, Any]:
    """The config.json that transformers 4, transformers 5 and `config_from_hf` read alike.

    Note: an untied head with scaled logits exists in transformers 5 only. Version 4 would leave
    out the scale; no published T5 is of that form.
    """
    return {key: getattr(config, name) for name, key in _KEYS.items()} | {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "feed_forward_proj": "gated-gelu" if config.gated else "relu",
        "dense_act_fn": "gelu_new" if config.gated else "relu",
        "is_gated_act": config.gated,
        # To version 4 True also means: scale. So a tied head without the scale is written as
        # an untied one that equals the embedding.
        "tie_word_embeddings": config.tied_head and config.scale_logits,
        "scale_decoder_outputs": config.scale_logits,
        "initializer_factor": 1.0,
        "use_cache": True,
        "torch_dtype": dtype,  # read by every version; "dtype" is known to the newer ones only
    }
