"""What a user sees while a command works: nothing is silent for long, on a terminal and in a log alike.

What takes more than two seconds says what it is. A reporter writes log lines, and a progress bar or a line now and
then, all on stderr.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

AFTER, EVERY = 2.0, 15.0  # seconds until the first line, and between the others
AGAIN = 120.0  # seconds until words that have not changed are said again
Shown = TypeVar("Shown", bound="Progressing")


@contextmanager
def saying(what: str, after: float | None = None) -> Iterator[None]:
    """A line on stderr after two seconds (or `after`), then now and then while the block runs: ``WHAT (22 s so far)``.

    For work that cannot say how far it is.
    """
    done = threading.Event()
    thread = threading.Thread(target=_say, args=(what, done, AFTER if after is None else after), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _say(what: str, done: threading.Event, pause: float) -> None:
    started = time.monotonic()
    while not done.wait(pause):
        with suppress(OSError, ValueError):  # nobody listens
            print(f"{what} ({time.monotonic() - started:.0f} s so far)", file=sys.stderr, flush=True)
        pause = EVERY


class Progressing:
    """Shows words that change, and how much of `total` is done; work that ends within two seconds says nothing.

    Off a terminal words are said once, and again only after two minutes without others.

    Args:
        words: what is done at first.
        total: of what `show` counts; None where nobody knows.
    """

    def __init__(self, words: str, total: float | None = None):
        self.words, self._total = words, total
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._bar: Any = None

    def __enter__(self: Shown) -> Shown:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self.words, total=self._total)
            self._bar.start()
        else:
            self._thread = threading.Thread(target=self._say, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._bar:
            self._bar.stop()
        if self._thread:
            self._thread.join()

    def show(self, words: str, done: float | None = None, total: float | None = None) -> None:
        """Say something else, and how far it is."""
        self.words, self._total = words, total or self._total
        if self._bar:
            self._bar.update(self._task, description=words, completed=done, total=self._total)

    def _say(self) -> None:
        wait, said, started = AFTER, "", time.monotonic()
        last = started
        while not self._over.wait(wait):
            now, wait = time.monotonic(), EVERY
            if self.words == said and now - last < AGAIN:
                continue
            again = f" ({now - started:.0f} s so far)" if self.words == said else ""
            said, last = self.words, now
            with suppress(OSError, ValueError):
                print(f"{said} ...{again}", file=sys.stderr, flush=True)


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
