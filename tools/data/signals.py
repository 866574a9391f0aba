"""Signals around work that must not be cut in half."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C inside the block (milliseconds of renames or of starting a process).

    A process started here inherits the deafness, so that Ctrl-C reaches the parent alone.
    """
    with _handler(signal.SIGINT, signal.SIG_IGN):
        yield


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Make SIGTERM end the block as Ctrl-C would: with the clean-up of every `with` and `finally`."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handler(signal.SIGTERM, interrupt):
        yield


@contextmanager
def _handler(number, handler) -> Iterator[None]:
    """Install `handler` for the block; do nothing outside the main thread, where Python allows no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
