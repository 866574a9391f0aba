"""A line on stderr when something takes longer than a moment, so that nobody wonders whether it hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click

_MOMENT = 2.0  # seconds


@contextmanager
def said_after(what: str, seconds: float = _MOMENT) -> Iterator[None]:
    """Say `what` if the block takes longer than so many seconds."""
    timer = threading.Timer(seconds, lambda: click.echo(f"{what} ...", err=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
