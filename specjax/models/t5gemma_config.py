"""T5Gemma 1 and 2 configs, and presets of the published models.

Sources of the published shapes: google-deepmind/gemma, gemma/research/t5gemma/config.py (version 1; the
parameters of S-S and B-B are those that Keras Hub states), and the Gemma 3 shapes of transformers'
models/gemma3/convert_gemma3_weights.py with the rotary scaling of google/t5gemma-2-270m-270m's config.json
(version 2).
"""

import dataclasses

import jax

from specjax.models.config import T5Config


@dataclasses.dataclass(frozen=True)
class StackConfig:
    """The shape of an encoder or of a decoder.

    Attributes:
      d_model, d_kv, d_ff, num_heads: M, D, F and H.
      num_kv_heads: key-value heads, each shared by H / `num_kv_heads` query heads.
      sliding: for each layer, whether it uses sliding-window attention.
      window: size of the window; see `t5gemma.reach`.
      query_scale: scores are divided by its square root.
      theta, full_theta: RoPE base in sliding-window and in full-attention layers.
      full_factor: positions are divided by it in full-attention layers (linear RoPE scaling).
      attention_cap: soft cap of the scores, cap * tanh(score / cap); None: no cap. Version 1 only.
      layer_norm_epsilon: epsilon of the norms.
    """

    d_model: int
    d_kv: int
    d_ff: int
    num_heads: int
    num_kv_heads: int
    sliding: tuple[bool, ...]
    window: int = 4096
    query_scale: float = 256.0
    theta: float = 10_000.0
    full_theta: float = 10_000.0
    full_factor: float = 1.0
    attention_cap: float | None = None
    layer_norm_epsilon: float = 1e-6

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.sliding)


@dataclasses.dataclass(frozen=True)
class T5GemmaConfig:
    """The sizes and variant of a T5Gemma network. Hashable, as a static argument must be.

    Attributes shared with `T5Config` have the same names; `d_model` and other sizes are the decoder's.

    Attributes:
      vocab_size: V, rows of an embedding.
      encoder, decoder: the shapes of both stacks.
      version: 1: separate cross-attention, and an embedding per stack; 2: normalised queries and keys, merged
        attention (one softmax over the decoder's tokens and the source, with the same kernels), and one
        shared embedding.
      logit_cap: soft cap of the logits, cap * tanh(logit / cap); None: no cap.
      tied_head: the output head shares the decoder's embedding matrix; otherwise it has its own.
      activation: of the feed-forward layers, a key of `layers.ACTIVATIONS`.
      image_end_id: an id whose embedding is stored outside the table (version 2); None: no such id.
      dropout_rate, dtype, pad_id, eos_id, start_id, other_eos_ids: see `T5Config`.
    """

    vocab_size: int
    encoder: StackConfig
    decoder: StackConfig
    version: int = 1
    logit_cap: float | None = None
    tied_head: bool = True
    activation: str = "gelu_new"
    image_end_id: int | None = None
    dropout_rate: float = 0.0
    dtype: str = "float32"
    pad_id: int = 0
    eos_id: int = 1
    start_id: int = 2
    other_eos_ids: tuple[int, ...] = ()

    @property
    def family(self) -> str:
        """See `families`."""
        return "t5gemma"

    @property
    def precision(self) -> jax.lax.Precision:
        """See `T5Config`."""
        return self.as_t5(self.decoder).precision

    @property
    def encoded_width(self) -> int:
        """M of the encoder."""
        return self.encoder.d_model

    @property
    def d_model(self) -> int:
        return self.decoder.d_model

    @property
    def d_kv(self) -> int:
        return self.decoder.d_kv

    @property
    def d_ff(self) -> int:
        return self.decoder.d_ff

    @property
    def num_heads(self) -> int:
        return self.decoder.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.decoder.num_kv_heads

    @property
    def num_layers(self) -> int:
        return self.encoder.num_layers

    @property
    def num_decoder_layers(self) -> int:
        return self.decoder.num_layers

    @property
    def gated(self) -> bool:
        """Always True: the feed-forward layers are gated."""
        return True

    @property
    def scale_logits(self) -> bool:
        """Always False: the embedding is scaled instead."""
        return False

    @property
    def has_cross_kernels(self) -> bool:
        """Whether cross-attention has its own kernels."""
        return self.version == 1

    def as_t5(self, stack: StackConfig) -> T5Config:
        """Returns the config of a T5 whose feed-forward layers are those of `stack`."""
        return T5Config(
            self.vocab_size,
            stack.d_model,
            stack.d_kv,
            stack.d_ff,
            stack.num_heads,
            gated=True,
            activation=self.activation,
            layer_norm_epsilon=stack.layer_norm_epsilon,
            dropout_rate=self.dropout_rate,
            dtype=self.dtype,
        )

    def for_heads(self, **sizes: int) -> T5Config:
        """Returns the config of the T5 layers of which heads on this network consist (see `heads`)."""
        return dataclasses.replace(self.as_t5(self.decoder), **sizes)  # type: ignore[arg-type]

    def shallow(self, num_layers: int) -> "T5GemmaConfig":
        """Returns the config with the first `num_layers` layers of each stack."""
        sides = (dataclasses.replace(s, sliding=s.sliding[:num_layers]) for s in (self.encoder, self.decoder))
        encoder, decoder = sides
        return dataclasses.replace(self, encoder=encoder, decoder=decoder)

    def resized(self, num_layers: int, d_model: int, dtype: str) -> "T5GemmaConfig":
        """Returns a config of the same version with other sizes, head width 64 and the same query groups."""
        num_heads = max(1, d_model // 64)
        group = self.num_heads // self.num_kv_heads

        def of(stack: StackConfig) -> StackConfig:
            return dataclasses.replace(
                stack,
                d_model=d_model,
                d_kv=64,
                d_ff=4 * d_model,
                num_heads=num_heads,
                num_kv_heads=num_heads // group if num_heads % group == 0 else num_heads,
                sliding=tuple(stack.sliding[i % len(stack.sliding)] for i in range(num_layers)),
                query_scale=64.0,
            )

        return dataclasses.replace(self, encoder=of(self.encoder), decoder=of(self.decoder), dtype=dtype)


def alternating(num_layers: int, period: int = 2) -> tuple[bool, ...]:
    """Returns which layers use sliding-window attention: all but every `period`-th."""
    return tuple(bool((i + 1) % period) for i in range(num_layers))


def _gemma_2(
    num_layers: int, d_model: int, d_ff: int, num_heads: int, d_kv: int, num_kv_heads: int
) -> StackConfig:
    sliding, scale = alternating(num_layers), float(d_kv)
    sizes = d_model, d_kv, d_ff, num_heads, num_kv_heads
    return StackConfig(*sizes, sliding, query_scale=scale, attention_cap=50.0)


def _gemma_3(
    num_layers: int, d_model: int, d_ff: int, num_heads: int, num_kv_heads: int, window: int
) -> StackConfig:
    sizes = d_model, 256, d_ff, num_heads, num_kv_heads
    return StackConfig(*sizes, alternating(num_layers, 6), window, full_theta=1e6, full_factor=8.0)


_STACKS = {
    "s": _gemma_2(8, 512, 1024, 8, 64, 8),
    "b": _gemma_2(12, 768, 2048, 12, 64, 12),
    "l": _gemma_2(24, 1024, 2816, 16, 64, 16),
    "ml": _gemma_2(26, 1152, 6912, 4, 256, 4),
    "xl": _gemma_2(24, 2048, 5120, 32, 64, 32),
    "2b": _gemma_2(26, 2304, 9216, 8, 256, 4),
    "9b": _gemma_2(42, 3584, 14336, 16, 256, 8),
    "270m": _gemma_3(18, 640, 2048, 4, 1, 512),
    "1b": _gemma_3(26, 1152, 6912, 4, 1, 512),
    "4b": _gemma_3(34, 2560, 10240, 8, 4, 1024),
}


def _published(version: int, name: str) -> T5GemmaConfig:
    encoder, decoder = (_STACKS[side] for side in name.split("-"))
    if version == 1:
        return T5GemmaConfig(256_000, encoder, decoder, version, logit_cap=30.0)
    return T5GemmaConfig(262_144, encoder, decoder, version, image_end_id=256_000)


# Names on the hub without the training method: google/t5gemma-9b-2b-ul2-it is a t5gemma-9b-2b.
PRESETS: dict[str, T5GemmaConfig] = {
    f"t5gemma-{name}": _published(1, name)
    for name in ("s-s", "b-b", "l-l", "ml-ml", "xl-xl", "2b-2b", "9b-2b", "9b-9b")
} | {f"t5gemma-2-{name}": _published(2, name) for name in ("270m-270m", "1b-1b", "4b-4b")}
