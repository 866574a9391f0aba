"""Runs of one configuration that were measured to differ: what no model of configurations can tell apart.

Most are one configuration under several releases of its software. A model gives one number for all of them; what it
misses then at least is a floor under its errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tools.estimate.published.rows import Row
from tools.estimate.published.validate import measured_seconds

TELLING = 0.10  # a spread below it is what runs differ by


@dataclass(frozen=True)
class Contradiction:
    """Rows of one configuration on one cluster, from the fastest to the slowest.

    Args:
        seconds: of each row's step.
    """

    rows: tuple[Row, ...]
    seconds: tuple[float, ...]

    @property
    def spread(self) -> float:
        """The slowest over the fastest - 1."""
        return self.seconds[-1] / self.seconds[0] - 1

    @property
    def floor(self) -> float:
        """The least that the worst of them can be off, whatever is predicted."""
        fast, slow = self.seconds[0], self.seconds[-1]
        return (slow - fast) / (slow + fast)

    @property
    def least_errors(self) -> list[float]:
        """Absolute errors of the one number that is least off on average."""
        every = np.array(self.seconds)
        errors = [np.abs(candidate / every - 1) for candidate in every]
        return [float(error) for error in min(errors, key=lambda found: found.sum())]


def same_configuration(rows: Iterable[Row]) -> list[Contradiction]:
    """Rows with a step time, those of one configuration together; a configuration measured once stands alone."""
    found: dict[object, list[tuple[float, Row]]] = {}
    for row in rows:
        seconds = measured_seconds(row)
        if row.config is not None and seconds is not None:
            seconds *= row.config.global_batch / row.samples
            found.setdefault((row.cluster, row.config), []).append((seconds, row))
    ordered = (sorted(own, key=lambda pair: pair[0]) for own in found.values())
    return [Contradiction(tuple(row for _, row in own), tuple(seconds for seconds, _ in own)) for own in ordered]


def contradictions(rows: Iterable[Row]) -> list[Contradiction]:
    """Those that differ by more than `TELLING`, the widest first."""
    wide = [found for found in same_configuration(rows) if found.spread > TELLING]
    return sorted(wide, key=lambda found: -found.spread)


def floor(rows: Iterable[Row]) -> tuple[float, float]:
    """(mean, worst) absolute error that no model of configurations can go below.

    The mean is of predictions that make it least, the worst of those that make that least.
    """
    every = same_configuration(rows)
    errors = [error for found in every for error in found.least_errors]
    return float(np.mean(errors)), max(found.floor for found in every)
