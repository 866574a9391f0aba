"""What was found of each kind of kernel, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tools.accuracy.fusion import cells
from tools.accuracy.fusion.kernels import Found, Kernel
from tools.accuracy.fusion.replay import (
    EXACT,
    FUSED,
    UNFUSED,
    Culprit,
    allowances,
    first_wrong,
    inputs_of,
    run,
    verdict,
)
from tools.accuracy.judge import Verdict

DVM, AKG = "DVM, replayed", "CPU graph kernels"


@dataclass(frozen=True)
class Row:
    """One kind of kernel.

    Args:
        who: `DVM` or `AKG`. name: its operators. where: the path of one. times: how many there are in the graphs.
        dtype: that it was judged in.
        fused, unfused: the largest error of its results against float64. allowed: of the fused one, by Table 2.
        passed, unfused_passed: whether they are within it; no fused one with a culprit is.
        detail: the worst element. culprit: the operator that is wrong alone. why: what kept it from being run.
    """

    who: str
    name: str
    where: str
    times: int
    dtype: str
    fused: float
    unfused: float
    allowed: float
    passed: bool
    unfused_passed: bool
    detail: str = ""
    culprit: str = ""
    why: str = ""


@dataclass
class Report:
    """All rows.

    Args:
        skipped: why kernels were not computed again -> how many.
        losses: of the steps, with graph kernels and without; empty where nothing was trained.
    """

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)

    @property
    def wrong(self) -> list[Row]:
        """Return the kernels whose fused results are out of tolerance, in the order of the graphs."""
        return [row for row in self.rows if not row.passed and not row.why]

    @property
    def unknown(self) -> int:
        """Return the kernels that nothing is known of."""
        return sum(self.skipped.values()) + sum(row.times for row in self.rows if row.why)

    @property
    def passed(self) -> bool | None:
        """Whether every kernel is within tolerance; None where none is known to be out of it, but not all are known."""
        if self.wrong:
            return False
        return None if self.unknown or not self.rows else True

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "passed": self.passed,
            "unknown": self.unknown,
            "rows": [asdict(row) for row in self.rows],
            "skipped": self.skipped,
            "losses": self.losses,
        }


def replayed(found: Found, seed: int) -> list[Row]:
    """Return the rows of predicted kernels, fused as DVM does and unfused, both in NumPy."""
    rows = []
    for key, kernel in found.kernels.items():
        inputs = inputs_of(kernel, seed)
        exact, fused, unfused = (_leaving(kernel, run(kernel, inputs, way)) for way in (EXACT, FUSED, UNFUSED))
        rows.append(_row(DVM, kernel, found.counts[key], exact, fused, unfused))
    return rows


def measured(found: Found, seed: int, folder: Path) -> list[Row]:
    """Rows of the smallest kernel of each kind, as MindSpore computes it on this CPU with graph kernels and without.

    Raises:
        ClusterError: a process that runs them died.
    """
    kernels = list(found.smallest().values())
    inputs = [inputs_of(kernel, seed) for kernel in kernels]
    unfused = cells.results_of(kernels, inputs, cells.OFF, folder / "off")
    fused = cells.results_of(kernels, inputs, cells.ON, folder / "on")
    times = _times(found)
    rows = []
    for kernel, taken, one, other in zip(kernels, inputs, fused, unfused, strict=True):
        if isinstance(one, str) or isinstance(other, str):
            rows.append(_unrun(kernel, times[kernel.kind], one if isinstance(one, str) else str(other)))
        else:
            exact = _leaving(kernel, run(kernel, taken, EXACT))
            rows.append(_row(AKG, kernel, times[kernel.kind], exact, one, other))
    named = culprits(kernels, inputs, fused, folder / "steps")
    return [_named(row, culprit) if culprit and not row.why else row for row, culprit in zip(rows, named, strict=True)]


def culprits(
    kernels: list[Kernel], inputs: list[list[np.ndarray]], fused: list[list[np.ndarray] | str], folder: Path
) -> list[Culprit | None]:
    """The first operator of each kernel that is wrong alone; None where none is, or where that could not be asked.

    Args:
        fused: results of the kernels as they are; one of a single operator is not run again.
    """
    several = [place for place, kernel in enumerate(kernels) if len(kernel.steps) > 1]
    observed = dict(enumerate(fused))
    if several:
        ones, taken = [kernels[place] for place in several], [inputs[place] for place in several]
        observed |= zip(several, cells.results_of(ones, taken, cells.ON, folder, every_step=True), strict=True)
    found = []
    for place, kernel in enumerate(kernels):
        seen = observed[place]
        found.append(None if isinstance(seen, str) else first_wrong(kernel, inputs[place], seen))
    return found


def _named(row: Row, culprit: Culprit) -> Row:
    """An operator that is wrong makes its kernel wrong, even where a sum hides it."""
    return replace(row, passed=False, culprit=culprit.op, detail=f"off by {culprit.verdict.error:.1e}")


def _times(found: Found) -> Mapping[str, int]:
    times: dict[str, int] = {}
    for key, kernel in found.kernels.items():
        times[kernel.kind] = times.get(kernel.kind, 0) + found.counts[key]
    return times


def _leaving(kernel: Kernel, results: list[np.ndarray]) -> list[np.ndarray]:
    return [results[place] for place in kernel.outputs]


def _row(
    who: str,
    kernel: Kernel,
    times: int,
    exact: list[np.ndarray],
    fused: list[np.ndarray],
    unfused: list[np.ndarray],
) -> Row:
    """The result that used most of its tolerance stands for the kernel."""
    allowed = [allowances(kernel)[place] for place in kernel.outputs]
    ones = [verdict(got, want, each, FUSED) for got, want, each in zip(fused, exact, allowed, strict=True)]
    others = [verdict(got, want, each, UNFUSED) for got, want, each in zip(unfused, exact, allowed, strict=True)]
    worst = max(range(len(ones)), key=lambda place: _share(ones[place], allowed[place].tolerance(FUSED)))
    return Row(
        who,
        kernel.name,
        kernel.where,
        times,
        allowed[worst].dtype,
        ones[worst].error,
        others[worst].error,
        allowed[worst].tolerance(FUSED),
        all(each.passed for each in ones),
        all(each.passed for each in others),
        ones[worst].detail,
    )


def _share(found: Verdict, tolerance: float) -> float:
    return found.error / tolerance if tolerance else (np.inf if found.error else 0.0)


def _unrun(kernel: Kernel, times: int, why: str) -> Row:
    return Row(AKG, kernel.name, kernel.where, times, "", 0.0, 0.0, 0.0, False, False, why=why)
