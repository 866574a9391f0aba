"""Which layers go to which stage and chunk, and what each recomputes: the fastest plan under every stage's memory cap.

1. `start`: a first plan at once, if evenly spread layers fit.
2. `lower_bound`: what no plan can beat, and the chains that make the model exact where it matters. Without a plan
   so far, one by `ilp`, or the proof that none fits and what is missing.
3. The whole model, adding chains, which may prove its plan best.
4. In rounds that grow longer, annealing with the simulator (`polish`), then the model around the best plan
   (`near`): where one is weak, the other has been strong. At last the whole model again, for the bound.

Every plan is judged by the simulator and by the exact peak memory; the model only proposes and bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tools.placement.budget import Budget
from tools.placement.ilp import Answer, PathModel
from tools.placement.incumbent import Incumbent
from tools.placement.instance import Instance
from tools.placement.lower_bound import path_bound, work_bound
from tools.placement.near import add_plan, search_near
from tools.placement.polish import anneal
from tools.placement.start import even_plan, recompute_less

# shares of the effort; what is left after the rounds goes to the whole model
_RELAXED, _FIRST = 0.05, 0.06
_ROUNDS = (0.06, 0.12, 0.24, 0.36)
# of a round; the rest searches near the best plan
_ANNEAL = 0.7


@dataclass(frozen=True)
class Outcome:
    """What a search found.

    plan        [K, C], or None
    time        simulated step time; infinite without a plan
    peak        [stages] peak memory of the plan
    bound       no plan is faster
    work_bound  the plain bound: all work shared evenly, nothing recomputed, nobody waiting
    finished    the plan is proven best (or, without one, proven not to exist)
    why         without a plan: what is missing
    seconds     that it took
    cut         a deadline ended it before its effort was spent: another machine may find another plan
    """

    instance: Instance
    plan: np.ndarray | None
    time: float
    bound: float
    work_bound: float
    finished: bool
    seconds: float
    why: str = ""
    cut: bool = False
    peak: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def gap(self) -> float:
        """(time - bound) / time."""
        return max(0.0, 1 - self.bound / self.time) if self.plan is not None else float("inf")


def optimise(
    instance: Instance, budget: Budget, seed: int = 0, report: Callable[[Incumbent], None] | None = None
) -> Outcome:
    """Search until `budget` is over or the best plan is proven best; `report` hears of every improvement."""
    incumbent = Incumbent(instance, work_bound(instance), report)
    even = even_plan(instance)
    if instance.fits(even[None])[0]:
        incumbent.offer(recompute_less(instance, even))
    model = PathModel(instance)
    incumbent.prove(path_bound(instance, model, budget.part(_RELAXED)))
    if incumbent.plan is None:
        least = model.least_excess(budget)
        if least.plan is None or not instance.fits(least.plan[None])[0]:
            return _nothing(instance, budget, least)
        incumbent.offer(recompute_less(instance, least.plan))
    rng = np.random.default_rng(seed)
    _whole(incumbent, model, budget.part(_FIRST))
    for share in _ROUNDS:
        if incumbent.proven or budget.over:
            break
        _round(incumbent, model, budget.part(share), rng)
    _whole(incumbent, model, budget)
    return _found(incumbent, budget)


def _round(incumbent: Incumbent, model: PathModel, budget: Budget, rng: np.random.Generator) -> None:
    assert incumbent.plan is not None
    anneal(incumbent, incumbent.plan[None], budget.part(_ANNEAL), rng)
    search_near(incumbent, model, budget, rng)


def _whole(incumbent: Incumbent, model: PathModel, budget: Budget) -> None:
    """Solve the whole model, adding chains, until it has no better plan or `budget` is over."""
    while not (incumbent.proven or budget.over):
        answer = model.best(budget, incumbent.goal)
        incumbent.prove(answer.bound)
        if answer.plan is None:
            break
        add_plan(incumbent, model, answer.plan)


def _found(incumbent: Incumbent, budget: Budget) -> Outcome:
    instance, plan = incumbent.instance, incumbent.plan
    assert plan is not None
    return Outcome(
        instance,
        plan,
        incumbent.time,
        incumbent.bound,
        work_bound(instance),
        incumbent.proven,
        budget.elapsed,
        cut=budget.cut and not incumbent.proven,
        peak=instance.peak_memory(plan[None])[0],
    )


def _nothing(instance: Instance, budget: Budget, least: Answer) -> Outcome:
    """Say what is missing: the smallest cap that some plan keeps, or that effort was short."""
    if least.plan is None:
        why = f"no plan found in {budget.elapsed:.0f} s, and none excluded; give it more effort and time"
    else:
        peak = instance.peak_memory(least.plan[None])[0]
        stage, missing = int(peak.argmax()), float(peak.max()) - instance.cap
        known = (
            "the least cap that any plan keeps is" if least.done else "the least cap found for which there is a plan is"
        )
        why = (
            f"no plan keeps memory_cap {instance.cap:g}: {known} {peak.max():g}, {missing:g} more (then stage {stage} "
            "is full); raise the cap, or use more stages, or a recompute option that holds less"
        )
    finished = least.plan is not None and least.done
    cut = budget.cut and not finished
    return Outcome(instance, None, float("inf"), float("inf"), work_bound(instance), finished, budget.elapsed, why, cut)
