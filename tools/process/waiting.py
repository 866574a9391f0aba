"""Nothing is silent for long: what takes more than two seconds says what it is, on a terminal and in a log alike."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
