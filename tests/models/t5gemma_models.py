"""Tiny T5Gemmas with every feature switched on: windows smaller than the texts, caps, sides that differ."""

import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import convert
from specjax.models.t5gemma import T5GemmaConfig, T5GemmaNetwork

GOLDEN = pathlib.Path(__file__).parent / "golden"
VERSIONS = (1, 2)
V = 48
IMAGE_END = 47
_SIDE = dict(
    vocab_size=V,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    query_pre_attn_scalar=6,
    sliding_window=5,
    max_position_embeddings=64,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=2.5,
)
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_ROTATION = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_VISION = dict(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)


def hf_config(version: int) -> dict[str, Any]:
    """What config.json states."""
    encoder = _SIDE | dict(num_hidden_layers=3, layer_types=_LAYERS, intermediate_size=20)
    decoder = _SIDE | dict(num_hidden_layers=2, layer_types=_LAYERS[:2])
    if version == 1:
        encoder |= dict(hidden_size=24, num_attention_heads=6, num_key_value_heads=3)
        return dict(encoder=encoder, decoder=decoder, vocab_size=V)
    rotation = dict(rope_parameters=_ROTATION)
    vision = dict(_VISION, model_type="siglip_vision_model", vision_use_head=False)
    parts = dict(text_config=encoder | rotation, vision_config=vision, mm_tokens_per_image=4)
    return dict(encoder=parts | dict(eoi_token_index=IMAGE_END), decoder=decoder | rotation)


def config(version: int) -> T5GemmaConfig:
    """The same, as specjax has it."""
    kind = "t5gemma" if version == 1 else "t5gemma2"
    found = silent(convert.config_from_hf, hf_config(version) | {"model_type": kind})
    assert isinstance(found, T5GemmaConfig)
    return found


def silent(function: Any, *args: Any, **options: Any) -> Any:
    """Calls without the notice that the vision part is not loaded."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the vision part")
        return function(*args, **options)


def torch_model(version: int, seed: int = 0) -> Any:
    """A random model of transformers whose outputs vary."""
    import torch
    import transformers

    kind = f"T5Gemma{'' if version == 1 else 2}"
    shape = getattr(transformers, f"{kind}Config")(**hf_config(version))
    shape._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(shape).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            shift, scale = _spread(name, weight.shape, weight.shape[-1])
            weight.normal_(shift, scale)
    return model


def random_network(config: T5GemmaConfig, seed: int = 0) -> T5GemmaNetwork:
    """A network whose outputs vary, drawn in numpy: nothing to compile."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shift, scale = _spread(name, leaf.shape, leaf.shape[-1 if "embedding" in name else 0])
        return jnp.asarray(shift + scale * rng.normal(size=leaf.shape), jnp.float32)

    return T5GemmaNetwork(jax.tree_util.tree_map_with_path(draw, convert.shapes(config)), config)


def _spread(name: str, shape: tuple[int, ...], width: int) -> tuple[float, float]:
    """Mean and deviation of a weight: layers add more than the last token's embedding, or it would repeat."""
    if len(shape) == 1:
        return (6.0 if name in ("decoder_norm/scale", "model.decoder.norm.weight") else 0.0), 0.5
    return 0.0, (0.3 if "embed" in name else 1.0) * width**-0.5


def draft_of(network: T5GemmaNetwork, noise: float = 0.1) -> T5GemmaNetwork:
    """A draft that often agrees: the target with noise on all of it."""
    rng = np.random.default_rng(9)

    def disturbed(x: jax.Array) -> jax.Array:
        return x + jnp.asarray(noise * float(jnp.std(x)) * rng.normal(size=x.shape), x.dtype)

    return network.replace(params=jax.tree.map(disturbed, network.params))
