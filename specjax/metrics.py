"""Quality of generated text, by the field's own libraries."""

from collections.abc import Sequence


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Corpus BLEU (sacrebleu, cased, 13a tokenisation) and the signature to report beside it.

    Raises:
      ValueError: different counts; both are named.
    """
    import sacrebleu

    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses but {len(references)} references: give one each")
    metric = sacrebleu.metrics.BLEU()
    return metric.corpus_score(list(hypotheses), [list(references)]).score, str(metric.get_signature())
