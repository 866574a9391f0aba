"""How often a run fails, and how often it should save: estimates with their uncertainty.

* Mean time between failures: running time over failures, with the two-sided interval of a Poisson count over a fixed
  time (F. Garwood, Biometrika 28, 1936; NIST/SEMATECH e-Handbook, 8.4.5.1), which few failures make wide.
* Interval between saves: J. W. Young, CACM 17 (1974): sqrt(2 C M); J. T. Daly, FGCS 22 (2006), eq. 37: its higher
  order. C: seconds that a save stops the training; M: mean time between failures.
* What an interval T costs, as a share of the time: C / T for saving and T / 2M for steps made again (first order).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CONFIDENCE = 0.9


@dataclass(frozen=True)
class Mtbf:
    """Seconds between failures: the estimate (None without a failure) and its interval (`high` None: no bound)."""

    failures: int
    running: float
    estimate: float | None
    low: float
    high: float | None


@dataclass(frozen=True)
class Saving:
    """The interval between saves, in seconds of training: what was used, what is best, and what each costs."""

    cost: float
    used: float
    best: float
    low: float
    high: float | None
    cost_used: float
    cost_best: float


def mtbf(failures: int, running: float) -> Mtbf | None:
    """Of `failures` in `running` seconds; None where nothing ran."""
    if running <= 0:
        return None
    tail = (1 - CONFIDENCE) / 2
    # most and fewest failures that would be expected in that time, were the truth at the interval's ends
    most = _mean_with(failures, tail)
    fewest = _mean_with(failures - 1, 1 - tail) if failures else 0.0
    return Mtbf(
        failures,
        running,
        running / failures if failures else None,
        running / most,
        running / fewest if fewest else None,
    )


def _mean_with(count: int, probability: float) -> float:
    """The mean of a Poisson variable that is at most `count` with `probability`, by bisection."""
    low, high = 0.0, count + 10 * math.sqrt(count + 1) + 10
    for _ in range(60):
        middle = (low + high) / 2
        if _at_most(count, middle) > probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _at_most(count: int, mean: float) -> float:
    """P(N <= count) of a Poisson variable."""
    if mean == 0:
        return 1.0
    logs = (number * math.log(mean) - mean - math.lgamma(number + 1) for number in range(count + 1))
    return math.fsum(map(math.exp, logs))


def young(cost: float, between: float) -> float:
    """Young's interval, seconds of training between two saves."""
    return math.sqrt(2 * cost * between)


def daly(cost: float, between: float) -> float:
    """Daly's interval; a save that costs more than twice the time between failures is done once in that time."""
    if cost >= 2 * between:
        return between
    share = math.sqrt(cost / (2 * between))
    return young(cost, between) * (1 + share / 3 + share**2 / 9) - cost


def overhead(cost: float, interval: float, between: float) -> float:
    """Share of the time that goes into saving every `interval` seconds and making steps again, to first order."""
    return cost / interval + interval / (2 * between)


def saving(cost: float, used: float, found: Mtbf) -> Saving | None:
    """The best interval against the one used; None where no failure was seen or nothing was measured."""
    if found.estimate is None or cost <= 0 or used <= 0:
        return None
    best = daly(cost, found.estimate)
    return Saving(
        cost,
        used,
        best,
        daly(cost, found.low),
        daly(cost, found.high) if found.high else None,
        overhead(cost, used, found.estimate),
        overhead(cost, best, found.estimate),
    )
