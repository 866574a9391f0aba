"""How many candidates each rule dropped: total -> legal -> within limits -> fit -> ranked."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Funnel:
    """Counts of candidates; `dropped` has those whose first broken rule is the reason."""

    total: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str, count: int) -> None:
        """Count candidates that a rule drops."""
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    @property
    def left(self) -> int:
        """Candidates remaining."""
        return self.total - sum(self.dropped.values())

    def excluded_by_limits(self) -> list[str]:
        """Limits of the user that dropped something."""
        return [reason for reason in self.dropped if reason.startswith("--limit")]

    def lines(self) -> list[tuple[str, int]]:
        """For a table: the whole, what each rule dropped (negative), what is left."""
        return [("all", self.total), *((reason, -count) for reason, count in self.dropped.items()), ("left", self.left)]
