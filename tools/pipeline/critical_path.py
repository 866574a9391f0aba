"""Why a step takes as long as it takes: the longest chain of operations, as a bound for every other plan.

The step time is the longest of all chains through the schedule, and a chain's length is a sum of durations. So
the chain that decides one plan, counted by what runs on it, bounds every other plan's step time from below:
``time >= (visits * times).sum()``, linear in the durations and therefore in the layers of each chunk.
"""

from __future__ import annotations

import numpy as np

from tools.pipeline.timetable import KINDS, Timetable


def critical_path(table: Timetable, times: np.ndarray) -> tuple[float, np.ndarray]:
    """Return (step time, visits [2, C]): how often the longest chain runs each chunk's forward and backward.

    `times` is [2, C], forward and backward of the chunks in model order (chunk * stages + stage). Schedules without
    split backwards, transfers not counted. Of chains of one length it takes those that stay on a stage.
    """
    size, stages = table.chunks * table.stages, table.stages
    cost = np.concatenate([times.ravel(), np.zeros(KINDS * size + 1 - 2 * size)])[table.work]
    free = np.zeros((len(cost) + 1, stages))
    cells = free.ravel()
    for level, needs in enumerate(table.needs):
        ready = np.maximum(cells.take(needs), free[level])
        np.add(ready, cost[level], out=free[level + 1])
    work, needs, values = table.work.ravel().tolist(), table.needs.ravel().tolist(), cells.tolist()
    visits = [0] * (KINDS * size + 1)
    place = len(values) - stages + int(free[-1].argmax())
    while place >= stages:
        here = place - stages
        visits[work[here]] += 1
        need = needs[here]
        place = need if need and values[need] > values[here] else here
    return float(free[-1].max()), np.array(visits[: 2 * size]).reshape(2, size)
