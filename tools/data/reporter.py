"""What the terminal sees while a command works: log lines and a progress bar, both on stderr."""

from __future__ import annotations

import sys
from typing import Any


class Reporter:
    """Says nothing. Library callers and tests use it as it is."""

    def log(self, message: str) -> None:
        """Report one line."""

    def start(self, label: str, total: int) -> None:
        """Begin a stage of `total` bytes."""

    def advance(self, amount: int) -> None:
        """Count `amount` bytes as done."""

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class TerminalReporter(Reporter):
    """Lines on stderr; a bar of rich's as well, when stderr is a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> TerminalReporter:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar:
            self._bar.stop()

    def log(self, message: str) -> None:
        """Print one line above the bar."""
        if self._bar:
            self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)
        else:
            print(message, file=sys.stderr, flush=True)

    def start(self, label: str, total: int) -> None:
        """Replace the bar by a new one of `total` bytes."""
        if self._bar:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(label, total=total)

    def advance(self, amount: int) -> None:
        """Move the bar by `amount` bytes."""
        if self._bar:
            self._bar.advance(self._task, amount)
