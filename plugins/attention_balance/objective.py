"""This module computes how long a training step takes, from the points where devices wait for each other, and a lower
bound on the step time that no assignment of the samples can beat. The module needs only NumPy.

Expert parallelism exchanges tokens in every MoE layer, so the ranks of an EP group process each micro-batch together:
the slowest rank sets the time of the micro-batch. All data-parallel ranks wait for each other at the end of the step.
Context- and tensor-parallel devices work on the same sample, so they add no wait between different samples. MindFormers
numbers devices (dp, cp, tp) with tp fastest and an EP group is `expert_parallel` consecutive devices
(`get_ep_group_name`): it spans ep / (cp * tp) data-parallel ranks. With `g` ranks in such a group and `t` the time of a
micro-batch on a rank:

    step time = max over groups of (sum over micro-batches of (max over the group's ranks of t))

With g = all ranks there is a barrier in every micro-batch; with g = 1 the only barrier is the end of the step. With
pipeline stages the inner sum becomes the `makespan` of 1F1B: each of p stages takes the same time t_m for micro-batch
m, one share of it for the forward pass and the rest for the backward pass; transfers take no time. A stage keeps the
order of `one_forward_one_backward`, and an operation starts when its stage is free and its input is there: forward(s,
m) needs forward(s - 1, m), backward(s, m) needs backward(s + 1, m). Interleaved (vpp) schedules are not modelled; their
bubble depends on the same neighbouring micro-batches.

The last stage is busy for sum(t), but only after the first forward pass has reached it and before the last backward
pass has left it, so makespan >= sum(t) + (p - 1) * (forward(first) + backward(last)). At any time the stages hold up to
p neighbouring micro-batches, of which the slowest sets the pace: so `best_order` places similar micro-batches next to
each other. `lower_bound` is the step time below which no assignment of the same samples can go.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from plugins.errors import RecipeError
from plugins.pipeline_layout import FORWARD, one_forward_one_backward


@lru_cache(maxsize=16)
def _levels(stages: int, micro_batches: int) -> list[np.ndarray]:
    """Return the operations of a pipeline in levels: an operation depends only on operations in earlier levels, and
    each level has at most one operation of a stage.

    A level is int64 [4, operations]: the stage; its duration's row, in forwards and then backwards by micro-batch; the
    row where its input's end stands; the row where its own end goes. Rows of ends: (direction, stage + 1, micro-batch),
    with a stage before the first and one behind the last that are never waited for.
    """
    waiting = [one_forward_one_backward(stage, stages, micro_batches)[::-1].tolist() for stage in range(stages)]
    done: set[tuple[int, int, int]] = set()
    levels = []
    while any(waiting):
        level = []
        for stage, operations in enumerate(waiting):
            if not operations:
                continue
            kind, m = operations[-1]
            source = stage - 1 if kind == FORWARD else stage + 1
            if not 0 <= source < stages or (kind, source, m) in done:
                level.append((kind, stage, source, m))
        for kind, stage, _, m in level:
            waiting[stage].pop()
            done.add((kind, stage, m))
        rows = []
        for kind, stage, source, m in level:
            first = 0 if kind == FORWARD else stages + 2
            ends = [(first + place + 1) * micro_batches + m for place in (source, stage)]
            rows.append((stage, m if kind == FORWARD else micro_batches + m, *ends))
        levels.append(np.array(rows).T)
    return levels


def makespan(times: np.ndarray, stages: int, forward_share: float) -> np.ndarray:
    """Return the time [...] of 1F1B over micro-batches that take `times` [..., micro-batches] on every stage, in that
    order.
    """
    *lead, micro_batches = times.shape
    time = np.moveaxis(times, -1, 0).reshape(micro_batches, -1)
    durations = np.concatenate((forward_share * time, (1 - forward_share) * time))
    ends = np.zeros((2 * (stages + 2) * micro_batches, time.shape[1]))
    free = np.zeros((stages, time.shape[1]))
    for stage, duration, source, own in _levels(stages, micro_batches):
        end = np.maximum(free.take(stage, 0), ends.take(source, 0)) + durations.take(duration, 0)
        free[stage] = end
        ends[own] = end
    return free[0].reshape(lead)


def best_order(times: np.ndarray, stages: int, forward_share: float) -> np.ndarray:
    """Return int64 [rows, micro-batches]: for each row of `times`, the order of its micro-batches with the shortest
    1F1B makespan among four candidates, one of which is the given order.

    The other three orders rise and fall at most once, because a micro-batch waits for its slowest neighbours: one order
    rises; two have small micro-batches at both ends, and start from the smallest or from the second smallest. Tests
    check that the best of these orders is at most 4 % slower than the best of all orders, for 6 micro-batches with
    log-normal times on 2 to 8 stages.
    """
    rows, micro_batches = times.shape
    rising = np.argsort(times, axis=1, kind="stable")
    peak = np.concatenate((rising[:, ::2], rising[:, 1::2][:, ::-1]), axis=1)
    given = np.broadcast_to(np.arange(micro_batches), (rows, micro_batches))
    candidates = np.stack((given, rising, peak, peak[:, ::-1]))
    spans = makespan(np.take_along_axis(times[None], candidates, 2), stages, forward_share)
    return candidates[spans.argmin(0), np.arange(rows)]


@dataclass(frozen=True)
class Objective:
    """An `Objective` is the step-time model that a plan minimises.

    Args:
        ranks_per_barrier: the number of data-parallel ranks that wait for each other in every micro-batch.
        stages: the number of pipeline stages.
        forward_share: the share of a micro-batch's time that its forward pass takes.
    """

    ranks_per_barrier: int
    stages: int = 1
    forward_share: float = 1 / 3

    def step_time(self, loads: np.ndarray) -> np.ndarray:
        """Return the modelled time of a step [...] from the cost `loads` [..., ranks, micro-batches], in the same
        unit.
        """
        *lead, ranks, micro_batches = loads.shape
        groups = ranks // self.ranks_per_barrier
        slowest = loads.reshape(*lead, groups, self.ranks_per_barrier, micro_batches).max(-2)
        if self.stages == 1:
            return slowest.sum(-1).max(-1)
        return makespan(slowest, self.stages, self.forward_share).max(-1)

    def even_time(self, totals: np.ndarray, ranks: int, micro_batches: int) -> np.ndarray:
        """Return the modelled time of a step [...] if its total cost `totals` [...] were spread evenly over all ranks
        and micro-batches.
        """
        return totals / ranks * (micro_batches + self.stages - 1) / micro_batches


def groups_fit(data_parallel: int, expert_parallel: Any, devices: int) -> Any:
    """Return whether EP groups consist of equally many whole data-parallel ranks, or are an equal part of one rank.

    Args:
        expert_parallel: the number of devices of an EP group, or an array of such numbers; the result then is an array.
        devices: the number of devices of a data-parallel rank within a pipeline stage.
    """
    larger, smaller = np.maximum(expert_parallel, devices), np.minimum(expert_parallel, devices)
    return (larger % smaller == 0) & (data_parallel % np.maximum(expert_parallel // devices, 1) == 0)


def objective_of(
    *,
    data_parallel: int,
    expert_parallel: int = 1,
    context_parallel: int = 1,
    tensor_parallel: int = 1,
    pipeline_stages: int = 1,
    recomputed: float = 0.0,
) -> Objective:
    """Return the step-time model (`Objective`) for a recipe's `parallel_config`; `recomputed` is the share of the
    forward pass that the backward pass repeats.

    Raises:
        RecipeError: EP groups do not consist of equally many whole data-parallel ranks.
    """
    devices = context_parallel * tensor_parallel
    together = max(expert_parallel // devices, 1)
    if not groups_fit(data_parallel, expert_parallel, devices):
        raise RecipeError(
            "parallel_config.expert_parallel: an EP group must consist of whole data-parallel ranks, or be an equal "
            f"part of one rank, but {expert_parallel} devices are neither: a data-parallel rank has "
            f"context_parallel {context_parallel} x model_parallel {tensor_parallel} devices, and data_parallel is "
            f"{data_parallel}; write a divisor or multiple of {devices} that divides {data_parallel * devices} and the "
            "number of experts"
        )
    return Objective(together, pipeline_stages, 1 / (3.0 + recomputed))


def lower_bound(costs: np.ndarray, ranks: int, micro_batches: int, slots: int, objective: Objective) -> np.ndarray:
    """Return a lower bound on the step time [...] of any assignment of the samples, in the unit of `costs` [...,
    samples]. The returned bound is the largest of several lower bounds on the step time.

    With one sample in a slot, one group of ranks and no pipeline some assignment reaches the bound (`assign.py`). The
    other cases use the following bounds (x: costs falling; y: the falling block maxima of `assign.py`'s claim, G groups
    of M blocks):

    1. The mean: the step cannot be shorter than all work spread evenly over the ranks.
    2. Blocks: the maxima of all blocks sum to at least sum(y), and some group has at least a G-th of that sum.
    3. Pigeonhole: of the j G + 1 heaviest blocks some group has at least j + 1, in addition to its other M - j - 1
       blocks.
    4. Pipelines: `_pipeline` raises the bound by the time that a micro-batch needs to pass all stages. The bound for
       pipelines is loose if micro-batches differ much.
    """
    *lead, size = costs.shape
    falling = -np.sort(-costs.reshape(-1, size), axis=1)
    together = objective.ranks_per_barrier
    groups = ranks // together
    work = falling.sum(1) / ranks
    blocks = _least_maxima(falling, together, slots)
    bound = np.maximum(work, blocks.sum(1) / groups)
    if together == 1:
        bound = np.maximum(bound, _pigeonhole(falling, ranks))
    else:
        bound = np.maximum(bound, _pigeonhole(blocks, groups))
    if objective.stages > 1:
        bound = _pipeline(bound, blocks, micro_batches, objective)
    return bound.reshape(lead)


def _least_maxima(falling: np.ndarray, together: int, slots: int) -> np.ndarray:
    """Return [rows, blocks]: a lower bound on the time of the k-th slowest block of any assignment.

    By the claim its largest sample is at least x[k * together * slots]; its rank has slots - 1 others besides, each
    of them at least as heavy as the lightest of all.
    """
    company = falling[:, falling.shape[1] - (slots - 1) :].sum(1, keepdims=True)
    return falling[:, :: together * slots] + company


def _pigeonhole(falling: np.ndarray, groups: int) -> np.ndarray:
    """Return bound 3 for items [rows, n] in falling order, which are divided into `groups` groups
    of equal size.
    """
    rows, count = falling.shape
    size = count // groups
    total = np.concatenate((np.zeros((rows, 1)), np.cumsum(falling, axis=1)), axis=1)
    j = np.arange(size)
    crowded = total[:, j * groups + 1] - total[:, j * groups - j]
    others = total[:, -1:] - total[:, count - (size - j - 1)]
    return (crowded + others).max(1)


def _pipeline(work: np.ndarray, blocks: np.ndarray, micro_batches: int, objective: Objective) -> np.ndarray:
    """Return a lower bound on the makespan of p stages, where f is the forward share, b is 1 - f, L the slowest
    micro-batch and S the fastest.

    1. The last stage works through all of them, after the first came down and before the last goes up:
       sum + (p - 1) S.
    2. only L goes down and up all stages; on the first stage the forwards of those before it come before, the backwards
       of those behind it after: p L + min(f, b) * (sum of the others).
    3. With X before L and Y behind it (sums): the last stage finishes X and L, L goes up, the first stage then runs
       the backwards of Y: (p - 1) f S + X + L + (p - 1) b L + b Y. Mirrored: f X + (p - 1) f L + L + Y + (p - 1) b S.
       Whatever X and Y are, b times the first plus f times the second stays below the makespan.
    """
    more, f = objective.stages - 1, objective.forward_share
    b = 1 - f
    slowest, fastest = blocks[:, 0], blocks[:, -1]
    others = blocks[:, blocks.shape[1] - (micro_batches - 1) :].sum(1)
    alone = objective.stages * slowest + min(f, b) * others
    around = slowest * (1 + more * (b * b + f * f)) + (1 - f * b) * others + more * 2 * f * b * fastest
    return np.maximum.reduce((work + more * fastest, alone, around))
