"""Why a step takes as long as it takes: the longest chain of operations, as a bound for every other plan.

The step time is the longest of all chains through the schedule, and a chain's length is a sum of durations. So
the chain that decides one plan, counted by what runs on it, bounds every other plan's step time from below:
``time >= (visits * times).sum()``, linear in the durations and therefore in the layers of each chunk.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tools.pipeline.timetable import KINDS, Timetable


def critical_path(table: Timetable, times: np.ndarray) -> tuple[float, np.ndarray]:
    """Return (step time, visits, as `times`): how often the longest chain runs each chunk's forward and backward.

    `times` is [2, C], forward and backward of the chunks by chunk * stages + stage, or [3, C] with the weight gradients
    in the backward, which schedules with split backwards need. Their visits say how often the chain runs weight
    gradients, less how often a backward without them: (visits * times).sum() is the step time. A pair takes as long as
    both its operations. Transfers are not counted. Of chains of one length it takes those that stay on a stage.
    """
    size, stages = table.chunks * table.stages, table.stages
    meaning = _meaning(table.chunks, stages, len(times), table.also is not None)
    cost = (meaning @ times.ravel())[table.work]
    free = np.zeros((len(cost) + 1, stages))
    cells = free.ravel()
    for level, needs in enumerate(table.needs):
        ready = np.maximum(cells.take(needs), free[level])
        if table.also is not None:
            np.maximum(ready, cells.take(table.also[0, level]), out=ready)
        np.add(ready, cost[level], out=free[level + 1])
    work, values = table.work.ravel().tolist(), cells.tolist()
    needed = [table.needs.ravel().tolist(), *([] if table.also is None else [table.also[0].ravel().tolist()])]
    visits = np.zeros(len(meaning))
    place = len(values) - stages + int(free[-1].argmax())
    while place >= stages:
        here = place - stages
        visits[work[here]] += 1
        latest = max((needs[here] for needs in needed), key=lambda need: values[need] if need else 0.0)
        place = latest if latest and values[latest] > values[here] else here
    return float(free[-1].max()), (visits @ meaning).round().astype(int).reshape(len(times), size)


@lru_cache(maxsize=16)
def _meaning(chunks: int, stages: int, rows: int, pairs: bool) -> np.ndarray:
    """[numbers of `Timetable.work`, rows x C] which times each takes, and how often."""
    size = chunks * stages
    one, none = np.eye(size), np.zeros((size, size))
    if rows == 2:
        kinds = [[one, none], [none, one], *[[none, none]] * (KINDS - 2)]
    else:
        kinds = [[one, none, none], [none, one, none], [none, one, -one], [none, none, one]]
    found = [np.block(kinds), np.zeros((1, rows * size))]
    if pairs:  # by forward's chunk, backward's chunk and stage
        forward, backward, stage = np.indices((chunks, chunks, stages)).reshape(3, -1)
        both = np.zeros((len(stage), rows, size))
        both[np.arange(len(stage)), 0, forward * stages + stage] = 1
        both[np.arange(len(stage)), 1, backward * stages + stage] = 1
        found.append(both.reshape(len(stage), -1))
    return np.concatenate(found)
