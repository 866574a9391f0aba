"""A bar for work that is counted in things instead of bytes."""

from __future__ import annotations

from typing import Any

from tools.data.reporter import TerminalReporter


class CountingReporter(TerminalReporter):
    """`TerminalReporter` whose bar shows a share and the time."""

    def columns(self) -> tuple[Any, ...]:
        """Of the bar."""
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

        return TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
