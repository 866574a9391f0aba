"""Signals to an agent: collected while it waits, and raised where it may be interrupted."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL = 0.1


class Interrupted(Exception):
    """A signal has told us to leave."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


class Notices:
    """Collects SIGINT, SIGTERM and SIGHUP, as a context. While workers run, the supervisor does instead."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def __enter__(self) -> Notices:
        self._old: dict[int, Any] = {number: signal.signal(number, self._take) for number in NUMBERS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def sleep(self, seconds: float) -> None:
        """Wait; raises Interrupted at a signal, also at one that came before."""
        until = time.monotonic() + seconds
        while True:
            if self.received:
                raise Interrupted(self.received[0])
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(POLL, left))

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
