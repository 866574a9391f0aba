"""A bar on stderr with the best plan so far, when stderr is a terminal."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tools.search.budget import Budget
from tools.search.incumbent import Incumbent


class SearchProgress:
    """Shows time, the best step time and the gap to the bound."""

    def __init__(self, budget: Budget):
        self._budget = budget
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> SearchProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("looking for a first plan", total=self._budget.seconds)
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, incumbent: Incumbent) -> None:
        """Tell of a better plan or bound."""
        if not self._bar:
            return
        best = "none yet" if np.isinf(incumbent.time) else f"{incumbent.time:.6g}, gap {100 * incumbent.gap:.2f} %"
        self._bar.update(self._task, description=f"best step {best}", completed=self._budget.spent)
