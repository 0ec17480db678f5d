"""What `decode.generate` refuses, and that it says why."""

import numpy as np
import pytest

from experiments import exact_law
from specjax import acceptance, decode
from specjax.drafters.model import ModelDrafter
from specjax.drafters.model_tree import ModelTreeDrafter
from specjax.models import t5
from specjax.sampling import Sampling
from tests.tiny_t5 import DRAFT_CONFIG
from tests.toy_batch import DRAFT_TABLE, TABLE, TOY

IDS, MASK = np.ones((2, 3), np.int32), np.ones((2, 3), bool)
REFUSED = {
    "empty batch": (dict(source_ids=IDS[:0], source_mask=MASK[:0]), "source_ids has shape"),
    "flat source": (dict(source_ids=IDS[0], source_mask=MASK[0]), "source_ids has shape"),
    "mask of another shape": (dict(source_mask=MASK[:, :2]), "source_mask has shape"),
    "negative temperature": (dict(sampling=Sampling(temperature=-0.1)), "temperature=-0.1"),
    "temperature that is no number": (dict(sampling=Sampling(temperature=float("nan"))), "temperature=nan"),
    "temperature of too many rows": (dict(sampling=Sampling(temperature=[1.0] * 3)), "temperature has shape"),
    "negative max_new_tokens": (dict(max_new_tokens=-1), "max_new_tokens=-1"),
    "max_new_tokens of too many rows": (dict(max_new_tokens=[1, 2, 3]), "max_new_tokens has shape"),
    "max_new_tokens over the bucket": (dict(max_new_tokens=9, length_bucket=8), "length_bucket=8"),
    "seeds of too many rows": (dict(seed=[1, 2, 3]), "seed has shape"),
    "K of 0": (dict(drafter=ModelDrafter(TOY, 0)), "num_draft=0"),
    "negative K": (dict(drafter=ModelDrafter(TOY, -2)), "num_draft=-2"),
    "another vocabulary": (dict(drafter=ModelDrafter(exact_law.ToyNetwork(32), 2)), "32.*40"),
    "greedy rule with temperature": (
        dict(rule=acceptance.greedy, sampling=Sampling(temperature=0.5)),
        "rule=greedy",
    ),
    "end token outside the vocabulary": (dict(eos_ids=(40,)), r"eos_ids=\(40,\): give a list"),
    "more ids than the vocabulary": (dict(num_ids=41), "num_ids"),
    "chain rule for a tree": (
        dict(
            drafter=ModelTreeDrafter(TOY, (2, 1)),
            drafter_params=DRAFT_TABLE,
            rule=acceptance.block,
            sampling=Sampling(),
        ),
        "use rule=multi_round",
    ),
    "shared encoder of another width": (
        dict(drafter=ModelDrafter(t5.T5Network(DRAFT_CONFIG), 2, share_encoder=True)),
        "share_encoder=True.*8.*1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_argument_is_refused_by_name(name):
    options, words = REFUSED[name]
    options = dict(source_ids=IDS, source_mask=MASK, seed=0) | options
    with pytest.raises(ValueError, match=words):
        decode.generate(TOY, TABLE, **options)
