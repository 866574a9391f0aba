"""This module limits how long a search may run. The effort of a search is counted in units of work. A search also stops
early at a time limit, which is only for safety, or after Ctrl-C.

A unit of effort takes about a second on one idle core, but it is counted as work: simulated operations, nodes of the
solver's branch-and-bound tree, simplex iterations. So the same effort gives the same plan on a fast and on a slow
machine, with or without other jobs. Only a deadline or Ctrl-C can end a search earlier, and `Budget.cut` says when a
deadline did.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from tools.process.children import handled

EFFORTS = {"low": 3.0, "normal": 10.0, "high": 60.0}  # units for one placement
LATE = "the time limit ended it: another machine may find another answer"


class Budget:
    """A `Budget` holds the units of work that a search may spend, and the number of seconds after which the search must
    stop in any case.
    """

    def __init__(self, effort: float, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic):
        self.effort = effort
        self.seconds = seconds
        self.spent = 0.0
        self.stopped = False
        self.cut = False  # a deadline, of this or of a part, came before the work was done
        self._late = False
        self._clock = clock
        self._begin = clock()

    @property
    def elapsed(self) -> float:
        """Return the seconds since the search started."""
        return self._clock() - self._begin

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the search's deadline; return 0 if the search was stopped."""
        return 0.0 if self.stopped else max(0.0, self.seconds - self.elapsed)

    @property
    def left(self) -> float:
        """Return the units of work that are left in this budget; return 0 if the search was stopped or the deadline has
        passed. The field `cut` records whether the deadline has passed.
        """
        units = max(0.0, self.effort - self.spent)
        if units and not self.stopped and self.elapsed >= self.seconds:
            self._late = True
            self._note_cut()
        return 0.0 if self.stopped or self._late else units

    @property
    def over(self) -> bool:
        """Return whether the search has spent its budget, so that no units of work are left."""
        return self.left <= 0

    def spend(self, units: float) -> None:
        """Subtract the units of work that a search has spent from the units that are left in its budget."""
        self.spent += units

    def part(self, share: float, seconds: float = math.inf) -> Budget:
        """Return a new budget with a share of this budget's units of work. Work that is charged to the new budget is
        also charged to this budget.
        """
        return _Part(self, min(self.left, share * self.effort), seconds)

    def units(self, units: float) -> Budget:
        """Return a new budget with the given number of units of work, limited to the units that are left. Work that is
        charged to the new budget is also charged to this budget.
        """
        return _Part(self, min(self.left, units), math.inf)

    def stop(self) -> None:
        """Discard all units of work that are left in this budget, so that the search ends."""
        self.stopped = True

    def _note_cut(self) -> None:
        self.cut = True


class _Part(Budget):
    def __init__(self, whole: Budget, effort: float, seconds: float):
        super().__init__(effort, seconds, whole._clock)
        self._whole = whole

    @property
    def left(self) -> float:
        return min(super().left, self._whole.left)

    def spend(self, units: float) -> None:
        super().spend(units)
        self._whole.spend(units)

    def _note_cut(self) -> None:
        super()._note_cut()
        self._whole._note_cut()


@contextmanager
def interruptible(budget: Budget) -> Iterator[None]:
    """While the `with` block runs, Ctrl-C, SIGTERM or SIGHUP stops the search's `budget` instead of the process; a
    second Ctrl-C raises KeyboardInterrupt.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        if budget.stopped:
            raise KeyboardInterrupt
        budget.stop()

    with handled(signal.SIGINT, stop), handled(signal.SIGTERM, stop), handled(signal.SIGHUP, stop):
        yield
