"""T5 configs, and presets of the published models."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class T5Config:
    """The sizes and variant of a T5 network. Hashable, as a static argument must be.

    Attributes:
      vocab_size: V, rows of the embedding (padding rows included).
      d_model, d_kv, d_ff, num_heads: M, D, F and H.
      num_layers, num_decoder_layers: number of layers of the encoder and of the decoder.
      gated: False: `f(x W)` (v1.0). True: `f(x W0) * (x W1)` (v1.1).
      tied_head: the output head shares the embedding matrix (v1.0); otherwise it has its own.
      scale_logits: multiply the head's input by M^-0.5 (v1.0).
      num_buckets, max_distance: of the relative-position bias.
      dropout_rate: used in training only.
      dtype: compute dtype, a string: "float32", "bfloat16" or "float16".
      pad_id, eos_id, start_id: special ids; the decoder's input begins with `start_id`.
      other_eos_ids: further ids that end a row.
      activation: f, a key of `layers.ACTIVATIONS`; None: relu, or the tanh form of gelu if gated.
      bias_in_every_layer: each layer has its own relative-position table (UMT5); otherwise one per stack.
    """

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_heads: int = 8
    num_layers: int = 6
    num_decoder_layers: int = 6
    gated: bool = False
    tied_head: bool = True
    scale_logits: bool = True
    num_buckets: int = 32
    max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    dropout_rate: float = 0.1
    dtype: str = "float32"
    pad_id: int = 0
    eos_id: int = 1
    start_id: int = 0
    other_eos_ids: tuple[int, ...] = ()
    activation: str | None = None
    bias_in_every_layer: bool = False

    @property
    def family(self) -> str:
        """See `families`."""
        return "t5"

    @property
    def encoded_width(self) -> int:
        """Width of the encoder's output: M."""
        return self.d_model

    @property
    def num_kv_heads(self) -> int:
        """H: one key-value head per query head."""
        return self.num_heads

    @property
    def has_cross_kernels(self) -> bool:
        """Whether cross-attention has its own kernels: always True for T5."""
        return True

    def for_heads(self, **sizes: int) -> "T5Config":
        """Returns the config of the T5 layers of which heads on this network consist (see `heads`)."""
        return dataclasses.replace(self, **sizes)  # type: ignore[arg-type]

    def shallow(self, num_layers: int) -> "T5Config":
        """Returns the config with `num_layers` layers in each stack."""
        return dataclasses.replace(self, num_layers=num_layers, num_decoder_layers=num_layers)

    def resized(self, num_layers: int, d_model: int, dtype: str) -> "T5Config":
        """Returns a config of the same variant with other sizes in both stacks and head width 64."""
        size = dict(d_model=d_model, d_kv=64, d_ff=4 * d_model, num_heads=max(1, d_model // 64))
        layers = dict(num_layers=num_layers, num_decoder_layers=num_layers)
        return dataclasses.replace(self, **size, **layers, dtype=dtype)  # type: ignore[arg-type]

    @property
    def precision(self) -> jax.lax.Precision:
        """Full float32 precision for float32: a TPU's default would round the operands to bfloat16."""
        exact = self.dtype == "float32"
        return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT


def _v1_0(d_model: int, d_kv: int, d_ff: int, num_heads: int, num_layers: int) -> T5Config:
    return T5Config(32128, d_model, d_kv, d_ff, num_heads, num_layers, num_layers)


def _v1_1(
    d_model: int, d_ff: int, num_heads: int, layers: int, decoder_layers: int, vocab: int = 32128
) -> T5Config:
    config = T5Config(vocab, d_model, 64, d_ff, num_heads, layers, decoder_layers)
    return dataclasses.replace(config, gated=True, tied_head=False, scale_logits=False)


PRESETS: dict[str, T5Config] = {
    "t5-small": _v1_0(512, 64, 2048, 8, 6),
    "t5-base": _v1_0(768, 64, 3072, 12, 12),
    "t5-large": _v1_0(1024, 64, 4096, 16, 24),
    "t5-3b": _v1_0(1024, 128, 16384, 32, 24),
    "t5-11b": _v1_0(1024, 128, 65536, 128, 24),
    "t5-v1_1-small": _v1_1(512, 1024, 6, 8, 8),
    "t5-v1_1-base": _v1_1(768, 2048, 12, 12, 12),
    "t5-v1_1-large": _v1_1(1024, 2816, 16, 24, 24),
    "t5-v1_1-xl": _v1_1(2048, 5120, 32, 24, 24),
    "t5-v1_1-xxl": _v1_1(4096, 10240, 64, 24, 24),
    "byt5-small": _v1_1(1472, 3584, 6, 12, 4, vocab=384),
}
