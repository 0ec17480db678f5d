"""Where two greedy runs differ, and whether it was at a near tie."""

from experiments import identity


def test_rows_that_differ_are_found_at_their_first_token_with_the_margin_there(monkeypatch):
    plain = [[5, 6, 1], [7, 8, 9], [4, 1], [3, 3]]
    others = [[5, 6, 1], [7, 2, 9], [4, 1, 1], [3]]
    margins = {("b", 1, (7,)): 1e-6, ("c", 2, (4, 1)): 1.0, ("d", 3, (3,)): 1e-5}
    monkeypatch.setattr(
        identity, "margin", lambda request, before, index: margins[request, index, tuple(before)]
    )
    found = identity.differences(plain, others, lambda row: ("abcd"[row], row))
    assert [(d.row, d.position) for d in found] == [(1, 1), (2, 2), (3, 1)]
    assert identity.counted(found, 4) == ("1 of 4", 2)
