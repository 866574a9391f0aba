"""What a node sees of the others while an attempt runs: that it is over, or that a neighbour is gone.

Each node looks after the next one by rank, so that its share is the same among 2 and among 4,096, and a dead one always
has a living one before it, while one lives. Spares look after one each, too: all others may die at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from launch.agent.meeting import Meeting
from tools.runs.attempts import End, Plan


@dataclass
class Around:
    """The other nodes of an attempt, as `host` sees them."""

    meeting: Meeting
    plan: Plan
    host: str
    finished: set[str] = field(default_factory=set)

    def look(self) -> str | None:
        """Why this node's workers are to end, in words; None while all is well. For about once a second.

        Who finds a neighbour lost writes its end for it.
        """
        number = self.plan.attempt
        if first := self.meeting.over(number):
            return f"{first} ended attempt {number}" if first != self.host else f"attempt {number} is over"
        other = self._neighbour()
        if other is None:
            return None
        if end := self.meeting.ended(number, other):  # it says no more
            self.meeting.end(number, end)  # again: if it went badly all must hear, and it may have died before that
            self.finished.add(other)
        elif self.meeting.stale(number, other):
            self.meeting.lost(number, other, f"no sign of life for {self.meeting.lost_after:g} s")
            return f"{other} gives no sign of life"
        return None

    def began(self) -> End | None:
        """How the part of the one that ended the attempt has ended."""
        number = self.plan.attempt
        first = self.meeting.over(number)
        return self.meeting.ended(number, first) if first else None

    def _neighbour(self) -> str | None:
        others = [host for host in self._after_us() if host not in self.finished]
        if not others:
            return None
        return others[0 if self.host in self.plan.hosts else sum(self.host.encode()) % len(others)]

    def _after_us(self) -> list[str]:
        """The others by rank, from the one after us and round."""
        hosts = self.plan.hosts
        place = hosts.index(self.host) + 1 if self.host in hosts else 0
        return [host for host in [*hosts[place:], *hosts[:place]] if host != self.host]
