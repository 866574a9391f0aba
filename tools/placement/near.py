"""Search around the best plan with the exact model: free a part of the plan, let HiGHS fill it in best.

Annealing changes a few layers at a time; where memory leaves little room, a better plan may need many changes at once.
Each round frees the chunks of some stages, or counts within one of the best plan's, or only the recompute options,
and asks the model for a plan that is better than the best. The model is as exact as its chains: when the simulator is
slower than the model said, the new chain is added and the same part is tried again.
"""

from __future__ import annotations

import numpy as np

from tools.placement.budget import Budget
from tools.placement.ilp import Answer, PathModel
from tools.placement.incumbent import Incumbent

_ROUND = 2.0  # effort
_REPEATS = 4


def search_near(incumbent: Incumbent, model: PathModel, budget: Budget, rng: np.random.Generator) -> None:
    """Improve `incumbent`, which has a plan, for all of `budget`."""
    stages = incumbent.instance.stages
    width = max(2, stages // 4)
    while not budget.over:
        low, high = _part(incumbent, width, rng)
        answer = _fill(incumbent, model, budget, low, high)
        # as much as HiGHS can search to the end in a round
        width = min(stages, width + 1) if answer.done else max(2, width - 1)


def _fill(incumbent: Incumbent, model: PathModel, budget: Budget, low: np.ndarray, high: np.ndarray) -> Answer:
    for _ in range(_REPEATS):
        answer = model.best(budget.part(_ROUND / budget.effort), incumbent.goal, low, high)
        if answer.plan is None or add_plan(incumbent, model, answer.plan) or not answer.done:
            break
    return answer


def add_plan(incumbent: Incumbent, model: PathModel, plan: np.ndarray) -> bool:
    """Offer a plan of the model and add the chain that decides it; say whether it was taken."""
    _, visits = incumbent.instance.longest_chain(plan)
    model.add_chain(visits)
    return incumbent.offer(plan)


def _part(incumbent: Incumbent, width: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Least and most layers [K, C] of a randomly chosen part."""
    plan, instance = incumbent.plan, incumbent.instance
    assert plan is not None
    kind = rng.choice(["neighbours", "stages", "by one", "options"])
    few = width if kind in ("neighbours", "stages") else 2 * width
    if kind == "neighbours":
        free = (rng.integers(instance.stages) + np.arange(few)) % instance.stages
    else:
        free = rng.permutation(instance.stages)[:few]
    chunks = np.isin(instance.stage_of, free)
    most = np.array([[instance.types[t].count] for t, _ in instance.columns])
    if kind == "by one":
        low, high = np.maximum(plan - 1, 0), np.minimum(plan + 1, most)
    elif kind == "options":
        low, high = np.zeros_like(plan), np.minimum(plan.sum(axis=0), most)
    else:
        low, high = np.zeros_like(plan), np.broadcast_to(most, plan.shape)
    return np.where(chunks, low, plan), np.where(chunks, high, plan)
