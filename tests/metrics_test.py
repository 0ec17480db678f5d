"""Scores come from sacrebleu and rouge-score; misuse raises."""

import pytest

from specjax import metrics


def test_bleu_of_the_references_is_100_and_the_signature_names_the_tokeniser():
    lines = ["Ein Mann fährt Rad auf der Straße.", "Zwei Hunde spielen im Schnee vor dem Haus."]
    score, signature = metrics.bleu(lines, lines)
    assert score == pytest.approx(100.0) and "tok:13a" in signature


@pytest.mark.parametrize("metric", [metrics.bleu, metrics.rouge])
def test_unequal_counts_raise_with_both(metric):
    with pytest.raises(ValueError, match="of equal number, at least 1, got 1 hypotheses and 2 references"):
        metric(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="got 0 hypotheses and 0 references"):
        metric([], [])


def test_rouge_equals_values_worked_out_by_hand():
    """Bigrams: "the cat" of 2 and 3. Longest common subsequence: "the cat sat" of 3 and 4."""
    scores, signature = metrics.rouge(["the cat sat", "dogs bark"], ["the cat quickly sat", "a dog barked"])
    one = 2 * 1 * 0.75 / 1.75
    assert scores["rouge1"] == pytest.approx(50 * (one + 2 * 1 * (2 / 3) / (5 / 3)))  # stems match
    assert scores["rouge2"] == pytest.approx(50 * (2 * 0.5 * (1 / 3) / (5 / 6) + 2 * 1 * 0.5 / 1.5))
    assert scores["rougeLsum"] == pytest.approx(scores["rouge1"])
    assert "stemmer:yes" in signature


def test_lost_newlines_do_not_change_rouge_lsum():
    """The tokenizer makes one line of a summary; its sentences may stand in another order."""
    reference = "Zarif met Kerry .\nHe was 36 .\nHe tweets in English ."
    hypothesis = "He tweets in English .\nZarif met Kerry .\nHe was 36 ."
    expected, _ = metrics.rouge([hypothesis], [reference])
    found, _ = metrics.rouge([hypothesis.replace("\n", " ")], [reference])
    assert found == expected and found["rougeLsum"] == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("One . Two . three", ["One .", "Two . three"]),
        ('He said "No." Then he left! 12 stayed?', ['He said "No."', "Then he left!", "12 stayed?"]),
        ("Er sagt: „Gut.“ Über allem: 3.5 kg. äußerst", ["Er sagt: „Gut.“", "Über allem: 3.5 kg. äußerst"]),
        ("kept\nnewlines here", ["kept", "newlines here"]),
    ],
)
def test_sentences_end_before_a_capital_or_a_digit(text, lines):
    assert metrics.split_sentences(text).split("\n") == lines
