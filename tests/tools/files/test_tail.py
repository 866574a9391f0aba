"""The end of a log."""

from tools.files import tail
from tools.files.tail import last_lines


def test_the_last_lines_of_a_log_or_none(tmp_path, monkeypatch):
    log = tmp_path / "worker.log"
    assert last_lines(log) == []
    log.write_bytes(b"first\nsecond \xff\nthird")
    assert last_lines(log) == ["first", "second \ufffd", "third"]
    monkeypatch.setattr(tail, "_LIMIT", 7)
    assert last_lines(log) == ["\ufffd", "third"]
