"""What a comparison found: the first divergence of each phase, and what that usually means (report section 3.2.1)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from tools.accuracy.compare_rows import EXTRA, MISSING, UPDATE, Row
from tools.accuracy.dumps.names import BACKWARD, FORWARD, PHASES, WEIGHTS
from tools.accuracy.tolerance import systematic

WIDE = 0.01  # a tolerance that needs to be said


@dataclass(frozen=True)
class Report:
    """All rows of a comparison, in the order of execution.

    Args:
        golden, bench: the folders.
        level, task: msprobe's.
        marked: both dumps say that they are whole; msprobe's own do not say.
        updates: weights' changes from one step to the next that were judged.
    """

    golden: str
    bench: str
    level: str
    task: str
    marked: bool
    rows: list[Row]
    updates: int = 0

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
        found: dict[str, Row | None] = {}
        for phase in PHASES:
            rows = [row for row in self.findings if row.phase == phase]
            found[phase] = min(rows, key=lambda row: (row.step, row.order, row.rank), default=None)
        return found

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
        if not self.updates:
            found.append(
                "updates not judged, so that the optimizer is not: that takes the values (--task tensor) of weights in "
                "two steps"
            )
        widest = max((row.tolerance for row in self.rows if row.by in ("values", "statistics")), default=0.0)
        if widest > WIDE:
            found.append(
                f"Table 2 lets single values be off by up to {100 * widest:.2g} % where sums are long; what scales a "
                f"whole tensor is found from {100 * systematic('bfloat16')[0]:.2g} % on, given some hundred values"
            )
        if not self.marked:
            found.append("a dump without tc3_dump.json does not say whether it is whole")
        return found

    def meaning(self) -> str:
        """What the pattern of first findings usually means."""
        return meaning(self.first, min((row.step for row in self.rows), default=0))

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
            "summary": self.summary(),
            "notes": self.notes(),
            "first": {phase: as_json(row) if row else None for phase, row in self.first.items()},
            "meaning": self.meaning(),
            "findings": [as_json(row) for row in self.findings],
        }


def as_json(row: Row) -> dict[str, Any]:
    """A row in values fit for JSON."""
    return {**asdict(row), "error": "inf" if math.isinf(row.error) else row.error}


def meaning(first: dict[str, Row | None], start: int) -> str:
    """Where to look, from the first finding of each phase; `start` is the first step dumped."""
    forward, backward, weights = first[FORWARD], first[BACKWARD], first[WEIGHTS]
    if weights and weights.step == start and weights.role == "parameters":
        return (
            f"The weights differ before any update, first {weights.place}: look at initialisation, seed or the loaded "
            "checkpoint before any arithmetic."
        )
    if forward and forward.step == start:
        return _forward(forward)
    if backward and backward.step == start:
        return (
            f"The forward pass of the first step agrees, its backward pass does not: {origin(backward)}. Look at how "
            "that gradient is computed, scaled or reduced."
        )
    changed = [row for row in (backward, weights, forward) if row]
    if not changed:
        return "No tensor diverges."
    if (
        weights
        and all(weights.step <= row.step for row in changed if row is not backward)
        and (not backward or backward.step >= weights.step)
    ):
        return (
            f"Forward and backward agree until the weights of step {weights.step} differ, first {weights.place}: the "
            "optimizer: weight decay and its groups, learning rate, betas, epsilon, clipping, or the reduction of "
            "gradients between backward and optimizer."
        )
    earliest = min(changed, key=lambda row: (row.step, row.phase == BACKWARD))
    return (
        f"The first step agrees and its weights do; step {earliest.step} does not: {origin(earliest)}. Look at its "
        "data (order, seed) and at state that is not a weight, such as a router's bias."
    )


def _forward(row: Row) -> str:
    if row.kind in (MISSING, EXTRA):
        return f"The sides do not call the same: {row.name} ({row.detail}). Look at the model's structure first."
    if row.role == "input" and row.order == 0:
        return "The inputs of the first step differ: look at the dataset's order, tokens and masks, not at arithmetic."
    return (
        f"The initial loss is affected: {origin(row)}. Look at the forward computation there: the operator's "
        "precision, or a structure that is not the same."
    )


def origin(row: Row) -> str:
    """Who made a row's tensor, as far as the dump tells."""
    if row.kind == UPDATE:
        return f"the update of {row.place}"
    if row.role == "input":
        around = row.place.split(" ")[0].rpartition(".")[0]
        inside = f" in {around}" if around else ""
        return f"what arrives at {row.place} is wrong already, made{inside} between the calls that were dumped"
    return f"{row.place} is the first whose result differs"
