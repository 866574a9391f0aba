"""How far a long command is, on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

QUIET = 2.0  # seconds of which nobody needs to hear
EVERY = 15.0  # seconds between two lines


class Counted:
    """Shows what is being done and how much of it is. Use as a context; it says nothing of what is over in no time."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True) if sys.stderr.isatty() else None
        self._next = time.monotonic() + QUIET

    def __enter__(self) -> Counted:
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, what: str, done: int, total: int) -> None:
        """`done` of `total` are done, and `what` is being done now."""
        if self._bar:
            self._bar.update(self._task, description=what, completed=done, total=total)
        elif time.monotonic() > self._next:
            self._next = time.monotonic() + EVERY
            click.echo(f"{done} of {total} done: {what} ...", err=True)
