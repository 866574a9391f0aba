"""What a user sees while a command works: log lines, and a progress bar or a line now and then, all on stderr."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tools.process.waiting import AFTER, EVERY


class Reporter:
    """Says nothing. Library callers and tests use it as it is."""

    def log(self, message: str) -> None:
        """Report one line."""

    def start(self, label: str, total: int) -> None:
        """Begin a stage of `total` bytes; 0 where nobody knows how much there is to do."""

    def advance(self, amount: int) -> None:
        """Count `amount` bytes as done."""

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


@dataclass
class _Stage:
    label: str
    total: int
    done: int = 0
    begin: float = field(default_factory=time.monotonic)

    def line(self) -> str:
        """``"encoding: 34%, 12 s"``; no share where all is read and something else goes on."""
        share = f"{self.done / self.total:.0%}, " if 0 < self.done < self.total else ""
        return f"{self.label}: {share}{time.monotonic() - self.begin:.0f} s"


class TerminalReporter(Reporter):
    """Lines on stderr. On a terminal a bar of rich's as well; elsewhere a line for work that takes its time."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._stage: _Stage | None = None
        self._over = threading.Event()
        self._pulse = threading.Thread(target=self._tell, daemon=True)

    def __enter__(self) -> TerminalReporter:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(*self.columns(), console=Console(stderr=True), transient=True)
            self._bar.start()
        else:
            self._pulse.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar:
            self._bar.stop()
        else:
            self._over.set()
            self._pulse.join()

    def columns(self) -> tuple[Any, ...]:
        """Of the bar."""
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

        return TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()

    def log(self, message: str) -> None:
        """Print one line above the bar."""
        if self._bar:
            self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)
        else:
            print(message, file=sys.stderr, flush=True)

    def start(self, label: str, total: int) -> None:
        """Replace the bar by a new one of `total` bytes."""
        self._stage = _Stage(label, total)
        if self._bar:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(label, total=total or None)

    def advance(self, amount: int) -> None:
        """Move the bar by `amount` bytes."""
        if self._stage:
            self._stage.done += amount
        if self._bar:
            self._bar.advance(self._task, amount)

    def _tell(self) -> None:
        """From a thread of its own, which speaks even where the work stays in C for minutes."""
        pause = AFTER
        while not self._over.wait(pause):
            pause = EVERY
            if self._stage:
                print(self._stage.line(), file=sys.stderr, flush=True)


class CountingReporter(TerminalReporter):
    """`TerminalReporter` for work that is counted in things instead of bytes: its bar shows a share and the time."""

    def columns(self) -> tuple[Any, ...]:
        """Of the bar."""
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

        return TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
