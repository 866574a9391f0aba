"""A sequential test for values that went up and stay up, with a stated rate of false alarms over a whole run. Pure.

Of each rank and probe it looks at whether the value lies above a limit. A healthy rank's does so at most with the share
`usual`, a slow one's with the share `slow`. With L the ratio of both likelihoods of what was seen, the statistic of
Shiryaev and Roberts sums the evidence over all probes k at which the rank may have become slow:

    R[k] = (1 + R[k - 1]) * L[k] = sum over j <= k of L[j] * ... * L[k]

Of healthy ranks the mean of L is at most 1, so R[k] - k never rises in the mean, and by Doob's inequality

    P(R reaches A within K probes) <= K / A

whatever the noise is like below and above the limit (Pollak, 1985, "Optimal detection of a change in distribution";
Shin, Ramdas and Rinaldo, 2022, "E-detectors", have the general case). The mean of several such statistics is one, too:
a low limit finds a small change after many probes, a high one a large change after three. What is assumed: `usual`, and
that the probes of a healthy rank lie above the limit independently of each other. One long pause counts as one probe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Level(NamedTuple):
    """A limit in standard deviations; how often a healthy rank lies above it at most, and how often a slow one does."""

    limit: float
    usual: float
    slow: float


# normal noise lies above 1.5 and 3 of its standard deviations in 6.7 and 0.13 %; the rest is for rare pauses
LEVELS = (Level(1.5, 0.08, 0.6), Level(3.0, 0.004, 0.7))


def threshold(tests: int, probes: int, alarm: float) -> float:
    """ln A: what the evidence must reach.

    Args:
        tests: series that are tested. probes: of each. alarm: chance that any of them is named though it is healthy.
    """
    return math.log(tests * probes / alarm)


def ratios(values: np.ndarray, limit: float, level: Level) -> np.ndarray:
    """ln L of `values` [K, N] against `limit`; 0 where a value is missing (NaN)."""
    above = math.log(level.slow / level.usual)
    below = math.log((1 - level.slow) / (1 - level.usual))
    return np.where(np.isnan(values), 0.0, np.where(values > limit, above, below))


def evidence(values: np.ndarray, limits: Sequence[float]) -> np.ndarray:
    """ln R [K, N] of `values` [K, N], the mean over `LEVELS`, of which `limits` has each one's limit."""
    parts = []
    for level, limit in zip(LEVELS, limits, strict=True):
        ratio = ratios(values, limit, level)
        total, rows = np.full(values.shape[1], -np.inf), []
        for row in ratio:
            total = np.logaddexp(0.0, total) + row
            rows.append(total)
        parts.append(np.array(rows))
    return np.logaddexp.reduce(parts, axis=0) - math.log(len(LEVELS))


def span(values: np.ndarray, limit: float, level: Level, alarm: int) -> tuple[int, int]:
    """The first and the last probe of the change in one series `values` [K] that raised an alarm at probe `alarm`.

    They are the most likely ones: between them the product of all L is the largest.
    """
    total = np.concatenate([[0.0], np.cumsum(ratios(values, limit, level))])  # total[k] is that before probe k
    begin = alarm - int(total[alarm::-1].argmin())
    return begin, begin + int(total[begin + 1 :].argmax())
