"""This module computes a lower bound on the step time of a pipeline-balance problem from weighted chains of operations.
The bound holds for plans that do not divide layers.

A chain of operations that wait for each other contains the forward and the backward pass of each chunk a number of
times, and a step takes at least as long as every chain. The weighted mean of the lengths of several chains is therefore
a lower bound, too. The weighted mean is a sum over the stages, so dynamic programming over the layers finds the plan
with the least mean, however many patterns a stage has (`tools.layout.patterns`). The longest chain of this plan is then
added, and a small linear program chooses new weights, until no weights give a higher bound (Dantzig and Wolfe 1960;
here the plans are the columns). Sending an activation also keeps a stage busy, which counts in a chain that stays on
the stage.

The time of a step after the pipeline (gradients, weights and the optimizer) depends on the slowest stage. All possible
times of a slowest stage are therefore tried in turn: no stage may take longer than this time, and a stage counts as the
slowest only if it can take this time with some recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from tools.layout.budget import Budget
from tools.layout.instance import Instance
from tools.layout.patterns import After, Stage, patterns_of
from tools.layout.stage_costs import StageCosts, compositions
from tools.pipeline.timetable import critical_path

_ROUNDS = 80  # plans that are tried for one time of the slowest stage
_NEW = 0.3  # share of the linear program's weights in those of the next round; the others are the best so far
_CLOSE = 1e-4  # relative: weights cannot give more than this
_EQUAL = 1e-6  # relative: stages are equally slow
_REACH = 2_000  # ways to recompute of a stage's layers; beyond that it may take any time in between
_ROUND, _CELL = 2e-3, 2e-8  # effort of a round, and of each of its operations and weighted patterns


def weighted_bound(instance: Instance, goal: float, budget: Budget, after: After | None = None) -> float:
    """Return a lower bound in ms (limited to `goal`) on the step time of every plan. The bound is 0 if none can be
    computed: for schedules other than 1F1B, for more than two types of layers, or if the budget is too small. Both
    `goal` and the bound include the time `after` the pipeline's last pass (gradients, weights, optimizer).
    """
    stages = patterns_of(instance, goal, budget, after)
    if stages is None:
        return 0.0
    if any(len(stage.columns) == 0 for stage in stages):
        return goal
    chains = _Chains(instance, stages)
    bound = goal
    for case in _cases(instance, stages, chains.works, after or After(0.0, _nothing), goal):
        if case.bound(0.0) < bound:
            bound = min(bound, case.bound(chains.least(case, case.enough(bound), budget)))
    return bound


def _nothing(early: np.ndarray, *_: np.ndarray) -> np.ndarray:
    return np.zeros(early.shape)


@dataclass(frozen=True)
class _Case:
    """A `_Case` holds the plans whose slowest stage takes at least `slowest` ms for a micro-batch, while no stage's
    pattern takes longer. The slowest stage itself may take longer, because it may recompute more than its memory needs.
    """

    slowest: float
    busy: np.ndarray  # [M] ms of all micro-batches on a stage that may be the slowest
    after: np.ndarray  # [M] ms after the pipeline if it is

    def bound(self, pipeline: float) -> float:
        """Return a lower bound in ms on the time of a step whose pipeline passes take at least `pipeline` ms."""
        return float((np.maximum(self.busy, pipeline) + self.after).min(initial=np.inf))

    def enough(self, goal: float) -> float:
        """Return the time of the pipeline passes, in ms, above which a step cannot take less than `goal` ms."""
        return float((goal - self.after[self.busy + self.after < goal]).max(initial=0.0))


def _cases(
    instance: Instance, stages: Sequence[Stage], works: Sequence[np.ndarray], after: After, goal: float
) -> list[_Case]:
    """Return the cases of the slowest stage in plans under `goal`, by time."""
    costs, many = StageCosts(instance), instance.micro_batches
    times = np.unique(np.concatenate(works).round(9))
    rows: list[np.ndarray] = []  # [ways, 5] stage, early and late layers, ms, ms at most
    for number, stage in enumerate(stages):
        held = np.column_stack([one[: len(stage.columns)].sum(axis=1) for one in (stage.early, stage.layers)])
        for early, layers in np.unique(held.astype(int), axis=0).tolist():
            able = _reach(costs, number, early, layers - early) - instance.received[number]
            most = able
            if not len(able):  # so many ways that it may be any of these times
                able, most = times, np.append(times[1:], max(times[-1], goal / many))
            one = np.array([number, early, layers - early])
            rows.append(np.column_stack([np.broadcast_to(one, (len(able), 3)), able, most]))
    number, early, late, able, most = np.concatenate(rows).T
    number = number.astype(int)
    busy = many * (able + instance.received[number])
    wide = np.ones((1, instance.stages))
    rest = after.of(early[:, None] * wide, late[:, None] * wide, able * (1 - _EQUAL), most * many)
    rest = rest[np.arange(len(number)), number]
    # a pattern of this time or the one before it is the slowest that the others may be
    place = np.searchsorted(times * (1 - _EQUAL), able, side="right") - 1
    return [_Case(time, busy[own], rest[own]) for index, time in enumerate(times) if (own := place == index).any()]


def _reach(costs: StageCosts, stage: int, early: int, late: int) -> np.ndarray:
    """Return the ms of a micro-batch for each way to recompute a stage's layers; none for too many ways."""
    found = np.array([costs.ends[stage]])
    for count, index in ((early, 0), (late, -1)):
        extra = costs.extra[index]
        if math.comb(count + len(extra) - 1, count) * len(found) > _REACH:
            return np.zeros(0)
        if count:
            found = (found[:, None] + compositions(count, len(extra)) @ extra + count * costs.base[index]).ravel()
    return np.unique(found.round(9))


class _Chains:
    """A `_Chains` holds chains of operations, and what each pattern of each stage adds to each of them."""

    def __init__(self, instance: Instance, stages: Sequence[Stage]) -> None:
        self.instance, self.stages = instance, stages
        self.sizes = [len(stage.columns) for stage in stages]
        received = instance.received
        own = [one.forward[:size] + one.backward[:size] for one, size in zip(stages, self.sizes, strict=True)]
        self.works = [work.sum(axis=1) - received[number] for number, work in enumerate(own)]
        self.early = instance.types[0].count if len(instance.types) > 1 else 0
        self.late = sum(kind.count for kind in instance.types) - self.early
        self.groups = [self._groups(stage, size) for stage, size in zip(stages, self.sizes, strict=True)]
        self.known: set[bytes] = set()
        self.more = np.zeros(0)  # [K] ms of a chain that no plan changes
        self.sums = [np.zeros((0, size)) for size in self.sizes]  # of each stage [K, N] ms
        for stage in range(instance.stages):  # all micro-batches of a stage, what comes before and what comes after
            visits = np.zeros((2, instance.chunks, instance.stages))
            visits[:, :, stage], visits[:, 0, :stage] = instance.micro_batches, 1
            self._add(visits, 0.0)
        self.weights = np.full(len(self.more), 1 / len(self.more))

    def _groups(self, stage: Stage, size: int) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
        """Return the patterns by their (early, late) layers, where those of each begin, and these layers."""
        early, layers = (one[:size].sum(axis=1).astype(int) for one in (stage.early, stage.layers))
        held = np.column_stack([early, layers - early])
        distinct, place = np.unique(held, axis=0, return_inverse=True)
        order = np.argsort(place.ravel(), kind="stable")
        first = np.searchsorted(place.ravel()[order], np.arange(len(distinct)))
        return order, first, [(int(early), int(late)) for early, late in distinct]

    def _add(self, visits: np.ndarray, more: float) -> None:
        """Add a chain with visits [2, V, stages]."""
        self.known.add(visits.tobytes())
        self.more = np.append(self.more, more)
        for number, (stage, size) in enumerate(zip(self.stages, self.sizes, strict=True)):
            own = stage.forward[:size] @ visits[0, :, number] + stage.backward[:size] @ visits[1, :, number]
            self.sums[number] = np.vstack([self.sums[number], own])

    def least(self, case: _Case, enough: float, budget: Budget) -> float:
        """Return a lower bound in ms on the pipeline time of all plans that belong to `case`. The function improves the
        weights of the chains until the bound reaches `enough`.
        """
        able = [work <= case.slowest * (1 + _EQUAL) for work in self.works]
        best, kept, weights, plans = 0.0, self.weights, self.weights, list[list[int]]()
        for _ in range(_ROUNDS):
            if budget.over:
                break
            budget.spend(_ROUND + _CELL * (self.instance.table.work.size + len(weights) * sum(self.sizes)))
            bound, plan = self._cheapest(weights, able)
            if plan is None:
                return np.inf  # so many layers do not find a place
            if bound > best:
                best, kept = bound, weights
            if best >= enough:
                break
            self._chain_of(plan)
            plans.append(plan)
            table = np.array([[*self.more]] * len(plans)) + sum(
                own[:, [plan[stage] for plan in plans]].T for stage, own in enumerate(self.sums)
            )
            most, found = _best_weights(table)
            kept = np.append(kept, np.zeros(len(self.more) - len(kept)))
            if best >= most * (1 - _CLOSE):
                break
            weights = _NEW * found + (1 - _NEW) * kept
        self.weights = np.append(kept, np.zeros(len(self.more) - len(kept)))
        return best

    def _cheapest(self, weights: np.ndarray, able: Sequence[np.ndarray]) -> tuple[float, list[int] | None]:
        """Return the least weighted mean of the chains, and its plan (a pattern for each stage); None without one."""
        left = np.full((self.early + 1, self.late + 1), np.inf)
        left[0, 0] = float(weights @ self.more[: len(weights)])
        steps = []
        for own, good, (order, first, held) in zip(self.sums, able, self.groups, strict=True):
            cost = np.where(good, weights @ own[: len(weights)], np.inf)[order]
            least, new, taken = np.minimum.reduceat(cost, first), np.full_like(left, np.inf), np.zeros(left.shape, int)
            for group, (early, late) in enumerate(held):
                if early > self.early or late > self.late or not np.isfinite(least[group]):
                    continue
                more = left[: self.early + 1 - early, : self.late + 1 - late] + least[group]
                better = more < new[early:, late:]
                new[early:, late:][better] = more[better]
                taken[early:, late:][better] = group
            steps.append((cost, taken))
            left = new
        if not np.isfinite(left[-1, -1]):
            return np.inf, None
        plan, early, late = [], self.early, self.late
        for (cost, taken), (order, first, held) in zip(reversed(steps), reversed(self.groups), strict=True):
            group = int(taken[early, late])
            begin, end = int(first[group]), int(first[group + 1]) if group + 1 < len(first) else len(cost)
            plan.append(int(order[begin + int(cost[begin:end].argmin())]))
            early, late = early - held[group][0], late - held[group][1]
        return float(left[-1, -1]), plan[::-1]

    def _chain_of(self, plan: Sequence[int]) -> None:
        """Add the longest chain of a plan, if it is new."""
        picked = [(stage.forward[pick], stage.backward[pick]) for stage, pick in zip(self.stages, plan, strict=True)]
        times = np.array(picked).transpose(1, 2, 0)  # [2, V, stages]
        took, visits = critical_path(self.instance.table, times.reshape(2, -1), self.instance.transfer)
        visits = visits.reshape(times.shape).astype(float)
        if visits.tobytes() not in self.known:
            self._add(visits, took - float((visits * times).sum()))


def _best_weights(table: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the largest weighted mean of the columns [K] that all rows [plans, K] have, and its weights."""
    plans, chains = table.shape
    found = linprog(
        np.append(np.zeros(chains), -1.0),
        A_ub=np.column_stack([-table, np.ones(plans)]),
        b_ub=np.zeros(plans),
        A_eq=np.append(np.ones(chains), 0.0)[None],
        b_eq=[1.0],
        bounds=[(0, None)] * chains + [(None, None)],
        method="highs",
    )
    weights = np.maximum(found.x[:chains], 0.0)
    return float(found.x[-1]), weights / weights.sum()
