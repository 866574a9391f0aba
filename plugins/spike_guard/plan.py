"""What is a spike, and what follows from one. Pure Python and NumPy.

Loss and global norm are compared on a logarithmic scale, on which their noise is about even, with the last good steps.
These have a trend, the median of the slopes between any two of them (Theil and Sen), which is followed where it falls:
a loss that rises is not what a step is expected to go on with. A value is a spike when it lies more than `threshold`
robust standard deviations (1.4826 times the median absolute deviation from the trend) above it; values below never are.
Until the window is full nothing is.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from plugins.finite_loss.plan import NORM
from plugins.spike_guard.ledger import Entry
from plugins.spike_guard.settings import Settings
from plugins.spike_guard.skip import Ranges, originals
from plugins.spike_guard.words import NO_MORE, SPIKE

JUDGED = ("loss", NORM)
_TO_SIGMA = 1.4826  # of a normal distribution: standard deviation over median absolute deviation
_LEAST_SPREAD = 0.01  # of a logarithm: steps that differ by less than 1 % are alike


def spreads_above(value: float, good: Sequence[float]) -> tuple[float, float]:
    """How many robust standard deviations log `value` lies above what follows `good`, and the value that would follow.

    Args:
        good: of the last steps, the newest last; all are above 0.
    """
    logs = np.log(good)
    one, two = np.triu_indices(len(logs), 1)
    slope = min(float(np.median((logs[two] - logs[one]) / (two - one))), 0.0) if len(logs) > 1 else 0.0
    level = logs - slope * np.arange(len(logs))
    median = np.median(level)
    spread = max(float(_TO_SIGMA * np.median(np.abs(level - median))), _LEAST_SPREAD)
    expected = float(median + slope * len(logs))
    return (math.log(value) - expected) / spread, math.exp(expected)


class Window:
    """The last good steps, and whether a step is like them.

    Args:
        size: how many; threshold: see above.
    """

    def __init__(self, size: int, threshold: float):
        self.size, self.threshold = size, threshold
        self.good: dict[str, deque[float]] = {name: deque(maxlen=size) for name in JUDGED}

    def see(self, readings: Mapping[str, float | None]) -> str | None:
        """Take in a step's numbers, by the names of `JUDGED`; what of them is a spike, in words.

        A spike is not taken in. What is not known, not finite or not above 0 is not judged.
        """
        known = {name: value for name in JUDGED if (value := readings.get(name)) and 0 < value < math.inf}
        for name, value in known.items():
            good = self.good[name]
            if len(good) < self.size:
                continue
            above, expected = spreads_above(value, good)
            if above > self.threshold:
                usual = f"{expected:.4g}, which the last {self.size} good steps led to"
                return f"{name} {value:.4g} is {above:.0f} standard deviations above {usual}"
        for name, value in known.items():
            self.good[name].append(value)
        return None


def good_steps(lines: Iterable[str], done: int, size: int) -> list[dict[str, float | None]]:
    """The last `size` steps up to `done`, for a `Window`, from the lines of RUN/metrics/rank_N.jsonl.

    A part of the run that repeats steps has a header, and replaces them.
    """
    steps: dict[int, dict[str, float | None]] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a killed run
            continue
        if "start_step" in record:
            steps = {step: old for step, old in steps.items() if step <= record["start_step"]}
        elif "step" in record:
            steps[record["step"]] = {"loss": record.get("loss"), NORM: record.get("global_norm")}
    return [steps[step] for step in sorted(steps) if step <= done][-size:]


def what_follows(
    step: int, wrong: str, before: Sequence[Entry], settings: Settings, batch: int, skipped: Ranges
) -> tuple[Entry | None, str]:
    """What a run does that has met a spike at `step`: the samples to leave out, and the whole in words.

    Args:
        wrong: what was seen; before: the spikes for which this run has gone back; batch: samples of a step;
        skipped: samples that are left out already.

    Returns:
        None and why, where it is not to go back.
    """
    again = any(entry.step == step for entry in before)
    other = f"; step {step} spiked before, with other samples: they are not the cause" if again else ""
    near = sum(abs(entry.step - step) <= settings.window for entry in before)
    if near >= settings.rollbacks:
        often = f"{near} time{'s' * (near > 1)} within {settings.window} steps"
        return None, f"{SPIKE}{wrong}{other}; the run has gone back {often}, and {NO_MORE}"
    first = max(step - settings.skip + 1, 1)
    samples = originals((first - 1) * batch, step * batch, skipped)
    steps = f"step {step}" if first == step else f"steps {first} to {step}"
    return (
        Entry(step, first, wrong + other, samples),
        f"{SPIKE}{wrong}{other}; going back to before step {first}, without the samples of {steps}",
    )
