"""The families of networks, by what their configs call them: modules, networks, published shapes."""

from typing import Any

from specjax.models.t5 import PRESETS as T5_PRESETS
from specjax.models.t5 import T5, T5Config, T5Network
from specjax.models.t5gemma import PRESETS as T5GEMMA_PRESETS
from specjax.models.t5gemma import T5Gemma, T5GemmaConfig, T5GemmaNetwork

Config = T5Config | T5GemmaConfig
Module = T5 | T5Gemma
PRESETS: dict[str, Config] = {**T5_PRESETS, **T5GEMMA_PRESETS}
_MODULES: dict[str, Any] = {"t5": T5, "t5gemma": T5Gemma}
_NETWORKS: dict[str, Any] = {"t5": T5Network, "t5gemma": T5GemmaNetwork}


def module(config: Config, **fields: Any) -> Module:
    """Returns the Linen module of a config; `fields` as of any `nn.Module`."""
    return _MODULES[config.family](config, **fields)


def network(params: Any, config: Config, **fields: Any) -> T5Network:
    """Returns the network of params and their config; `fields` as of `T5Network`."""
    return _NETWORKS[config.family](params, config, **fields)
