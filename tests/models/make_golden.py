"""Writes the golden checkpoints and activations of tests/models/golden with torch.

    python tests/models/make_golden.py

Needs the extra `parity`. Each NAME has a checkpoint directory and NAME.npz: inputs, logits, and
what goes in and comes out of single modules, so that a difference is localised.
"""

import pathlib
from typing import Any

import numpy as np
import torch
import transformers

GOLDEN = pathlib.Path(__file__).parent / "golden"
SHAPES = {
    "v1_0": dict(vocab_size=48, num_layers=2, num_decoder_layers=2),
    "v1_1": dict(
        vocab_size=48,
        num_layers=2,
        num_decoder_layers=2,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
    ),
    "byt5": dict(
        vocab_size=384,
        num_layers=3,
        num_decoder_layers=1,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    ),
    "umt5": dict(
        vocab_size=48,
        num_layers=2,
        num_decoder_layers=2,
        feed_forward_proj="gated-silu",
        tie_word_embeddings=False,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
    ),
}
SOURCE_LENGTHS, NUM_SOURCE, NUM_DECODER = (40, 23, 1), 40, 24

# Name of an activation -> module. Recorded as NAME_in and NAME_out.
MODULES = {
    "norm": "encoder.block.0.layer.0.layer_norm",
    "self_attention": "encoder.block.0.layer.0.SelfAttention",
    "feed_forward": "encoder.block.0.layer.1.DenseReluDense",
    "encoder_layer": "encoder.block.0",
    "causal_attention": "decoder.block.0.layer.0.SelfAttention",
    "cross_attention": "decoder.block.0.layer.1.EncDecAttention",
    "decoder_layer": "decoder.block.0",
}


def build(name: str, seed: int) -> Any:
    """A random model whose activations are of order one, with a head of its own where untied."""
    torch.manual_seed(seed)
    kind = "UMT5" if name == "umt5" else "T5"
    config = getattr(transformers, f"{kind}Config")(
        d_model=16, d_kv=8, d_ff=24, num_heads=3, decoder_start_token_id=0, **SHAPES[name]
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    untied = SHAPES[name].get("tie_word_embeddings") is False
    if untied:  # a fresh model is tied whatever its config says
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(config.vocab_size, config.d_model))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            is_table = key.startswith("shared") or "relative" in key
            scale = 1.0 if is_table else weight.shape[-1] ** -0.5
            weight.normal_(0.0, scale)
            if "norm" in key:
                weight.mul_(0.5).add_(1.0)
    return model


def inputs(vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    """Three rows that differ in everything, their source length included."""
    rng = np.random.default_rng(seed)
    mask = np.arange(NUM_SOURCE)[None] < np.array(SOURCE_LENGTHS)[:, None]
    source = np.where(mask, rng.integers(2, vocab_size, mask.shape), 0)
    decoder = rng.integers(2, vocab_size, (len(mask), NUM_DECODER))
    decoder[:, 0] = 0
    return {"source_ids": source, "source_mask": mask, "decoder_input": decoder}


def run(model: Any, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Logits and activations of a teacher-forced pass."""
    found: dict[str, torch.Tensor] = {}

    def hook(name):
        def record(module, args, kwargs, output):
            found[f"{name}_in"] = args[0] if args else kwargs["hidden_states"]
            found[f"{name}_out"] = output[0] if isinstance(output, tuple) else output

        return record

    handles = [
        model.get_submodule(path).register_forward_hook(hook(name), with_kwargs=True)
        for name, path in MODULES.items()
    ]
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor(given["source_ids"]),
            attention_mask=torch.tensor(given["source_mask"]).long(),
            decoder_input_ids=torch.tensor(given["decoder_input"]),
        )
        found["embedding_out"] = model.shared(torch.tensor(given["source_ids"]))
    for handle in handles:
        handle.remove()
    found |= {"encoded": output.encoder_last_hidden_state, "logits": output.logits}
    return {name: value.numpy() for name, value in found.items()}


def main() -> None:
    for seed, name in enumerate(SHAPES):
        model = build(name, seed)
        model.save_pretrained(GOLDEN / name)
        given = inputs(model.config.vocab_size, seed)
        found = run(model, given)
        if name == "umt5":  # its modules are those of the others
            found = {kept: found[kept] for kept in ("encoded", "logits")}
        np.savez_compressed(GOLDEN / f"{name}.npz", **given, **found)


if __name__ == "__main__":
    main()
