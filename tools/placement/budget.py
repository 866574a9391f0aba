"""How long a search may go on: a deadline, and Ctrl-C as a wish to stop with the best so far."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Budget:
    """Seconds from now until the search must stop; `stop()` ends it at once.

    `clock` says the time: `time.process_time` makes a search independent of what else the machine does.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.seconds = seconds
        self.stopped = False
        self._clock = clock
        self._begin = clock()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._begin

    @property
    def left(self) -> float:
        """Seconds that are left; 0 once stopped."""
        return 0.0 if self.stopped else max(0.0, self.seconds - self.spent)

    @property
    def over(self) -> bool:
        """Whether there is nothing left."""
        return self.left <= 0

    def part(self, share: float) -> Budget:
        """Return a budget of a share of the whole, within what is left; it stops when this one does."""
        return _Part(self, min(self.left, share * self.seconds))

    def stop(self) -> None:
        """Leave no time, now."""
        self.stopped = True


class _Part(Budget):
    def __init__(self, whole: Budget, seconds: float):
        super().__init__(seconds, whole._clock)
        self._whole = whole

    @property
    def left(self) -> float:
        return min(super().left, self._whole.left)


@contextmanager
def interruptible(budget: Budget) -> Iterator[None]:
    """Make Ctrl-C and SIGTERM stop `budget` instead of raising; a second Ctrl-C raises as usual."""

    def stop(number: int, frame: FrameType | None) -> None:
        if budget.stopped:
            raise KeyboardInterrupt
        budget.stop()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
