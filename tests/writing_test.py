"""Files are written completely or not at all."""

import pytest

from specjax.writing import write_whole


def test_files_are_replaced_together(tmp_path):
    weights, config = tmp_path / "weights", tmp_path / "config"
    weights.write_text("old")
    write_whole({weights: lambda path: path.write_text("new"), config: lambda path: path.write_text("8")})
    assert (weights.read_text(), config.read_text()) == ("new", "8")
    assert set(tmp_path.iterdir()) == {weights, config}


def test_write_whole_keeps_the_old_files_if_a_writer_fails(tmp_path):
    weights, config = tmp_path / "weights", tmp_path / "config"
    weights.write_text("old")

    def fail(path):
        path.write_text("half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        write_whole({weights: lambda path: path.write_text("new"), config: fail})
    assert weights.read_text() == "old" and set(tmp_path.iterdir()) == {weights}
