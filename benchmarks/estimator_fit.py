"""This module fits the efficiencies of all device types together to published step times, and measures the errors of
the fit on groups that it leaves out.

Minimised is, over the logarithms r of predicted over measured step time and the parameters x of all types,

    sum of weight x huber(r / NOISE) + sum of ((x of a type - x of its parent) / SPREAD)^2

by Gauss-Newton with damping inside the bounds of `calibrate`. Runs of one configuration under several releases count
as the square root of their number, for they are one observation of the model and several of its software.

Each group is left out whole, one at a time. A fold starts from the fit of all groups and uses that fit's derivatives,
which are computed anew if it moves far; its cost contains nothing of the group left out.

A group is one model on one device.

A model is defined by its sizes without its depth, so truncated models of one kind form one group, whatever their
layout, precision or release. If single rows were left out instead, the same configuration of another release would stay
in the fit.

Runs of one configuration with different measured step times contradict each other.

Most of them are one configuration under several releases of its software. A model predicts one step time for all of
them, so its errors have a lower bound.

A device type is the set of clusters that share efficiencies; it says where a set starts, and how far a fit may take
it.

The parameters of a type with few runs are regularised towards those of the most similar type (its parent), and those of
a type without a parent towards the start. `SPREAD` says how strongly: properties of software or hosts are nearly the
same on all devices, properties of the device are free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import NAMES, Efficiency, cluster
from tools.estimate.published.calibrate import SPREAD, coordinates, limits, with_coordinates
from tools.estimate.published.rows import Row, express
from tools.estimate.published.validate import Prediction, measured_seconds, predict
from tools.estimate.time_model import TimeModel
from tools.model import Model

UNSEEN = Path(__file__).parent / "estimator_unseen.yaml"
RELEASE, CARD = "release", "card"  # bands of that file


@dataclass(frozen=True)
class DeviceType:
    """This is a device type: clusters that share one set of efficiencies.

    Args:
        parent: the device type towards which the parameters are regularised; "" for the start of the fit.
        mesh: whether each two devices of a node have a link of their own.
        own: values towards which single parameters are regularised in place of the parent's values, for a reason
            that is not in the rows.
    """

    clusters: tuple[str, ...]
    parent: str = ""
    mesh: bool = False
    own: Mapping[str, float] = field(default_factory=dict)


START = Efficiency(
    matmul=0.70,
    matmul_fp8=0.55,
    half_size=300.0,
    attention=0.55,
    memory=0.75,
    unfused=2.0,
    link=1.0,
    hidden=0.5,
    hidden_ep=0.8,
    layer_s=2e-5,
    moe_s=2e-3,
    burst=1.4,
    step_s=0.05,
    blocks=0.9,
    matmul_fp4=0.4,
    graphed=0.7,
    network=1.0,
)
TYPES = {
    "a100": DeviceType(("a100_80g",)),
    "h100": DeviceType(("h100",)),
    # PyTorch's attention of 2024, FlashAttention-2: 35 to 40 % of an H100 (FlashAttention-3's paper, arXiv 2407.08608)
    "h100_96g": DeviceType(("h100_96g",), "h100", own={"attention": 0.37}),
    "h800": DeviceType(("h800",), "h100"),
    "gb200": DeviceType(("gb200",), "h100"),
    "b200": DeviceType(("b200",), "gb200"),
    "gb300": DeviceType(("gb300",), "gb200"),
    "b300": DeviceType(("b300",), "gb300"),
    "ascend_910b": DeviceType(("atlas_800t_a2", "atlas_900_a2"), mesh=True),
    "ascend_910c": DeviceType(("atlas_900_a3",), "ascend_910b"),
}
# parameter -> the one whose step from the parent it is taken to share: clocks and power move both
FOLLOWS = {"matmul_fp8": "matmul"}


def type_of(cluster: str) -> str:
    """Return the device type that a cluster belongs to."""
    return next(name for name, kind in TYPES.items() if cluster in kind.clusters)


class Group(NamedTuple):
    """A `Group` identifies a group of published runs: those of one model, known by its sizes, on one cluster."""

    model: str
    cluster: str

    def __str__(self) -> str:
        return f"{self.model} on {self.cluster}"


def sizes(model: Model) -> str:
    """Return a text with the sizes that distinguish models; the number of layers is not among these sizes."""
    attention = f"{model.heads}/{model.kv_heads} heads"
    if not model.experts:
        return f"{model.hidden} wide, {attention}, MLP {model.ffn}, vocabulary {model.vocab}"
    experts = f"{model.experts} experts of {model.expert_ffn}, top {model.top_k}"
    return f"{model.hidden} wide, {attention}, {experts}, vocabulary {model.vocab}"


def group_of(row: Row) -> Group:
    """Return the group of a row that has a configuration."""
    assert row.config is not None
    return Group(sizes(row.config.model), row.cluster)


def grouped(rows: Iterable[Row]) -> dict[Group, list[Row]]:
    """Return the rows by their group, in the order in which groups first occur."""
    found: dict[Group, list[Row]] = {}
    for row in rows:
        found.setdefault(group_of(row), []).append(row)
    return found


NOISE = 0.05  # of a measured step: what the same configuration differs by from one release to the next
OUTLIER = 2.0  # in NOISE; beyond it a run pulls no harder
_STEP = 1e-3
_ROUNDS = 30
_DONE = 2e-3  # a step that changes no prediction by more than this ends the search
_SEARCHES, _WON = 8, 0.05  # whole searches, and what one must win of the cost for another
_FAR = 0.05  # derivatives are made anew where a prediction has moved by more
Sets = dict[str, Efficiency]


@dataclass(frozen=True)
class Run:
    """A `Run` is one configuration on one cluster, with the seconds of its step as measured once or several times."""

    cluster: str
    config: Configuration
    seconds: tuple[float, ...]

    @property
    def kind(self) -> str:
        """Return the configuration's device type."""
        return type_of(self.cluster)


def usable(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that a fit uses: those that have a configuration and a step time and are not only context."""
    return [row for row in rows if row.use == "fit" and row.config and measured_seconds(row) is not None]


def runs_of(rows: Iterable[Row]) -> list[Run]:
    """Return the usable rows, grouped by configuration."""
    found: dict[tuple[str, Configuration], list[float]] = {}
    for row in rows:
        seconds = measured_seconds(row)
        assert row.config is not None and seconds is not None
        found.setdefault((row.cluster, row.config), []).append(seconds * row.config.global_batch / row.samples)
    return [Run(name, config, tuple(seconds)) for (name, config), seconds in found.items()]


def predicted(run: Run, sets: Mapping[str, Efficiency]) -> float:
    """Return the predicted seconds of a run's step."""
    return TimeModel(cluster(run.cluster), sets[run.kind]).step(run.config).total


@dataclass(frozen=True)
class Point:
    """A `Point` is the state of a fit: its parameters, the logarithms of the seconds that they predict, and derivatives
    that were computed at or near these parameters.
    """

    x: np.ndarray
    logs: np.ndarray
    slopes: np.ndarray


class Problem:
    """A `Problem` is the least-squares problem of the fit: the runs' residuals depend on one vector of parameters
    [types x NAMES].
    """

    def __init__(self, runs: Sequence[Run], kinds: Sequence[str]):
        self.kinds, self.runs = list(kinds), list(runs)
        self.owner = np.array([index for index, run in enumerate(runs) for _ in run.seconds], int)
        self.measured = np.log([seconds for run in runs for seconds in run.seconds])
        self.weight = np.array([len(run.seconds) ** -0.5 for run in runs for _ in run.seconds])
        sides = [limits(NAMES, TYPES[kind].clusters) for kind in self.kinds]
        self.low, self.high = (np.concatenate(side) for side in zip(*sides, strict=True))
        self.pull, self.home = self._prior()

    def _prior(self) -> tuple[np.ndarray, np.ndarray]:
        """Return rows D and h of the prior |D x - h|^2."""
        size = len(NAMES)
        start = coordinates(START, NAMES)
        many = len(self.kinds) * size
        pull, home = np.zeros((many, many)), np.zeros(many)
        for place, kind in enumerate(self.kinds):
            parent = TYPES[kind].parent
            for index, name in enumerate(NAMES):
                row, own = place * size + index, TYPES[kind].own.get(name)
                spread = SPREAD[name][parent != ""]
                pull[row, row] = 1 / spread
                if own is not None:
                    home[row] = coordinates(replace(START, **{name: own}), [name])[0] / spread  # type: ignore[arg-type]
                elif parent:
                    above = self.kinds.index(parent) * size
                    pull[row, above + index] = -1 / spread
                    if name in FOLLOWS:
                        with_it = NAMES.index(FOLLOWS[name])
                        pull[row, place * size + with_it] = -1 / spread
                        pull[row, above + with_it] = 1 / spread
                else:
                    home[row] = start[index] / spread
        return pull, home

    def sets(self, x: np.ndarray) -> Sets:
        """Return the parameters in a vector as sets of efficiencies."""
        size = len(NAMES)
        return {
            kind: with_coordinates(replace(START, mesh=TYPES[kind].mesh), NAMES, x[size * place : size * (place + 1)])
            for place, kind in enumerate(self.kinds)
        }

    def vector(self, sets: Mapping[str, Efficiency]) -> np.ndarray:
        """Return sets of efficiencies as a vector of parameters."""
        return np.concatenate([coordinates(sets[kind], NAMES) for kind in self.kinds])

    def logs(self, x: np.ndarray) -> np.ndarray:
        """Return the logarithm of each run's predicted seconds."""
        sets = self.sets(x)
        return np.log([predicted(run, sets) for run in self.runs])

    def slopes(self, x: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Return the derivatives [measurements, parameters] of the logarithms whose values are `at`; a run depends only
        on the parameters of its own type.
        """
        found, size = np.zeros((len(self.runs), len(x))), len(NAMES)
        moved = np.where(x + _STEP <= self.high, _STEP, -_STEP)
        columns = np.array([self.kinds.index(run.kind) * size for run in self.runs])
        for index in range(size):
            tried = x.copy()
            tried[index::size] += moved[index::size]
            found[np.arange(len(self.runs)), columns + index] = (self.logs(tried) - at) / moved[columns + index]
        return found[self.owner]

    def cost(self, logs: np.ndarray, x: np.ndarray, weight: np.ndarray) -> float:
        """Return the cost that the fit minimises; `weight` holds the weight of each measurement."""
        off = np.abs(logs[self.owner] - self.measured) / NOISE
        huber = np.where(off <= OUTLIER, off**2, OUTLIER * (2 * off - OUTLIER))
        return float((weight * huber).sum() + ((self.pull @ x - self.home) ** 2).sum())

    def solve(self, at: Point, kept: np.ndarray) -> Point:
        """Return the minimum of the cost over the measurements that are `kept`, starting at `at`."""
        weight, damping, made = self.weight * kept, 1e-3, at.logs
        for _ in range(_ROUNDS):
            if np.abs(at.logs - made).max(initial=0.0) > _FAR:
                at, made = replace(at, slopes=self.slopes(at.x, at.logs)), at.logs
            off = (at.logs[self.owner] - self.measured) / NOISE
            pulled = weight * np.minimum(1.0, OUTLIER / np.maximum(np.abs(off), 1e-12))
            moves = at.slopes / NOISE
            normal = moves.T @ (pulled[:, None] * moves) + self.pull.T @ self.pull
            slope = moves.T @ (pulled * off) + self.pull.T @ (self.pull @ at.x - self.home)
            before = self.cost(at.logs, at.x, weight)
            while damping < 1e4:
                step = np.linalg.solve(normal + damping * np.diag(normal.diagonal()), slope)
                x = np.clip(at.x - step, self.low, self.high)
                logs = self.logs(x)
                if self.cost(logs, x, weight) < before:
                    break
                damping = max(10 * damping, 1e-2)
            else:
                return at
            change = np.abs(logs - at.logs).max(initial=0.0)
            at, damping = replace(at, x=x, logs=logs), damping / 10
            if change < _DONE:
                return at
        return at

    def begin(self, sets: Mapping[str, Efficiency]) -> Point:
        """Return the parameters at which a fit starts."""
        x = np.clip(self.vector(sets), self.low, self.high)
        logs = self.logs(x)
        return Point(x, logs, self.slopes(x, logs))

    def settled(self, sets: Mapping[str, Efficiency]) -> Point:
        """Return the minimum of the cost over all measurements; the fit is repeated with new derivatives until it no
        longer improves.
        """
        kept = np.ones(len(self.measured))
        at, before = self.begin(sets), np.inf
        for _ in range(_SEARCHES):
            found = self.solve(at, kept)
            at, cost = self.begin(self.sets(found.x)), self.cost(found.logs, found.x, self.weight)
            if cost > before - _WON:
                break
            before = cost
        return at


def fit(rows: Iterable[Row], start: Mapping[str, Efficiency] | None = None) -> Sets:
    """Return the fitted set of efficiencies for every device type.

    Args:
        start: the efficiencies at which the search begins; they are not part of the minimised cost.
    """
    problem = Problem(runs_of(usable(rows)), list(TYPES))
    return problem.sets(problem.settled(start or dict.fromkeys(TYPES, START)).x)


@dataclass(frozen=True)
class Judged:
    """A `Judged` is a row that was predicted by a fit that did not use it; `error` is predicted over measured - 1."""

    row: Row
    group: Group
    error: float


def errors_of(rows: Iterable[Row], sets: Mapping[str, Efficiency]) -> list[float]:
    """Return the error, predicted over measured - 1, of each usable row's step time."""
    runs = [run for row in rows for run in runs_of([row])]
    return [predicted(run, sets) / run.seconds[0] - 1 for run in runs]


def folds(problem: Problem) -> Iterator[tuple[Group, np.ndarray]]:
    """Yield each group with an array that is 0 for the measurements of this group, which a fit must leave out, and 1
    for all other measurements.
    """
    groups = [Group(sizes(run.config.model), run.cluster) for run in problem.runs]
    for group in dict.fromkeys(groups):
        yield group, np.array([groups[index] != group for index in problem.owner], float)


def cross_validated(rows: Iterable[Row], start: Mapping[str, Efficiency] | None = None) -> list[Judged]:
    """Return every usable row, predicted by a fit to all groups but its own."""
    every = usable(rows)
    problem = Problem(runs_of(every), list(TYPES))
    whole = problem.settled(start or dict.fromkeys(TYPES, START))
    by_group, judged = grouped(every), []
    for group, kept in folds(problem):
        sets, own = problem.sets(problem.solve(whole, kept).x), by_group[group]
        judged += [Judged(row, group, error) for row, error in zip(own, errors_of(own, sets), strict=True)]
    return judged


TELLING = 0.10  # a spread below it is what runs differ by


@dataclass(frozen=True)
class Contradiction:
    """A `Contradiction` holds rows of one configuration on one cluster, from the fastest to the slowest.

    Args:
        seconds: measured seconds of each row's step.
    """

    rows: tuple[Row, ...]
    seconds: tuple[float, ...]

    @property
    def spread(self) -> float:
        """Return the slowest divided by the fastest, minus 1."""
        return self.seconds[-1] / self.seconds[0] - 1

    @property
    def floor(self) -> float:
        """Return the smallest possible worst error of the rows for any single prediction."""
        fast, slow = self.seconds[0], self.seconds[-1]
        return (slow - fast) / (slow + fast)

    @property
    def least_errors(self) -> list[float]:
        """Return the absolute errors for the single prediction with the smallest mean error."""
        every = np.array(self.seconds)
        errors = [np.abs(candidate / every - 1) for candidate in every]
        return [float(error) for error in min(errors, key=lambda found: found.sum())]


def same_configuration(rows: Iterable[Row]) -> list[Contradiction]:
    """Return the rows with a step time, grouped by configuration; a configuration that was measured once is a group of
    one row.
    """
    found: dict[object, list[tuple[float, Row]]] = {}
    for row in rows:
        seconds = measured_seconds(row)
        if row.config is not None and seconds is not None:
            seconds *= row.config.global_batch / row.samples
            found.setdefault((row.cluster, row.config), []).append((seconds, row))
    ordered = (sorted(own, key=lambda pair: pair[0]) for own in found.values())
    return [Contradiction(tuple(row for _, row in own), tuple(seconds for seconds, _ in own)) for own in ordered]


def contradictions(rows: Iterable[Row]) -> list[Contradiction]:
    """Return the groups whose step times differ by more than `TELLING`, the widest first."""
    wide = [found for found in same_configuration(rows) if found.spread > TELLING]
    return sorted(wide, key=lambda found: -found.spread)


def floor(rows: Iterable[Row]) -> tuple[float, float]:
    """Return the (mean, worst) absolute error that no model can undercut, because rows with equal configurations were
    measured differently.

    The mean error is that of the predictions with the least mean error, the worst error that of the predictions with
    the least worst error.
    """
    every = same_configuration(rows)
    errors = [error for found in every for error in found.least_errors]
    return float(np.mean(errors)), max(found.floor for found in every)


def unseen(band: str) -> list[Prediction]:
    """Return the predictions of the runs in one group (band) of `UNSEEN`, which no fit has seen."""
    found = []
    for entry in yaml.safe_load(UNSEEN.read_text("utf-8"))["unseen"]:
        if entry["band"] == band:
            row = express(entry["row"], f"{UNSEEN}: {entry['row']['id']}")
            assert row.config is not None, row.reason
            found.append(predict(replace(row, config=replace(row.config, **entry.get("run", {})))))
    return found
