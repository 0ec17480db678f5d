"""Model families by the `family` of their configs: modules, networks and presets."""

from typing import Any

from specjax.models.t5 import PRESETS as T5_PRESETS
from specjax.models.t5 import T5, T5Config, T5Network
from specjax.models.t5gemma import PRESETS as T5GEMMA_PRESETS
from specjax.models.t5gemma import T5Gemma, T5GemmaConfig, T5GemmaNetwork
from specjax.models.t5gemma_config import StackConfig, alternating

Config = T5Config | T5GemmaConfig
Module = T5 | T5Gemma
PRESETS: dict[str, Config] = {**T5_PRESETS, **T5GEMMA_PRESETS}
_MODULES: dict[str, Any] = {"t5": T5, "t5gemma": T5Gemma}
_NETWORKS: dict[str, Any] = {"t5": T5Network, "t5gemma": T5GemmaNetwork}


FLAVOURS = ("t5", "t5gemma", "t5gemma2")


def sized(
    flavour: str,
    vocab_size: int,
    *,
    d_model: int,
    d_kv: int,
    d_ff: int,
    num_heads: int,
    num_layers: int,
    num_decoder_layers: int,
    num_kv_heads: int | None = None,
    window: int = 4096,
) -> Config:
    """Returns a config of one of `FLAVOURS` to train from scratch; `start_id` is the padding id.

    Args:
      num_kv_heads, window: for T5Gemma, see `t5gemma_config.StackConfig`; None: `num_heads`.
    """
    if flavour == "t5":
        return T5Config(vocab_size, d_model, d_kv, d_ff, num_heads, num_layers, num_decoder_layers)
    like = T5GEMMA_PRESETS["t5gemma-2b-2b" if flavour == "t5gemma" else "t5gemma-2-270m-270m"]

    def stack(like: StackConfig, layers: int) -> StackConfig:
        sliding = alternating(layers, 2)  # version 2 publishes period 6, too long for few layers
        sizes = d_model, d_kv, d_ff, num_heads, num_kv_heads or num_heads, sliding, window, float(d_kv)
        rotation = like.theta, like.full_theta, like.full_factor
        return StackConfig(*sizes, *rotation, like.attention_cap)

    stacks = stack(like.encoder, num_layers), stack(like.decoder, num_decoder_layers)
    return T5GemmaConfig(vocab_size, *stacks, like.version, like.logit_cap, start_id=0)


def module(config: Config, **fields: Any) -> Module:
    """Returns the Linen module of a config; `fields` are those of `nn.Module`."""
    return _MODULES[config.family](config, **fields)


def network(params: Any, config: Config, **fields: Any) -> T5Network:
    """Returns the network of params and their config; `fields` are those of `T5Network`."""
    return _NETWORKS[config.family](params, config, **fields)
