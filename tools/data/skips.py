"""Counting, and reporting without flooding, what a corpus holds that is no document."""

from __future__ import annotations

from dataclasses import dataclass, field

from plugins.errors import DataError
from tools.data.reporter import Reporter

SHOWN = 10


@dataclass
class Skips:
    """Counts of skipped documents by kind: `empty`, `invalid_utf8`, `broken_lines`.

    strict: raise at the first that is not merely empty. reporter: where the first `SHOWN` of them are named.
    """

    strict: bool = False
    reporter: Reporter = field(default_factory=Reporter)
    counts: dict[str, int] = field(default_factory=lambda: {"empty": 0, "invalid_utf8": 0, "broken_lines": 0})
    first: str = ""
    _faults: int = 0

    def add(self, kind: str, where: str, why: str) -> None:
        """Count one skipped document; raises `DataError` when strict and it is faulty, not just empty."""
        message = f"{where}: {why}"
        self.first = self.first or message
        self.counts[kind] += 1
        if kind == "empty":
            return
        if self.strict:
            raise DataError(f"{message} (--strict stops here)")
        self._faults += 1
        if self._faults <= SHOWN:
            self.reporter.log(f"skipped {message}")
        elif self._faults == SHOWN + 1:
            self.reporter.log("skipped ... more: only counted from here on")

    def summary(self) -> str:
        """Return e.g. "skipped 2 empty, 1 invalid_utf8", or an empty string."""
        counted = ", ".join(f"{count:,} {kind}" for kind, count in self.counts.items() if count)
        return f"skipped {counted}" if counted else ""
