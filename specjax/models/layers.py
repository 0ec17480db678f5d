"""The layers of a T5, as Flax (Linen) modules.

Sources: Raffel et al. 2020 (arXiv 1910.10683) for v1.0, Shazeer 2020 (arXiv 2002.05202) for
the gated feed-forward layer of v1.1, Shaw et al. 2018 for relative positions, Chung et al. 2023 (arXiv
2304.09151) for UMT5.

Axes: B rows, N decoder tokens of this call, S source length, T cache slots, M model width, F
feed-forward width, H heads, D head width.

The residual stream, the norms and the softmax are float32 whatever the compute dtype is: T5
activations reach 1e5, beyond float16. Masks select scores; no large negative number is added to one.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax.models.config import T5Config

MASKED = -1e30  # a float32 score with zero weight in any softmax

_gelu = functools.partial(nn.gelu, approximate=False)
_tanh_gelu = functools.partial(nn.gelu, approximate=True)
# By their names in transformers.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": nn.relu,
    "gelu": _gelu,
    "gelu_new": _tanh_gelu,
    "silu": nn.silu,
}

# One mask per row and feature, shared by all positions, as in T5X: a tenth of the random bits.
Dropout = functools.partial(nn.Dropout, broadcast_dims=(-2,))


def relative_bucket(
    distance: jax.Array, *, two_sided: bool, num_buckets: int, max_distance: int
) -> jax.Array:
    """Returns the bucket of a relative position `key - query` (Raffel et al. 2020, section 2.1).

    Half of the buckets hold exact distances, half grow logarithmically up to `max_distance`.
    Two-sided (encoder): half of all buckets are for keys after the query. One-sided
    (decoder): keys after the query share bucket 0.

    Args:
      distance: integers of any shape.

    Returns:
      int32 of the same shape, in 0..num_buckets - 1.
    """
    offset = jnp.zeros_like(distance)
    if two_sided:
        num_buckets //= 2
        offset = jnp.where(distance > 0, num_buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    num_exact = num_buckets // 2
    ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / num_exact)
    scale = (num_buckets - num_exact) / jnp.log(jnp.float32(max_distance / num_exact))
    far = num_exact + (ratio * scale).astype(jnp.int32)
    near_or_far = jnp.where(distance < num_exact, distance, jnp.minimum(far, num_buckets - 1))
    return (offset + near_or_far).astype(jnp.int32)


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    bias: jax.Array | None,
    visible: jax.Array,
    precision: Any,
) -> jax.Array:
    """Computes attention without the 1/sqrt(D) factor, as in T5.

    Args:
      queries: `[B, N, H, D]`.
      keys: `[B, H, D, T]`.
      values: `[B, H, T, D]`.
      bias: `[B or 1, H, N, T] float32` added to the scores, or None.
      visible: `[B or 1, N or 1, T] bool`, True where a query attends.

    Returns:
      `[B, N, H, D]` in the dtype of `values`; zero for a query that attends to nothing.
    """
    scores = jnp.einsum(
        "bnhd,bhdt->bhnt", queries, keys, precision=precision, preferred_element_type=jnp.float32
    )
    mask = visible[:, None]
    scores = jnp.where(mask, scores if bias is None else scores + bias, MASKED)
    scores = scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(scores), 0.0)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    # 0 * NaN is NaN: the values of slots that no query attends to are zeroed as well.
    values = jnp.where(visible.any(1)[:, None, :, None], values, 0)
    context = jnp.einsum("bhnt,bhtd->bhnd", weights.astype(values.dtype), values, precision=precision)
    return context.swapaxes(1, 2)


def to_cache_axes(keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Transposes `[B, T, H, D]` keys and values into `[B, H, D, T]` and `[B, H, T, D]`."""
    return keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2)


def unit(x: jax.Array, epsilon: float) -> jax.Array:
    """Returns `x` `[..., M]` divided by its root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + epsilon)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def product(axes: str, x: jax.Array, kernel: jax.Array, precision: Any, dtype: Any) -> jax.Array:
    """Multiplies activations by a kernel: `einsum(axes, x, kernel)` in `dtype`.

    Its gradients are products in the dtype of `x` with sums in float32, as on a TPU's matrix unit. Without
    this, gradients of bfloat16 products are products of float32, half as fast on CPUs and slower still on
    accelerators.

    Args:
      axes: einsum's subscripts; each index stands in two of the three terms.
      x: activations in the compute dtype.
      kernel: of any float dtype; it is converted to that of `x`.
      precision: `jax.lax.Precision` or None.
      dtype: of the result.
    """
    kernel = kernel.astype(x.dtype)
    return jnp.einsum(axes, x, kernel, precision=precision, preferred_element_type=dtype)


def _product_and_inputs(
    axes: str, x: jax.Array, kernel: jax.Array, precision: Any, dtype: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Sums in float32 that are then rounded: twice as fast on a CPU as sums that it has to round itself.
    return product(axes, x, kernel, precision, jnp.float32).astype(dtype), (x, kernel)


def _product_gradients(
    axes: str, precision: Any, dtype: Any, inputs: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = inputs
    terms, of_result = axes.split("->")
    of_x, of_kernel = terms.split(",")
    gradient = gradient.astype(x.dtype)
    to_x = product(f"{of_result},{of_kernel}->{of_x}", gradient, kernel, precision, jnp.float32)
    to_kernel = product(f"{of_x},{of_result}->{of_kernel}", x, gradient, precision, jnp.float32)
    return to_x.astype(x.dtype), to_kernel.astype(kernel.dtype)


product.defvjp(_product_and_inputs, _product_gradients)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, without mean or bias (T5's layer norm)."""

    config: T5Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., M] float32` to `[..., M]` in the compute dtype."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        x = unit(x, self.config.layer_norm_epsilon)
        return (x * jnp.broadcast_to(scale.astype(jnp.float32), x.shape)).astype(self.config.dtype)


class Attention(nn.Module):
    """The four projections of one attention layer. Kernels: q, k, v `[M, H, D]`, o `[H, D, M]`."""

    config: T5Config

    def setup(self) -> None:
        c = self.config
        width = c.num_heads * c.d_kv
        shape = (c.d_model, c.num_heads, c.d_kv)
        normal = nn.initializers.normal
        self.q = self.param("q", normal((c.d_model * c.d_kv) ** -0.5), shape)
        self.k = self.param("k", normal(c.d_model**-0.5), shape)
        self.v = self.param("v", normal(c.d_model**-0.5), shape)
        self.o = self.param("o", normal(width**-0.5), (c.num_heads, c.d_kv, c.d_model))

    def _project(self, x: jax.Array, kernel: jax.Array, axes: str) -> jax.Array:
        return product(axes, x, kernel, self.config.precision, x.dtype)

    def keys_values(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps `[B, S, M]` to keys and values `[B, S, H, D]`."""
        return self._project(x, self.k, "bsm,mhd->bshd"), self._project(x, self.v, "bsm,mhd->bshd")

    def __call__(
        self, x: jax.Array, keys: jax.Array, values: jax.Array, bias: jax.Array | None, visible: jax.Array
    ) -> jax.Array:
        """Attends from `x` `[B, N, M]`; the rest as in `attend`. Returns `[B, N, M] float32`."""
        queries = self._project(x, self.q, "bnm,mhd->bnhd")
        context = attend(queries, keys, values, bias, visible, self.config.precision)
        # Heads are merged first: contracted as two axes, the compiler would transpose the kernel.
        context = context.reshape(*context.shape[:2], -1)
        out = self.o.reshape(context.shape[-1], -1)
        return product("bnf,fm->bnm", context, out, self.config.precision, jnp.float32)


class FeedForward(nn.Module):
    """One hidden layer, plain (v1.0) or gated (v1.1). Kernels: wi or wi_0, wi_1 `[M, F]`, wo `[F, M]`."""

    config: T5Config

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        """Maps `[B, N, M]` to `[B, N, M] float32`."""
        c = self.config
        init_in, init_out = nn.initializers.normal(c.d_model**-0.5), nn.initializers.normal(c.d_ff**-0.5)

        def widen(name: str) -> jax.Array:
            kernel = self.param(name, init_in, (c.d_model, c.d_ff))
            return product("bnm,mf->bnf", x, kernel, c.precision, x.dtype)

        activation = ACTIVATIONS[c.activation or ("gelu_new" if c.gated else "relu")]
        hidden = activation(widen("wi_0")) * widen("wi_1") if c.gated else activation(widen("wi"))
        hidden = Dropout(c.dropout_rate)(hidden, deterministic=deterministic)
        wo = self.param("wo", init_out, (c.d_ff, c.d_model))
        return product("bnf,fm->bnm", hidden, wo, c.precision, jnp.float32)


class RelativeBias(nn.Module):
    """The table `[num_buckets, H]` of relative-position biases of a stack, or of one layer."""

    config: T5Config
    two_sided: bool

    @nn.compact
    def __call__(self, query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
        """Returns the bias between absolute positions `[B or 1, N]` and `[B or 1, T]`, all below T.

        Returns:
          `[B or 1, H, N, T] float32`.
        """
        c = self.config
        init = nn.initializers.normal(c.d_model**-0.5)
        table = self.param("table", init, (c.num_buckets, c.num_heads)).astype(jnp.float32)
        num_keys = key_positions.shape[1]
        # One entry per possible distance: a constant for the compiler, so no logarithm at run time.
        distances = jnp.arange(-num_keys, num_keys + 1)
        buckets = relative_bucket(
            distances, two_sided=self.two_sided, num_buckets=c.num_buckets, max_distance=c.max_distance
        )
        offsets = key_positions[:, None, :] - query_positions[..., None] + num_keys  # [B, N, T]
        return table.T[:, buckets][:, jnp.clip(offsets, 0, 2 * num_keys)].swapaxes(0, 1)


def biases(
    tables: RelativeBias | Sequence[RelativeBias],
    num_layers: int,
    query_positions: jax.Array,
    key_positions: jax.Array,
) -> list[jax.Array]:
    """Returns the bias of each layer, from a shared table or from one per layer; see `RelativeBias`."""
    if isinstance(tables, RelativeBias):
        return [tables(query_positions, key_positions)] * num_layers
    return [table(query_positions, key_positions) for table in tables]


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each as x + f(norm(x))."""

    config: T5Config

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array, visible: jax.Array, deterministic: bool) -> jax.Array:
        """Maps the residual stream `[B, S, M] float32` to the next."""
        c = self.config
        drop = Dropout(c.dropout_rate, deterministic=deterministic)
        attention = Attention(c, name="attention")
        y = RMSNorm(c, name="attention_norm")(x)
        keys, values = attention.keys_values(y)
        keys, values = to_cache_axes(keys, values)
        x = x + drop(attention(y, keys, values, bias, visible))
        y = RMSNorm(c, name="feed_forward_norm")(x)
        return x + drop(FeedForward(c, name="feed_forward")(y, deterministic))


class DecoderLayer(nn.Module):
    """Self-attention over the cache, cross-attention to the source, feed-forward."""

    config: T5Config

    def setup(self) -> None:
        c = self.config
        self.attention_norm = RMSNorm(c)
        self.attention = Attention(c)
        self.cross_norm = RMSNorm(c)
        self.cross = Attention(c)
        self.feed_forward_norm = RMSNorm(c)
        self.feed_forward = FeedForward(c)
        self.dropout = Dropout(c.dropout_rate)

    def cross_keys_values(self, encoded: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps the encoder output `[B, S, M]` to keys `[B, H, D, S]` and values `[B, H, S, D]`."""
        return to_cache_axes(*self.cross.keys_values(encoded))

    def __call__(
        self,
        x: jax.Array,
        cache: cache_lib.Cache,
        index: int,
        bias: jax.Array,
        visible: jax.Array,
        deterministic: bool,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Maps the residual stream `[B, N, M] float32` to the next, with layer `index` of the cache.

        Returns:
          The residual stream and this layer's keys and values with the new tokens written.
        """
        y = self.attention_norm(x)
        keys, values = self.attention.keys_values(y)
        if cache.num_slots == 0:  # teacher forcing: the call itself contains every token
            keys, values = to_cache_axes(keys, values)
        else:
            keys = cache_lib.write(cache.keys[index], keys, cache.length, slots_last=True)
            values = cache_lib.write(cache.values[index], values, cache.length)
        drop = lambda y: self.dropout(y, deterministic=deterministic)  # noqa: E731
        x = x + drop(self.attention(y, keys, values, bias, visible))
        y = self.cross_norm(x)
        source_visible = cache.source_mask[:, None, :]
        cross_keys, cross_values = cache.cross_keys[index], cache.cross_values[index]
        x = x + drop(self.cross(y, cross_keys, cross_values, None, source_visible))
        return x + drop(self.feed_forward(self.feed_forward_norm(x), deterministic)), keys, values


def empty_cache(
    layers: Sequence[DecoderLayer], encoded: jax.Array, source_mask: jax.Array, num_slots: int, dtype: Any
) -> cache_lib.Cache:
    """Returns an empty cache with these layers' cross-attention keys and values of the sources.

    Args:
      encoded: `[B, S, M]`, the encoder output.
      source_mask: `[B, S] bool`.
      num_slots: T. Static.
      dtype: of keys and values.
    """
    c = layers[0].config
    keys = jnp.zeros((encoded.shape[0], c.num_heads, c.d_kv, num_slots), dtype)
    cross = [layer.cross_keys_values(encoded) for layer in layers]
    return cache_lib.Cache(
        keys=(keys,) * len(layers),
        values=(keys.swapaxes(2, 3),) * len(layers),
        length=jnp.zeros(encoded.shape[:1], jnp.int32),
        cross_keys=tuple(keys for keys, _ in cross),
        cross_values=tuple(values for _, values in cross),
        source_mask=source_mask,
    )


def run_decoder(
    layers: Sequence[DecoderLayer],
    x: jax.Array,
    cache: cache_lib.Cache,
    biases: Sequence[jax.Array],
    visible: jax.Array,
    deterministic: bool = True,
) -> tuple[list[jax.Array], cache_lib.Cache]:
    """Returns the residual stream `[B, N, M]` after each layer, and the cache with N more tokens.

    Args:
      biases: one per layer; see `attend`, also for `visible`.
    """
    streams, keys, values = [], [], []
    for index, (layer, bias) in enumerate(zip(layers, biases, strict=True)):
        x, layer_keys, layer_values = layer(x, cache, index, bias, visible, deterministic)
        streams.append(x)
        keys.append(layer_keys)
        values.append(layer_values)
    cache = cache.replace(keys=tuple(keys), values=tuple(values), length=cache.length + x.shape[1])
    return streams, cache
