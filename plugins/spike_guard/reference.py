"""This module computes the results of `plugins.spike_guard` sample by sample and step by step, in the most direct and
slow way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median


def samples(total: int, skipped: Iterable[Sequence[int]]) -> list[int]:
    """Return in order the numbers of the samples on which a run trains, from data with `total` samples."""
    out = {sample for first, stop in skipped for sample in range(first, stop)}
    return [sample for sample in range(total) if sample not in out]


def standing_steps(trainings: Iterable[tuple[int, int, int]], done: int) -> list[tuple[int, int]]:
    """Return in order the steps that trained on the first `done` samples of a run, as pairs (number of the start of the
    workers, index of the step after this start).

    Args:
        trainings: for each start of the workers, the number of samples that its checkpoint had trained, the samples of
            a step, and the number of steps.
    """
    owner: dict[int, tuple[int, int]] = {}
    for number, (begin, batch, steps) in enumerate(trainings):
        owner = {sample: step for sample, step in owner.items() if sample < begin}
        for index in range(steps):
            first = begin + index * batch
            owner.update(dict.fromkeys(range(first, first + batch), (number, index)))
    return list(dict.fromkeys(owner[sample] for sample in range(done) if sample in owner))


def spreads_above(value: float, good: Sequence[float], least: float) -> float:
    """Return how many robust standard deviations log `value` lies above the trend of log `good`, computed by sorting;
    see `plan.spreads_above`.
    """
    logs = [math.log(each) for each in good]
    slopes = [(logs[j] - logs[i]) / (j - i) for j in range(len(logs)) for i in range(j)]
    slope = min(median(slopes), 0.0) if slopes else 0.0
    level = [each - slope * place for place, each in enumerate(logs)]
    start = median(level)
    spread = 1.4826 * median(abs(each - start) for each in level)
    return (math.log(value) - start - slope * len(logs)) / max(spread, least)
