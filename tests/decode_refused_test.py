"""Invalid arguments of `decode.generate`, and the errors that they raise."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.exactness import toys
from specjax import acceptance, decode
from specjax.drafters import ModelDrafter, ModelTreeDrafter
from tests.tiny_t5 import DRAFT_CONFIG, random_network
from tests.toy_batch import TABLE, TOY

IDS, MASK = np.ones((2, 3), np.int32), np.ones((2, 3), bool)
REFUSED = {
    "empty batch": (dict(source_ids=IDS[:0], source_mask=MASK[:0]), "`source_ids` must have shape"),
    "flat source": (dict(source_ids=IDS[0], source_mask=MASK[0]), "`source_ids` must have shape"),
    "mask of another shape": (dict(source_mask=MASK[:, :2]), "`source_mask` must have the shape"),
    "negative temperature": (dict(temperature=-0.1), "`temperature` must be.*got -0.1"),
    "temperature that is no number": (dict(temperature=float("nan")), "`temperature` must be.*got nan"),
    "temperature of too many rows": (dict(temperature=[1.0] * 3), "`temperature` must be.*shape"),
    "negative max_new_tokens": (dict(max_new_tokens=-1), "`max_new_tokens` must be.*got -1"),
    "max_new_tokens of too many rows": (dict(max_new_tokens=[1, 2, 3]), "`max_new_tokens` must be.*shape"),
    "max_new_tokens over the bucket": (
        dict(max_new_tokens=9, length_bucket=8),
        "`length_bucket` must be at least max_new_tokens, 9, got 8",
    ),
    "seeds of too many rows": (dict(seed=[1, 2, 3]), "`seed` must be.*shape"),
    "K of 0": (dict(drafter=ModelDrafter(TOY, 0)), "`num_draft` must be at least 1, got 0"),
    "negative K": (dict(drafter=ModelDrafter(TOY, -2)), "`num_draft` must be at least 1, got -2"),
    "another vocabulary": (
        dict(drafter=ModelDrafter(toys.ToyNetwork(jnp.asarray(TABLE[:, :32])), 2)),
        "vocabulary must contain the target's 40 ids, got 32",
    ),
    "greedy rule with temperature": (
        dict(rule=acceptance.greedy, temperature=0.5),
        "`rule` must be lossless",
    ),
    "stop strings without a tokenizer": (dict(stop="x"), "`stop` needs a tokenizer, got .x. at token level"),
    "end token outside the vocabulary": (dict(eos_ids=(40,)), r"`eos_ids` must be a list.*got \(40,\)"),
    "chain rule for a tree": (
        dict(drafter=ModelTreeDrafter(TOY, (2, 1)), rule=acceptance.block, temperature=1.0),
        "use multi_round",
    ),
    "shared encoder of another width": (
        dict(drafter=ModelDrafter(random_network(DRAFT_CONFIG), 2, share_encoder=True)),
        "`share_encoder` must be False.*width 8.*width 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_generate_raises_for_an_invalid_argument_by_name(name):
    options, words = REFUSED[name]
    options = dict(source_ids=IDS, source_mask=MASK, seed=0) | options
    with pytest.raises(ValueError, match=words):
        decode.generate(TOY, **options)
