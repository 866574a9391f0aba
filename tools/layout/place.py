"""This module assigns the layers of a configuration to stages and chunks, and chooses the recomputation of each layer.
The module calls the pipeline optimiser (`tools.layout.optimise`) to find the fastest assignment.

`place` makes a pipeline-balance instance of the configuration (`problem`), optimises it, and converts the plan to
tables of layers and recomputation in the form that MindFormers reads: each option counts from a chunk's first layer,
full recomputation first, then selective recomputation, then communication. The instance allows only plans that
MindFormers can express. The estimator then predicts the time and memory of the result: `TimeModel.step` with a
simulated schedule, and the memory model for every stage. A plan that exceeds the cap of the memory model is dropped,
and the placement says so.

Finally, `eased` looks for groups of operators that a placement recomputes although memory suffices without that. The
optimiser lets layers recompute the cheapest group first (`tools.layout.problem.by_price`), and a layer that recomputes
a further group also recomputes all cheaper groups. The tables of MindFormers count each group separately: if the last
group frees more memory than is missing, a cheaper group need not be recomputed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tools.estimate.configuration import NORMS, PATTERNS, Configuration, Table, offered, parts_of
from tools.estimate.memory.model import all_stages, layer_options, peak_memory, stage_memory
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.layout.budget import Budget
from tools.layout.fast import place_fast
from tools.layout.floor import floor_of
from tools.layout.ilp import IMPROVEMENT, PathModel, path_bound
from tools.layout.instance import Instance
from tools.layout.optimise import Outcome, optimise
from tools.layout.patterns import After, pattern_bound
from tools.layout.problem import ORDER, by_layers, by_price, pipeline_instance
from tools.layout.stage_costs import StageCosts
from tools.layout.weighted import weighted_bound
from tools.pipeline.schedules import pairs_up


def eased(config: Configuration, model: TimeModel, cap_bytes: float) -> Configuration:
    """Return `config` with fewer layers that recompute groups of operators: only as many as are needed so that every
    stage stays within `cap_bytes`. The function first tries to keep the results of the groups whose recomputation takes
    the most time.
    """
    kind = config.model.last_kind
    names = [name for name, _ in config.recompute.operators] + [NORMS] * bool(config.recompute.select)
    for name in sorted(names, key=lambda name: -model.layer(config, kind).again(name).total):
        for stage in range(config.pp):
            if stage_memory(config, stage).peak > cap_bytes:
                continue
            for chunk in reversed(range(config.chunks)):
                config = _fewest(config, name, chunk, stage, cap_bytes)
    return config


def _fewest(config: Configuration, name: str, chunk: int, stage: int, cap_bytes: float) -> Configuration:
    """Return the configuration in which as few layers of a chunk and stage recompute a group as are needed to fit. If
    these would only be layers that are recomputed whole, no layer recomputes the group.
    """
    table = recomputed_table(config, name)
    most, least = table[chunk][stage], config.recompute.layers("full", chunk, stage)
    for count in [0, *range(least + 1, most)] if most else []:
        rows = [list(row) for row in table]
        rows[chunk][stage] = count
        tried = with_table(config, name, tuple(map(tuple, rows)))
        if stage_memory(tried, stage).peak <= cap_bytes:
            return tried
    return config


def recomputed_table(config: Configuration, name: str) -> Table:
    """Return the numbers of layers [chunks][stages] that recompute the given group of operators (or the norms)."""
    none: Table = tuple((0,) * config.pp for _ in config.layers)
    return (config.recompute.select if name == NORMS else dict(config.recompute.operators).get(name)) or none


def with_table(config: Configuration, name: str, table: Table) -> Configuration:
    """Return a configuration in which `table` [chunks][stages] holds the numbers of layers that recompute a group of
    operators (or the norms). If the table has no layers, the group is no longer recomputed.
    """
    some = table if any(map(any, table)) else None
    if name == NORMS:
        return replace(config, recompute=replace(config.recompute, select=some))
    rest = dict(config.recompute.operators) | {name: some}
    operators = tuple((group, rows) for group, rows in rest.items() if rows)
    return replace(config, recompute=replace(config.recompute, operators=operators))


def recomputing_least(config: Configuration, model: TimeModel, cap_bytes: float) -> list[Configuration]:
    """Return a list with one configuration: `config` with as little recomputation as memory allows. On each stage the
    first layers have one recompute option, and the other layers have a weaker option. The options are chosen so that
    the stage needs at most `cap_bytes` and takes the least time. The list is empty if a stage needs more than
    `cap_bytes` with all choices of recomputation.
    """
    layers = np.array(config.layers)
    tables = {name: np.zeros_like(layers) for name in ORDER[:-1]}
    for stage in range(config.pp):
        own = layers[:, stage]
        found: list[tuple[float, dict[str, np.ndarray]]] = []
        for strong, weak in itertools.combinations(ORDER, 2):
            for count in range(own.sum() + 1):
                tried = {name: table.copy() for name, table in tables.items()}
                tried[strong][:, stage] = np.clip(count - (own.cumsum() - own), 0, own)
                if weak in tried:
                    tried[weak][:, stage] = own
                one = _recomputing(config, tried)
                if stage_memory(one, stage).peak <= cap_bytes:
                    forward, backward, _ = model.chunks(one)
                    found.append((float((forward + backward)[:, stage].sum()), tried))
                    break
        if not found:
            return []
        tables = min(found, key=lambda pair: pair[0])[1]
    return [_recomputing(config, tables)]


def _recomputing(config: Configuration, tables: dict[str, np.ndarray]) -> Configuration:
    """Return the configuration with these tables [chunks, stages] and no others."""
    rows: dict[str, Any] = {name: tuple(map(tuple, table.tolist())) for name, table in tables.items() if table.any()}
    kept = replace(config.recompute, **{**dict.fromkeys(ORDER[:-1]), **rows}, operators=())
    return replace(config, recompute=kept)


_SHARE = 0.35  # of effort and time, for each instance but the last
# of the bounds of a candidate at most: by the solver's model, by whole layers
BOUND_EFFORT, WHOLE_EFFORT = 0.5, 5.0
_EQUAL = 1e-6  # relative: stages are equally slow
GOALS = (0.972, 0.986, 1.0)  # shares of the time to beat for which bounds by whole layers are proven in turn


@dataclass(frozen=True)
class Placement:
    """A `Placement` holds the distribution of a run's layers over stages and chunks with their recomputation, the
    predicted step time, and lower bounds.
    """

    configuration: Configuration | None  # with its new layers and recomputation; None where nothing fits
    step_s: float  # simulated seconds of a step; infinite without a configuration
    # lower bound of the seconds of every placement that needs as much time outside of the pipeline as this one; 0 where
    # no bound is known
    bound_s: float
    peak_bytes: tuple[float, ...] = ()  # of each stage
    why: str = ""  # without a configuration what is missing
    least_s: float = 0.0  # lower bound of the seconds of every placement, whatever it needs outside of the pipeline
    cut: bool = False  # a deadline ended the search before its effort was spent
    spent: float = 0.0  # effort
    outside_s: float = 0.0  # of `least_s` what gradients, weights and optimizer take at least
    dropped: tuple[str, ...] = ()  # plans that the optimiser proposed and that were not taken, each with the reason


def place(
    config: Configuration,
    model: TimeModel,
    cap_bytes: float,
    budget: Budget,
    seed: int = 0,
    groups: bool = False,
    start: Placement | None = None,
) -> Placement:
    """Return the fastest placement that was found for the layers of `config`, with the recomputation of each layer. In
    the returned placement, no stage needs more than `cap_bytes` of memory.

    The present placement of `config` is one of the candidates. If dense and MoE layers alternate, layers stay on their
    stages, and only their recomputation is chosen (`recomputing_least`). For schedules with pairs
    (`tools.pipeline.orders`) the optimiser does not count the time that a pair hides, because this time depends on two
    chunks at once; the time of the returned placement counts it, and its bound is 0.

    Args:
        groups: whether layers may also recompute groups of operators. Half of the effort is spent without groups, so
            that the result is never slower than a result without groups from half of the effort.
        start: a placement of the same layers, such as the result of `screen`; the returned placement is never slower.

    Raises:
        RecipeError: the schedule cannot run with the configuration's numbers of stages, chunks and micro-batches.
    """
    if config.pp == 1 and config.chunks > 1:
        none = replace(config.recompute, full=None, select=None, communication=None, operators=())
        config = replace(config, layers=((config.model.layers,),), recompute=none)
    outcomes: list[Outcome] = []
    floors: list[float] = []
    first = start.configuration if start else None
    own = [config, *([] if ways(config) else recomputing_least(config, model, cap_bytes))]
    candidates = own if first is None else [*own, first]

    def optimised(way: Way, part: Budget) -> list[Configuration]:
        """Run the pipeline optimiser on one pipeline-balance problem, and add the outcome to the results."""
        instance = pipeline_instance(config, model, cap_bytes, *way)
        if way.groups:  # the optimiser's bound is one of plans that add group after group, which `eased` leaves
            floors.append(path_bound(instance, PathModel(instance), Budget(BOUND_EFFORT)) / 1000)  # see `_closer`
        outcomes.append(optimise(instance, part, seed, start=plan_of(first, instance) if first else None))
        plan = outcomes[-1].plan
        return [] if plan is None else [configuration_of(config, instance, plan)]

    half = budget.part(0.5, 0.5 * budget.seconds) if groups else budget
    every = ways(config)
    for way in every:  # a deadline leaves the later ones their time
        candidates += optimised(way, half if way == every[-1] else half.part(_SHARE, _SHARE * half.seconds))
    every = group_ways(config, model) if groups else []
    for left, way in zip(range(len(every), 0, -1), every, strict=True):  # each has its share of what is left
        part = budget.part(budget.left / left / budget.effort, budget.seconds_left / left)
        candidates += [eased(found, model, cap_bytes) for found in optimised(way, part)]
    best: Placement | None = None
    dropped: list[str] = []
    bound = min([*map(_bound, outcomes), *floors], default=0.0)
    bound = 0.0 if pairs_up(config.schedule) else bound
    for candidate in candidates:
        peaks = tuple(memory.peak for memory in all_stages(candidate))
        if max(peaks) > cap_bytes:
            dropped += [_exceeds(candidate, peaks, cap_bytes)] if candidate not in (config, first) else []
            continue
        step = model.step(candidate, simulated=True)
        if best is None or step.total < best.step_s:
            known = 0.0 if pairs_up(config.schedule) else min(step.total, step.total - step.pipeline + bound)
            best = Placement(candidate, step.total, known, peaks)
    best = best or Placement(None, float("inf"), bound, why=_why(config, cap_bytes, outcomes))
    outside = start.outside_s if start else 0.0
    least = min(best.step_s, bound + outside + model.fixed)
    cut = any(outcome.cut for outcome in outcomes)
    return replace(best, least_s=least, outside_s=outside, cut=cut, dropped=tuple(dropped))


def screen(
    config: Configuration,
    model: TimeModel,
    cap_bytes: float,
    beat: float = math.inf,
    groups: bool = False,
    effort: float = WHOLE_EFFORT,
) -> Placement:
    """Return a placement of the layers of `config` that is computed in a fraction of a second, with a lower bound on
    the step time of all placements. Layers are placed only if the lower bound is below `beat` seconds. The bound holds
    only for placements whose step takes less than `beat` seconds. At most `effort` units of work are spent on the lower
    bound for undivided layers. The result's field `Placement.spent` holds how many units of work this bound took.
    """
    low, found, outside = math.inf, Placement(None, math.inf, 0.0, why="no placement was found quickly"), math.inf
    every = all_ways(config, model, groups)
    candidates = [] if every else recomputing_least(config, model, cap_bytes)
    spent = 0.0
    for way in every:
        instance = pipeline_instance(config, model, cap_bytes, *way)
        bound, rest = _floor(config, model, instance, beat)
        total, plans = bound + rest + model.fixed, list[np.ndarray]()
        if total < beat < math.inf and not pairs_up(config.schedule):
            budget = Budget(effort / len(every))
            closer, plans = _closer(config, model, instance, rest, beat, budget, divided=bool(way.groups))
            total, spent = max(total, closer), spent + budget.spent
        low, outside = min(low, total), min(outside, rest)
        if total < beat:
            plan = place_fast(instance, 1000 * (beat - rest - model.fixed))
            laid = [configuration_of(config, instance, plan)] if plan is not None else []
            laid += [configuration_of(config, instance, each) for each in plans]
            candidates += [eased(one, model, cap_bytes) for one in laid] if way.groups else laid
    dropped = []
    for candidate in [*candidates, *([] if _at_least(config, model) >= min(beat, low) else [config])]:
        peaks = tuple(memory.peak for memory in all_stages(candidate))
        if max(peaks) > cap_bytes:
            dropped += [_exceeds(candidate, peaks, cap_bytes)] if candidate is not config else []
            continue
        step = model.step(candidate, simulated=True)
        if step.total < found.step_s:
            found = Placement(candidate, step.total, 0.0, peaks)
    least = 0.0 if not every or pairs_up(config.schedule) else min(found.step_s, low)
    rest = outside if every else 0.0
    return replace(found, bound_s=least, least_s=least, outside_s=rest, spent=spent, dropped=tuple(dropped))


def _closer(
    config: Configuration, model: TimeModel, instance: Instance, rest: float, beat: float, budget: Budget, divided: bool
) -> tuple[float, list[np.ndarray]]:
    """Return seconds of a step that no plan of an instance under `beat` is under, by weighted chains (or the solver's
    model with layers that may be divided), and where that leaves some by patterns; the fastest plan, if it was found to
    be that. A bound a little under `beat` takes a small share of the work of one at `beat`, so that they are proven in
    turn. If `divided` is True, only layers that may be divided give a bound, which holds for all sets of groups of
    operators, because options that add group after group are the lower convex hull of all others.
    """
    known, after = rest + model.fixed, _after(config, model, instance, rest)
    effort = budget.effort * BOUND_EFFORT / WHOLE_EFFORT
    goal, half = 1000 * beat * (1 + IMPROVEMENT), budget.units(budget.effort / 2)
    bound = 0.0 if divided else weighted_bound(instance, goal, half, after) / 1000
    if not bound:  # too many patterns
        bound = path_bound(instance, PathModel(instance), Budget(effort)) / 1000 + known
    if divided:
        return bound, []
    for share in GOALS:
        if bound >= share * beat:
            continue
        goal = share * beat
        closer, plan = pattern_bound(instance, 1000 * goal * (1 + IMPROVEMENT), budget, after)
        bound = max(bound, closer / 1000)
        if plan is not None or bound < goal:
            return bound, [] if plan is None else [plan]
    return bound, []


def floor_seconds(
    config: Configuration, model: TimeModel, cap_bytes: float, beat: float = math.inf, groups: bool = False
) -> float:
    """Return a lower bound on the seconds of a step for all placements of `config`; computing this bound takes only
    milliseconds. The bound holds for all placements by `place` and `screen` whose step takes less than `beat` seconds.
    The bound is 0 if no layer can move, and infinite if no placement fits in memory.
    """
    every = all_ways(config, model, groups)
    if not every or pairs_up(config.schedule):
        return 0.0
    instances = (pipeline_instance(config, model, cap_bytes, *way) for way in every)
    least = min(sum(_floor(config, model, instance, beat)) for instance in instances) + model.fixed
    own = _at_least(config, model)  # the placements try the configuration's own tables, too
    return own if own < least and peak_memory(config) <= cap_bytes else least


def _at_least(config: Configuration, model: TimeModel) -> float:
    """Return seconds that a step of a configuration takes at least: those of its slowest stage."""
    forward, backward, _ = model.chunks(config)
    hidden = model.hidden(config).max() if pairs_up(config.schedule) else 0.0
    return config.micro_batches * (float((forward + backward).sum(axis=0).max()) - hidden) + model.fixed


def _floor(config: Configuration, model: TimeModel, instance: Instance, beat: float) -> tuple[float, float]:
    """Return seconds that no plan under `beat` is under: of the pipeline, and of what `fixed` leaves out."""
    pipeline, slowest = floor_of(instance)
    if not math.isfinite(pipeline):
        return pipeline, 0.0
    return pipeline / 1000, outside_least(config, model, instance, slowest / 1000, (beat - model.fixed))


def outside_least(config: Configuration, model: TimeModel, instance: Instance, slowest: float, beat: float) -> float:
    """Return a lower bound on the seconds that a step spends on the optimizer and on communicating gradients and
    weights. The bound holds for plans whose slowest stage takes at least `slowest` seconds for a micro-batch, and whose
    pipeline takes at most `beat` seconds. For the bound, the slowest stage is assumed to have only as many layers as
    take `slowest` seconds with full recomputation.
    """
    costs, kinds = StageCosts(instance), [kind.name for kind in instance.types]
    longest = max(base + extra.max() for base, extra in zip(costs.base, costs.extra, strict=True)) / 1000
    share = 1.0
    if config.skew != 1:  # the slowest stage is that of even loads
        even = replace(config, skew=1.0)
        share = min(
            (one.forward.total + one.backward.total) / (two.forward.total + two.backward.total)
            for one, two in ((model.layer(even, kind), model.layer(config, kind)) for kind in kinds)
        )
    # what the slowest one takes counts without receiving
    own, ends = slowest - instance.received.max() / 1000, (costs.ends - instance.received) / 1000
    layers = np.maximum(0, np.ceil((share * own - ends) / longest - 1e-9))
    return float(_outside(config, model, instance)(layers, 0 * layers, beat / config.micro_batches).min())


def _outside(config: Configuration, model: TimeModel, instance: Instance) -> Callable[..., np.ndarray]:
    """Return a function of layers [..., stages] of any type, of layers of the last type, and of seconds of a
    micro-batch: the seconds [..., stages] that gradients, weights and the optimizer take at least, if that stage with
    these layers is the slowest and takes at most so long.
    """
    ends, each = by_layers(
        config,
        [kind.name for kind in instance.types],
        lambda laid, stage: np.array([*model.once_and_each(laid, stage), model.optimizer(laid, stage)]),
    )
    least, last, many = np.min(list(each.values()), axis=0), list(each.values())[-1], config.micro_batches
    rounds = min(config.pp, many) if config.chunks > 1 else 1
    rounds = many if config.shard_weights else rounds

    def seconds(layers: np.ndarray, late: np.ndarray, work: Any) -> np.ndarray:
        more = layers[..., None] * least + late[..., None] * last
        once, again, optimizer = np.moveaxis(ends + (more if config.pp > 1 else 0 * more), -1, 0)  # else ends have all
        data = model.waited(once, again, work, many, rounds) if config.overlap_dp else once + again * many
        return np.maximum(0.0, data) + optimizer

    return seconds


def _after(config: Configuration, model: TimeModel, instance: Instance, rest: float) -> After:
    """Return the time after the pipeline in ms, for plans whose slowest stage takes at least `rest` seconds of it. If
    layers have uneven loads, any stage may be the slowest, so the slowest stage at even loads counts. A stage that
    recomputes in vain can become the slowest: each that can take as long counts. A slower stage hides more, until the
    pipeline takes longer by as much or more.
    """
    seconds, costs = _outside(config, model, instance), StageCosts(instance)
    longest = [base + extra.max() for base, extra in zip(costs.base, costs.extra, strict=True)]

    def after(early: np.ndarray, late: np.ndarray, slowest: np.ndarray, pipeline: np.ndarray) -> np.ndarray:
        ends = costs.ends - instance.received
        able = ends + early * longest[0] + late * longest[-1] >= slowest[:, None] * (1 - _EQUAL)
        work = pipeline[:, None] / 1000 / config.micro_batches
        every = seconds(early, late, work) if config.skew == 1 else np.zeros(able.shape)
        return 1000 * (np.maximum(np.where(able, every, np.inf), rest) + model.fixed)

    return After(1000 * (rest + model.fixed), after)


class Way(NamedTuple):
    """A `Way` says which kinds of recomputation are allowed in one of the optimiser's problems for a configuration. A
    `Way` holds arguments of the function `pipeline_instance`.
    """

    full: bool
    mtp: bool = False
    groups: tuple[str, ...] = ()


def ways(config: Configuration) -> list[Way]:
    """Return arguments of `pipeline_instance` for the optimiser's problems that are solved for a configuration; return
    [] if no layer can move. In the first problem no layer may be recomputed fully, and in the second problem every
    layer may be recomputed fully. If the model has MTP layers, a third problem always recomputes the last layer and the
    MTP layers.
    """
    if config.model.alternates:  # the optimiser keeps layers of a kind side by side
        return []
    return [Way(False), Way(True)] + [Way(True, True)] * bool(config.model.mtp)


def group_ways(config: Configuration, model: TimeModel) -> list[Way]:
    """Return arguments of `pipeline_instance` for problems in which layers may also recompute groups of operators (such
    as attention); return [] if no group can be recomputed.
    """
    if not offered(config) or not ways(config):
        return []
    groups = by_price(config, model)
    return [way._replace(groups=groups) for way in ways(config)]


def all_ways(config: Configuration, model: TimeModel, groups: bool) -> list[Way]:
    """Return arguments of `pipeline_instance` for all problems that the optimiser solves for a configuration. If
    `groups` is True, the problems include those in which layers may recompute groups of operators (such as attention).
    """
    return [*ways(config), *(group_ways(config, model) if groups else [])]


def _bound(outcome: Outcome) -> float:
    """Return seconds of the pipeline that no plan is under; infinite when there is proven to be no plan."""
    proven = outcome.plan is not None or outcome.finished
    return (outcome.bound if proven else outcome.work_bound) / 1000


def _exceeds(config: Configuration, peaks: Sequence[float], cap_bytes: float) -> str:
    stage = int(np.argmax(peaks))
    needs = f"stage {stage} needs {peaks[stage] / GIB:.1f} GiB of {cap_bytes / GIB:.1f} by the memory model"
    return f"a plan with layers {config.layers} was dropped, because {needs} and less by the optimiser's instance"


def _why(config: Configuration, cap_bytes: float, outcomes: list[Outcome]) -> str:
    if not outcomes:
        peak = max(memory.peak for memory in all_stages(config))
        needs = f"the heaviest stage needs {peak / GIB:.1f} GiB of {cap_bytes / GIB:.1f}"
        return f"{needs} with every layer recomputed, and no layer is moved where dense and MoE layers alternate"
    return f"{outcomes[-1].why or 'the memory model allows none of the plans found'} (GiB)"


def configuration_of(config: Configuration, instance: Instance, plan: np.ndarray) -> Configuration:
    """Return `config` with the placement of layers and the recomputation of a valid plan [K, C]."""
    layers = _table(instance, plan.sum(axis=0))
    chunks = [_options_of(instance, plan, chunk) for chunk in range(plan.shape[1])]
    names = {name for options in chunks for option in options for name in parts_of(option)}

    def table(name: str) -> Table | None:
        # it counts from the chunk's first layer; where it adds nothing to the stronger ones it stays 0
        last = [max((n for n, o in enumerate(chunk, 1) if name in parts_of(o)), default=0) for chunk in chunks]
        return _table(instance, np.array(last)) if name in names else None

    operators = tuple((name, rows) for name in PATTERNS if (rows := table(name)))
    tables: dict[str, Any] = {name: table(name) for name in ORDER[:-1]}
    return replace(config, layers=layers, recompute=replace(config.recompute, **tables, operators=operators))


def plan_of(config: Configuration, instance: Instance) -> np.ndarray | None:
    """Return the plan [K, C] that describes the placement of layers and the recomputation of a configuration. Return
    None if the pipeline-balance problem lacks one of the configuration's recompute options.
    """
    plan = np.zeros((len(instance.columns), len(instance.stage_of)), int)
    names = {
        (instance.types[t].name, instance.types[t].options[o].name): n for n, (t, o) in enumerate(instance.columns)
    }
    for stage in range(config.pp):
        for number, kinds in enumerate(config.stage_kinds(stage)):
            layers = [kind for kind in kinds if kind in ("dense", "moe")]
            place = int(np.flatnonzero(instance.places == number * config.pp + stage)[0])
            for pair in zip(layers, layer_options(config, number, stage, len(layers)), strict=True):
                if pair not in names:
                    return None
                plan[names[pair], place] += 1
    return plan


def _options_of(instance: Instance, plan: np.ndarray, chunk: int) -> list[str]:
    """Return the option of each layer of a chunk, in the model's order and MindFormers' of options."""
    found: list[str] = []
    for index, kind in enumerate(instance.types):
        counts = dict(zip((o.name for o in kind.options), plan[instance.type_columns(index), chunk], strict=True))
        found += [name for name in instance.order for _ in range(int(counts.get(name, 0)))]
    return found


def _table(instance: Instance, counts: np.ndarray) -> Table:
    rows = instance.by_stage(counts).reshape(instance.chunks, instance.stages)
    return tuple(tuple(int(count) for count in row) for row in rows)
