"""How far the search of a recipe is: the phase, and the best step so far."""

from __future__ import annotations

import math

from tools.placement.budget import Budget
from tools.placement.incumbent import Incumbent
from tools.process.waiting import Progressing

_WORDS = {"ranking": "ranking the space", "placing": "placing layers", "bounding": "bounding the others"}


class SpaceProgress(Progressing):
    """Of `tc3 search RECIPE`: one phase after the other."""

    def __init__(self) -> None:
        super().__init__("looking at every mesh of the devices")

    def tell(self, phase: str, done: int, of: int, best: float) -> None:
        """Tell how far a phase is, and the best step seconds so far (infinite: none)."""
        found = f", best step {best:.2f} s" if math.isfinite(best) else ""
        self.show(f"{_WORDS[phase]}, {done:,} of {of:,}{found}", done, of)


class PlanProgress(Progressing):
    """Of the pipeline optimiser: the best plan, and how far it may be from the best there is."""

    def __init__(self, budget: Budget):
        super().__init__("looking for a first plan", budget.effort)
        self._budget = budget

    def tell(self, incumbent: Incumbent) -> None:
        """Tell of a better plan or bound."""
        if math.isfinite(incumbent.time):
            found = f"best step {incumbent.time:.6g}, gap {100 * incumbent.gap:.2f} %"
            self.show(f"{found}; effort {self._budget.spent:.0f} of {self._budget.effort:.0f}", self._budget.spent)
