"""This module computes two lower bounds for a pipeline-balance problem: on the step time, and on the time of the
slowest stage.

The bounds assume whole layers, but let a layer recompute fractions of its options to stay within the memory cap of its
stage; with one chunk per stage the bounds include the filling and draining of the pipeline. Computing the bounds takes
milliseconds; the bound of the solver's model (`tools.layout.ilp.path_bound`) is tighter and slower. The tests compare
the bounds with an enumeration of all plans of small instances (`tests/tools/layout/pipeline_instances.py`).
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from tools.layout.ilp import work_bound
from tools.layout.instance import Instance
from tools.layout.stage_costs import StageCosts, least_layers, least_sum


def floor_of(instance: Instance) -> tuple[float, float]:
    """Return two lower bounds in ms that hold for every plan: on the step time, and on the time of the slowest stage.
    The two lower bounds are infinite if no plan fits in memory.

    The layers of a stage are whole. The recomputation of a layer may be divided into fractions, whose cost is the
    convex hull of the recompute options. If a stage has several chunks, each chunk holds its least number of layers,
    and the other layers are in the chunk with the fewest micro-batches in flight.
    """
    if len(instance.types) > 2:
        work = work_bound(instance)
        return work, work / instance.micro_batches
    costs = StageCosts(instance)
    low = _low(costs)
    times = np.unique(low[np.isfinite(low)].round(9))
    first = bisect_left(times, True, key=lambda time: _holds(costs, low, time))
    if first == len(times):
        return np.inf, np.inf
    slowest, many = float(times[first]), instance.micro_batches
    if instance.chunks > 1 or instance.schedule != "1f1b" or many < instance.stages:
        return many * slowest, slowest
    # with one chunk the work of all stages fills and drains the pipeline, but for forwards (or backwards) that the
    # slowest stage does meanwhile
    share = max(
        *(k.forward / (k.forward + k.backward) for k in instance.types),
        *(one[0] / sum(one) for one in instance.ends.T if sum(one)),
    )
    best, table = np.inf, _by_position(costs, low)
    for time in map(float, times[first:]):
        if many * time >= best:
            break
        solved = least_sum(table, time)
        if solved is None:
            continue
        able = [s for s in range(instance.stages) if (np.abs(low[s] - time) < 1e-8).any()]
        after = max((instance.stages - s - 1 for s in range(instance.stages) if s in able), default=instance.stages - 1)
        best = min(best, max(many * time, solved[0] + (many - 1) * time - after * share * time))
    return best, slowest


def _low(costs: StageCosts) -> np.ndarray:
    """Return [stages, early + 1, layers + 1] no stage that holds so many layers, of them so many early ones (of the
    first of two types), takes less; infinite where they cannot fit.
    """
    instance, counts = costs.instance, np.arange(costs.layers + 1)
    early = instance.types[0].count if len(instance.types) > 1 else 0
    least = instance.by_stage(least_layers(instance)).reshape(instance.chunks, instance.stages)
    free = [float(extra.min()) for extra in costs.extra]
    kept = [float(held[extra == extra.min()].min()) for extra, held in zip(costs.extra, costs.held, strict=True)]
    hulls = [_hull(extra, held) for extra, held in zip(costs.extra, costs.held, strict=True)]
    number = np.arange(early + 1)[:, None]
    late = counts - number
    work = number * (costs.base[0] + free[0]) + late * (costs.base[-1] + free[-1])
    room = costs.room[:, None, None] - number * costs.parameters[0] - late * costs.parameters[-1]
    # [stages, early + 1, chunks] late layers that a chunk surely holds: early ones may fill the first chunk, or all
    sure = np.repeat(least.T[:, None], early + 1, axis=1)
    sure[:, 1:, : 1 if early < instance.stages else None] = 0
    others = sure.sum(axis=2)[:, :, None]
    extra = np.zeros(room.shape)
    for vector in range(max(map(len, instance.peaks))):
        peaks = np.array([held[min(vector, len(held) - 1)] for held in instance.peaks], float)
        fewest = peaks.min(axis=1)
        parts = [
            (hulls[-1], kept[-1], held, n[:, :, None]) for held, n in zip(peaks.T, sure.T.swapaxes(1, 2), strict=True)
        ]
        parts += [(hulls[-1], kept[-1], fewest, late - others), (hulls[0], kept[0], fewest, number[None])]
        ends = np.array([held[min(vector, len(held) - 1)] for held in instance.kept_by_ends])
        extra = np.maximum(extra, _freeing(parts, room - ends[:, None, None]))
    found = costs.ends[:, None, None] + work + extra
    found[counts < np.maximum(number + others, least.sum(axis=0)[:, None, None])] = np.inf
    if instance.updates:
        both = np.broadcast_arrays(number, np.maximum(late, 0))[-len(instance.types) :]
        layers = np.repeat(np.stack(both, axis=2)[..., None], instance.stages, axis=3)
        found[~np.moveaxis(instance.within(instance.in_update(layers)), 2, 0)] = np.inf
    if instance.least_layers:  # the stages before one with early layers have some, too
        found[np.arange(instance.stages) > early, 1:] = np.inf
    return found


# hull, activation, [stages] in flight, layers [stages, early + 1, layers + 1], where an axis may be 1
Part = tuple[list[tuple[float, float]], float, np.ndarray, np.ndarray]


def _freeing(parts: list[Part], room: np.ndarray) -> np.ndarray:
    """Return the least ms of (divisible) recomputation that keeps `room`, [stages, early + 1, layers + 1], or inf."""
    over, cost = -room, np.zeros(room.shape)
    prices, most = [], []
    for hull, kept, held, count in parts:
        over = over + kept * held[:, None, None] * count
        for ms, gib in hull:
            prices.append(np.divide(ms, gib * held, out=np.zeros(len(held)), where=held > 0))
            most.append(np.broadcast_to(np.maximum(gib * held[:, None, None] * count, 0.0), room.shape))
    if not (over > 0).any():
        return cost
    every, stages = np.array(most), np.arange(len(room))
    for pick in np.argsort(np.array(prices), axis=0, kind="stable"):
        taken = np.minimum(np.maximum(over, 0.0), every[pick, stages])
        over, cost = over - taken, cost + np.array(prices)[pick, stages][:, None, None] * taken
    return np.where(over > 1e-9, np.inf, cost)


def _hull(extra: np.ndarray, held: np.ndarray) -> list[tuple[float, float]]:
    """Return [(ms, memory)] pieces of the lower convex hull of a layer's recomputation over freed memory."""
    first = np.lexsort((held, extra))[0]
    points = [(float(held[first] - a), float(x - extra[first])) for x, a in zip(extra, held, strict=True)]
    pieces, at = [], (0.0, 0.0)
    while further := [point for point in points if point[0] > at[0] + 1e-12]:
        best = min(further, key=lambda point: ((point[1] - at[1]) / (point[0] - at[0]), -point[0]))
        pieces.append((best[1] - at[1], best[0] - at[0]))
        at = best
    return pieces


def _holds(costs: StageCosts, low: np.ndarray, slowest: float) -> bool:
    """Return whether all layers find a place if no stage may take longer."""
    stages, early, size = low.shape
    most = np.where(low <= slowest + 1e-9, np.arange(size), -size * stages).max(axis=2)  # [stages, early]
    best = np.full(early, -size * stages)
    best[0] = 0
    for row in most:
        best = np.array([max(best[k - d] + row[d] for d in range(k + 1)) for k in range(early)])
    return bool(best[-1] >= costs.layers)


def _by_position(costs: StageCosts, low: np.ndarray) -> np.ndarray:
    """Return `low` of one chunk per stage as [stages, layers with the stage, before it]; early ones come first."""
    early, size = low.shape[1] - 1, low.shape[2]
    after, before = np.indices((size, size))
    count = after - before
    number = np.clip(early - before, 0, np.maximum(count, 0))
    return np.where(count >= 0, low[:, number, count], np.inf)
