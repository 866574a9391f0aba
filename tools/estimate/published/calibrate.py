"""This module fits the efficiencies of a device (`tools.estimate.efficiency`) to a few training steps that were
measured on the device.

The fit is a robust least-squares fit of the logarithm of step time, by the Gauss-Newton method within plausible bounds.
The fit has three steps:

1. *sensitivity*: find the change of each row's predicted time with each parameter (the unit is a factor of e; for a
  share in [0, 1], it is the whole range);
2. *choice*: choose one parameter after another, always the parameter whose change affects the predicted times of the
  rows most in a way that changes of the earlier parameters cannot. A parameter that changes these times by less than
  `TELLING` is not chosen, and at most as many parameters as rows are chosen. The other parameters keep their values;
3. *fit*: fit the chosen parameters. Rows whose prediction is off by more than `OUTLIER` have less weight (Huber). A
  penalty for the distance from the starting values decides where the rows do not determine the values; this penalty is
  weak for parameters that differ much between device types (`SPREAD`). Parameters of software or hosts therefore stay
  nearly the same on all devices, and parameters of the device can change freely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from plugins.errors import DataError
from tools.estimate.configuration import MODEL_VERSION
from tools.estimate.efficiency import Efficiency, cluster_file
from tools.estimate.efficiency import cluster as hardware_of
from tools.estimate.published.rows import Row
from tools.estimate.published.validate import measured_seconds, predict

_PARAMETERS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("parameters.yaml").read_text(encoding="utf-8"))
SPREAD = {name: tuple(known["spread"]) for name, known in _PARAMETERS.items()}
BOUNDS = {name: tuple(known["bounds"]) for name, known in _PARAMETERS.items()}
TELLING = 0.02  # a parameter that is a tenth off must show as a fifth of a percent somewhere
OUTLIER = 0.1  # of the logarithm of time
NOISE = 0.05  # of the logarithm of time: as `fit` has it
WIDE = 4.0  # how much further than `SPREAD` one machine may be from what it starts with
MISTAKEN = 10.0  # a step that the fitted model still misses by such a factor: a unit mistaken, or another cluster's
_STEP = 1e-3  # of the numeric derivative
_ROUNDS = 40
_SHARES = (1.0, 0.5, 0.25, 0.1, 0.03)  # of a step, until one is found that wins
_WON = 1e-6  # of the cost: less ends the search
Residuals = Callable[[np.ndarray], np.ndarray]
Bounds = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Calibration:
    """A `Calibration` is the result of fitting a cluster's efficiencies."""

    efficiency: Efficiency  # fitted for the parameters in `fitted`, otherwise unchanged
    fitted: tuple[str, ...]
    kept: dict[str, str]  # parameter -> the reason why the rows do not determine it
    errors: dict[str, tuple[float, float]]  # row -> (before, after the fit) predicted / measured step time - 1
    skipped: dict[str, str]  # row -> the reason why it was not used


def calibrate(rows: Sequence[Row], cluster: str, start: Efficiency) -> Calibration:
    """Fit efficiencies to the measured step times of `rows`, beginning with the efficiencies `start`, and return the
    fitted efficiencies. All rows count as measured on `cluster` (the name of a cluster or a file), even if a row names
    other hardware.

    Raises:
        DataError: no row has both a configuration and a step time, or a row cannot have been measured on `cluster`.
    """
    used, skipped = [], {}
    for row in rows:
        found = predict(replace(row, cluster=cluster), start)
        if found.step_error is None:
            skipped[row.id] = found.reason or "it has no step time, nor a throughput to derive it from"
        else:
            used.append(replace(row, cluster=cluster))
    if not used:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items()) or "there are none"
        raise DataError(f"no row of the measurements can be used to calibrate ({reasons})")

    def residuals(values: Efficiency) -> np.ndarray:
        return np.log1p(np.array([predict(row, values).step_error for row in used], float))

    names, kept = _choose(residuals, start, limits(list(BOUNDS), [cluster]))
    best = _fit(residuals, start, names, limits(names, [cluster])) if names else start
    before, after = np.expm1(residuals(start)), np.expm1(residuals(best))
    errors = {row.id: (float(b), float(a)) for row, b, a in zip(used, before, after, strict=True)}
    for row, (_, miss) in zip(used, errors.values(), strict=True):
        if not 1 / MISTAKEN <= 1 + miss <= MISTAKEN:
            seconds = measured_seconds(row) or 0.0
            raise DataError(
                f"row {row.id}: the measured step takes {seconds:.4g} s, but the best fit predicts "
                f"{(1 + miss) * seconds:.4g} s; check that these are the seconds of one step, measured on the same "
                "cluster as the other rows"
            )
    return Calibration(best, tuple(names), kept, errors, skipped)


def coordinates(values: Efficiency, names: Sequence[str]) -> np.ndarray:
    """Return the efficiencies as a vector for the fit. The vector holds shares (of peak FLOP/s or bandwidth) unchanged,
    and the logarithm of every other parameter.
    """
    plain = np.array([getattr(values, name) for name in names], float)
    return np.clip(np.where(_shares(names), plain, np.log(np.maximum(plain, 1e-12))), *limits(names))


def with_coordinates(values: Efficiency, names: Sequence[str], where: np.ndarray) -> Efficiency:
    """Return a copy of the efficiencies `values` in which the parameters `names` have the values of the fit's vector
    `where` (see `coordinates`).
    """
    plain = np.where(_shares(names), where, np.exp(where))
    changed: dict[str, Any] = {name: float(value) for name, value in zip(names, plain, strict=True)}
    return replace(values, **changed)


def _shares(names: Sequence[str]) -> np.ndarray:
    return np.array([BOUNDS[name][0] == 0 for name in names], bool)


def limits(names: Sequence[str], clusters: Sequence[str] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Return the allowed range of each parameter of a fit, in the form of `coordinates`. No link of the given clusters
    may become faster than its nominal bandwidth. Above the nominal bandwidth the predicted time does not change, so
    that a fit would not return to values below this bandwidth.
    """
    bounds, links = dict(BOUNDS), [hardware_of(name) for name in clusters]
    for name, fractions in (
        ("link", [own.intra_node.efficiency for own in links]),
        ("network", [own.inter_node.efficiency for own in links]),
    ):
        bounds[name] = (bounds[name][0], min([bounds[name][1], *(1 / fraction for fraction in fractions)]))
    pairs = np.array([bounds[name] for name in names], float)
    shares = _shares(names)[:, None]
    low, high = np.where(shares, pairs, np.log(np.where(shares, 1.0, pairs))).T
    return low, high


def _derivatives(residuals: Residuals, at: np.ndarray, here: np.ndarray, bounds: Bounds) -> np.ndarray:
    """Return [rows, parameters], each by a step that stays inside its limits; `here`: the residuals at `at`."""
    columns = []
    for index in range(len(at)):
        moved = at.copy()
        moved[index] += _STEP if at[index] + _STEP <= bounds[1][index] else -_STEP
        columns.append((residuals(moved) - here) / (moved[index] - at[index]))
    return np.array(columns).T


def _choose(
    residuals: Callable[[Efficiency], np.ndarray], start: Efficiency, bounds: Bounds
) -> tuple[list[str], dict[str, str]]:
    """Return the parameters that the rows tell apart, the most telling first; and why not the others."""
    names = list(BOUNDS)
    at = np.clip(coordinates(start, names), *bounds)

    def missed(where: np.ndarray) -> np.ndarray:
        return residuals(with_coordinates(start, names, where))

    moves = _derivatives(missed, at, missed(at), bounds)
    left = moves.copy()
    chosen: list[int] = []
    while len(chosen) < len(moves):
        norms = np.linalg.norm(left, axis=0)
        index = int(norms.argmax())
        if norms[index] < TELLING:
            break
        chosen.append(index)
        direction = left[:, index] / norms[index]
        left = left - np.outer(direction, direction @ left)
    kept = {}
    for index in sorted(set(range(len(names))) - set(chosen)):
        own = float(np.linalg.norm(moves[:, index]))
        if own < TELLING:
            kept[names[index]] = "no row depends on it" if own < 1e-6 else "it moves no row by enough"
        else:
            shares = np.linalg.lstsq(moves[:, chosen], moves[:, index], rcond=None)[0]
            alike = names[chosen[int((np.abs(shares) * np.linalg.norm(moves[:, chosen], axis=0)).argmax())]]
            kept[names[index]] = f"the rows cannot tell it from {alike}"
    return [names[index] for index in chosen], kept


def _fit(
    residuals: Callable[[Efficiency], np.ndarray], start: Efficiency, names: Sequence[str], bounds: Bounds
) -> Efficiency:
    home = np.clip(coordinates(start, names), *bounds)
    pull = (NOISE / (WIDE * np.array([SPREAD[name][0] for name in names]))) ** 2

    def missed(where: np.ndarray) -> np.ndarray:
        return residuals(with_coordinates(start, names, where))

    def cost(off: np.ndarray, where: np.ndarray) -> float:
        size = np.abs(off)
        huber = np.where(size <= OUTLIER, size**2, OUTLIER * (2 * size - OUTLIER))
        return float(huber.sum() + (pull * (where - home) ** 2).sum())

    at, off = home, missed(home)
    for _ in range(_ROUNDS):
        moves = _derivatives(missed, at, off, bounds)
        weight = np.minimum(1.0, OUTLIER / np.maximum(np.abs(off), 1e-12))
        normal = moves.T @ (weight[:, None] * moves) + np.diag(pull)
        step = np.linalg.solve(normal, -(moves.T @ (weight * off) + pull * (at - home)))
        before = cost(off, at)
        for share in _SHARES:
            tried = np.clip(at + share * step, *bounds)
            off_now = missed(tried)
            if cost(off_now, tried) < before:
                break
        else:
            break
        at, off = tried, off_now
        if cost(off, at) > (1 - _WON) * before:
            break
    return with_coordinates(start, names, at)


def cluster_text(cluster: str, name: str, found: Calibration, source: str) -> str:
    """Return the text of a hardware file called `name`: the file of `cluster` with efficiencies that were fitted to the
    measurements of `source`.
    """
    content: dict[str, Any] = yaml.safe_load(cluster_file(cluster).read_text(encoding="utf-8"))
    content["name"] = name
    content["efficiency"] = {key: _short(value) for key, value in asdict(found.efficiency).items()}
    content["estimator"] = MODEL_VERSION
    worst = max(abs(after) for _, after in found.errors.values())
    head = [
        f"{name}: {cluster} with efficiencies fitted to {len(found.errors)} measured steps ({source}).",
        f"Fitted: {', '.join(found.fitted) or 'none'}; step times miss by {worst:.1%} at most. Others as they were:",
        *(f"  {key}: {why}" for key, why in found.kept.items()),
    ]
    body = yaml.safe_dump(content, sort_keys=False, width=110)
    return "".join(f"# {line}\n" for line in head) + body


def _short(value: float | bool) -> float | bool:
    return value if isinstance(value, bool) else float(f"{value:.4g}")
