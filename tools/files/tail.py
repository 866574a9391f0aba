"""The end of a log, which may be long."""

from __future__ import annotations

from pathlib import Path

_LIMIT = 1 << 20  # bytes


def last_lines(log: Path) -> list[str]:
    """Lines of the last megabyte of a log; none when there is no such file."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _LIMIT))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
