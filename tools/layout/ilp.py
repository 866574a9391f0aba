"""This module formulates a pipeline-balance problem as an exact mixed-integer program for the solver HiGHS. The module
also proves lower bounds on the step time with this program.

Unknowns: y[k, c], layers of column k (type and option) in chunk c, and T, the step time.

    minimise T
    every type's layers are placed; each inner chunk has a layer; types keep the model's order, as do the options of a
    chunk's layers where the instance asks for it; the last chunk has the layers and the option that it must
    for each stage and each Pareto-maximal moment of its order:   static + layers' parameters + in-flight activations
                                                                  + the largest pass and buffers of the layers
                                                                  <= cap                  (exact peak memory)
    for each stage, in the optimizer's update:   the layers' parameters and gradients + the largest gradient and buffers
                                                                  <= cap
    for each chain found so far:   T >= (times a chunk's forward or backward is on the chain) x (its duration)

The time of a step is the length of the longest chain of operations (`tools.pipeline.timetable`), so the constraints for
all chains together would be equivalent to the simulator. There are too many chains for that; constraints are added one
by one where the model's step time is still too low, which is the cutting-plane method of Kelley (1960). With any set of
these constraints the model's optimum is a lower bound of the true optimum, and a plan is optimal if it is the model's
optimum and its simulated time equals the model's time. Therefore the model needs no approximation of the step time (sum
over a stage, slowest chunk, slots of the steady state).

`path_bound` solves the exact model for layers that may be divided arbitrarily, and adds the longest chain of each
solution until the simulator agrees with the model. The result is the least step time of any plan if layers were
divisible. This bound includes the memory cap, the filling and draining of the schedule, and the times of head and tail.

Annealing changes a few layers at a time; if the memory cap is tight, a better plan may need many changes at once. Each
round of `search_near` keeps most of the best plan fixed, and lets the solver change the chunks of some stages, or every
number of layers by at most one, or only the recompute options, to find a better plan. The model's step time is exact
only if the model has the right chains: if the simulated time is longer than the model's time, the longest chain is
added to the model and the same round is tried again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import highspy
import numpy as np

from tools.layout.budget import Budget
from tools.layout.instance import Instance

INFINITE = highspy.kHighsInf
# of effort (tools.layout.budget), about what they take: a look at the tree with so many nonzeros in the model, an
# iteration of the simplex with them, and a run
_LOOK, _ITERATION, _RUN = 1.5e-7, 1e-8, 1e-3
# relative: a plan must be better by this much to be looked for, and is called optimal within it
IMPROVEMENT = 1e-6


@dataclass(frozen=True)
class Answer:
    """An `Answer` is the result of one run of the solver HiGHS."""

    plan: np.ndarray | None  # [K, C] layers (not whole numbers from `relaxed`)
    value: float  # the model's T for it, or the excess of `least_excess`
    bound: float  # what no plan within the searched range can be under; infinite if there is none at all
    done: bool  # the range has been searched to its end


class PathModel:
    """A `PathModel` is the mixed-integer program of one pipeline-balance problem. Constraints that `add_chain` adds
    stay for all later runs of the solver.
    """

    def __init__(self, instance: Instance):
        self.instance = instance
        self.size = instance.chunks * instance.stages
        self.shape = (len(instance.columns), self.size)
        self.chains = 0
        self._budget, self._nonzeros = Budget(0), 0
        self._solver = highspy.Highs()
        # one thread: the searcher's other half is NumPy, and users run several
        # no restarts: with them HiGHS 1.15.1 called plans optimal that were not, about once in 1,500 small instances
        # fixed seed: an answer that is asked for twice is the same
        options = {
            **{"output_flag": False, "threads": 1, "random_seed": 0},
            **{"mip_rel_gap": IMPROVEMENT, "mip_allow_restart": False},
        }
        for option, value in options.items():
            self._solver.setOptionValue(option, value)
        self._solver.cbMipInterrupt += self._look
        self._solver.cbSimplexInterrupt += self._ask
        self._most = np.repeat([[instance.types[t].count] for t, _ in instance.columns], self.size, axis=1)
        count = self._most.size
        self._solver.addVars(count, np.zeros(count), self._most.ravel().astype(float))
        self._time = self._add_variable(INFINITE)
        self._excess = self._add_variable(0.0)
        self._whole = list(range(count))
        self._place_layers()
        self._keep_order()
        self._order_options()
        self._limit_memory()

    def add_chain(self, visits: np.ndarray) -> None:
        """Add the constraint that a step takes at least as long as a chain of operations that wait for each other. The
        argument `visits` [rows, C] holds how often the chain runs the forward and the backward pass of each chunk.
        """
        layer = np.einsum("ik,ic->kc", self.instance.rows, visits)
        self._add_row(float((visits * self.instance.fixed).sum()), INFINITE, -layer, {self._time: 1.0})
        self.chains += 1

    def relaxed(self, budget: Budget) -> Answer:
        """Solve the linear relaxation of the program, in which layers may be divided between chunks, to get a lower
        bound on the step time.
        """
        return self._run(budget, self._time, whole=False)

    def best(
        self, budget: Budget, below: float = INFINITE, low: np.ndarray | None = None, high: np.ndarray | None = None
    ) -> Answer:
        """Search for the fastest plan of whole layers whose step time is at most `below`. The plan's numbers of layers
        [K, C] must lie between `low` and `high`.
        """
        return self._run(budget, self._time, below, low, high)

    def least_excess(self, budget: Budget) -> Answer:
        """Find a plan of whole layers that exceeds the memory cap as little as possible. The field `value` of the
        answer is the memory above the cap.
        """
        self._solver.changeColBounds(self._excess, 0.0, INFINITE)
        answer = self._run(budget, self._excess)
        self._solver.changeColBounds(self._excess, 0.0, 0.0)
        return answer

    def _look(self, event) -> None:
        """Count work: HiGHS asks at the same places of its tree whatever the clock says."""
        self._budget.spend(_LOOK * self._nonzeros)
        self._ask(event)

    def _ask(self, event) -> None:
        # said each time: HiGHS keeps the answer of an earlier run
        event.interrupt(self._budget.over)

    def _run(
        self,
        budget: Budget,
        aim: int,
        below: float = INFINITE,
        low: np.ndarray | None = None,
        high: np.ndarray | None = None,
        whole: bool = True,
    ) -> Answer:
        """Minimise the variable `aim`, and return the answer."""
        kind = highspy.HighsVarType.kInteger if whole else highspy.HighsVarType.kContinuous
        kinds = np.array([kind] * len(self._whole))
        self._solver.changeColsIntegrality(len(kinds), np.array(self._whole, np.int32), kinds)
        for variable in (self._time, self._excess):
            self._solver.changeColCost(variable, float(variable == aim))
        low, high = np.zeros(self.shape) if low is None else low, self._most if high is None else high
        which = np.arange(self._most.size, dtype=np.int32)
        self._solver.changeColsBounds(len(which), which, low.ravel().astype(float), high.ravel().astype(float))
        self._solver.changeColBounds(self._time, 0.0, below)
        self._budget, self._nonzeros = budget, self._solver.getNumNz()
        # not HiGHS's own limit, which counts from the first run in some places and from this run in others
        self._solver.run()
        status, info = self._solver.getModelStatus(), self._solver.getInfo()
        budget.spend(_RUN + _ITERATION * self._nonzeros * max(0, info.simplex_iteration_count))
        # T is bounded from below, so what HiGHS could not tell apart is infeasible too
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return Answer(None, INFINITE, INFINITE, True)
        done = status == highspy.HighsModelStatus.kOptimal
        bound = info.mip_dual_bound if whole else info.objective_function_value if done else -INFINITE
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return Answer(None, INFINITE, bound, done)
        values = np.array(self._solver.getSolution().col_value[: self._most.size]).reshape(self.shape)
        plan = np.rint(values).astype(int) if whole else values
        return Answer(plan, info.objective_function_value, bound, done)

    def _place_layers(self) -> None:
        for index, kind in enumerate(self.instance.types):
            layers = np.zeros(self.shape)
            layers[self.instance.type_columns(index)] = 1
            self._add_row(kind.count, kind.count, layers)
        for chunk in range(1, self.size - 1) if self.instance.least_layers else ():
            layers = np.zeros(self.shape)
            layers[:, chunk] = 1
            self._add_row(1, INFINITE, layers)
        if self.instance.last_layers:
            layers = np.zeros(self.shape)
            layers[:, -1] = 1
            self._add_row(self.instance.last_layers, INFINITE, layers)
        if self.instance.kept_out.any():
            layers = np.zeros(self.shape)
            layers[self.instance.kept_out, -1] = 1
            self._add_row(0, 0, layers)

    def _keep_order(self) -> None:
        """Add z[t, c] in {0, 1}, 1 if type t ends by chunk c, for which the next type's first layer waits."""
        for index, (kind, following) in enumerate(zip(self.instance.types, self.instance.types[1:], strict=False)):
            for chunk in range(self.size):
                ended = self._add_variable(1.0)
                self._whole.append(ended)
                for number, count, low, high in (
                    (index, kind.count, 0, INFINITE),
                    (index + 1, following.count, -INFINITE, 0),
                ):
                    layers = np.zeros(self.shape)
                    layers[self.instance.type_columns(number), : chunk + 1] = 1
                    self._add_row(low, high, layers, {ended: -count})

    def _order_options(self) -> None:
        """Add z[t, c, k] in {0, 1}: if the next type has options before place k in chunk c, t has none from k on."""
        instance, strengths, before = self.instance, self.instance.strengths, 0
        for index, (kind, following) in enumerate(zip(instance.types, instance.types[1:], strict=False)):
            before += kind.count
            # where each inner chunk holds a layer, no later chunk than this can hold one of the type
            chunks = min(self.size, before + 1) if instance.least_layers else self.size
            own, later = (np.arange(len(strengths))[instance.type_columns(number)] for number in (index, index + 1))
            for place in range(1, len(instance.order)):
                weak, strong = own[strengths[own] >= place], later[strengths[later] < place]
                for chunk in range(chunks) if len(weak) and len(strong) else ():
                    there = self._add_variable(1.0)
                    self._whole.append(there)
                    for columns, count, high in ((strong, following.count, 0), (weak, kind.count, kind.count)):
                        layers = np.zeros(self.shape)
                        layers[columns, chunk] = 1
                        self._add_row(-INFINITE, high, layers, {there: count if high else -count})

    def _limit_memory(self) -> None:
        _, _, parameters, activation = self.instance.costs
        for stage, peaks in enumerate(self.instance.peaks):
            own = self.instance.stage_of == stage  # chunk by chunk, whichever way they run
            once = self._steps(self.instance.more[:, stage], own)
            room = self.instance.cap - self.instance.least_static[stage]
            for held, ends in zip(peaks, self.instance.kept_by_ends[stage], strict=True):
                memory = np.zeros(self.shape)
                memory[:, own] = parameters[:, None] + np.outer(activation, held)
                self._add_row(-INFINITE, room - ends, memory, {self._excess: -1.0, **once})
            if self.instance.updates:
                once = self._steps(self.instance.more_updated[:, stage], own)
                room = self.instance.cap - self.instance.least_updated[stage]
                memory = np.outer([self.instance.types[t].updated for t, _ in self.instance.columns], own)
                self._add_row(-INFINITE, room, memory, {self._excess: -1.0, **once})

    def _steps(self, needs: np.ndarray, own: np.ndarray) -> dict[int, float]:
        """Add a variable in {0, 1} for each step of the memory that a stage's layers need once, which is given for each
        column as `needs` [2, K]: 1 means that the stage has a layer that needs as much or more. Return the height of
        each step.
        """
        found = {}
        for more in needs.round(9):
            levels = np.unique(np.append(0.0, more))
            for low, high in itertools.pairwise(levels):
                there = self._add_variable(1.0)
                self._whole.append(there)
                layers = np.zeros(self.shape)
                layers[np.ix_(more >= high, own)] = 1
                most = sum(kind.count for kind in self.instance.types)
                self._add_row(-INFINITE, 0, layers, {there: -most})
                found[there] = high - low
        return found

    def _add_variable(self, high: float) -> int:
        self._solver.addVar(0.0, high)
        return self._solver.getNumCol() - 1

    def _add_row(self, low: float, high: float, layers: np.ndarray, others: dict[int, float] | None = None) -> None:
        flat, others = layers.ravel(), others or {}
        where = np.flatnonzero(flat)
        index = np.concatenate([where, list(others)]).astype(np.int32)
        self._solver.addRow(low, high, len(index), index, np.concatenate([flat[where], list(others.values())]))


class Incumbent:
    """An `Incumbent` keeps the best plan so far: the valid plan with the shortest simulated step time."""

    def __init__(self, instance: Instance, bound: float = 0.0, report: Callable[[Incumbent], None] | None = None):
        self.instance = instance
        self.plan: np.ndarray | None = None  # [K, C]
        self.time = np.inf  # simulated
        self.bound = bound  # no plan is faster
        self._report = report

    @property
    def gap(self) -> float:
        """Return (time - bound) / time, where time is the step time of the best plan and bound is the proven lower
        bound. Return infinity if no plan has been found yet.
        """
        return max(0.0, 1 - self.bound / self.time) if self.plan is not None else np.inf

    @property
    def proven(self) -> bool:
        """Return whether it is proven that no plan is better than the best plan so far by more than `IMPROVEMENT`."""
        return self.gap <= IMPROVEMENT

    @property
    def goal(self) -> float:
        """Return the step time below which a plan counts as better than the best plan so far."""
        return self.time * (1 - IMPROVEMENT)

    def offer(self, plan: np.ndarray) -> bool:
        """Keep `plan` as the best plan if it obeys all rules and is faster than the best plan so far; return whether
        `plan` was kept.
        """
        one = plan[None]
        if not (self.instance.well_formed(one)[0] and self.instance.fits(one)[0]):
            return False
        time = float(self.instance.step_times(one)[0])
        if time >= self.time:
            return False
        self.plan, self.time = plan.copy(), time
        self.bound = min(self.bound, time)  # the solver's tolerance may have put it a little above
        self._tell()
        return True

    def prove(self, bound: float) -> None:
        """Record a proven lower bound on the step time of all plans; if the bound reaches the best plan's step time,
        this plan is proven to be the fastest.
        """
        bound = min(bound, self.time)
        if np.isfinite(bound) and bound > self.bound:
            self.bound = bound
            self._tell()

    def _tell(self) -> None:
        if self._report:
            self._report(self)


AGREED = 1e-4
_CHAINS_PER_CHUNK = 6
_CHAIN = 1e-6  # effort of the longest chain, for each micro-batch and chunk


def work_bound(instance: Instance) -> float:
    """Return a simple lower bound on the step time: the work of all micro-batches without recomputation, divided by the
    number of stages.
    """
    least = [kind.forward + kind.backward + min(o.extra_backward for o in kind.options) for kind in instance.types]
    layers = sum(kind.count * work for kind, work in zip(instance.types, least, strict=True))
    return instance.micro_batches * (layers + float(instance.ends.sum())) / instance.stages


def path_bound(instance: Instance, model: PathModel, budget: Budget) -> float:
    """Return a lower bound on the step time of every plan, and add to `model` the chains of passes that prove the
    bound. The bound is infinite if no plan fits in memory, even with layers that are divided between stages. The
    function stops early, with a weaker but valid bound, when `budget` is spent or when `model` has far more chains than
    chunks.
    """
    bound = work_bound(instance)
    while not budget.over and model.chains < _CHAINS_PER_CHUNK * model.size:
        answer = model.relaxed(budget)
        if answer.plan is None:
            return answer.bound if answer.done else bound
        bound = max(bound, answer.bound)
        budget.spend(_CHAIN * instance.micro_batches * model.size)
        simulated, visits = instance.longest_chain(answer.plan)
        if simulated - answer.value <= AGREED * simulated:
            break
        model.add_chain(visits)
    return bound


_ROUND = 2.0  # effort
_REPEATS = 4


def search_near(incumbent: Incumbent, model: PathModel, budget: Budget, rng: np.random.Generator) -> None:
    """Search for faster plans close to the best plan so far, which `incumbent` keeps, until `budget` is spent."""
    stages = incumbent.instance.stages
    width = max(2, stages // 4)
    while not budget.over:
        low, high = _part(incumbent, width, rng)
        for _ in range(_REPEATS):
            answer = model.best(budget.units(_ROUND), incumbent.goal, low, high)
            if answer.plan is None or add_plan(incumbent, model, answer.plan) or not answer.done:
                break
        # as much as HiGHS can search to the end in a round
        width = min(stages, width + 1) if answer.done else max(2, width - 1)


def add_plan(incumbent: Incumbent, model: PathModel, plan: np.ndarray) -> bool:
    """Offer `plan` to `incumbent` as the best plan so far, and add the longest chain of operations of the plan's step
    to `model`. Return whether `incumbent` kept the plan as the best plan so far.
    """
    _, visits = incumbent.instance.longest_chain(plan)
    model.add_chain(visits)
    return incumbent.offer(plan)


def _part(incumbent: Incumbent, width: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return least and most layers [K, C] of a randomly chosen part."""
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
