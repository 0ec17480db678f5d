"""Small networks on a frozen target's features: Medusa heads, an EAGLE layer, a one-pass layer.

Sources: Medusa (Cai et al. 2024), EAGLE (Li et al. 2024), EAGLE-3 (Li et al. 2025), DFlash (2026).
For an encoder-decoder, layers attend to the target's own encoder output: there is no draft encoder.

Axes: B rows, N pairs, D positions ahead, S source length, T cache slots, F width of the target's
features, M of its embedding (`encoded` has the width of its encoder), W of the heads, V vocabulary, R ids
that are drafted. The layers are those of a T5, with relative positions, whatever the target is.

A pair is (f_j, t_(j+1)): the target's feature after token j, and the token chosen from it. A head
predicts token j + 2 from it. The first pair of a text is (0, t_0): its feature is zero. The embedding, and
the output head if all ids are drafted, are the target's: they are passed as `frozen`, and are neither trained
nor stored.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import cache as cache_lib
from specjax import sharding
from specjax.models import families, layers, t5
from specjax.types import Layout, Network, Params

KINDS = ("medusa", "eagle", "one_pass")


@dataclasses.dataclass(frozen=True)
class HeadsConfig:
    """The kind and sizes of heads. Hashable, as a static argument must be.

    Raises:
      ValueError: `kind` is unknown, or `num_steps` is below 1.

    Attributes:
      kind: one of `KINDS`.
      num_steps: D, number of positions ahead that they are trained for.
      d_model, d_kv, d_ff, num_heads, num_layers: sizes of the layers; Medusa has no layers and width M.
      draft_ids: the R ids that they can draft, ascending; empty: all V, by the target's head (width M).
      feature_layers: see `t5.T5Network`.
    """

    kind: str
    num_steps: int
    d_model: int
    d_kv: int = 64
    d_ff: int = 0
    num_heads: int = 1
    num_layers: int = 1
    draft_ids: tuple[int, ...] = ()
    feature_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"`kind` must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.num_steps < 1:
            raise ValueError(f"`num_steps` must be at least 1, got {self.num_steps}")

    def num_features(self, target: families.Config) -> int:
        """Returns F for a target."""
        return target.d_model * (1 + len(self.feature_layers))

    def check(self, target: families.Config) -> None:
        """Raises a ValueError if these heads do not fit the target."""
        if (self.kind == "medusa" or not self.draft_ids) and self.d_model != target.d_model:
            raise ValueError(
                f"`d_model` must be the target's, {target.d_model}, for Medusa heads and for heads without "
                f"`draft_ids`, got {self.d_model}"
            )
        if self.kind == "medusa" and self.feature_layers:
            raise ValueError(
                f"`feature_layers` must be empty for Medusa heads, which read the last layer only, got "
                f"{self.feature_layers}"
            )
        if any(not 0 <= i < target.num_decoder_layers for i in self.feature_layers):
            raise ValueError(
                f"`feature_layers` must be in 0..{target.num_decoder_layers - 1}, layers of the decoder, got "
                f"{self.feature_layers}"
            )
        sizes = {
            "d_ff": self.d_ff,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "d_kv": self.d_kv,
        }
        if self.kind != "medusa" and min(sizes.values()) < 1:
            raise ValueError(f"{', '.join(f'`{name}`' for name in sizes)} must be at least 1, got {sizes}")
        if any(not 0 <= i < target.vocab_size for i in self.draft_ids):
            raise ValueError(
                f"`draft_ids` must be in 0..{target.vocab_size - 1}, the target's vocabulary, got "
                f"{min(self.draft_ids)}..{max(self.draft_ids)}"
            )


class _VocabularyHead(nn.Module):
    """The output head: its own kernel `[W, R]` for R drafted ids, or the target's head for all V."""

    config: HeadsConfig
    target: families.Config

    @nn.compact
    def __call__(self, frozen: Any, hidden: jax.Array) -> jax.Array:
        """Maps `[..., W]` to `[..., R] float32`."""
        num_ids = len(self.config.draft_ids)
        if not num_ids:
            flat = hidden.reshape(1, -1, hidden.shape[-1])
            target = families.module(self.target, parent=None)
            logits: Any = target.apply({"params": frozen}, flat, method="logits")
            return logits.reshape(*hidden.shape[:-1], -1)
        init = nn.initializers.normal(self.config.d_model**-0.5)
        kernel = self.param("kernel", init, (hidden.shape[-1], num_ids)).astype(hidden.dtype)
        return jnp.einsum(
            "...w,wr->...r",
            hidden,
            kernel,
            precision=self.target.precision,
            preferred_element_type=jnp.float32,
        )


class MedusaHeads(nn.Module):
    """Medusa heads: head d is x + SiLU(x W_d + b_d), then a shared output head; W_d starts at zero."""

    config: HeadsConfig
    target: families.Config

    @nn.compact
    def unroll(self, frozen: Any, features: jax.Array, depth: int | None = None) -> jax.Array:
        """Maps features `[B, N, M]` to logits `[B, depth, N, R]` of the tokens 2, 3, ... positions ahead."""
        num_heads, width = self.config.num_steps, self.config.d_model
        kernel = self.param("kernel", nn.initializers.zeros, (num_heads, width, width)).astype(features.dtype)
        bias = self.param("bias", nn.initializers.zeros, (num_heads, width)).astype(features.dtype)
        kernel, bias = kernel[:depth], bias[:depth]
        change = jnp.einsum("bnm,dmk->bdnk", features, kernel, precision=self.target.precision)
        hidden = features[:, None] + nn.silu(change + bias[None, :, None])
        return _VocabularyHead(self.config, self.target, name="head")(frozen, hidden)


class FeatureDecoder(nn.Module):
    """Decoder layers over pairs, followed by masks if all positions are predicted at once."""

    config: HeadsConfig
    target: families.Config

    def setup(self) -> None:
        c, normal = self.config, nn.initializers.normal
        layer = self.target.for_heads(
            d_model=c.d_model,
            d_kv=c.d_kv,
            d_ff=c.d_ff,
            num_heads=c.num_heads,
            num_decoder_layers=c.num_layers,
        )
        num_features = c.num_features(self.target)
        self.fuse = self.param("fuse", normal(num_features**-0.5), (num_features, c.d_model))
        num_inputs = c.d_model + self.target.d_model
        self.mix = self.param("mix", normal(num_inputs**-0.5), (num_inputs, c.d_model))
        width = self.target.encoded_width
        self.encoded_in = self.param("encoded_in", normal(width**-0.5), (width, c.d_model))
        if c.kind == "one_pass" and c.num_steps > 1:
            self.masks = self.param("masks", normal(1.0), (c.num_steps - 1, c.d_model))
        self.hidden_norm, self.token_norm = layers.RMSNorm(layer), layers.RMSNorm(layer)
        self.bias = layers.RelativeBias(layer, two_sided=False)
        self.layers = [layers.DecoderLayer(layer) for _ in range(c.num_layers)]
        self.norm = layers.RMSNorm(layer)
        self.head = _VocabularyHead(c, self.target)

    def _project(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.einsum("...i,io->...o", x, kernel.astype(x.dtype), precision=self.target.precision)

    def init_cache(self, encoded: jax.Array, source_mask: jax.Array, num_slots: int) -> cache_lib.Cache:
        """Returns an empty cache for the target's encoder output `[B, S, M]`; see `t5.T5.init_cache`."""
        encoded = self._project(encoded, self.encoded_in)
        return layers.empty_cache(self.layers, encoded, source_mask, num_slots, encoded.dtype)

    def hidden(self, features: jax.Array) -> jax.Array:
        """Maps features `[B, N, F]` to `[B, N, W]`; later steps take the layers' own output in its place."""
        return self._project(features, self.fuse)

    def decode(
        self,
        frozen: Any,
        hidden: jax.Array,
        tokens: jax.Array,
        cache: cache_lib.Cache,
        layout: Layout,
        mask_ids: tuple[int, ...] = (),
    ) -> tuple[jax.Array, cache_lib.Cache]:
        """Feeds pairs, then masks.

        Args:
          hidden: `[B, N, W]`.
          tokens: `[B, N]`.
          cache: pairs and masks go into the slots after its length.
          layout: of pairs and masks.
          mask_ids: indices of the masks. Static.

        Returns:
          `[B, N + masks, W]`, and the cache with N + masks more entries.
        """
        embedded = frozen["embedding"][tokens].astype(hidden.dtype).astype(jnp.float32)
        inputs = [self.hidden_norm(hidden.astype(jnp.float32)), self.token_norm(embedded)]
        x = self._project(jnp.concatenate(inputs, axis=-1), self.mix).astype(jnp.float32)
        if mask_ids:
            masks = self.masks[np.array(mask_ids)].astype(x.dtype)
            masks = jnp.broadcast_to(masks[None], (len(x), *masks.shape))
            x = jnp.concatenate([x, masks], axis=1)
        num_layers = self.config.num_layers
        biases = layers.biases(self.bias, num_layers, layout.positions, layout.key_positions)
        streams, cache = layers.run_decoder(self.layers, x, cache, biases, layout.visible)
        return self.norm(streams[-1]), cache

    def logits(self, frozen: Any, hidden: jax.Array) -> jax.Array:
        """Maps `[..., W]` to `[..., R] float32`."""
        return self.head(frozen, hidden)

    def unroll(
        self, frozen: Any, features: jax.Array, tokens: jax.Array, encoded: jax.Array, source_mask: jax.Array
    ) -> jax.Array:
        """Returns the logits `[B, D, N, R]` of drafting from each of N pairs, for training.

        Entry [d, i] predicts the token d + 1 positions after that of pair i; the true tokens take the place
        of earlier drafts (teacher forcing).

        Args:
          features: `[B, N, F]`, zero in the first pair.
          tokens: `[B, N]`, the decoder's inputs.
        """
        one_pass = self.config.kind == "one_pass"
        blocks = self._unroll_masks if one_pass else self._unroll_steps
        return self.logits(frozen, blocks(frozen, features, tokens, encoded, source_mask))

    def _unroll_steps(
        self, frozen: Any, features: jax.Array, tokens: jax.Array, encoded: jax.Array, source_mask: jax.Array
    ) -> jax.Array:
        """Runs D steps (EAGLE-3, section 3.2): each reads the outputs of the one before, as in drafting."""
        num_pairs, depth = features.shape[1], self.config.num_steps
        place = np.arange(num_pairs)
        cache, hidden = self.init_cache(encoded, source_mask, num_pairs * depth), self.hidden(features)
        outputs = []
        for step in range(depth):
            # Pair j at step d was drafted from pair j - d: it sees the target's features up to pair j - d,
            # and only the outputs of earlier steps after it.
            start = place[:, None] - step
            blocks = [place[None] <= start]
            blocks += [(place[None] == start + i) & (i <= step) for i in range(1, depth)]
            layout = Layout(
                jnp.asarray(place)[None],
                jnp.asarray(np.tile(place, depth))[None],
                jnp.asarray(np.concatenate(blocks, axis=1))[None],
            )
            hidden, cache = self.decode(frozen, hidden, tokens, cache, layout)
            outputs.append(jnp.roll(hidden, -step, axis=1))
            hidden = jnp.roll(hidden, 1, axis=1)
        return jnp.stack(outputs, axis=1)

    def _unroll_masks(
        self, frozen: Any, features: jax.Array, tokens: jax.Array, encoded: jax.Array, source_mask: jax.Array
    ) -> jax.Array:
        """Makes one call on all pairs, followed by a block of masks for each pair."""
        num_pairs, num_masks = features.shape[1], self.config.num_steps - 1
        place = np.arange(num_pairs)
        origin = np.concatenate([place, np.repeat(place, num_masks)])
        ahead = np.concatenate([0 * place, np.tile(np.arange(1, num_masks + 1), num_pairs)])
        is_pair = ahead == 0
        sees_pairs = is_pair[None] & (origin[None] <= origin[:, None])
        sees_block = (~is_pair)[None] & (~is_pair)[:, None] & (origin[None] == origin[:, None])
        positions = jnp.asarray(origin + ahead)[None]
        layout = Layout(positions, positions, jnp.asarray(sees_pairs | sees_block)[None])
        cache, hidden = self.init_cache(encoded, source_mask, len(origin)), self.hidden(features)
        mask_ids = tuple((ahead[num_pairs:] - 1).tolist())
        hidden, _ = self.decode(frozen, hidden, tokens, cache, layout, mask_ids)
        first, rest = hidden[:, None, :num_pairs], hidden[:, num_pairs:]
        rest = rest.reshape(len(rest), num_pairs, num_masks, hidden.shape[-1]).swapaxes(1, 2)
        return jnp.concatenate([first, rest], axis=1)


@dataclasses.dataclass(frozen=True, eq=False)
class Originals:
    """Arrays kept for identity checks. All instances are equal, so that compiled programs are shared."""

    arrays: Params = dataclasses.field(repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Originals)

    def __hash__(self) -> int:
        return 0


class HeadsNetwork(struct.PyTreeNode):
    """Heads with their params and the arrays of the target that they read.

    Attributes:
      params: the heads' own params; None before initialisation.
      frozen: the target's embedding and head: the arrays of its params themselves, or replicated copies.
      config: the config of the heads. Static.
      target: the config of the target. Static.
      cache_sharding: see `T5Network`; heads are small and always replicated.
      originals: the arrays that `frozen` copies; None if they are not copies. Static.
    """

    params: Params = struct.field(repr=False)
    frozen: Params = struct.field(repr=False)
    config: HeadsConfig = struct.field(pytree_node=False)
    target: families.Config = struct.field(pytree_node=False)
    cache_sharding: jax.sharding.NamedSharding | None = struct.field(pytree_node=False, default=None)
    originals: "Originals | None" = struct.field(pytree_node=False, default=None)

    @classmethod
    def of(cls, config: HeadsConfig, target: t5.T5Network, params: Params = None) -> "HeadsNetwork":
        """Returns heads on a target."""
        frozen = {name: target.params[name] for name in ("embedding", "head") if name in target.params}
        return cls(params, frozen, config, target.config)

    def check(self, target: Network) -> None:
        """Raises a ValueError if they were loaded for another target; traced arrays are not checked."""
        frozen = self.frozen if self.originals is None else self.originals.arrays
        leaves = [*jax.tree.leaves(target), *jax.tree.leaves(frozen)]
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return
        ours = {id(leaf) for leaf in jax.tree.leaves(target)}
        if not {id(leaf) for leaf in jax.tree.leaves(frozen)} <= ours:
            raise ValueError("`drafter` must have heads of this target; use load_heads(directory, target)")

    @property
    def vocab_size(self) -> int:
        """V, the target's."""
        return self.target.vocab_size

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose features are read."""
        return self.config.feature_layers

    @property
    def num_features(self) -> int:
        """F."""
        return self.config.num_features(self.target)

    @property
    def num_steps(self) -> int:
        """D."""
        return self.config.num_steps

    @property
    def module(self) -> Any:
        """The Linen module."""
        kind = MedusaHeads if self.config.kind == "medusa" else FeatureDecoder
        return kind(self.config, self.target)

    def ahead(self, features: jax.Array, depth: int) -> jax.Array:
        """Returns logits `[B, depth, V]` of the first `depth` Medusa heads on features `[B, M]`."""
        logits = self._apply(self.frozen, features[:, None], depth, method="unroll")
        return self._spread(logits[:, :, 0])

    def init_cache(self, encoded: jax.Array, source_mask: jax.Array, num_slots: int) -> cache_lib.Cache:
        """See `FeatureDecoder.init_cache`."""
        return self._apply(encoded, source_mask, num_slots, method="init_cache")

    def hidden(self, features: jax.Array) -> jax.Array:
        """See `FeatureDecoder.hidden`."""
        return self._apply(features, method="hidden")

    def decode(
        self, cache: cache_lib.Cache, hidden: jax.Array, tokens: jax.Array, layout: Layout, num_masks: int = 0
    ) -> tuple[jax.Array, cache_lib.Cache]:
        """See `FeatureDecoder.decode`; uses the first `num_masks` masks."""
        mask_ids = tuple(range(num_masks))
        return self._apply(self.frozen, hidden, tokens, cache, layout, mask_ids, method="decode")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Maps `[B, N, W]` to logits `[B, N, V]`; ids that are not drafted are masked."""
        return self._spread(self._apply(self.frozen, hidden, method="logits"))

    def unroll(self, *inputs: jax.Array) -> jax.Array:
        """Returns logits `[B, D, N, R]` for training; see `unroll` of the modules."""
        return self._apply(self.frozen, *inputs, method="unroll")

    def _spread(self, logits: jax.Array) -> jax.Array:
        """Maps `[..., R]` to `[..., V]`."""
        if not self.config.draft_ids:
            return logits
        place = np.full(self.vocab_size, len(self.config.draft_ids))
        place[list(self.config.draft_ids)] = np.arange(len(self.config.draft_ids))
        rest = jnp.full((*logits.shape[:-1], 1), layers.MASKED, logits.dtype)
        return jnp.concatenate([logits, rest], axis=-1)[..., place]

    def _apply(self, *args: Any, method: str) -> Any:
        found = self.module.apply({"params": self.params}, *args, method=method)
        return sharding.keep_whole(found, self.cache_sharding)
