"""Scores come from sacrebleu; misuse is refused."""

import pytest

from specjax import metrics


def test_bleu_of_the_references_is_100_and_the_signature_names_the_tokeniser():
    lines = ["Ein Mann fährt Rad auf der Straße.", "Zwei Hunde spielen im Schnee vor dem Haus."]
    score, signature = metrics.bleu(lines, lines)
    assert score == pytest.approx(100.0) and "tok:13a" in signature


def test_unequal_counts_are_refused_with_both():
    with pytest.raises(ValueError, match="1 hypotheses but 2 references"):
        metrics.bleu(["a"], ["a", "b"])
