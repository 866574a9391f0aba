"""Which samples a run trains when some are left out. Pure Python; `reference.py` has the obvious way.

Samples are counted in the order in which the loader would deliver them if none were left out: 0 is the first one of the
first step. What is left out are ranges (first, stop) of that count. The samples behind each range move up, those behind
the last one that the recipe trains fill the end: the run keeps its number of steps, and with it its learning rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

Ranges = tuple[tuple[int, int], ...]


def normal(ranges: Iterable[Sequence[int]]) -> Ranges:
    """The same samples as ranges that are sorted and neither overlap nor touch."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted((int(first), int(stop)) for first, stop in ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        elif first < stop:
            found.append((first, stop))
    return tuple(found)


def count(skipped: Ranges) -> int:
    """Samples that are left out."""
    return sum(stop - first for first, stop in skipped)


def original(position: int, skipped: Ranges) -> int:
    """Which sample the run gets at `position`. `skipped` is `normal`."""
    for first, stop in skipped:
        if position < first:
            break
        position += stop - first
    return position


def originals(first: int, stop: int, skipped: Ranges) -> Ranges:
    """Which samples the run gets from position `first` up to `stop`."""
    return normal((sample, sample + 1) for sample in (original(each, skipped) for each in range(first, stop)))


def reached(done: int, skipped: Ranges) -> int:
    """How far a run has come that has trained `done` samples: the sample behind the last one of them."""
    return original(done - 1, skipped) + 1 if done else 0


def same_until(done: int, one: Ranges, two: Ranges) -> bool:
    """Whether two runs of `done` samples have trained the same ones, in the same order."""
    end = reached(done, one)
    return end == reached(done, two) and _until(end, one) == _until(end, two)


def _until(end: int, skipped: Ranges) -> Ranges:
    return normal((first, min(stop, end)) for first, stop in skipped if first < end)


def continued(weights: Sequence[float], counts: Sequence[int], lengths: Sequence[int], wanted: int) -> np.ndarray:
    """The items that a blend of data sets would have next, as MindFormers' `build_blending_indices` chooses them.

    Args:
        weights: of each data set, as the blend has them; counts: items that it has of each; lengths: of the data sets;
        wanted: how many items.

    Returns:
        int64 [up to `wanted`, 2]: data set, item of it. Fewer where the one whose turn it is has no more.
    """
    share, taken = np.asarray(weights, np.float64), np.array(counts, np.int64)
    found: list[tuple[int, int]] = []
    for done in range(int(taken.sum()), int(taken.sum()) + wanted):
        chosen = int(np.argmax(share * max(done, 1) - taken))
        if taken[chosen] >= lengths[chosen]:
            break
        found.append((chosen, int(taken[chosen])))
        taken[chosen] += 1
    return np.array(found, np.int64).reshape(-1, 2)
