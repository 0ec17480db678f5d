"""Shapes of a tiny T5 and of a draft for it."""

import dataclasses

from specjax.models import t5
from tests.toy_batch import V

CONFIG = t5.T5Config(
    vocab_size=V, d_model=16, d_kv=4, d_ff=32, num_heads=4, num_layers=1, num_decoder_layers=2,
    gated=True, tied_head=False, scale_logits=False,
)  # fmt: skip
DRAFT_CONFIG = dataclasses.replace(CONFIG, d_model=8, num_decoder_layers=1)
