"""A bar for work that is counted in things instead of bytes."""

from __future__ import annotations

import sys

from tools.data.reporter import TerminalReporter


class CountingReporter(TerminalReporter):
    """`TerminalReporter` whose bar shows a share and the time, and which says nothing when stderr is no terminal."""

    def __enter__(self) -> CountingReporter:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        return self
