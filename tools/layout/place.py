"""This module assigns a configuration's layers to stages and chunks and chooses what each layer recomputes. It uses
the pipeline optimiser.

`place` makes a pipeline-balance instance of the configuration (`problem`), has it optimised and turns the
plan back into tables of layers and recomputation as MindFormers reads them: each option counts from a chunk's first
layer, full recomputation first, then selective, then communication. The instance admits only plans that MindFormers can
express. What comes out is judged by the estimator itself: `TimeModel.step` with the schedule simulated, and the memory
model for every stage. The instance is never below the memory model; should a plan exceed the cap all the same, it is
dropped and the placement says so.

At last `eased` looks for groups of operators that a placement recomputes although they would fit. The optimiser gives
layers the cheapest groups first (`tools.layout.problem.by_price`), and a layer that needs one more group of it has all
those before. A table of MindFormers counts each group for itself: where the last one frees more than is missing, an
earlier one can be left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tools.estimate.configuration import NORMS, PATTERNS, Configuration, Recompute, Table, offered, parts_of
from tools.estimate.memory.model import all_stages, stage_memory
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.layout.budget import Budget
from tools.layout.ilp import PathModel, path_bound
from tools.layout.instance import Instance
from tools.layout.optimise import Outcome, optimise
from tools.layout.problem import ORDER, by_price, pipeline_instance
from tools.pipeline.schedules import pairs_up


def eased(config: Configuration, model: TimeModel, cap_bytes: float) -> Configuration:
    """Return `config` with fewer recomputed layers of each group, as long as every stage keeps `cap_bytes`. The most
    expensive group comes first.
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
    """With as few layers of a chunk and stage in a group as fit; none where only whole layers recompute it."""
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
    """Return the table of the layers that recompute a group of operators, or norms."""
    none: Table = tuple((0,) * config.pp for _ in config.layers)
    return (config.recompute.select if name == NORMS else dict(config.recompute.operators).get(name)) or none


def with_table(config: Configuration, name: str, table: Table) -> Configuration:
    """Return the configuration with another table for a group, or for norms. A group without layers is removed."""
    some = table if any(map(any, table)) else None
    if name == NORMS:
        return replace(config, recompute=replace(config.recompute, select=some))
    rest = dict(config.recompute.operators) | {name: some}
    operators = tuple((group, rows) for group, rows in rest.items() if rows)
    return replace(config, recompute=replace(config.recompute, operators=operators))


_SHARE = 0.35  # of effort and time, for each instance but the last


@dataclass(frozen=True)
class Placement:
    """A `Placement` is the result of `place`."""

    configuration: Configuration | None  # with its new layers and recomputation; None where nothing fits
    step_s: float  # simulated seconds of a step; infinite without a configuration
    bound_s: float  # no placement is faster (what is outside of the pipeline taken as it is in this one)
    peak_bytes: tuple[float, ...] = ()  # of each stage
    why: str = ""  # without a configuration what is missing
    least_s: float = 0.0  # no placement is faster, whatever is outside of the pipeline
    cut: bool = False  # a deadline ended the search before its effort was spent
    dropped: tuple[str, ...] = ()  # plans that the optimiser proposed and that were not taken, each with the reason


def place(
    config: Configuration, model: TimeModel, cap_bytes: float, budget: Budget, seed: int = 0, groups: bool = False
) -> Placement:
    """Return the fastest placement of `config`'s layers, with the recomputation of each, that keeps `cap_bytes` on
    every stage.

    The configuration's own tables are one of the candidates, and the only one for models whose dense and MoE layers
    alternate. Of schedules with pairs (`tools.pipeline.orders`) the optimiser does not count what a pair hides,
    which hangs on two chunks at once; the answer's time does. The bound is then 0.

    Args:
        groups: layers may recompute groups of operators as well (`tools.estimate.configuration`). Half of the effort is
            spent without them, so that the answer is never slower than that of half the effort.

    Raises:
        RecipeError: the schedule cannot run with these numbers.
    """
    if config.pp == 1 and config.chunks > 1:
        config = replace(config, layers=((config.model.layers,),), recompute=Recompute())
    outcomes: list[Outcome] = []
    candidates = [config]

    def optimised(way: Way, part: Budget) -> list[Configuration]:
        """Optimise one instance, and add the outcome."""
        instance = pipeline_instance(config, model, cap_bytes, *way)
        outcomes.append(optimise(instance, part, seed))
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
    bound = min((_bound(outcome) for outcome in outcomes), default=0.0)
    bound = 0.0 if pairs_up(config.schedule) else bound
    for candidate in candidates:
        peaks = tuple(memory.peak for memory in all_stages(candidate))
        if max(peaks) > cap_bytes:
            dropped += [_exceeds(candidate, peaks, cap_bytes)] if candidate is not config else []
            continue
        step = model.step(candidate, simulated=True)
        if best is None or step.total < best.step_s:
            rest = step.total - step.pipeline
            best = Placement(candidate, step.total, min(step.total, rest + bound), peaks)
    best = best or Placement(None, float("inf"), bound, why=_why(config, cap_bytes, outcomes))
    least = min(best.step_s, bound + model.fixed)
    return replace(best, least_s=least, cut=any(outcome.cut for outcome in outcomes), dropped=tuple(dropped))


class Way(NamedTuple):
    """A `Way` holds the arguments of `pipeline_instance` that differ between instances of a configuration."""

    full: bool
    mtp: bool = False
    groups: tuple[str, ...] = ()


def ways(config: Configuration) -> list[Way]:
    """Return the instances by which a configuration is placed; return [] if no layer can move.

    No layer recomputes everything; some do; the last one does, and MTP with it.
    """
    if config.model.alternates:  # the optimiser keeps layers of a kind side by side
        return []
    return [Way(False), Way(True)] + [Way(True, True)] * bool(config.model.mtp)


def group_ways(config: Configuration, model: TimeModel) -> list[Way]:
    """Return instances in which layers may recompute groups of operators as well; return [] if no group is known.

    Without whole layers once for each number of groups: what a pass works with hangs on which groups there are.
    """
    if not offered(config) or not ways(config):
        return []
    groups = by_price(config, model)
    some = [Way(False, False, groups[:count]) for count in range(1, len(groups) + 1)]
    return some + [way._replace(groups=groups) for way in ways(config) if way.full]


def least_seconds(
    config: Configuration, model: TimeModel, cap_bytes: float, budget: Budget, groups: bool = False
) -> float:
    """Return a lower bound on the seconds of a step. The bound holds for every placement that `place` may return for
    `config`.

    The least `path_bound` of its instances; gradients and optimizer count nothing, for they hang on the layers. 0
    where nothing is moved, infinite where nothing fits.
    """
    every = [*ways(config), *(group_ways(config, model) if groups else [])]
    if not every or config.pp == 1 or pairs_up(config.schedule):
        return 0.0
    bounds = []
    for way in every:
        instance = pipeline_instance(config, model, cap_bytes, *way)
        bounds.append(path_bound(instance, PathModel(instance), budget.part(1 / len(every))) / 1000)
    if max(memory.peak for memory in all_stages(config)) <= cap_bytes:  # `place` tries its own tables, too
        bounds.append(model.step(config, simulated=True).pipeline)
    return min(bounds) + model.fixed


def _bound(outcome: Outcome) -> float:
    """Seconds of the pipeline that no plan is under; infinite when there is proven to be no plan."""
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
        return f"{needs}, and nothing is moved or recomputed for layers that alternate between dense and MoE"
    return f"{outcomes[-1].why or 'the memory model allows none of the plans found'} (GiB)"


def configuration_of(config: Configuration, instance: Instance, plan: np.ndarray) -> Configuration:
    """Return `config` with the layers and recomputation of a well-formed plan [K, C]."""
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


def _options_of(instance: Instance, plan: np.ndarray, chunk: int) -> list[str]:
    """The option of each layer of a chunk, in the model's order and MindFormers' of options."""
    found: list[str] = []
    for index, kind in enumerate(instance.types):
        counts = dict(zip((o.name for o in kind.options), plan[instance.type_columns(index), chunk], strict=True))
        found += [name for name in instance.order for _ in range(int(counts.get(name, 0)))]
    return found


def _table(instance: Instance, counts: np.ndarray) -> Table:
    rows = instance.by_stage(counts).reshape(instance.chunks, instance.stages)
    return tuple(tuple(int(count) for count in row) for row in rows)
