"""This module shows progress while a command works, so that no command is silent for long on a terminal or in a log.

Work that takes more than two seconds prints a line that describes it. A reporter writes log lines to stderr, and a
progress bar or a line from time to time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

AFTER, EVERY = 2.0, 15.0  # seconds until the first line, and between the others
AGAIN = 120.0  # seconds until words that have not changed are said again


@contextmanager
def meanwhile(what: Callable[[], object], first: float, every: float) -> Iterator[None]:
    """Call the function `what` repeatedly while the `with` block runs: first after `first` seconds, and then every
    `every` seconds.

    A separate thread calls the function, also while the work stays in C code for minutes. The end of the block waits
    for a call in progress.
    """
    over = threading.Event()

    def go_round() -> None:
        pause = first
        while not over.wait(pause):
            pause = every
            what()

    thread = threading.Thread(target=go_round, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _print(line: str) -> None:
    with suppress(OSError, ValueError):  # nobody listens
        print(line, file=sys.stderr, flush=True)


def saying(what: str, after: float | None = None) -> AbstractContextManager[None]:
    """While the `with` block runs, print a line such as ``WHAT (22 s so far)`` on stderr after two seconds (or after
    `after` seconds), and then every 15 seconds.

    This function serves work that cannot report its progress.
    """
    started = time.monotonic()
    return meanwhile(
        lambda: _print(f"{what} ({time.monotonic() - started:.0f} s so far)"), AFTER if after is None else after, EVERY
    )


class _OnStderr:
    """An `_OnStderr` shows the progress of work: on a terminal by a progress bar of the library rich, elsewhere by the
    lines that `_say` prints now and then.
    """

    COLUMNS: tuple[str, ...] = ("TimeElapsedColumn",)  # of rich, behind words and bar
    _bar: Any = None
    _shown: AbstractContextManager[Any]

    def __enter__(self: Shown) -> Shown:
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            columns = [progress.TextColumn("{task.description}"), progress.BarColumn()]
            columns += [getattr(progress, name)() for name in self.COLUMNS]
            self._bar = self._shown = progress.Progress(*columns, console=Console(stderr=True), transient=True)
        else:
            self._shown = meanwhile(self._say, AFTER, EVERY)
        self._shown.__enter__()
        self._begin()
        return self

    def __exit__(self, *exc: object) -> None:
        self._shown.__exit__(None, None, None)

    def _begin(self) -> None:
        """Do what is to be done when the text is first shown."""

    def _say(self) -> None:
        raise NotImplementedError


Shown = TypeVar("Shown", bound=_OnStderr)


class Progressing(_OnStderr):
    """A `Progressing` shows the progress of long work: a text that can change, and how much of the work (`total`) is
    done. Work that ends within two seconds prints nothing.

    If stderr is not a terminal, each text is printed once, and again only if it has not changed for two minutes.

    Args:
        words: the text that is shown first.
        total: the total amount of the work that `show` counts; None if it is unknown.
    """

    def __init__(self, words: str, total: float | None = None):
        self.words, self._total = words, total
        self._said, self._started = "", time.monotonic()
        self._last = self._started

    def _begin(self) -> None:
        if self._bar:
            self._task = self._bar.add_task(self.words, total=self._total)

    def show(self, words: str, done: float | None = None, total: float | None = None) -> None:
        """Show a new text in the progress display, and the amount of work that is done."""
        self.words, self._total = words, total or self._total
        if self._bar:
            self._bar.update(self._task, description=words, completed=done, total=self._total)

    def _say(self) -> None:
        now, words = time.monotonic(), self.words
        if words == self._said and now - self._last < AGAIN:
            return
        again = f" ({now - self._started:.0f} s so far)" if words == self._said else ""
        self._said, self._last = words, now
        _print(f"{words} ...{again}")


class Reporter:
    """A `Reporter` receives the progress of a command and prints nothing; tests and programs that call the tools as a
    library use this class.
    """

    def log(self, message: str) -> None:
        """Print nothing; subclasses of this class print the given line of text."""

    def start(self, label: str, total: int) -> None:
        """Print nothing; subclasses of this class begin to show a stage of the work with `total` bytes (0 if the number
        is unknown).
        """

    def advance(self, amount: int) -> None:
        """Print nothing; subclasses of this class show that `amount` more bytes are done."""

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
        """Return the progress as text, such as ``"encoding: 34%, 12 s"``. The percentage is left out if all input has
        been read but the work has not ended.
        """
        share = f"{self.done / self.total:.0%}, " if 0 < self.done < self.total else ""
        return f"{self.label}: {share}{time.monotonic() - self.begin:.0f} s"


class TerminalReporter(_OnStderr, Reporter):
    """A `TerminalReporter` prints lines on stderr. On a terminal a `TerminalReporter` also shows a progress bar (of the
    library rich); elsewhere it prints a line now and then during long work.
    """

    COLUMNS = ("DownloadColumn", "TimeRemainingColumn")
    _task: Any = None
    _stage: _Stage | None = None

    def log(self, message: str) -> None:
        """Print one line of text above the progress bar."""
        if self._bar:
            self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)
        else:
            print(message, file=sys.stderr, flush=True)

    def start(self, label: str, total: int) -> None:
        """Replace the progress bar by a new bar for `total` bytes."""
        self._stage = _Stage(label, total)
        if self._bar:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(label, total=total or None)

    def advance(self, amount: int) -> None:
        """Move the progress bar forward by `amount` bytes."""
        if self._stage:
            self._stage.done += amount
        if self._bar:
            self._bar.advance(self._task, amount)

    def _say(self) -> None:
        if self._stage:
            _print(self._stage.line())


class CountingReporter(TerminalReporter):
    """A `CountingReporter` is a `TerminalReporter` for work that is counted in items instead of bytes."""

    COLUMNS = ("TaskProgressColumn", "TimeElapsedColumn")
