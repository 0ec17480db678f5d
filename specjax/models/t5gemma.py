"""T5Gemma 1 and 2 as a Flax (Linen) module: the methods of `t5.T5` over the layers of Gemma. Text only.

Sources: Zhang et al. 2025 (arXiv 2504.06225) for T5Gemma, Zhang et al. 2025 (arXiv 2512.14856) for T5Gemma 2,
Gemma 2 (arXiv 2408.00118) and Gemma 3 (arXiv 2503.19786) for the layers, Su et al. 2021 for rotary positions,
Ainslie et al. 2023 for grouped queries. Details that they leave open follow transformers.

Axes: B rows, N decoder tokens of this call, S source length, T cache slots, V vocabulary, M model width, H
heads, E key-value heads (each shared by a group of H / E query heads), D head width.

The residual stream, norms, softmax and logits are float32 whatever the compute dtype is. Keys are rotated by
their position in the text before they are cached, so they may move to other slots (`cache.keep_path`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from specjax import cache as cache_lib
from specjax import tree
from specjax.cache import Cache
from specjax.models.layers import MASKED, Dropout, FeedForward, product, to_cache_axes, unit
from specjax.models.t5 import T5Network
from specjax.models.t5gemma_config import PRESETS, StackConfig, T5GemmaConfig
from specjax.types import Layout

__all__ = ["PRESETS", "T5Gemma", "T5GemmaConfig", "T5GemmaNetwork"]


class Rotation(NamedTuple):
    """A rotary position embedding: cosines and sines `[B or 1, N, 1, D / 2] float32`."""

    cos: jax.Array
    sin: jax.Array

    @classmethod
    def at(cls, positions: jax.Array, width: int, theta: float, factor: float) -> "Rotation":
        """Returns the rotation at `positions` `[B or 1, N]` for heads of `width` D."""
        rates = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width) / factor
        angles = positions[..., None, None].astype(jnp.float32) * rates[None, None, None]
        return cls(jnp.cos(angles), jnp.sin(angles))

    def turn(self, x: jax.Array) -> jax.Array:
        """Rotates `x` `[B, N, heads, D]`."""
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = [first * self.cos - second * self.sin, second * self.cos + first * self.sin]
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class View(NamedTuple):
    """The rotation and the mask of a layer's self-attention.

    Attributes:
      rotation: the rotation of the new tokens.
      visible: `[B or 1, N or 1, T] bool`, True where a new token attends.
    """

    rotation: Rotation
    visible: jax.Array


def reach(config: T5GemmaConfig, *, is_decoder: bool) -> tuple[int, int]:
    """Returns how many positions before and after itself a token attends to in a sliding-window layer.

    In a decoder the window of W tokens ends at the token itself. In an encoder it has W tokens on each side
    (version 1), or W tokens with the token itself in the middle (version 2).
    """
    window = (config.decoder if is_decoder else config.encoder).window
    if is_decoder:
        return window - 1, 0
    return (window, window) if config.version == 1 else ((window + 1) // 2 - 1, window // 2)


def views(config: T5GemmaConfig, layout: Layout, *, is_decoder: bool) -> list[View]:
    """Returns the view of each layer of a stack; windows count text positions, not cache slots."""
    stack = config.decoder if is_decoder else config.encoder
    before, after = reach(config, is_decoder=is_decoder)
    ahead = layout.key_positions[:, None, :] - layout.positions[:, :, None]
    near = layout.visible & (-before <= ahead) & (ahead <= after)
    sliding = View(Rotation.at(layout.positions, stack.d_kv, stack.theta, 1.0), near)
    full = Rotation.at(layout.positions, stack.d_kv, stack.full_theta, stack.full_factor)
    return [sliding if slides else View(full, layout.visible) for slides in stack.sliding]


class Keys(NamedTuple):
    """Keys and values with their mask, in the axes of a cache.

    Attributes:
      keys: `[B, E, D, T]`.
      values: `[B, E, T, D]`.
      visible: `[B or 1, N or 1, T] bool`, True where a query attends.
    """

    keys: jax.Array
    values: jax.Array
    visible: jax.Array


def attend(queries: jax.Array, parts: Sequence[Keys], cap: float | None, precision: Any) -> jax.Array:
    """Computes attention with one softmax over the keys of all parts.

    Keys and values are not concatenated, which would copy the cache: the softmax combines their scores.

    Args:
      queries: `[B, N, H, D]`, scaled.
      cap: see `StackConfig`.

    Returns:
      `[B, N, H, D]` in the dtype of the values; zero for a query that attends to nothing.
    """
    groups = queries.reshape(*queries.shape[:2], parts[0].keys.shape[1], -1, queries.shape[3])
    scores = []
    for part in parts:
        of_part = jnp.einsum(
            "bnegd,bedt->begnt", groups, part.keys, precision=precision, preferred_element_type=jnp.float32
        )
        of_part = of_part if cap is None else cap * jnp.tanh(of_part / cap)
        scores.append(jnp.where(part.visible[:, None, None], of_part, MASKED))
    largest = jax.lax.stop_gradient(jnp.stack([of_part.max(-1, keepdims=True) for of_part in scores]).max(0))
    weights = [
        jnp.where(part.visible[:, None, None], jnp.exp(of_part - largest), 0.0)
        for part, of_part in zip(parts, scores, strict=True)
    ]
    total = jnp.maximum(sum(w.sum(-1, keepdims=True) for w in weights), 1e-30)
    context = jnp.zeros((), jnp.float32)
    for part, weight in zip(parts, weights, strict=True):
        # 0 * NaN is NaN: the values of slots that no query attends to are zeroed as well.
        values = jnp.where(part.visible.any(1)[:, None, :, None], part.values, 0)
        context = context + jnp.einsum(
            "begnt,betd->bnegd", (weight / total).astype(values.dtype), values, precision=precision
        ).astype(jnp.float32)
    return context.reshape(queries.shape).astype(parts[0].values.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, without mean or bias; the stored scale is an offset from 1."""

    epsilon: float
    dtype: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., M]` to `[..., M]` in `dtype`."""
        scale = self.param("scale", nn.initializers.zeros, (x.shape[-1],))
        x = unit(x.astype(jnp.float32), self.epsilon)
        return (x * jnp.broadcast_to(1.0 + scale.astype(jnp.float32), x.shape)).astype(self.dtype)


class Attention(nn.Module):
    """The projections of one attention layer. Kernels: q `[M, H, D]`, k, v `[M, E, D]`, o `[H, D, M]`.

    Attributes:
      encoded_width: width of the encoder output for cross-attention; None: keys and values are of width M.
    """

    config: T5GemmaConfig
    stack: StackConfig
    encoded_width: int | None = None

    def setup(self) -> None:
        s, normal = self.stack, nn.initializers.normal
        source = self.encoded_width or s.d_model
        self.q = self.param("q", normal(s.d_model**-0.5), (s.d_model, s.num_heads, s.d_kv))
        self.k = self.param("k", normal(source**-0.5), (source, s.num_kv_heads, s.d_kv))
        self.v = self.param("v", normal(source**-0.5), (source, s.num_kv_heads, s.d_kv))
        self.o = self.param("o", normal((s.num_heads * s.d_kv) ** -0.5), (s.num_heads, s.d_kv, s.d_model))
        if self.config.version == 2:
            self.q_norm = RMSNorm(s.layer_norm_epsilon, self.config.dtype)
            self.k_norm = RMSNorm(s.layer_norm_epsilon, self.config.dtype)

    def _project(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        return product("bnm,mhd->bnhd", x, kernel, self.config.precision, x.dtype)

    def keys_values(self, x: jax.Array, rotation: Rotation | None = None) -> tuple[jax.Array, jax.Array]:
        """Maps `[B, S, M]` to keys and values `[B, S, E, D]`, the keys rotated by `rotation`."""
        keys = self._project(x, self.k)
        keys = self.k_norm(keys) if self.config.version == 2 else keys
        return keys if rotation is None else rotation.turn(keys), self._project(x, self.v)

    def __call__(self, x: jax.Array, parts: Sequence[Keys], rotation: Rotation | None) -> jax.Array:
        """Attends from `x` `[B, N, M]` to `parts`; returns `[B, N, M] float32`."""
        s = self.stack
        queries = self._project(x, self.q)
        queries = self.q_norm(queries) if self.config.version == 2 else queries
        queries = queries if rotation is None else rotation.turn(queries)
        queries = queries * jnp.asarray(s.query_scale**-0.5, queries.dtype)
        cap = s.attention_cap if self.config.version == 1 else None
        context = attend(queries, parts, cap, self.config.precision)
        # Heads are merged first: contracted as two axes, the compiler would transpose the kernel.
        context = context.reshape(*context.shape[:2], -1)
        out = self.o.reshape(context.shape[-1], -1)
        return product("bnf,fm->bnm", context, out, self.config.precision, jnp.float32)


class _Sublayers(nn.Module):
    """The base of both kinds of layers: the norms before and after each sublayer."""

    config: T5GemmaConfig

    def _norms(self, stack: StackConfig) -> tuple[RMSNorm, RMSNorm]:
        """Returns the norms before and after a sublayer; they return the compute dtype and float32."""
        epsilon = stack.layer_norm_epsilon
        return RMSNorm(epsilon, self.config.dtype), RMSNorm(epsilon, "float32")


class EncoderLayer(_Sublayers):
    """Self-attention and feed-forward, each as x + norm(f(norm(x)))."""

    def setup(self) -> None:
        c = self.config
        self.attention_norm, self.attention_post_norm = self._norms(c.encoder)
        self.feed_forward_norm, self.feed_forward_post_norm = self._norms(c.encoder)
        self.attention = Attention(c, c.encoder)
        self.feed_forward = FeedForward(c.as_t5(c.encoder))
        self.dropout = Dropout(c.dropout_rate)

    def __call__(self, x: jax.Array, view: View, deterministic: bool) -> jax.Array:
        """Maps the residual stream `[B, S, M] float32` to the next."""
        drop = lambda y: self.dropout(y, deterministic=deterministic)  # noqa: E731
        y = self.attention_norm(x)
        own = Keys(*to_cache_axes(*self.attention.keys_values(y, view.rotation)), view.visible)
        x = x + drop(self.attention_post_norm(self.attention(y, [own], view.rotation)))
        y = self.feed_forward(self.feed_forward_norm(x), deterministic)
        return x + drop(self.feed_forward_post_norm(y))


class DecoderLayer(_Sublayers):
    """Self- and cross-attention, separate (version 1) or merged (version 2), then feed-forward."""

    def setup(self) -> None:
        c = self.config
        self.attention_norm, self.attention_post_norm = self._norms(c.decoder)
        self.feed_forward_norm, self.feed_forward_post_norm = self._norms(c.decoder)
        self.attention = Attention(c, c.decoder)
        if c.has_cross_kernels:
            self.cross_norm, self.cross_post_norm = self._norms(c.decoder)
            self.cross = Attention(c, c.decoder, c.encoded_width)
        self.feed_forward = FeedForward(c.as_t5(c.decoder))
        self.dropout = Dropout(c.dropout_rate)

    def cross_keys_values(self, encoded: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps the encoder output `[B, S, M]` to unrotated keys `[B, E, D, S]` and values `[B, E, S, D]`."""
        attention = self.cross if self.config.has_cross_kernels else self.attention
        return to_cache_axes(*attention.keys_values(encoded))

    def __call__(
        self, x: jax.Array, cache: Cache, index: int, view: View, deterministic: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Maps the residual stream `[B, N, M] float32` to the next, with layer `index` of the cache.

        Returns:
          The residual stream and this layer's keys and values with the new tokens written.
        """
        drop = lambda y: self.dropout(y, deterministic=deterministic)  # noqa: E731
        y = self.attention_norm(x)
        keys, values = self.attention.keys_values(y, view.rotation)
        if cache.num_slots == 0:  # teacher forcing: the call itself contains every token
            keys, values = to_cache_axes(keys, values)
        else:
            keys = cache_lib.write(cache.keys[index], keys, cache.length, slots_last=True)
            values = cache_lib.write(cache.values[index], values, cache.length)
        own = Keys(keys, values, view.visible)
        source = Keys(cache.cross_keys[index], cache.cross_values[index], cache.source_mask[:, None, :])
        if self.config.has_cross_kernels:
            x = x + drop(self.attention_post_norm(self.attention(y, [own], view.rotation)))
            x = x + drop(self.cross_post_norm(self.cross(self.cross_norm(x), [source], None)))
        else:
            x = x + drop(self.attention_post_norm(self.attention(y, [own, source], view.rotation)))
        y = self.feed_forward(self.feed_forward_norm(x), deterministic)
        return x + drop(self.feed_forward_post_norm(y)), keys, values


class Embedding(nn.Module):
    """The encoder's own embedding table `[V, M]` (version 1)."""

    config: T5GemmaConfig

    @nn.compact
    def __call__(self) -> jax.Array:
        """Returns the table."""
        width = self.config.encoded_width
        return self.param("embedding", nn.initializers.normal(width**-0.5), (self.config.vocab_size, width))


class Vector(nn.Module):
    """One vector `[M]`."""

    width: int

    @nn.compact
    def __call__(self) -> jax.Array:
        """Returns the vector."""
        return self.param("vector", nn.initializers.zeros, (self.width,))


class T5Gemma(nn.Module):
    """An encoder-decoder T5Gemma. Every method is a pure function of (params, arguments), as in `t5.T5`."""

    config: T5GemmaConfig

    def setup(self) -> None:
        c = self.config
        embed_init = nn.initializers.normal(c.d_model**-0.5)
        self.embedding = self.param("embedding", embed_init, (c.vocab_size, c.d_model))
        if not c.tied_head:
            self.head = self.param("head", embed_init, (c.d_model, c.vocab_size))
        if c.version == 1:
            self.encoder_embedding = Embedding(c)
        if c.image_end_id is not None:
            self.image_end = Vector(c.d_model)
        self.encoder_layers = [EncoderLayer(c) for _ in range(c.num_layers)]
        self.encoder_norm = RMSNorm(c.encoder.layer_norm_epsilon, c.dtype)
        self.decoder_layers = [DecoderLayer(c) for _ in range(c.num_decoder_layers)]
        self.decoder_norm = RMSNorm(c.decoder.layer_norm_epsilon, c.dtype)
        self.dropout = Dropout(c.dropout_rate)

    def _embed(self, table: jax.Array, ids: jax.Array, deterministic: bool) -> jax.Array:
        dtype = self.config.dtype
        x = table[ids].astype(dtype) * jnp.asarray(table.shape[1] ** 0.5, dtype)
        if self.config.image_end_id is not None:
            is_image_end = (ids == self.config.image_end_id)[..., None]
            x = jnp.where(is_image_end, self.image_end().astype(dtype)[None, None], x)
        return self.dropout(x.astype(jnp.float32), deterministic=deterministic)

    def encode(self, source_ids: jax.Array, source_mask: jax.Array, deterministic: bool = True) -> jax.Array:
        """Encodes sources; padding is masked.

        Args:
          source_ids: `[B, S] int32`.
          source_mask: `[B, S] bool`, True at real tokens.

        Returns:
          `[B, S, M]` in the compute dtype.
        """
        table = self.encoder_embedding() if self.config.version == 1 else self.embedding
        x = self._embed(table, source_ids, deterministic)
        positions = jnp.arange(source_ids.shape[1])[None]
        layout = Layout(positions, positions, source_mask[:, None, :])
        of_layers = views(self.config, layout, is_decoder=False)
        for layer, view in zip(self.encoder_layers, of_layers, strict=True):
            x = layer(x, view, deterministic)
        return self.dropout(self.encoder_norm(x), deterministic=deterministic)

    def init_cache(self, encoded: jax.Array, source_mask: jax.Array, num_slots: int) -> Cache:
        """Returns an empty cache with the cross-attention keys and values of these sources.

        Args:
          encoded: `[B, S, M]`, the output of `encode`.
          source_mask: `[B, S] bool`.
          num_slots: T. Static. 0 makes a cache for teacher forcing: the single decode call that
            follows must contain every token.
        """
        stack, num_layers = self.config.decoder, self.config.num_decoder_layers
        keys = jnp.zeros((len(encoded), stack.num_kv_heads, stack.d_kv, num_slots), self.config.dtype)
        cross = [layer.cross_keys_values(encoded) for layer in self.decoder_layers]
        return Cache(
            keys=(keys,) * num_layers,
            values=(keys.swapaxes(2, 3),) * num_layers,
            length=jnp.zeros(len(encoded), jnp.int32),
            cross_keys=tuple(keys for keys, _ in cross),
            cross_values=tuple(values for _, values in cross),
            source_mask=source_mask,
        )

    def decode(
        self,
        cache: Cache,
        tokens: jax.Array,
        deterministic: bool = True,
        layout: Layout | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Feeds N tokens after those in the cache; see `t5.T5.decode`."""
        num_new = tokens.shape[1]
        if layout is None:
            layout = tree.chain_layout(cache.length, num_new, cache.num_slots or num_new)
        x = self._embed(self.embedding, tokens, deterministic)
        streams, keys, values = [], [], []
        of_layers = views(self.config, layout, is_decoder=True)
        for index, (layer, view) in enumerate(zip(self.decoder_layers, of_layers, strict=True)):
            x, layer_keys, layer_values = layer(x, cache, index, view, deterministic)
            streams.append(x)
            keys.append(layer_keys)
            values.append(layer_values)
        cache = cache.replace(keys=tuple(keys), values=tuple(values), length=cache.length + num_new)
        features = self.dropout(self.decoder_norm(x), deterministic=deterministic)
        logits = self.logits(features)
        if feature_layers:
            epsilon = self.config.decoder.layer_norm_epsilon
            others = [unit(streams[i], epsilon).astype(features.dtype) for i in feature_layers]
            features = jnp.concatenate([features, *others], axis=-1)
        return logits, features, cache

    def logits(self, features: jax.Array) -> jax.Array:
        """Maps features `[B, N, M]` to logits `[B, N, V] float32`."""
        c = self.config
        axes, kernel = ("bnm,vm->bnv", self.embedding) if c.tied_head else ("bnm,mv->bnv", self.head)
        logits = product(axes, features, kernel, c.precision, jnp.float32)
        return logits if c.logit_cap is None else c.logit_cap * jnp.tanh(logits / c.logit_cap)

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


class T5GemmaNetwork(T5Network):
    """A T5Gemma with its params; see `T5Network`."""

    config: T5GemmaConfig = struct.field(pytree_node=False)  # type: ignore[assignment]

    @property
    def module(self) -> T5Gemma:  # type: ignore[override]
        """The Linen module."""
        return T5Gemma(self.config)
