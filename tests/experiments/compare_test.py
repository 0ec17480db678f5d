"""Comparison of two arms: differences of greedy outputs, and quality of texts."""

import pytest

from experiments.lib import compare

TEXTS = ["The dog runs. A man sits.", "Blue snow."]


def test_differences_have_the_first_differing_token_and_its_margin(monkeypatch):
    baseline = [[5, 6, 1], [7, 8, 9], [4, 1], [3, 3]]
    others = [[5, 6, 1], [7, 2, 9], [4, 1, 1], [3]]
    margins = {("b", 1, (7,)): 1e-6, ("c", 2, (4, 1)): 1.0, ("d", 3, (3,)): 1e-5}
    monkeypatch.setattr(
        compare, "margin", lambda request, before, index: margins[request, index, tuple(before)]
    )
    found = compare.differences(baseline, others, lambda row: ("abcd"[row], row))
    assert [(d.row, d.position) for d in found] == [(1, 1), (2, 2), (3, 1)]
    assert compare.counted(found, 4) == ("1 of 4", 2)


def test_quality_uses_the_metric_of_the_task():
    same = compare.quality(TEXTS, compare.References(TEXTS, "rouge"))
    assert (same["quality"], same["rouge1"], same["rouge2"]) == pytest.approx((100, 100, 100))
    assert same["metric"].startswith("ROUGE-Lsum rouge-score:")
    other = compare.quality(TEXTS, compare.References([TEXTS[0], "A cat."], "rouge"))
    assert other["quality"] == pytest.approx(50)
    assert compare.quality(TEXTS, compare.References(TEXTS, "bleu"))["metric"].startswith("BLEU ")
    assert compare.quality(TEXTS, None) == {}
