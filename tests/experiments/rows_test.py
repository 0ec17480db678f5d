"""What a table says of texts."""

import pytest

from experiments import rows

SAID = ["The dog runs. A man sits.", "Blue snow."]


def test_quality_is_by_the_metric_of_the_task():
    same = rows.quality(SAID, rows.References(SAID, "rouge"))
    assert (same["quality"], same["rouge1"], same["rouge2"]) == pytest.approx((100, 100, 100))
    assert same["metric"].startswith("ROUGE-Lsum rouge-score:")
    other = rows.quality(SAID, rows.References([SAID[0], "A cat."], "rouge"))
    assert other["quality"] == pytest.approx(50)
    assert rows.quality(SAID, rows.References(SAID, "bleu"))["metric"].startswith("BLEU ")
    assert rows.quality(SAID, None) == {}
