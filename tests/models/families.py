"""A tiny random checkpoint of every T5 family: its files, the keys of its config, its tokenizer.

The keys are those of the published config.json, as far as public sources show them; the sizes are not. Torch
writes the weights.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import tokenizers

TEXTS = [
    "def add(a, b): return a + b",
    "class Name: pass",
    "for i in range(10): print(i)",
    "a man rides a red horse",
    "two dogs run on the grass",
    "the house is small",
] * 3
SENTINELS = [f"<extra_id_{i}>" for i in range(4)]
SIZES = {
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_heads": 4,
    "num_layers": 2,
    "vocab_size": 384,
    "relative_attention_num_buckets": 32,
    "dropout_rate": 0.1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
}
V1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 2}
DERIVED = {"dense_act_fn": "gelu_new", "is_gated_act": True, "relative_attention_max_distance": 128}
ENCODER, DECODER, HEAD = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"
CROSS_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def write_json(path: pathlib.Path, content: Any) -> None:
    path.write_text(json.dumps(content), "utf-8")


# ---- tokenizers


def _train_sentencepiece(directory: pathlib.Path, name: str, **options: Any) -> int:
    """Writes a SentencePiece model; returns its size."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(directory / name),
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    (directory / f"{name}.vocab").unlink()
    return len(sentencepiece.SentencePieceProcessor(model_file=str(directory / f"{name}.model")))


def write_spiece(directory: pathlib.Path) -> None:
    """T5's: spiece.model and sentinels that only tokenizer_config.json states."""
    _train_sentencepiece(directory, "spiece", vocab_size=60, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    special["additional_special_tokens"] = SENTINELS
    write_json(directory / "special_tokens_map.json", special)
    stated = special | {"extra_ids": len(SENTINELS), "tokenizer_class": "T5Tokenizer"}
    write_json(directory / "tokenizer_config.json", stated)


def write_madlad(directory: pathlib.Path) -> None:
    """Unknown 0, `<s>` 1, end 2, then a newline and the languages; no sentinels."""
    languages = ["\n", "<2de>", "<2pt>"]
    ids = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
    _train_sentencepiece(directory, "spiece", vocab_size=64, user_defined_symbols=languages, **ids)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<s>"}
    write_json(directory / "special_tokens_map.json", special)
    stated = special | {"extra_ids": 0, "additional_special_tokens": [], "tokenizer_class": "T5Tokenizer"}
    write_json(directory / "tokenizer_config.json", stated)


def write_llama(directory: pathlib.Path) -> None:
    """Llama's: BPE of SentencePiece in tokenizer.model, bytes for what it cannot spell."""
    ids = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
    _train_sentencepiece(directory, "tokenizer", vocab_size=320, model_type="bpe", byte_fallback=True, **ids)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    write_json(directory / "special_tokens_map.json", special)
    stated = special | {"add_bos_token": False, "add_eos_token": True, "tokenizer_class": "LlamaTokenizer"}
    write_json(directory / "tokenizer_config.json", stated | {"legacy": False})


def write_roberta(directory: pathlib.Path) -> None:
    """CodeT5's: byte-level BPE in vocab.json and merges.txt, sentinels in added_tokens.json."""
    names = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS, vocab_size=300, min_frequency=1, special_tokens=list(names.values()))
    trained.save_model(str(directory))
    size = trained.get_vocab_size()

    def token(text: str) -> dict[str, Any]:
        is_sentinel = text in SENTINELS or text == "<mask>"
        flags = {"single_word": False, "lstrip": is_sentinel, "rstrip": False, "normalized": True}
        return {"content": text, **flags, "__type": "AddedToken"}

    special: dict[str, Any] = {f"{name}_token": token(text) for name, text in names.items()}
    special |= {"cls_token": token("<s>"), "sep_token": token("</s>")}
    special["additional_special_tokens"] = [token(text) for text in reversed(SENTINELS)]
    write_json(directory / "special_tokens_map.json", special)
    ids = {text: size + len(SENTINELS) - 1 - i for i, text in enumerate(SENTINELS)}
    write_json(directory / "added_tokens.json", ids)
    settings = {"add_prefix_space": False, "errors": "replace", "trim_offsets": True, "model_max_length": 512}
    write_json(
        directory / "tokenizer_config.json", special | settings | {"tokenizer_class": "RobertaTokenizer"}
    )


def write_byt5(directory: pathlib.Path) -> None:
    """ByT5's needs no vocabulary."""
    special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "extra_ids": 125}
    write_json(directory / "tokenizer_config.json", special | {"tokenizer_class": "ByT5Tokenizer"})


# ---- the families


@dataclasses.dataclass(frozen=True)
class Family:
    """How a family is stored.

    Attributes:
      config: keys of config.json that differ from `SIZES`; None: not there.
      tokenizer: writes its files.
      copies: names under which the file holds the embedding beside, or instead of, `shared.weight`.
      is_shared: the file has `shared.weight`.
      is_legacy: pytorch_model.bin is all there is.
      dtype: of the file.
      other: tensors of the file that no T5 reads.
      seed: of weights whose outputs vary.
    """

    config: dict[str, Any]
    tokenizer: Callable[[pathlib.Path], None] = write_spiece
    copies: tuple[str, ...] = (ENCODER, DECODER)
    is_shared: bool = True
    is_legacy: bool = False
    dtype: str = "float32"
    other: tuple[str, ...] = ()
    seed: int = 7

    @property
    def keys(self) -> dict[str, Any]:
        """The config.json."""
        return {key: value for key, value in (SIZES | self.config).items() if value is not None}

    @property
    def kind(self) -> str:
        """The prefix of its classes in transformers."""
        return self.keys["architectures"][0].removesuffix("ForConditionalGeneration")


UMT5 = {"architectures": ["UMT5ForConditionalGeneration"], "scalable_attention": True}
CODE = {"bos_token_id": 1, "eos_token_id": 2, "feed_forward_proj": "relu", "n_positions": 512}
FAMILIES = {
    "T5 v1.0": Family({"n_positions": 512}, copies=(ENCODER, DECODER, HEAD), other=(CROSS_BIAS,)),
    "T5 v1.1, LM-adapted": Family(V1_1 | {"output_past": True}, is_legacy=True),
    "FLAN": Family(V1_1 | DERIVED | {"n_positions": 512}),
    "FLAN-UL2": Family(
        V1_1 | DERIVED | {"feed_forward_proj": "gated-silu", "dense_act_fn": "silu"}, dtype="bfloat16"
    ),
    "mT5": Family(
        V1_1 | {"model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"]}, is_legacy=True
    ),
    "ByT5": Family(V1_1 | {"num_layers": 3, "num_decoder_layers": 1}, write_byt5, is_legacy=True, seed=0),
    "MADLAD-400": Family(
        V1_1 | DERIVED | {"pad_token_id": 1, "eos_token_id": 2},
        write_madlad,
        copies=(DECODER,),
        is_shared=False,
        seed=0,
    ),
    "UMT5": Family(V1_1 | DERIVED | UMT5 | {"model_type": None}, is_legacy=True, seed=2),
    "CodeT5": Family(CODE | {"num_decoder_layers": 2}, write_roberta, is_legacy=True, seed=2),
    "CodeT5+": Family(
        CODE | {"is_gated_act": False, "dense_act_fn": "relu"},
        write_roberta,
        is_legacy=True,
        dtype="float16",
        seed=2,
    ),
    "Pile-T5": Family(V1_1 | DERIVED | UMT5 | {"model_type": "umt5", "eos_token_id": 2}, write_llama, seed=0),
}


def write(directory: pathlib.Path, family: Family) -> None:
    """Writes a checkpoint of a family with random weights whose outputs vary."""
    import safetensors.torch
    import torch
    import transformers

    directory.mkdir()
    family.tokenizer(directory)
    write_json(directory / "config.json", family.keys)
    config = getattr(transformers, f"{family.kind}Config").from_dict(family.keys)
    model = getattr(transformers, f"{family.kind}ForConditionalGeneration")(config)
    if not family.keys.get("tie_word_embeddings", True):
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(config.vocab_size, config.d_model))
    torch.manual_seed(family.seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # The layers add more than the embedding of the last token, or each row would repeat it.
            scale = {"shared": 0.3, "relative_attention_bias": 3.0, "o": 3.0, "wo": 3.0}.get(
                name.split(".")[-2], 1.0
            )
            is_table = name.startswith("shared") or "relative" in name
            weight.normal_(0.0, scale * (1.0 if is_table else weight.shape[-1] ** -0.5))
            if "norm" in name:
                weight.mul_(0.5).add_(1.0)
    tensors = {name: x.to(getattr(torch, family.dtype)) for name, x in model.state_dict().items()}
    embedding, head = tensors["shared.weight"], tensors.pop(HEAD)
    tensors = {name: x for name, x in tensors.items() if name not in (ENCODER, DECODER, "shared.weight")}
    tensors |= {name: embedding for name in family.copies}
    if family.is_shared:
        tensors["shared.weight"] = embedding
    if not family.keys.get("tie_word_embeddings", True):
        tensors[HEAD] = head
    tensors |= {name: torch.ones(32, config.num_heads) for name in family.other}
    if family.is_legacy:
        torch.save(tensors, directory / "pytorch_model.bin")
        return
    whole = {name: x.clone().contiguous() for name, x in tensors.items()}
    safetensors.torch.save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
