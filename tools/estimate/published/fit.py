"""Fit the efficiencies of all device types at once to published step times, and judge them by groups left out.

Minimised is, over the logarithms r of predicted over measured step time and the parameters x of all types,

    sum of weight x huber(r / NOISE) + sum of ((x of a type - x of its parent) / SPREAD)^2

by Gauss-Newton with damping inside the bounds of `calibrate`. Runs of one configuration under several releases count
as the square root of their number, for they are one observation of the model and several of its software.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import NAMES, Efficiency, cluster
from tools.estimate.published.calibrate import BOUNDS, coordinates, limits, with_coordinates
from tools.estimate.published.device_types import SPREAD, START, TYPES, type_of
from tools.estimate.published.groups import Group, grouped
from tools.estimate.published.rows import Row
from tools.estimate.published.validate import measured_seconds
from tools.estimate.time_model import TimeModel

NOISE = 0.05  # of a measured step: what the same configuration differs by from one release to the next
OUTLIER = 2.0  # in NOISE; beyond it a run pulls no harder
_STEP = 1e-3
_ROUNDS = 12
_DONE = 3e-3  # a step of the parameters that changes no prediction by more than a fraction of a percent
Sets = dict[str, Efficiency]


@dataclass(frozen=True)
class Run:
    """One configuration on one cluster, and the seconds that its step was measured to take, once or several times."""

    cluster: str
    config: Configuration
    seconds: tuple[float, ...]

    @property
    def kind(self) -> str:
        """Its device type."""
        return type_of(self.cluster)


def usable(rows: Iterable[Row]) -> list[Row]:
    """Rows that a fit reads: with a configuration and a step time, and not for context only."""
    return [row for row in rows if row.use == "fit" and row.config and measured_seconds(row) is not None]


def runs_of(rows: Iterable[Row]) -> list[Run]:
    """Usable rows, those of one configuration together."""
    found: dict[tuple[str, Configuration], list[float]] = {}
    for row in rows:
        seconds = measured_seconds(row)
        assert row.config is not None and seconds is not None
        found.setdefault((row.cluster, row.config), []).append(seconds * row.config.global_batch / row.samples)
    return [Run(name, config, tuple(seconds)) for (name, config), seconds in found.items()]


def predicted(run: Run, sets: Mapping[str, Efficiency]) -> float:
    """Seconds of its step."""
    return TimeModel(cluster(run.cluster), sets[run.kind]).step(run.config).total


class _Problem:
    """The runs as residuals of one long vector of parameters [types x NAMES]."""

    def __init__(self, runs: Sequence[Run], kinds: Sequence[str]):
        self.kinds, self.runs = list(kinds), list(runs)
        self.owner = np.array([index for index, run in enumerate(runs) for _ in run.seconds], int)
        self.measured = np.log([seconds for run in runs for seconds in run.seconds])
        self.weight = np.array([len(run.seconds) ** -0.5 for run in runs for _ in run.seconds])
        self.low, self.high = (np.tile(side, len(self.kinds)) for side in limits(NAMES))
        self.pull, self.home = self._prior()

    def _prior(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows D and h of the prior |D x - h|^2."""
        size = len(NAMES)
        start = coordinates(START, NAMES)
        pull, home = np.zeros((2, len(self.kinds) * size, len(self.kinds) * size))[0], np.zeros(len(self.kinds) * size)
        for place, kind in enumerate(self.kinds):
            parent = TYPES[kind].parent
            for index, name in enumerate(NAMES):
                row, spread = place * size + index, SPREAD[name][parent != ""]
                pull[row, row] = 1 / spread
                if parent:
                    pull[row, self.kinds.index(parent) * size + index] = -1 / spread
                else:
                    home[row] = start[index] / spread
        return pull, home

    def sets(self, x: np.ndarray) -> Sets:
        """A vector as sets."""
        size = len(NAMES)
        return {
            kind: with_coordinates(replace(START, mesh=TYPES[kind].mesh), NAMES, x[size * place : size * (place + 1)])
            for place, kind in enumerate(self.kinds)
        }

    def vector(self, sets: Mapping[str, Efficiency]) -> np.ndarray:
        """The sets as a vector."""
        return np.concatenate([coordinates(sets[kind], NAMES) for kind in self.kinds])

    def logs(self, x: np.ndarray) -> np.ndarray:
        """Logarithm of each run's predicted seconds."""
        sets = self.sets(x)
        return np.log([predicted(run, sets) for run in self.runs])

    def slopes(self, x: np.ndarray, at: np.ndarray) -> np.ndarray:
        """[runs, parameters]; a run depends on its own type's."""
        found, size = np.zeros((len(self.runs), len(x))), len(NAMES)
        moved = np.where(x + _STEP <= self.high, _STEP, -_STEP)
        for index in range(size):
            tried = x.copy()
            tried[index::size] += moved[index::size]
            change = self.logs(tried) - at
            for row, run in enumerate(self.runs):
                column = self.kinds.index(run.kind) * size + index
                found[row, column] = change[row] / moved[column]
        return found

    def cost(self, logs: np.ndarray, x: np.ndarray) -> float:
        """What is minimised."""
        off = np.abs(logs[self.owner] - self.measured) / NOISE
        huber = np.where(off <= OUTLIER, off**2, OUTLIER * (2 * off - OUTLIER))
        return float((self.weight * huber).sum() + ((self.pull @ x - self.home) ** 2).sum())


def fit(rows: Iterable[Row], start: Mapping[str, Efficiency] | None = None) -> Sets:
    """A set for every device type.

    Args:
        start: where the search begins; it has no part in what is minimised.
    """
    problem = _Problem(runs_of(rows), list(TYPES))
    x = problem.vector(start or {kind: START for kind in TYPES})
    logs, damping = problem.logs(x), 1e-2
    for _ in range(_ROUNDS):
        moves = problem.slopes(x, logs)[problem.owner] / NOISE
        off = (logs[problem.owner] - problem.measured) / NOISE
        weight = problem.weight * np.minimum(1.0, OUTLIER / np.maximum(np.abs(off), 1e-12))
        normal = moves.T @ (weight[:, None] * moves) + problem.pull.T @ problem.pull
        slope = moves.T @ (weight * off) + problem.pull.T @ (problem.pull @ x - problem.home)
        before = problem.cost(logs, x)
        while damping < 1e8:
            tried = np.clip(x - np.linalg.solve(normal + damping * np.diag(normal.diagonal()), slope), problem.low, problem.high)
            found = problem.logs(tried)
            if problem.cost(found, tried) < before:
                break
            damping *= 5
        else:
            break
        change, gained = np.abs(found - logs).max(initial=0.0), before - problem.cost(found, tried)
        x, logs, damping = tried, found, max(1e-6, damping / 10)
        if change < _DONE and gained < 0.01 * before:
            break
    return problem.sets(x)


@dataclass(frozen=True)
class Judged:
    """A row that had no part in the fit that predicts it; `error` is predicted over measured - 1."""

    row: Row
    group: Group
    error: float


def errors_of(rows: Iterable[Row], sets: Mapping[str, Efficiency]) -> list[float]:
    """Predicted over measured - 1."""
    runs = [run for row in rows for run in runs_of([row])]
    return [predicted(run, sets) / run.seconds[0] - 1 for run in runs]


def cross_validated(rows: Iterable[Row], start: Mapping[str, Efficiency] | None = None) -> list[Judged]:
    """Every row, predicted by a fit to all groups but its own."""
    every, judged = usable(rows), []
    for group, own in grouped(every).items():
        sets = fit([row for row in every if row not in own], start)
        judged += [Judged(row, group, error) for row, error in zip(own, errors_of(own, sets), strict=True)]
    return judged
