"""Training of a tokenizer: a SentencePiece unigram model with byte fallback."""

import pathlib
import tempfile
from collections.abc import Iterable
from typing import Any

# From this size on, the vocabulary includes the 256 bytes, which encode any character.
MIN_SIZE_WITH_BYTES = 1024


def load_or_train_tokenizer(
    directory: str | pathlib.Path, lines: Iterable[str], vocab_size: int | None
) -> Any:
    """Returns the tokenizer in `directory`; if it is missing, makes one and writes it there.

    Pad is 0, end 1 and unknown 2, as in T5. Text is neither normalised nor trimmed: repeated spaces survive a
    round trip (a leading space does not); with byte fallback, newlines and rare characters do too.

    Args:
      lines: text to train a unigram model on, without sentinels.
      vocab_size: with byte fallback from `MIN_SIZE_WITH_BYTES` on; None: ByT5's byte tokenizer, which
        needs no training.
    """
    import transformers

    directory = pathlib.Path(directory)
    if not (directory / "tokenizer_config.json").exists():
        tokenizer = transformers.ByT5Tokenizer() if vocab_size is None else _train(lines, vocab_size)
        tokenizer.save_pretrained(directory)
    return transformers.AutoTokenizer.from_pretrained(directory)


def _train(lines: Iterable[str], vocab_size: int) -> Any:
    import sentencepiece
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, processors

    spells_bytes = vocab_size >= MIN_SIZE_WITH_BYTES
    with tempfile.TemporaryDirectory() as scratch:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_prefix=f"{scratch}/spiece",
            vocab_size=vocab_size,
            model_type="unigram",
            character_coverage=0.9999 if spells_bytes else 1.0,
            byte_fallback=spells_bytes,
            user_defined_symbols=["\n"] if spells_bytes else [],
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            minloglevel=2,
        )
        trained = sentencepiece.SentencePieceProcessor(model_file=f"{scratch}/spiece.model")
    pieces = [(trained.id_to_piece(i), trained.get_score(i)) for i in range(len(trained))]
    # transformers.T5Tokenizer splits at white space and drops it, so the pieces need another pipeline.
    pipeline = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=spells_bytes))
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    pipeline.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pipeline.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pipeline, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
