"""This module assigns layers to stages and chunks, and chooses how each layer is recomputed. The module searches for
the fastest plan in which no stage exceeds the memory cap.

1. A first plan is the plan that the caller gives, or otherwise the quick placement (`fast`); if it fits, a plan with
   evenly spread layers that recompute as little as memory allows is tried, too.
2. A lower bound on the step time of all plans is computed, together with the chains of operations that make the exact
   model (`ilp`) precise near the best plans. If there is no plan so far, the exact model finds a plan, or proves that
   no plan fits and how much memory is missing. If the caller gave no plan, the bound of weighted chains (`weighted`) is
   computed, too.
3. The solver solves the whole model and adds chains of operations, which may prove that its plan is the best.
4. In rounds, each twice as long as the round before, annealing with the simulator and then the model near the best plan
   (`ilp`) improve the plan; each of the two methods has found plans that the other did not. Each round ends with the
   whole model, which improves the bound. If stages have several chunks, a round begins with the patterns of whole
   layers (`patterns`), which may prove that the best plan is optimal.

The amount of work in each of these parts does not depend on the budget, which only ends the last part: a search with a
larger budget begins with the same work as a search with a smaller budget, so its result is never worse.

The simulator and the exact peak memory judge every plan; the model is used only to propose plans and to prove bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tools.layout.anneal import anneal
from tools.layout.budget import Budget
from tools.layout.fast import place_fast
from tools.layout.ilp import Answer, Incumbent, PathModel, add_plan, path_bound, search_near, work_bound
from tools.layout.instance import Instance
from tools.layout.patterns import pattern_bound
from tools.layout.weighted import weighted_bound


def recompute_less(instance: Instance, plan: np.ndarray) -> np.ndarray:
    """Return `plan` [K, C] with as little recomputation as the memory cap allows; no layer changes its stage."""
    # chunks near the model's end hold the fewest micro-batches: there memory buys most
    kinds = range(len(instance.types))
    for chunk in reversed(range(plan.shape[1])):
        # where options are ordered, a type may do no less than a later one of its chunk
        for index in reversed(kinds) if instance.order else kinds:
            plan = _ease(instance, plan, chunk, index)
    return plan


def even_plan(instance: Instance) -> np.ndarray:
    """Return a plan with evenly distributed layers, in which every layer has the recompute option that keeps the least
    activation memory. The returned plan may exceed the memory cap.
    """
    plan = np.zeros((len(instance.columns), instance.chunks * instance.stages), int)
    size = plan.shape[1]
    layers = sum(kind.count for kind in instance.types)
    # the first and the last chunk may be empty: they have head and tail
    ends = (1, size - 1 + instance.last_layers)
    first, last = (0, size) if layers >= size or not instance.least_layers else ends
    chunk_of = first + np.arange(layers) * (last - first) // layers
    chunk_of[layers - instance.last_layers :] = size - 1
    begin = 0
    for index, kind in enumerate(instance.types):
        columns = instance.type_columns(index)
        least = columns.start + int(instance.costs[3, columns].argmin())
        np.add.at(plan[least], chunk_of[begin : begin + kind.count], 1)
        begin += kind.count
    return plan


def _ease(instance: Instance, plan: np.ndarray, chunk: int, index: int) -> np.ndarray:
    """Give a chunk's layers of a type, one by one, the fastest option that stays within the memory cap."""
    columns = instance.type_columns(index)
    fastest = columns.start + instance.costs[1, columns].argsort(kind="stable")
    for slow in reversed(fastest):
        for fast in fastest:
            if fast == slow:
                break
            while plan[slow, chunk]:
                tried = plan.copy()
                tried[slow, chunk] -= 1
                tried[fast, chunk] += 1
                if not (instance.fits(tried[None])[0] and instance.well_formed(tried[None])[0]):
                    break
                plan = tried
    return plan


_RELAXED, _FIRST, _ROUND = 0.2, 0.2, 0.2  # effort of the bound, of the whole model and of the first round
_ANNEAL, _NEAR = 0.6, 0.25  # of a round; the rest goes to the whole model
_WEIGHTED = 2.0  # effort of the bound of weighted chains
_PATTERNS = 2.0  # times a round's effort is spent on whole layers before it, if stages have several chunks


@dataclass(frozen=True)
class Outcome:
    """An `Outcome` is the result of the pipeline optimiser: the best plan, its step time, and the proven lower bound on
    the step time.
    """

    instance: Instance
    plan: np.ndarray | None  # [K, C]
    time: float  # simulated step time; infinite without a plan
    bound: float  # no plan is faster
    work_bound: float  # the plain bound: all work shared evenly, nothing recomputed, nobody waiting
    finished: bool  # the plan is proven best (or, without one, proven not to exist)
    seconds: float  # that it took
    why: str = ""  # without a plan: what is missing
    cut: bool = False  # a deadline ended it before its effort was spent: another machine may find another plan
    peak: np.ndarray = field(default_factory=lambda: np.zeros(0))  # [stages] peak memory of the plan

    @property
    def gap(self) -> float:
        """Return (time - bound) / time, where time is the plan's step time and bound is the proven lower bound. Return
        infinity if there is no plan.
        """
        return max(0.0, 1 - self.bound / self.time) if self.plan is not None else float("inf")


def optimise(
    instance: Instance,
    budget: Budget,
    seed: int = 0,
    report: Callable[[Incumbent], None] | None = None,
    start: np.ndarray | None = None,
) -> Outcome:
    """Search for the fastest plan until `budget` is spent or the best plan is proven to be the fastest. The function
    `report` is called whenever the search has found a better plan. The returned plan is never slower than the plan
    `start` [K, C], if `start` obeys all rules. If `start` is given, the caller has already made a quick placement and
    computed the bound of weighted chains, so that these two steps are not repeated.
    """
    incumbent = Incumbent(instance, work_bound(instance), report)
    first = place_fast(instance) if start is None else start
    if first is not None:
        incumbent.offer(first)
    even = even_plan(instance)
    if instance.fits(even[None])[0]:
        incumbent.offer(recompute_less(instance, even))
    model = PathModel(instance)
    incumbent.prove(path_bound(instance, model, budget.units(_RELAXED)))
    if incumbent.plan is None:
        least = model.least_excess(budget)
        if least.plan is None or not instance.fits(least.plan[None])[0]:
            return _nothing(instance, budget, least)
        incumbent.offer(recompute_less(instance, least.plan))
    rng = np.random.default_rng(seed)
    assert incumbent.plan is not None
    _whole(incumbent, model, budget.units(_FIRST))
    if start is None and not incumbent.proven:
        bound = weighted_bound(instance, incumbent.goal, budget.units(_WEIGHTED))
        incumbent.prove(bound if bound < incumbent.goal else np.inf)
    units = _ROUND
    while not (incumbent.proven or budget.over):
        if instance.chunks > 1:
            _by_patterns(incumbent, budget.units(_PATTERNS * units))
        part = budget.units(units)
        anneal(incumbent, incumbent.plan[None], part.units(_ANNEAL * units), rng, planned=_ANNEAL * units)
        search_near(incumbent, model, part.units(_NEAR * units), rng)
        _whole(incumbent, model, part)
        units *= 2
    known, done = (incumbent.plan, incumbent.time, incumbent.bound, work_bound(instance)), incumbent.proven
    peak = instance.peak_memory(incumbent.plan[None])[0]
    return Outcome(instance, *known, done, budget.elapsed, cut=budget.cut and not done, peak=peak)


def _by_patterns(incumbent: Incumbent, budget: Budget) -> None:
    """Look for a better plan, and for a proof that there is none, with whole layers in every chunk."""
    bound, plan = pattern_bound(incumbent.instance, incumbent.goal, budget)
    incumbent.prove(bound if bound < incumbent.goal else np.inf)
    if plan is not None:
        incumbent.offer(plan)


def _whole(incumbent: Incumbent, model: PathModel, budget: Budget) -> None:
    """Solve the whole model, adding chains, until it has no better plan or `budget` is over."""
    while not (incumbent.proven or budget.over):
        answer = model.best(budget, incumbent.goal)
        incumbent.prove(answer.bound)
        if answer.plan is None:
            break
        add_plan(incumbent, model, answer.plan)


def _nothing(instance: Instance, budget: Budget, least: Answer) -> Outcome:
    """Return a sentence that says why no plan was found: the smallest memory cap that some plan needs, or an effort
    that was too small.
    """
    if least.plan is None:
        why = f"no plan found in {budget.elapsed:.0f} s, and none excluded; give it more effort and time"
    else:
        peak = instance.peak_memory(least.plan[None])[0]
        stage, missing = int(peak.argmax()), float(peak.max()) - instance.cap
        known = (
            "the least cap that any plan keeps is" if least.done else "the least cap found for which there is a plan is"
        )
        why = (
            f"no plan keeps memory_cap {instance.cap:g}: {known} {peak.max():g}, which is {missing:g} more (stage "
            f"{stage} is then full); raise the cap, or use more stages, or a recompute option that holds less"
        )
    finished = least.plan is not None and least.done
    cut = budget.cut and not finished
    return Outcome(instance, None, float("inf"), float("inf"), work_bound(instance), finished, budget.elapsed, why, cut)
