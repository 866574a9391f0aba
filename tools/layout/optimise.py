"""This module finds which layers go to which stage and chunk, and what each recomputes. The search looks for the
fastest plan that keeps every stage's memory cap.

1. A first plan at once, if evenly spread layers fit, or the one that is given.
2. What no plan can beat, and the chains that make the model exact where it matters. Without a plan
   so far, one by the exact model (`ilp`), or the proof that none fits and what is missing.
3. The whole model, adding chains, which may prove its plan best.
4. In rounds, each twice as long as the one before, annealing with the simulator, then the model around the best plan
   (`ilp`): where one is weak, the other has been strong. Each round ends with the whole model, for the bound. If stages
   have several chunks, it begins with the patterns of whole layers (`patterns`), which may prove the best plan.

The amount of work in each of these does not depend on the budget, which only ends the last one: a larger budget begins
with what a smaller one does, and is never worse.

Every plan is judged by the simulator and by the exact peak memory; the model only proposes and bounds.

The first plan spreads the layers evenly, then recomputes as little as memory allows. In annealing each of many chains
holds a plan that keeps every rule. In a step each chain tries a change of one to three layers (another recompute
option, another chunk); changes that break a rule are dropped before the simulation, which then runs for all chains at
once. A chain takes what is faster, and what is slower by no more than a random share of a temperature that falls to
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tools.layout.budget import Budget
from tools.layout.ilp import Answer, Incumbent, PathModel, add_plan, path_bound, search_near, work_bound
from tools.layout.instance import Instance
from tools.layout.patterns import pattern_bound


def recompute_less(instance: Instance, plan: np.ndarray) -> np.ndarray:
    """Return `plan` [K, C] with less recomputation, as much as the cap allows. The layers stay on their stages."""
    # chunks near the model's end hold the fewest micro-batches: there memory buys most
    kinds = range(len(instance.types))
    for chunk in reversed(range(plan.shape[1])):
        # where options are ordered, a type may do no less than a later one of its chunk
        for index in reversed(kinds) if instance.order else kinds:
            plan = _ease(instance, plan, chunk, index)
    return plan


def even_plan(instance: Instance) -> np.ndarray:
    """Return a plan with layers in model order, equally many in each chunk, each with its type's smallest activation.
    The returned plan may exceed the memory cap.
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
    """Give a chunk's layers of a type, one by one, the fastest option that keeps the cap."""
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


CHAINS = 64
TRIES = 4  # changes drawn for a chain in a step, of which the first that keeps the rules is simulated
HOT = 0.003  # of the best time: the first temperature
_REPLACE_EVERY = 50
_STEP, _OPERATION = 1e-3, 1e-8  # effort of a step of all chains, and of each simulated operation in it
# chances of a change: a second and a third layer; a later layer on the first one's stage; where a layer goes
_SECOND, _THIRD, _SAME_STAGE, _STAYS, _NEXT_CHUNK = 0.45, 0.2, 0.6, 0.45, 0.25


def anneal(
    incumbent: Incumbent,
    starts: np.ndarray,
    budget: Budget,
    rng: np.random.Generator,
    step_times: Callable[[np.ndarray], np.ndarray] | None = None,
    planned: float | None = None,
) -> None:
    """Search from the legal plans `starts` [S, K, C] until `budget` is spent, and offer every better plan.

    Args:
        step_times: stands in for the instance's own.
        planned: effort after which the temperature is nothing, where that is more than `budget` has.
    """
    instance = incumbent.instance
    step_times = step_times or instance.step_times
    changes = Changes(instance, rng)
    plans = starts[np.arange(CHAINS) % len(starts)].copy()
    times = step_times(plans)
    step, operations = 0, 2 * instance.micro_batches * instance.chunks * instance.stages
    while not budget.over:
        done = budget.spent / (planned or budget.effort)
        temperature = HOT * times.min() * (1 - done) ** 2
        which, tried = _legal(instance, changes(np.repeat(plans, TRIES, axis=0)))
        simulated = step_times(tried)
        budget.spend(_STEP + _OPERATION * operations * len(which))
        taken = simulated <= times[which] + temperature * rng.standard_exponential(len(which))
        plans[which[taken]], times[which[taken]] = tried[taken], simulated[taken]
        if times.min() < incumbent.time:
            incumbent.offer(plans[times.argmin()])
        step += 1
        if step % _REPLACE_EVERY == 0:  # the best eighth of the chains take the place of the worst
            ranked = times.argsort()
            few = len(ranked) // 8
            plans[ranked[-few:]], times[ranked[-few:]] = plans[ranked[:few]], times[ranked[:few]]


def _legal(instance: Instance, tried: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The chains [n] that have a try within the rules, and the first such try [n, K, C] of each."""
    legal = (instance.fits(tried) & instance.well_formed(tried)).reshape(-1, TRIES)
    which = np.flatnonzero(legal.any(axis=1))
    return which, tried[which * TRIES + legal[which].argmax(axis=1)]


class Changes:
    """A `Changes` draws random changes of plans. Every layer keeps its type, but a change may break other rules."""

    def __init__(self, instance: Instance, rng: np.random.Generator):
        self._rng = rng
        self._stage_of = instance.stage_of
        spans = [instance.type_columns(t) for t, _ in instance.columns]
        self._first = np.array([span.start for span in spans])
        self._options = np.array([span.stop - span.start for span in spans])

    def __call__(self, plans: np.ndarray) -> np.ndarray:
        """Return changed copies of plans [N, K, C]."""
        rng, changed, count = self._rng, plans.copy(), len(plans)
        moves = 1 + (rng.random(count) < _SECOND) + (rng.random(count) < _THIRD)
        stage = np.full(count, -1)
        for turn in range(3):
            movers = np.flatnonzero(moves > turn)
            only = np.where(rng.random(len(movers)) < _SAME_STAGE, stage[movers], -1)
            movers, column, chunk = self._pick(changed, movers, only)
            option, target = self._destination(column, chunk, changed.shape[2])
            changed[movers, column, chunk] -= 1
            changed[movers, option, target] += 1
            if turn == 0:
                stage[movers] = self._stage_of[np.where(rng.random(len(movers)) < 0.5, chunk, target)]
        return changed

    def _pick(
        self, plans: np.ndarray, movers: np.ndarray, only: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A layer of each mover, from any stage or `only` one: (movers that have one, its column, its chunk)."""
        layers, size = plans[movers], plans.shape[2]
        elsewhere = (only[:, None] >= 0) & (self._stage_of != only[:, None])
        layers = np.where(elsewhere[:, None], 0, layers).reshape(len(movers), plans.shape[1] * size).cumsum(axis=1)
        total = layers[:, -1]
        drawn = (self._rng.random(len(movers)) * total).astype(int)
        column, chunk = np.divmod((layers > drawn[:, None]).argmax(axis=1), size)
        some = total > 0
        return movers[some], column[some], chunk[some]

    def _destination(self, column: np.ndarray, chunk: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        rng, count = self._rng, len(column)
        option = self._first[column] + (rng.random(count) * self._options[column]).astype(int)
        beside = np.clip(chunk + rng.choice([-1, 1], count), 0, size - 1)
        draw = rng.random(count)
        moved = np.where(draw < _STAYS + _NEXT_CHUNK, beside, rng.integers(0, size, count))
        return option, np.where(draw < _STAYS, chunk, moved)


_RELAXED, _FIRST, _ROUND = 0.2, 0.2, 0.2  # effort of the bound, of the whole model and of the first round
_ANNEAL, _NEAR = 0.6, 0.25  # of a round; the rest goes to the whole model
_PATTERNS = 2.0  # times a round's effort is spent on whole layers before it, if stages have several chunks


@dataclass(frozen=True)
class Outcome:
    """An `Outcome` is the result of a search."""

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
        """Return (time - bound) / time; return infinity without a plan."""
        return max(0.0, 1 - self.bound / self.time) if self.plan is not None else float("inf")


def optimise(
    instance: Instance,
    budget: Budget,
    seed: int = 0,
    report: Callable[[Incumbent], None] | None = None,
    start: np.ndarray | None = None,
) -> Outcome:
    """Search until `budget` is spent or the best plan is proven. `report` is called with every improvement; the answer
    is never worse than the plan `start` [K, C].
    """
    incumbent = Incumbent(instance, work_bound(instance), report)
    if start is not None:
        incumbent.offer(start)
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
