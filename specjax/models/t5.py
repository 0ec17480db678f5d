"""T5 as a Flax (Linen) module: v1.0, v1.1 and their descendants, UMT5 included. See `layers`.

Axes: B rows, N decoder tokens of this call, S source length, T cache slots, V vocabulary, M model width.

The residual stream and the logits are float32 whatever the compute dtype is.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from specjax import sharding, tree
from specjax.cache import Cache
from specjax.models.config import PRESETS, T5Config
from specjax.models.layers import (
    DecoderLayer,
    Dropout,
    EncoderLayer,
    RelativeBias,
    RMSNorm,
    biases,
    empty_cache,
    product,
    run_decoder,
    unit,
)
from specjax.types import Layout, Network, Params

__all__ = ["PRESETS", "T5", "T5Config", "T5Network"]


class T5(nn.Module):
    """An encoder-decoder T5. Every method is a pure function of (params, arguments).

    `encode`, then `init_cache`, then any number of `decode` calls of any width. Calling the
    module runs all three on a complete decoder input, for training.
    """

    config: T5Config

    def setup(self) -> None:
        c = self.config
        embed_init = nn.initializers.normal(1.0)
        self.embedding = self.param("embedding", embed_init, (c.vocab_size, c.d_model))
        if not c.tied_head:
            head_init = nn.initializers.normal(c.d_model**-0.5)
            self.head = self.param("head", head_init, (c.d_model, c.vocab_size))
        self.encoder_bias = self._tables(c.num_layers, two_sided=True)
        self.encoder_layers = [EncoderLayer(c) for _ in range(c.num_layers)]
        self.encoder_norm = RMSNorm(c)
        self.decoder_bias = self._tables(c.num_decoder_layers, two_sided=False)
        self.decoder_layers = [DecoderLayer(c) for _ in range(c.num_decoder_layers)]
        self.decoder_norm = RMSNorm(c)
        self.dropout = Dropout(c.dropout_rate)

    def _tables(self, num_layers: int, two_sided: bool) -> Any:
        """Returns the relative-position table of a stack, or one per layer."""
        if not self.config.bias_in_every_layer:
            return RelativeBias(self.config, two_sided)
        return [RelativeBias(self.config, two_sided) for _ in range(num_layers)]

    def _embed(self, ids: jax.Array, deterministic: bool) -> jax.Array:
        x = self.embedding[ids].astype(self.config.dtype).astype(jnp.float32)
        return self.dropout(x, deterministic=deterministic)

    def encode(self, source_ids: jax.Array, source_mask: jax.Array, deterministic: bool = True) -> jax.Array:
        """Encodes sources; padding is masked.

        Args:
          source_ids: `[B, S] int32`.
          source_mask: `[B, S] bool`, True at real tokens.

        Returns:
          `[B, S, M]` in the compute dtype.
        """
        x = self._embed(source_ids, deterministic)
        num_source = source_ids.shape[1]
        positions = jnp.arange(num_source)[None]
        of_layers = biases(self.encoder_bias, self.config.num_layers, positions, positions)
        for layer, bias in zip(self.encoder_layers, of_layers, strict=True):
            x = layer(x, bias, source_mask[:, None, :], deterministic)
        return self.dropout(self.encoder_norm(x), deterministic=deterministic)

    def init_cache(self, encoded: jax.Array, source_mask: jax.Array, num_slots: int) -> Cache:
        """Returns an empty cache with the cross-attention keys and values of these sources.

        Args:
          encoded: `[B, S, M]`, the output of `encode`.
          source_mask: `[B, S] bool`.
          num_slots: T. Static. 0 makes a cache for teacher forcing: the single decode call that
            follows must contain every token.
        """
        return empty_cache(self.decoder_layers, encoded, source_mask, num_slots, self.config.dtype)

    def decode(
        self,
        cache: Cache,
        tokens: jax.Array,
        deterministic: bool = True,
        layout: Layout | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Feeds N tokens after those in the cache.

        Args:
          cache: the cache; the caller ensures that length + N <= T.
          tokens: `[B, N] int32`; row b's tokens go into slots length[b]..length[b] + N - 1.
          layout: positions of the tokens and what they attend to; None: a chain.
          feature_layers: see `T5Network`.

        Returns:
          logits `[B, N, V] float32` of the token after each position, features `[B, N, F]`
          (the last hidden state after the final norm, before any logit scale; then those of
          `feature_layers`), and the cache with N more tokens.
        """
        num_new = tokens.shape[1]
        if layout is None:
            layout = tree.chain_layout(cache.length, num_new, cache.num_slots or num_new)
        num_layers = self.config.num_decoder_layers
        of_layers = biases(self.decoder_bias, num_layers, layout.positions, layout.key_positions)
        x = self._embed(tokens, deterministic)
        streams, cache = run_decoder(self.decoder_layers, x, cache, of_layers, layout.visible, deterministic)
        features = self.dropout(self.decoder_norm(streams[-1]), deterministic=deterministic)
        logits = self.logits(features)
        if feature_layers:
            epsilon = self.config.layer_norm_epsilon
            others = [unit(streams[i], epsilon).astype(features.dtype) for i in feature_layers]
            features = jnp.concatenate([features, *others], axis=-1)
        return logits, features, cache

    def logits(self, features: jax.Array) -> jax.Array:
        """Maps features `[B, N, M]` to logits `[B, N, V] float32`."""
        c = self.config
        if c.scale_logits:
            features = features * jnp.asarray(c.d_model**-0.5, features.dtype)
        axes, kernel = ("bnm,vm->bnv", self.embedding) if c.tied_head else ("bnm,mv->bnv", self.head)
        return product(axes, features, kernel, c.precision, jnp.float32)

    def __call__(
        self,
        source_ids: jax.Array,
        source_mask: jax.Array,
        decoder_input: jax.Array,
        deterministic: bool = True,
    ) -> jax.Array:
        """Returns logits `[B, N, V] float32` after each token of `decoder_input` `[B, N]`."""
        encoded = self.encode(source_ids, source_mask, deterministic)
        cache = self.init_cache(encoded, source_mask, num_slots=0)
        return self.decode(cache, decoder_input, deterministic)[0]


class T5Network(Network):
    """A T5 with its params, which are leaves; everything else is static.

    Attributes:
      params: nested dicts of arrays, in the structure of `T5(config).init(...)["params"]`.
      config: sizes and variant.
      feature_layers: decoder layers whose output, divided by its root mean square, is appended to the last
        hidden state in the features (EAGLE-3 reads a low, a middle and a high layer).
      cache_sharding: sharding of the cache's keys and values `[B, H, ...]` on a mesh; the compiler cannot
        infer it, since an empty cache has no input. None: one device.
      vocabulary: a `texts.Vocabulary`; None: unknown, all V ids exist.
    """

    params: Params = struct.field(repr=False)
    config: T5Config = struct.field(pytree_node=False)
    feature_layers: tuple[int, ...] = struct.field(pytree_node=False, default=())
    cache_sharding: jax.sharding.NamedSharding | None = struct.field(pytree_node=False, default=None)
    vocabulary: Any = struct.field(pytree_node=False, default=None)

    @property
    def module(self) -> T5:
        """The Linen module."""
        return T5(self.config)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @property
    def encoded_width(self) -> int:
        """M of the encoder."""
        return self.config.encoded_width

    @property
    def num_ids(self) -> int | None:
        """Number of ids that exist, if V is padded beyond it; None: all V."""
        known = self.vocab_size if self.vocabulary is None else len(self.vocabulary)
        return known if known < self.vocab_size else None

    @property
    def pad_id(self) -> int:
        """From the config, like the next two."""
        return self.config.pad_id

    @property
    def start_id(self) -> int:
        return self.config.start_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return (self.config.eos_id, *self.config.other_eos_ids)

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The mesh of the params; None: one device."""
        place: Any = self.cache_sharding
        return place and place.mesh

    def with_features(self, layers: tuple[int, ...]) -> "T5Network":
        """Returns the same network, whose features also contain those of `layers`."""
        return self.replace(feature_layers=layers)

    def with_vocabulary(self, vocabulary: Any) -> "T5Network":
        """Returns the same network with another vocabulary."""
        return self.replace(vocabulary=vocabulary)

    def encode(self, source_ids: jax.Array, source_mask: jax.Array) -> jax.Array:
        """See `T5.encode`."""
        return self._apply(source_ids, source_mask, method="encode")

    def init_cache(self, encoded: jax.Array, source_mask: jax.Array, num_slots: int) -> Cache:
        """See `T5.init_cache`."""
        return self._placed(self._apply(encoded, source_mask, num_slots, method="init_cache"))

    def decode(
        self, cache: Cache, tokens: jax.Array, layout: Layout | None = None
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """See `T5.decode`."""
        cache, layers = self._placed(cache), self.feature_layers
        found = self._apply(cache, tokens, layout=layout, feature_layers=layers, method="decode")
        return sharding.keep_whole(found, self.cache_sharding)

    def logits(self, features: jax.Array) -> jax.Array:
        """See `T5.logits`."""
        return sharding.keep_whole(self._apply(features, method="logits"), self.cache_sharding)

    def _placed(self, cache: Cache) -> Cache:
        """Returns the cache constrained to its sharding on the mesh."""
        if self.cache_sharding is None:
            return cache
        arrays = (cache.keys, cache.values, cache.cross_keys, cache.cross_values)
        arrays = jax.lax.with_sharding_constraint(arrays, self.cache_sharding)
        names = ("keys", "values", "cross_keys", "cross_values")
        return cache.replace(**dict(zip(names, arrays, strict=True)))

    def _apply(self, *args: Any, method: str, **options: Any) -> Any:
        return self.module.apply({"params": self.params}, *args, method=method, **options)
