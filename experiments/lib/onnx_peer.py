"""ONNX Runtime as a peer: exports the T5 of transformers (torch), and runs it.

There are two graphs: the encoder with the keys and values of cross-attention, run once per source; and a
decoding step with a cache, which also chooses the token, so that no logits leave it. (Optimum exports nearly
the same graphs, but needs an older transformers.) Decoding is greedy, at batch 1, without padding.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch.nn import functional

from experiments.lib import results


class Encoder(torch.nn.Module):
    """Maps `[1, S]` ids to the cross-attention keys and values of each decoder layer, `[1, H, S, D]`."""

    def __init__(self, model: Any):
        super().__init__()
        self.encoder = model.encoder
        self.cross = torch.nn.ModuleList(block.layer[1].EncDecAttention for block in model.decoder.block)

    def forward(self, source_ids: torch.Tensor) -> list[torch.Tensor]:
        encoded = self.encoder(input_ids=source_ids).last_hidden_state
        return [_heads(part(encoded), layer) for layer in self.cross for part in (layer.k, layer.v)]


class Step(torch.nn.Module):
    """Maps a token to the next one, and to the cache with one more slot.

    The relative position bias of all distances is stored once; each step slices its part.
    """

    def __init__(self, model: Any, max_new_tokens: int):
        super().__init__()
        self.decoder, self.head = model.decoder, model.lm_head
        self.scale = model.config.d_model**-0.5 if model.config.scale_decoder_outputs else 1.0
        attention = model.decoder.block[0].layer[0].SelfAttention
        with torch.no_grad():  # [1, H, 1, T]: the last column is distance 0
            bias = attention.compute_bias(1, max_new_tokens, past_seen_tokens=max_new_tokens - 1)
        self.register_buffer("bias", bias.clone())

    def forward(
        self, token: torch.Tensor, past: list[torch.Tensor], cross: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        x = self.decoder.embed_tokens(token)
        first = self.bias.shape[-1] - 1 - past[0].shape[2]
        bias, present = self.bias[..., first:], []
        for i, block in enumerate(self.decoder.block):
            attention, normed = block.layer[0].SelfAttention, _norm(block.layer[0].layer_norm, x)
            new = [_heads(part(normed), attention) for part in (attention.k, attention.v)]
            pair = [torch.cat([past[2 * i + j], new[j]], dim=2) for j in (0, 1)]
            present += pair
            x = x + _attend(attention, normed, *pair, bias)
            layer = block.layer[1]
            x = x + _attend(layer.EncDecAttention, _norm(layer.layer_norm, x), *cross[2 * i : 2 * i + 2], 0.0)
            x = x + block.layer[2].DenseReluDense(_norm(block.layer[2].layer_norm, x))
        logits = self.head(_norm(self.decoder.final_layer_norm, x) * self.scale)
        return [logits.argmax(-1), *present]


def _norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns T5's norm as one operation; written out it would be five in ONNX Runtime."""
    return functional.rms_norm(x, x.shape[-1:], layer.weight, layer.variance_epsilon)


def _heads(x: torch.Tensor, attention: Any) -> torch.Tensor:
    return x.view(1, -1, attention.n_heads, attention.key_value_proj_dim).transpose(1, 2)


def _attend(attention: Any, x: torch.Tensor, keys: Any, values: Any, bias: Any) -> torch.Tensor:
    scores = _heads(attention.q(x), attention) @ keys.transpose(2, 3) + bias
    context = functional.softmax(scores, dim=-1) @ values
    return attention.o(context.transpose(1, 2).reshape(1, 1, attention.inner_dim))


def export(model: Any, folder: pathlib.Path, max_new_tokens: int) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes both graphs; returns their paths."""
    model.set_attn_implementation("eager")  # the exporter does not support the fused one
    count, c = 2 * len(model.decoder.block), model.config
    paths = folder / "encoder.onnx", folder / "step.onnx"
    ids, token = torch.zeros(1, 7, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long)
    slots = lambda num: [torch.zeros(1, c.num_heads, num, c.d_kv) for _ in range(count)]  # noqa: E731
    source, filled = torch.export.Dim("source"), torch.export.Dim("filled", max=max_new_tokens - 1)
    common = dict(dynamo=True, opset_version=23, external_data=True, optimize=True, verbose=False)
    torch.onnx.export(Encoder(model).eval(), (ids,), paths[0], dynamic_shapes=({1: source},), **common)
    torch.onnx.export(
        Step(model, max_new_tokens).eval(),
        (token, slots(3), slots(7)),
        paths[1],
        dynamic_shapes=(None, [{2: filled}] * count, [{2: source}] * count),
        **common,
    )
    return paths


def runner(
    model: Any, folder: pathlib.Path, max_new_tokens: int, start_id: int, eos_id: int
) -> Callable[[np.ndarray], list[int]]:
    """Exports a T5; returns a function from source ids to output ids."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = results.num_cores()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    encoder, step = (
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        for path in export(model, folder, max_new_tokens)
    )
    value = onnxruntime.OrtValue.ortvalue_from_numpy
    (source_name,), names = [x.name for x in encoder.get_inputs()], [x.name for x in step.get_inputs()]
    c, num_past = model.config, 2 * len(model.decoder.block)
    empty = value(np.zeros((1, c.num_heads, 0, c.d_kv), np.float32))
    start = value(np.full((1, 1), start_id, np.int64))

    def run(source_ids: np.ndarray) -> list[int]:
        cross = encoder.run_with_ort_values(None, {source_name: value(source_ids[None].astype(np.int64))})
        token, past, ids = start, [empty] * num_past, []
        while len(ids) < max_new_tokens and ids[-1:] != [eos_id]:
            # OrtValues are passed on without copies.
            token, *past = step.run_with_ort_values(
                None, dict(zip(names, [token, *past, *cross], strict=True))
            )
            ids.append(int(token.numpy()[0, 0]))
        return ids

    return run
