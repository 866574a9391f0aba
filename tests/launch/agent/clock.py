"""A clock that only moves when somebody waits, and a shared disk that goes by it: what these tests say of time does not
depend on how busy the machine is.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch.agent.disk import Disk

LOOK = 0.02  # seconds that pass between two looks of `Clock.until`
LONG = 600.0  # seconds: bounds what would otherwise hang, on any machine


class Clock:
    """Stands for the module `time` too, where a module reads the clock itself."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def until(self, what: Callable[[], Any], seconds: float = 60.0) -> tuple[Any, float]:
        """Call `what` until its result counts as true; return the result, and the seconds that passed."""
        began = self.now
        while not (found := what()):
            assert self.now - began < seconds
            self.sleep(LOOK)
        return found, self.now - began


class ClockedDisk(Disk):
    """A `ClockedDisk` waits by the clock, and its files have the clock's time. Each call is made at once, by the
    caller: no call takes so long that the disk counts as lost.
    """

    def __init__(self, clock: Clock, bound: float = 60.0):
        super().__init__(bound)
        self.clock = clock

    def ticks(self) -> float:
        return self.clock.now

    def pause(self, seconds: float) -> None:
        self.clock.sleep(seconds)

    def _stamp(self, descriptor: int) -> None:
        self.clock.sleep(1e-6)  # no two writes at the same time
        os.utime(descriptor, ns=(0, int(self.clock.now * 1e9)))

    def _ask(self, path: Path, what: Callable[[], Any], until: float) -> Any:
        return what()
