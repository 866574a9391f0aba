"""The best plan of a search so far, and what is proven about all others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tools.placement.ilp import IMPROVEMENT
from tools.placement.instance import Instance


class Incumbent:
    """Takes plans from anyone, keeps the fastest that keeps every rule by the simulator's word.

    plan    [K, C] or None
    time    its simulated step time; infinite without a plan
    bound   no plan is faster than this
    """

    def __init__(self, instance: Instance, bound: float = 0.0, report: Callable[[Incumbent], None] | None = None):
        self.instance = instance
        self.plan: np.ndarray | None = None
        self.time = np.inf
        self.bound = bound
        self._report = report

    @property
    def gap(self) -> float:
        """How much of the step time the bound leaves open: (time - bound) / time; infinite without a plan."""
        return max(0.0, 1 - self.bound / self.time) if self.plan is not None else np.inf

    @property
    def proven(self) -> bool:
        """Whether no other plan is better by more than `IMPROVEMENT`."""
        return self.gap <= IMPROVEMENT

    @property
    def goal(self) -> float:
        """What a plan must not exceed to be better."""
        return self.time * (1 - IMPROVEMENT)

    def offer(self, plan: np.ndarray) -> bool:
        """Take `plan` if it is faster, well formed and within the cap; say whether it was taken."""
        one = plan[None]
        if not (self.instance.well_formed(one)[0] and self.instance.fits(one)[0]):
            return False
        time = float(self.instance.step_times(one)[0])
        if time >= self.time:
            return False
        self.plan, self.time = plan.copy(), time
        self.bound = min(self.bound, time)  # the solver's tolerance may have put it a little above
        self._tell()
        return True

    def prove(self, bound: float) -> None:
        """Take a lower bound of all plans; one over the best plan's time proves that plan the best."""
        bound = min(bound, self.time)
        if np.isfinite(bound) and bound > self.bound:
            self.bound = bound
            self._tell()

    def _tell(self) -> None:
        if self._report:
            self._report(self)
