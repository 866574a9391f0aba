"""What a search is at, on stderr: a bar where that is a terminal, else a line now and then."""

from __future__ import annotations

import sys
import threading
from typing import Any, TypeVar

Shown = TypeVar("Shown", bound="Progressing")
_FIRST, _EVERY = 2.0, 15.0  # seconds until the first line, and between two


class Progressing:
    """Shows words that change, and how much of `total` is done; work that ends within two seconds says nothing.

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
        wait = _FIRST
        while not self._over.wait(wait):
            print(f"tc3: {self.words}", file=sys.stderr, flush=True)
            wait = _EVERY
