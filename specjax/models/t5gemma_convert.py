"""T5Gemma checkpoints in Hugging Face's format: tensor names and config.json.

Axes: V vocabulary, M model width, F feed-forward width, H heads, E key-value heads, D head width.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specjax.models.layers import ACTIVATIONS
from specjax.models.t5gemma_config import StackConfig, T5GemmaConfig, alternating
from specjax.models.tensors import Format, Tensor

MODEL_TYPES = {"t5gemma": "T5GemmaForConditionalGeneration", "t5gemma2": "T5Gemma2ForConditionalGeneration"}
HEAD = "lm_head.out_proj.weight"
_ENCODER, _DECODER = "model.encoder", "model.decoder"
_VISION = ("model.encoder.vision_tower.", "model.encoder.multi_modal_projector.")
_IMAGE_END = "embed_tokens.eoi_embedding"
# Other names of activations -> keys of `ACTIVATIONS`.
_SAME_ACTIVATION = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new", "swish": "silu"}

# Attribute of `StackConfig` -> the key that config.json must contain for each stack.
_REQUIRED = {
    "d_model": "hidden_size",
    "d_kv": "head_dim",
    "d_ff": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}


# ---- names of tensors


def _norm(name: str, width: int, *path: str) -> Tensor:
    return Tensor(f"{name}.weight", (*path, "scale"), "same", (width,), (width,))


def _attention(
    config: T5GemmaConfig, stack: StackConfig, source: int, name: str, *path: str
) -> Iterator[Tensor]:
    """Yields the tensors of one attention layer; `source` is the input width of keys and values."""
    m, h, e, d = stack.d_model, stack.num_heads, stack.num_kv_heads, stack.d_kv
    for part, width, heads in (("q", m, h), ("k", source, e), ("v", source, e)):
        shapes = (heads * d, width), (width, heads, d)
        yield Tensor(f"{name}.{part}_proj.weight", (*path, part), "transposed", *shapes)
    yield Tensor(f"{name}.o_proj.weight", (*path, "o"), "transposed", (m, h * d), (h, d, m))
    if config.version == 2:
        for part in ("q_norm", "k_norm"):
            yield _norm(f"{name}.{part}", d, *path, part)


def _layers(config: T5GemmaConfig, side: str, stack: StackConfig) -> Iterator[Tensor]:
    """Yields the tensors of the layers of the encoder or of the decoder, and of its final norm."""
    m, f = stack.d_model, stack.d_ff
    for index in range(stack.num_layers):
        layer, block = f"{side}_layers_{index}", f"model.{side}.layers.{index}"
        yield from _attention(config, stack, m, f"{block}.self_attn", layer, "attention")
        parts = {"attention": "self_attn", "feed_forward": "feedforward"}
        if side == "decoder" and config.has_cross_kernels:
            parts["cross"] = "cross_attn"
            width = config.encoded_width
            yield from _attention(config, stack, width, f"{block}.cross_attn", layer, "cross")
        for part, name in parts.items():
            yield _norm(f"{block}.pre_{name}_layernorm", m, layer, f"{part}_norm")
            yield _norm(f"{block}.post_{name}_layernorm", m, layer, f"{part}_post_norm")
        for part, name in (("wi_0", "gate_proj"), ("wi_1", "up_proj")):
            shapes = (f, m), (m, f)
            yield Tensor(f"{block}.mlp.{name}.weight", (layer, "feed_forward", part), "transposed", *shapes)
        wo = (layer, "feed_forward", "wo")
        yield Tensor(f"{block}.mlp.down_proj.weight", wo, "transposed", (m, f), (f, m))
    yield _norm(f"model.{side}.norm", m, f"{side}_norm")


def tensor_names(config: T5GemmaConfig) -> Iterator[Tensor]:
    """Yields every tensor of a checkpoint of this shape once; see `convert.tensor_names`."""
    v, m = config.vocab_size, config.d_model
    yield Tensor(_embedding(config), ("embedding",), "same", (v, m), (v, m))
    if config.version == 1:
        shape = (v, config.encoded_width)
        yield Tensor(
            f"{_ENCODER}.embed_tokens.weight", ("encoder_embedding", "embedding"), "same", shape, shape
        )
    if config.image_end_id is not None:
        yield Tensor(f"{_ENCODER}.{_IMAGE_END}", ("image_end", "vector"), "same", (m,), (m,))
    yield from _layers(config, "encoder", config.encoder)
    yield from _layers(config, "decoder", config.decoder)
    if not config.tied_head:
        yield Tensor(HEAD, ("head",), "transposed", (v, m), (m, v))


def _embedding(config: T5GemmaConfig) -> str:
    return f"{_DECODER if config.version == 1 else _ENCODER}.embed_tokens.weight"


def _copies(config: T5GemmaConfig) -> tuple[str, ...]:
    of_decoder = () if config.version == 1 else (f"{_DECODER}.embed_tokens.weight",)
    return (*of_decoder, HEAD) if config.tied_head else of_decoder


def _is_ignored(name: str) -> bool:
    """Returns whether a tensor is ignored: the vision part, and the copy of the end-of-image embedding."""
    return name.startswith(_VISION) or name == f"{_DECODER}.{_IMAGE_END}"


# ---- config.json


def config_from_hf(config: Mapping[str, Any], kind: str) -> T5GemmaConfig:
    """Returns the config, in float32, that a config.json of the model_type `kind` describes.

    Raises:
      ValueError: a key is missing, or a setting is not supported.
    """
    version = 1 if kind == "t5gemma" else 2
    sides = {"encoder": config.get("encoder"), "decoder": config.get("decoder")}
    if version == 2 and sides["encoder"]:
        sides["encoder"] = sides["encoder"].get("text_config")
    for name, side in sides.items():
        absent = [key for key in (*_REQUIRED.values(), "num_hidden_layers") if (side or {}).get(key) is None]
        if absent:
            raise ValueError(f"config.json lacks {', '.join(absent)} of its {name}: is this a {kind}?")
    encoder, decoder = (_stack(side, version, name) for name, side in sides.items() if side)
    given = sides["decoder"] or {}
    get = lambda key, default=None: _first(config.get(key), given.get(key), default)  # noqa: E731
    eos = get("eos_token_id", 1)
    eos_ids = tuple(eos) if isinstance(eos, Sequence) else (eos,)
    if not eos_ids:
        raise ValueError("`eos_token_id` of config.json must contain an id, got []; give the end tokens")
    image_end = (config.get("encoder") or {}).get("eoi_token_index", 256_000) if version == 2 else None
    if version == 2:
        warnings.warn(
            "the vision part of this T5Gemma 2 is not loaded: specjax supports text only", stacklevel=2
        )
    return T5GemmaConfig(
        vocab_size=get("vocab_size", 256_000),
        encoder=encoder,
        decoder=decoder,
        version=version,
        logit_cap=given.get("final_logit_softcapping", 30.0 if version == 1 else None),
        tied_head=config.get("tie_word_embeddings", True) is not False,
        activation=_activation(sides),
        image_end_id=image_end,
        dropout_rate=float(config.get("dropout_rate") or 0.0),
        pad_id=get("pad_token_id", 0),
        eos_id=eos_ids[0],
        other_eos_ids=eos_ids[1:],
        start_id=_first(config.get("decoder_start_token_id"), get("bos_token_id", 2)),
    )


def _first(*values: Any) -> Any:
    """Returns the first value that is not None."""
    return next((value for value in values if value is not None), None)


def _activation(sides: Mapping[str, Any]) -> str:
    names = {side.get("hidden_activation") or "gelu_pytorch_tanh" for side in sides.values()}
    name = _SAME_ACTIVATION.get(min(names), min(names))
    if len(names) > 1 or name not in ACTIVATIONS:
        known = ", ".join((*ACTIVATIONS, *_SAME_ACTIVATION))
        raise ValueError(
            f"`hidden_activation` must be the same in both stacks, one of {known}, got "
            f"{', '.join(sorted(names))}"
        )
    return name


def _stack(side: Mapping[str, Any], version: int, name: str) -> StackConfig:
    """Returns the shape of one stack, with the defaults of its version."""
    if side.get("attention_bias"):
        raise ValueError(f"attention_bias of the {name} is not supported: no published T5Gemma has it")
    kinds, num_layers = side.get("layer_types"), side["num_hidden_layers"]
    sliding = alternating(num_layers, side.get("sliding_window_pattern", 6) if version == 2 else 2)
    if kinds is not None:
        unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
        if unknown or len(kinds) != num_layers:
            raise ValueError(f"layer_types of the {name} must name {num_layers} known layers, got {kinds}")
        sliding = tuple(kind == "sliding_attention" for kind in kinds)
    rotation = side.get("rope_parameters") or {}
    if version == 1:
        theta = full_theta = _theta(rotation, side.get("rope_theta", 10_000.0), name)
        factor = 1.0
    else:
        of_full = rotation.get("full_attention") or side.get("rope_scaling") or {}
        factor = float(of_full.get("factor", 1.0))
        full_theta = _theta(of_full, side.get("rope_theta", 1e6), name, ("default", "linear"))
        theta = _theta(
            rotation.get("sliding_attention") or {}, side.get("rope_local_base_freq", 10_000.0), name
        )
    return StackConfig(
        **{attribute: side[key] for attribute, key in _REQUIRED.items()},
        sliding=sliding,
        window=side.get("sliding_window") or 4096,
        query_scale=float(side.get("query_pre_attn_scalar", 256)),
        theta=theta,
        full_theta=full_theta,
        full_factor=factor,
        # transformers states a cap for version 2, but does not apply it.
        attention_cap=side.get("attn_logit_softcapping", 50.0) if version == 1 else None,
        layer_norm_epsilon=side.get("rms_norm_eps", 1e-6),
    )


def _theta(
    rotation: Mapping[str, Any], default: float, name: str, kinds: tuple[str, ...] = ("default",)
) -> float:
    kind = rotation.get("rope_type", "default")
    if kind not in kinds:
        raise ValueError(f"rope_type {kind!r} of the {name} is not supported: use {' or '.join(kinds)}")
    return float(rotation.get("rope_theta", default))


def config_to_hf(config: T5GemmaConfig, dtype: str = "float32") -> dict[str, Any]:
    """Returns the config.json that transformers and `config_from_hf` read alike.

    Note: transformers adds a vision part to version 2, initialised at random if the checkpoint lacks it.
    """
    sides = {
        name: _side_to_hf(config, stack)
        for name, stack in (("encoder", config.encoder), ("decoder", config.decoder))
    }
    kind = "t5gemma" if config.version == 1 else "t5gemma2"
    if config.version == 2:
        image_end = {} if config.image_end_id is None else {"eoi_token_index": config.image_end_id}
        sides["encoder"] = {"text_config": sides["encoder"], **image_end}
    eos_ids = [config.eos_id, *config.other_eos_ids]
    return sides | {
        "architectures": [MODEL_TYPES[kind]],
        "model_type": kind,
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied_head,
        "dropout_rate": config.dropout_rate,
        "pad_token_id": config.pad_id,
        "eos_token_id": eos_ids if config.other_eos_ids else config.eos_id,
        "bos_token_id": config.start_id,
        "decoder_start_token_id": config.start_id,
        "torch_dtype": dtype,
    }


def _side_to_hf(config: T5GemmaConfig, stack: StackConfig) -> dict[str, Any]:
    activation = {"gelu_new": "gelu_pytorch_tanh"}.get(config.activation, config.activation)
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": stack.full_theta}
    if stack.full_factor != 1.0:
        full |= {"rope_type": "linear", "factor": stack.full_factor}
    sliding = {"rope_type": "default", "rope_theta": stack.theta}
    rotation = full if config.version == 1 else {"full_attention": full, "sliding_attention": sliding}
    return {key: getattr(stack, attribute) for attribute, key in _REQUIRED.items()} | {
        "vocab_size": config.vocab_size,
        "num_hidden_layers": stack.num_layers,
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in stack.sliding],
        "sliding_window": stack.window,
        "query_pre_attn_scalar": int(stack.query_scale),
        "rope_parameters": rotation,
        "attn_logit_softcapping": stack.attention_cap,
        "final_logit_softcapping": config.logit_cap,
        "rms_norm_eps": stack.layer_norm_epsilon,
        "hidden_activation": activation,
        "pad_token_id": config.pad_id,
        "eos_token_id": config.eos_id,
        "bos_token_id": config.start_id,
    }


FORMAT = Format(
    tensor_names=tensor_names,
    config_to_hf=config_to_hf,
    canonical=lambda name: name.replace(f"{_ENCODER}.text_model.", f"{_ENCODER}."),
    embedding=_embedding,
    head=HEAD,
    copies=_copies,
    has_head_copy=lambda config: False,
    is_ignored=_is_ignored,
    hints=lambda missing, left_over, config: [],
)
