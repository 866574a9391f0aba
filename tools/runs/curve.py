"""Steps of a run whose loss or global norm jumps far above the steps before, or is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from plugins.spike_guard.settings import Settings
from tools.runs.source import Part

# as plugins.spike_guard would judge them, but all steps at once: a window also holds the spikes before
WINDOW, THRESHOLD = Settings().window, Settings().threshold
_LEAST = 8  # steps before, of which a spread says anything
_TO_SIGMA = 1.4826  # of a normal distribution: standard deviation over median absolute deviation
_LEAST_SPREAD = 0.01  # of a logarithm: steps that differ by less than 1 % are alike
JUDGED = ("loss", "global_norm")


@dataclass(frozen=True)
class Spike:
    """`value` of `name` at `step`, `above` standard deviations above the steps before (None: it is not finite)."""

    step: int
    name: str
    value: float
    above: float | None
    stands: bool


def spikes(parts: list[Part], cuts: list[int]) -> list[Spike]:
    """Of all parts, in the order in which they were made.

    Args:
        cuts: of each part the last step that was not made again.
    """
    found = []
    for at, part in enumerate(parts):
        steps = np.asarray(part["step"])
        for name in JUDGED:
            before = [_standing(one, name, part.start_step) for one in parts[:at]]
            known = np.concatenate([*before, []])[-WINDOW:]
            values = np.asarray(part[name])
            above = _above(np.concatenate([known, values]))[len(known) :]
            for index in np.flatnonzero((above > THRESHOLD) | np.isinf(values) | _turned_nan(values)):
                score = float(above[index]) if math.isfinite(values[index]) else None
                step = int(steps[index])
                found.append(Spike(step, name, float(values[index]), score, step <= cuts[at]))
    return found


def _standing(part: Part, name: str, until: int) -> np.ndarray:
    """The values of an earlier part that still stood when a later one began after step `until`."""
    return np.asarray(part[name])[np.asarray(part["step"]) <= until]


def _turned_nan(values: np.ndarray) -> np.ndarray:
    """NaN in a part that knows the number elsewhere: other parts do not record it, or this rank has none."""
    return np.isnan(values) if np.isfinite(values).any() else np.zeros(len(values), bool)


def _above(values: np.ndarray) -> np.ndarray:
    """How many robust standard deviations the logarithm of each value lies above the `WINDOW` values before it."""
    with np.errstate(all="ignore"):
        logs = np.log(np.where(values > 0, values, np.nan))
    logs[~np.isfinite(logs)] = np.nan
    padded = np.concatenate([np.full(WINDOW, np.nan), logs])
    result = np.full(len(values), -np.inf)
    size = 1 << 14  # at a time, for memory's sake
    for first in range(0, len(values), size):
        stop = min(first + size, len(values))
        windows = np.lib.stride_tricks.sliding_window_view(padded[first : stop + WINDOW - 1], WINDOW)
        enough = np.isfinite(windows).sum(1) >= _LEAST
        if enough.any():
            rows, own = windows[enough], logs[first:stop][enough]
            median = np.nanmedian(rows, 1)
            spread = _TO_SIGMA * np.nanmedian(np.abs(rows - median[:, None]), 1)
            result[first:stop][enough] = (own - median) / np.maximum(spread, _LEAST_SPREAD)
    return np.nan_to_num(result, nan=-np.inf)
