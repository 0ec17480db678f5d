"""Writes the golden checkpoints and logits of T5Gemma 1 and 2 with torch, as `make_golden` does those of T5.

python -m tests.models.make_golden_t5gemma
"""

import numpy as np
import torch

from tests.models.t5gemma_models import GOLDEN, IMAGE_END, VERSIONS, V, torch_model

LENGTHS, NUM_SOURCE, NUM_DECODER = (14, 9), 14, 9


def main() -> None:
    for version in VERSIONS:
        model = torch_model(version, seed=version)
        with torch.no_grad():  # of the rotation's buffers too `model.to` would take half the digits
            for weight in model.parameters():
                weight.copy_(weight.bfloat16().float())
        rng = np.random.default_rng(version)
        mask = np.arange(NUM_SOURCE)[None] < np.array(LENGTHS)[:, None]
        source = np.where(mask, rng.integers(3, V, mask.shape), 0)
        source[0, 3] = IMAGE_END
        decoder = rng.integers(3, V, (len(mask), NUM_DECODER))
        decoder[:, 0] = 2
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor(source),
                attention_mask=torch.tensor(mask).long(),
                decoder_input_ids=torch.tensor(decoder),
                decoder_attention_mask=torch.ones(decoder.shape, dtype=torch.long),
            ).logits.numpy()
        model.to(torch.bfloat16).save_pretrained(GOLDEN / f"t5gemma_{version}")
        given = {"source_ids": source, "source_mask": mask, "decoder_input": decoder}
        np.savez_compressed(GOLDEN / f"t5gemma_{version}.npz", **given, logits=logits)


if __name__ == "__main__":
    main()
