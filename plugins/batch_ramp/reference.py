"""This module computes the results of `plan.Ramp` sample by sample instead of by arithmetic, as the slow reference for
the tests.
"""

from __future__ import annotations

from collections.abc import Sequence


def batches(stages: Sequence[tuple[int, int]], full: int, samples: int) -> list[list[int]]:
    """Return the indices of the samples on which each step of a run over `samples` samples trains; samples at the end
    that do not fill a step are not used.

    Args:
        stages: (last step, samples of a step) of each stage.
        full: samples of a step after the last stage.
    """
    left, steps = list(range(samples)), list[list[int]]()
    while True:
        number = len(steps) + 1
        size = full
        for end, batch in reversed(stages):
            if number <= end:
                size = batch
        if len(left) < size:
            return steps
        steps.append([left.pop(0) for _ in range(size)])


def full_steps(stages: Sequence[tuple[int, int]], full: int, step: int) -> float:
    """Return the number of samples in the first `step` steps, divided by the number of samples in a step of the full
    batch.
    """
    largest = max([full, *(batch for _, batch in stages)])
    return sum(map(len, batches(stages, full, largest * step)[:step])) / full


def dealt(step: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the samples of each data-parallel rank, if a step's samples are assigned to the ranks in round-robin
    order.
    """
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for place, sample in enumerate(step):
        hands[place % ranks].append(sample)
    return hands
