"""What a comparison found: the first divergence of each phase, and what that usually means (report section 3.2.1)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

from tools.accuracy.compare.meaning import first_findings, meaning
from tools.accuracy.compare.rows import Row
from tools.accuracy.compare.updates import Updates
from tools.accuracy.tolerance import systematic

WIDE = 0.01  # a tolerance that needs to be said


@dataclass(frozen=True)
class Report:
    """All rows of a comparison, in the order of execution.

    Args:
        golden, bench: the folders.
        level, task: msprobe's.
        marked: both dumps say that they are whole; msprobe's own do not say.
        judged: what became of weights' changes from one step to the next.
        trained_known: whether the dumps tell which parameters a gradient trains.
    """

    golden: str
    bench: str
    level: str
    task: str
    marked: bool
    rows: list[Row]
    judged: Updates = field(default_factory=Updates)
    trained_known: bool = True

    @property
    def updates(self) -> int:
        """How many were judged."""
        return self.judged.judged

    @cached_property
    def findings(self) -> list[Row]:
        """The rows that did not pass."""
        return [row for row in self.rows if row.kind]

    @property
    def passed(self) -> bool:
        """Whether there is none, of at least one row."""
        return bool(self.rows) and not self.findings

    @cached_property
    def first(self) -> dict[str, Row | None]:
        """phase -> its first finding; of several ranks the one that is earliest in its own order."""
        return first_findings(self.findings)

    def summary(self) -> str:
        """One line."""
        exact = sum(not row.error for row in self.rows)
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(row.kind for row in self.findings).items())
        text = f"{len(self.rows)} tensors ({self.level}, {self.task}), {exact} identical, {len(self.findings)} findings"
        return text + (f": {kinds}" if kinds else "")

    def notes(self) -> list[str]:
        """What a reader must know about the judgement."""
        found = []
        if self.task == "statistics":
            found.append("judged by max, min, mean and norm only: values that changed places or cancel are not seen")
        found += self._about_updates()
        widest = max((row.tolerance for row in self.rows if row.by in ("values", "statistics")), default=0.0)
        if widest > WIDE:
            found.append(
                f"Table 2 lets single values be off by up to {100 * widest:.2g} % where sums are long; what scales a "
                f"whole tensor is found from {100 * systematic('bfloat16')[0]:.2g} % on, given some hundred values"
            )
        if not self.marked:
            found.append("a dump without tc3_dump.json does not say whether it is whole")
        return found

    def _about_updates(self) -> list[str]:
        """Which updates were judged how well; without any, the optimizer was not looked at."""
        judged, found = self.judged, []
        if self.updates > judged.exact:
            least = "they moved the same on both sides, or not at all"
            if judged.least:
                share = 100 * median(judged.least)
                least = f"one that is off by less than {share:.2g} % of itself is not seen (median)"
            count = self.updates - judged.exact
            found.append(f"{count} updates of weights judged by how max, min, mean and norm moved: {least}")
        for reason, count in judged.unknown.items():
            found.append(f"{count} updates of weights unknown: {reason}; --task tensor tells")
        if not self.updates and not judged.unknown:
            found.append("updates not judged, so that the optimizer is not: that takes weights in two steps")
        return found

    def meaning(self) -> str:
        """Where to look."""
        return meaning(self.rows, self.trained_known)

    def as_json(self) -> dict[str, Any]:
        """Everything but the rows that passed; an infinite error is the string "inf"."""
        return {
            "golden": self.golden,
            "bench": self.bench,
            "level": self.level,
            "task": self.task,
            "passed": self.passed,
            "tensors": len(self.rows),
            "updates": self.updates,
            "updates_unknown": dict(self.judged.unknown),
            "updates_seen_from": median(self.judged.least) if self.judged.least else None,
            "summary": self.summary(),
            "notes": self.notes(),
            "first": {phase: as_json(row) if row else None for phase, row in self.first.items()},
            "meaning": self.meaning(),
            "findings": [as_json(row) for row in self.findings],
        }


def as_json(row: Row) -> dict[str, Any]:
    """A row in values fit for JSON."""
    return {**asdict(row), "error": "inf" if math.isinf(row.error) else row.error}


def finding_text(row: Row) -> str:
    """One line about a finding."""
    rank = f" rank {row.rank}" if row.rank else ""
    numbers = f"error {row.error:.3g}, tolerance {row.tolerance:.3g} at count {row.count}; " if row.shape else ""
    return f"step {row.step}{rank} {row.name}: {row.kind}: {numbers}{row.detail}"
