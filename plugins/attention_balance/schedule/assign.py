"""Samples of one global batch -> (data-parallel rank, micro-batch, slot), for the shortest step. NumPy only.

One sample a slot, all ranks in one barrier (g = R): sort the samples and give each R consecutive ones to a micro-batch.

    Claim. The k-th largest of the micro-batches' maxima is, in any assignment, at least x[(k - 1) R] (x sorted
    falling, from 0), which is what the sorted assignment has.
    Proof. The k - 1 micro-batches with the largest maxima hold (k - 1) R samples. So among the (k - 1) R + 1 largest
    samples at least one lies in another micro-batch, whose maximum is then at least x[(k - 1) R].

So the sorted assignment minimises every non-decreasing function of the maxima at once: their sum, and also a
pipeline's makespan for the best order of micro-batches; only that order is then a heuristic.

Several groups of ranks (g < R): the same claim holds for blocks of g samples over all groups; which blocks go to
which group is number partitioning (`partition.py`), as with plain data parallelism (g = 1, a block is a sample).
Several samples a slot: two constructions, the better one is taken, see `_blocks`.
"""

from __future__ import annotations

import numpy as np

from plugins.attention_balance.schedule.objective import Objective
from plugins.attention_balance.schedule.order import falling_order, taken
from plugins.attention_balance.schedule.partition import partition
from plugins.attention_balance.schedule.pipeline import best_order

_SCALE = float(1 << 32)


def unscheduled(ranks: int, micro_batches: int, slots: int) -> np.ndarray:
    """int64 [ranks, micro-batches, slots]: what MindFormers delivers, as positions in the global batch.

    `GeneratorDataset` deals positions to ranks in turn; a rank's samples fill its micro-batches one after the other.
    Where the graph gathers the batches first (`plan.delivery_order`) it is another order that knows no costs either.
    """
    return np.arange(ranks * micro_batches * slots).reshape(micro_batches, slots, ranks).transpose(2, 0, 1)


def assign(costs: np.ndarray, ranks: int, micro_batches: int, slots: int, objective: Objective) -> np.ndarray:
    """Assign the samples of one global batch, or of several at once.

    Args:
        costs: float64 [..., ranks * micro_batches * slots], at least 0, in the order of the global batch.
        ranks: data-parallel ranks. micro_batches: of a step. slots: samples of a rank's micro-batch.
        objective: where ranks wait for each other.

    Returns:
        int64 [..., ranks, micro_batches, slots]: positions in the global batch, each once. Equal costs keep their
        order; a batch's result depends on its costs alone, the same on every machine. Never slower than
        `unscheduled` (which is returned when nothing beats it).
    """
    *lead, size = costs.shape
    assert size == ranks * micro_batches * slots
    weights = _integers(costs.reshape(-1, size))
    if objective.ranks_per_barrier == 1:
        plan = _ranks_alone(weights, ranks, micro_batches, slots, objective)
    else:
        plan = _groups(weights, ranks, micro_batches, slots, objective)
    if objective.stages > 1:
        plan = _ordered(weights, plan, objective)
    natural = np.broadcast_to(unscheduled(ranks, micro_batches, slots), plan.shape)
    plan = _fastest(weights, [natural, plan], objective)
    return plan.reshape(*lead, ranks, micro_batches, slots)


def loads_of(costs: np.ndarray, plan: np.ndarray) -> np.ndarray:
    """Cost [..., ranks, micro-batches] of each rank's micro-batches. costs: [..., samples]; plan as in `assign`."""
    rows = int(np.prod(plan.shape[:-3]))
    return taken(costs.reshape(rows, -1), plan.reshape(rows, -1)).reshape(plan.shape).sum(-1)


def _integers(costs: np.ndarray) -> np.ndarray:
    """Costs [rows, n] as int64 of 32 bits: exact sums, so that every rank of a mixed cluster finds the same plan."""
    largest = costs.max(1, keepdims=True)
    return np.rint(costs * (_SCALE / np.where(largest > 0, largest, 1.0))).astype(np.int64)


def _ranks_alone(weights: np.ndarray, ranks: int, micro_batches: int, slots: int, objective: Objective) -> np.ndarray:
    """Plain data parallelism: each rank's total counts, and with a pipeline how even its micro-batches are."""
    rows = len(weights)
    parts = partition(weights, ranks)
    if objective.stages > 1 and slots > 1:
        inner = partition(taken(weights, parts).reshape(rows * ranks, -1), micro_batches).reshape(rows, ranks, -1)
        parts = np.take_along_axis(parts, inner, 2)
    return parts.reshape(rows, ranks, micro_batches, slots)


def _groups(weights: np.ndarray, ranks: int, micro_batches: int, slots: int, objective: Objective) -> np.ndarray:
    """Barriers inside groups of ranks: blocks of samples that run together, then blocks to groups."""
    rows, together = len(weights), objective.ranks_per_barrier
    groups = ranks // together
    plans = []
    for blocks in _blocks(weights, together, slots):
        mine = partition(taken(weights, blocks).sum(-1).max(-1), groups)  # [rows, groups, micro_batches]
        plan = blocks[np.arange(rows)[:, None, None], mine]
        # heavy to light, then light to heavy: ranks' totals come close too, for the waits that no barrier forces
        plan[:, :, 1::2] = plan[:, :, 1::2, ::-1]
        plans.append(plan.transpose(0, 1, 3, 2, 4).reshape(rows, ranks, micro_batches, slots))
    if slots > 1:
        plans.append(_sorted_inside(weights, partition(weights, ranks)).reshape(plans[0].shape))
    return plans[0] if len(plans) == 1 else _fastest(weights, plans, objective)


def _sorted_inside(weights: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """The items of each part [rows, parts, size] in falling order."""
    rows, count, size = parts.shape
    order = falling_order(taken(weights, parts).reshape(-1, size))
    return taken(parts.reshape(-1, size), order).reshape(rows, count, size)


def _blocks(weights: np.ndarray, together: int, slots: int):
    """Yield ways to cut the samples into blocks [rows, blocks, together, slots] that run at the same time.

    1. Sort, cut into blocks of together * slots, divide each evenly over its ranks: best when costs vary smoothly.
    2. (several slots) Divide all samples evenly into rank-sized bins, sort the bins, cut: best when a few samples
       are far heavier than the rest and each needs the lightest ones beside it.
    """
    rows, size = weights.shape
    order = falling_order(weights)
    if slots == 1:
        yield order.reshape(rows, -1, together, 1)
        return
    blocks = order.reshape(-1, together * slots)
    inside = partition(taken(weights, order).reshape(blocks.shape), together, by_item=False)
    yield taken(blocks, inside).reshape(rows, -1, together, slots)
    # they are sorted next, so closer bins gain nothing
    bins = partition(weights, size // slots, by_item=False, swap=False)
    falling = falling_order(taken(weights, bins).sum(-1))
    yield np.take_along_axis(bins, falling[:, :, None], 1).reshape(rows, -1, together, slots)


def _ordered(weights: np.ndarray, plan: np.ndarray, objective: Objective) -> np.ndarray:
    """The same plan with each group's micro-batches in an order that suits the pipeline."""
    micro_batches, slots = plan.shape[2:]
    together = objective.ranks_per_barrier
    times = taken(weights, plan).sum(-1).reshape(-1, together, micro_batches).max(1)
    order = best_order(times, objective.stages, objective.forward_share)
    grouped = plan.reshape(-1, together, micro_batches, slots)
    return np.take_along_axis(grouped, order[:, None, :, None], 2).reshape(plan.shape)


def _fastest(weights: np.ndarray, plans: list[np.ndarray], objective: Objective) -> np.ndarray:
    """For each row the fastest of the plans, the first of equals."""
    times = objective.step_time(np.stack([taken(weights, plan).sum(-1) for plan in plans]))
    best = times.argmin(0)
    if (best == best[0]).all():
        return plans[best[0]]
    return np.stack(plans)[best, np.arange(len(weights))]
