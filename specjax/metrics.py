"""Quality metrics of generated text, computed by the standard libraries."""

import importlib
import importlib.metadata
import re
from collections.abc import Sequence
from typing import Any

_BETWEEN_SENTENCES = re.compile(
    r"([.!?][\"'\u201c\u201d\u2019)]*)\s+(?=[\"'\u201c\u201e\u2018(]*[^\W_a-zß-ÿ])"
)


def _imported(module: str, metric: str) -> Any:
    """Imports and returns a module of the extra `metrics`, on first use."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{metric} needs {module.split(".")[0]}: pip install "specjax[metrics]"') from error


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Returns corpus BLEU (sacrebleu, cased, 13a tokenisation) and the signature to report with it.

    Raises:
      ValueError: the counts differ or are 0; the message states both.
    """
    sacrebleu = _imported("sacrebleu", "BLEU")
    _check_counts(hypotheses, references)
    metric = sacrebleu.metrics.BLEU()
    return metric.corpus_score(list(hypotheses), [list(references)]).score, str(metric.get_signature())


def rouge(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[dict[str, float], str]:
    """Returns mean F1 of ROUGE-1, ROUGE-2 and ROUGE-Lsum in percent, and the signature to report with it.

    Computed by rouge-score with its stemmer. ROUGE-Lsum compares sentence by sentence, but T5's tokenizer
    drops the newlines that separate them, so both sides are split by `split_sentences`.

    Returns:
      `{"rouge1": ..., "rouge2": ..., "rougeLsum": ...}` and, for instance,
      `rouge-score:0.1.2|stemmer:yes|sentences:newline+punctuation|mean:f1`.

    Raises:
      ValueError: the counts differ or are 0; the message states both.
    """
    rouge_scorer = _imported("rouge_score.rouge_scorer", "ROUGE")
    _check_counts(hypotheses, references)
    names = ("rouge1", "rouge2", "rougeLsum")
    scorer = rouge_scorer.RougeScorer(names, use_stemmer=True)
    scores = [
        scorer.score(split_sentences(reference), split_sentences(hypothesis))
        for hypothesis, reference in zip(hypotheses, references, strict=True)
    ]
    means = {name: 100 * sum(score[name].fmeasure for score in scores) / len(scores) for name in names}
    version = importlib.metadata.version("rouge-score")
    return means, f"rouge-score:{version}|stemmer:yes|sentences:newline+punctuation|mean:f1"


def split_sentences(text: str) -> str:
    """Inserts a newline after `.`, `!` or `?` (and closing quotes) before a capital or digit.

    Existing newlines stay. "Mr. Smith" is split too, in hypothesis and reference alike.
    """
    return _BETWEEN_SENTENCES.sub(r"\1\n", text)


def _check_counts(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references) or not references:
        raise ValueError(
            f"`hypotheses` and `references` must be of equal number, at least 1, got "
            f"{len(hypotheses)} hypotheses and {len(references)} references"
        )
