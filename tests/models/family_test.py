"""Every T5 that people have, as it is stored, against transformers: ids, logits, greedy tokens, drafts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import convert_checkpoint, drafters
from specjax.loading import Model
from specjax.models import convert, t5
from tests.models.families import FAMILIES, write

PROMPTS = ["def add(a, b): return a", "a man rides two dogs run on the grass"]
NUM_NEW = 12


class Reference:
    """The same directory in transformers."""

    def __init__(self, directory, family):
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        kind = getattr(transformers, f"{family.kind}ForConditionalGeneration")
        self.model = kind.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        rows = [self.tokenizer(prompt).input_ids for prompt in PROMPTS]
        width = max(map(len, rows))
        self.ids = np.array([row + [0] * (width - len(row)) for row in rows])
        self.mask = np.arange(width) < np.array([[len(row)] for row in rows])
        beyond = list(range(len(self.tokenizer), self.model.config.vocab_size))
        with torch.no_grad():
            found = self.model.generate(
                torch.tensor(self.ids),
                attention_mask=torch.tensor(self.mask).long(),
                max_new_tokens=NUM_NEW,
                do_sample=False,
                suppress_tokens=beyond or None,
            )
            self.decoder_input = found[:, :-1]
            self.logits = self.model(
                input_ids=torch.tensor(self.ids),
                attention_mask=torch.tensor(self.mask).long(),
                decoder_input_ids=self.decoder_input,
            ).logits.numpy()
        end = self.model.generation_config.eos_token_id
        self.tokens = [row[: row.index(end) + 1] if end in row else row for row in found[:, 1:].tolist()]


def shallow(target):
    """A draft of the same family: the target's own first layers."""
    config = dataclasses.replace(target.config, num_layers=1, num_decoder_layers=1)
    params = {name: target.params[name] for name in convert.shapes(config)}
    return Model(t5.T5Network(params, config), target.tokenizer)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_decodes_as_in_transformers(tmp_path, name):
    family, directory = FAMILIES[name], tmp_path / "model"
    pytest.importorskip("torch")
    write(directory, family)
    reference = Reference(directory, family)
    if family.is_legacy:
        with pytest.raises(ValueError, match="python -m specjax.convert_checkpoint"):
            specjax.load(directory)
        convert_checkpoint.convert_checkpoint(directory, tmp_path / "converted")
        directory = tmp_path / "converted"
    target = specjax.load(directory, "float32")

    assert target.tokenizer.get_vocab() == reference.tokenizer.get_vocab()
    text = "a <extra_id_1> man </s> def é"
    assert target.tokenizer(text).input_ids == reference.tokenizer(text).input_ids

    given = (jnp.asarray(np.asarray(x)) for x in (reference.ids, reference.mask, reference.decoder_input))
    logits = jax.jit(t5.T5(target.config).apply)({"params": target.params}, *given)
    np.testing.assert_allclose(logits, reference.logits, rtol=1e-4, atol=1e-4)

    plain = specjax.generate(target, PROMPTS, max_new_tokens=NUM_NEW)
    assert plain.token_ids == reference.tokens
    assert all(len(set(row)) >= 5 for row in plain.token_ids), plain.token_ids
    drafter = drafters.from_model(shallow(target), num_draft=3)
    drafted = specjax.generate(target, PROMPTS, drafter=drafter, max_new_tokens=NUM_NEW)
    assert drafted.token_ids == plain.token_ids and int(drafted.stats.num_drafted.sum()) > 0
