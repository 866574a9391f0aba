"""What a run found: rows by operator and data type, counted; as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from tools.accuracy.operators.run import FAIL, NOT_RUNNABLE, PASS, Row
from tools.accuracy.promotion import NAMES

SHORT = {long: short for short, long in NAMES.items()}


@dataclass(frozen=True)
class Report:
    """All rows of a run.

    Args:
        device: what the operators ran on.
        seed, reruns: of the run.
    """

    device: str
    seed: int
    reruns: int
    rows: list[Row]

    def cells(self) -> dict[tuple[str, str], list[Row]]:
        """(operator, data type) -> its rows, in the order of the run."""
        cells: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            cells.setdefault((row.op, row.dtype), []).append(row)
        return cells

    def with_status(self, status: str) -> list[Row]:
        """The rows of one status."""
        return [row for row in self.rows if row.status == status]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.with_status(FAIL)

    def counted(self) -> dict[str, int]:
        """How many combinations of operator and data type have which status."""
        found = [status_of(rows) for rows in self.cells().values()]
        return {status: found.count(status) for status in (PASS, FAIL, NOT_RUNNABLE)}

    def summary(self) -> str:
        """One line."""
        counts, partly = self.counted(), sum(row.phase == "backward" for row in self.with_status(NOT_RUNNABLE))
        names = len({row.op for row in self.rows})
        text = f"{names} operator{'s' * (names != 1)} on {self.device}; by data type: {counts[PASS]} pass, "
        text += f"{counts[FAIL]} fail, {counts[NOT_RUNNABLE]} not runnable here"
        return text + (f"; of {partly} only the forward runs" if partly else "")

    def as_json(self) -> dict[str, Any]:
        """Everything; an infinite error is the string "inf"."""
        rows = [{**asdict(row), "error": "inf" if math.isinf(row.error) else row.error} for row in self.rows]
        return {
            "device": self.device,
            "seed": self.seed,
            "reruns": self.reruns,
            "passed": self.passed,
            "counts": self.counted(),
            "rows": rows,
        }


def status_of(rows: list[Row]) -> str:
    """Of an operator in a data type: a failure, else whether the forward ran at all."""
    if any(row.status == FAIL for row in rows):
        return FAIL
    return NOT_RUNNABLE if rows[0].status == NOT_RUNNABLE else PASS


def used(rows: list[Row]) -> float:
    """The largest share of the tolerance that forward and backward used up; 0 for values that are only moved."""
    return max((row.error / row.tolerance for row in rows if row.tolerance and row.phase != "special"), default=0.0)


def cell_text(rows: list[Row]) -> str:
    """One cell of the table."""
    status = status_of(rows)
    if status == NOT_RUNNABLE:
        return "-"
    if status == FAIL:
        return "FAIL special" if all(row.phase == "special" for row in rows if row.status == FAIL) else "FAIL"
    text = f"{used(rows):.0%}" if any(row.tolerance for row in rows if row.phase != "special") else "exact"
    return f"{text}, forward only" if any(row.status == NOT_RUNNABLE for row in rows) else text


def failure_text(row: Row) -> str:
    """One line about a failure."""
    sizes = "x".join(map(str, row.shape))
    which = f"{row.phase} {row.tensor}" if row.phase != "rerun" else "rerun"
    numbers = f"error {row.error:.3g}, tolerance {row.tolerance:.3g} at count {row.count}; " if row.outside else ""
    outside = f"{row.outside} elements; " if row.outside else ""
    return f"{row.op} {SHORT[row.dtype]} {which} [{sizes}]: {numbers}{outside}{row.detail}"


def not_runnable_lines(rows: list[Row]) -> list[str]:
    """One line an operator and message: data types, phase when it is only the backward, and what MindSpore said."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        grouped.setdefault((row.op, row.phase, row.detail), []).append(SHORT[row.dtype])
    return [
        f"{op} {', '.join(dtypes)}{' backward' if phase == 'backward' else ''}: {detail}"
        for (op, phase, detail), dtypes in grouped.items()
    ]
