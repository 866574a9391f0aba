"""Which parameters does a gradient train? The others are state: counters, a router's bias, running statistics, caches.

msprobe shows a parameter behind its cell's forward pass. That cannot have changed a weight, but it may just have filled
a counter: a counter that differs in the first step is no sign of other initial weights. A parameter is trained if the
dump holds a gradient of it, in any step, on any rank and either side, or says so itself (`requires_grad`).
"""

from __future__ import annotations

from collections.abc import Iterable

from tools.accuracy.dumps.names import GRADIENT
from tools.accuracy.dumps.read_items import Entry, Item


class Trained:
    """What two dumps tell about their parameters.

    Args:
        entries: all calls of both dumps.

    Attributes:
        known: whether they tell anything: dumps of forward passes alone do not.
    """

    def __init__(self, entries: Iterable[Entry]):
        self._trained: set[tuple[str, str]] = set()
        self.known = False
        for entry in entries:
            gradient = entry.name.phase == GRADIENT
            for item in entry.items:
                if gradient or (item.role == "parameters" and item.trained is not None):
                    self.known = True
                    if gradient or item.trained:
                        self._trained.add((entry.name.path, item.parameter))

    def has(self, entry: Entry, item: Item) -> bool:
        """Whether a gradient trains this parameter; where nothing tells, it is taken for a weight."""
        return not self.known or (entry.name.path, item.parameter) in self._trained
