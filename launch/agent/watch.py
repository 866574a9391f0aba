"""Who gives no sign of life any more, from changes that this host has seen itself: no two clocks are ever compared."""

from __future__ import annotations

from collections.abc import Hashable


class Watch:
    """For how long each thing has not changed. `most`: seconds that one look can add.

    A look after a long pause of our own (the disk stalled, this process was stopped, a clock was set) says little of
    the others: they may have been held up by the same thing, and must get the time to write. So a look never adds
    more than `most`, and nothing where the clock went back.
    """

    def __init__(self, most: float):
        self.most = most
        self._seen: dict[Hashable, tuple[object, float, float]] = {}  # its mark, the last look, seconds without change

    def unchanged(self, key: Hashable, mark: object, now: float) -> float:
        """Look at `key`, which is `mark` at time `now`: seconds for which it has been that, 0 at the first look."""
        before = self._seen.get(key)
        if before is None or before[0] != mark:
            quiet = 0.0
        else:
            quiet = before[2] + min(max(now - before[1], 0.0), self.most)
        self._seen[key] = (mark, now, quiet)
        return quiet
