"""This module computes a lower bound on the step time of all plans that do not divide a layer between chunks. The
module often finds the best plan, too.

A pattern of a stage says how many layers of each type each chunk of the stage holds, and what these layers recompute. A
pattern is considered only if it fits the stage's memory, recomputes no more than memory requires, and allows a step
time under a goal. The search gives patterns to the stages one after another, beginning with the last stage. For a stage
that has no pattern yet, each chunk takes the least time of all patterns of this stage with at least the necessary
number of layers. Therefore the simulated step time of some stages' patterns is a lower bound for all plans with these
patterns. Combinations whose bound is not under the goal are dropped. The combinations that are left when every stage
has a pattern are all plans under the goal; if no combination is left, there is no such plan.

The bound of `tools.layout.ilp.path_bound` assumes that layers can be divided. If a chunk holds only one or two layers,
that bound is far too low, because stages then run their short chunks at different times. The tests compare this module
with an enumeration of all plans of small instances (`tests/tools/layout/test_patterns.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tools.layout.budget import Budget
from tools.layout.instance import CAP_TOLERANCE, SCHEDULES, Instance
from tools.layout.stage_costs import compositions, least_layers, updates_within
from tools.pipeline.simulate import makespans

# effort of each simulated operation, of each way to share out a stage's layers among its chunks, of each of these whose
# ways to recompute are tried, and of each such way
_OPERATION, _COUNT, _TRIED, _WAY = 4e-8, 1e-5, 5e-5, 1e-7
_WAYS = 20_000  # ways to recompute of one stage's layers; beyond that none of its chunks recomputes more than it must
_FRONT = 6  # patterns with the same layers; beyond that they count as one, with the least time of each chunk
_ROWS = 1_000_000  # patterns of several stages that are looked at together
_CELLS = 8_000_000  # operations that are simulated at once
_SLACK = 1e-9  # relative

# (layers of each type of a chunk, whether it is the model's last) -> what `_choices` returns
Choices = dict[tuple[tuple[int, ...], bool], tuple[np.ndarray, np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Stage:
    """A `Stage` holds the N patterns of one stage, one in each row. A pattern is one choice of layers and their
    recomputation for the stage's V chunks. Below the rows of the patterns there is one row for each number of layers n,
    from 0 on; it holds in each column the least value of all patterns with at least n layers.
    """

    layers: np.ndarray  # [N + most + 1, V]
    early: np.ndarray  # [N + most + 1, V] layers of the first of two types
    forward: np.ndarray  # [N + most + 1, V] ms
    backward: np.ndarray  # [N + most + 1, V]
    columns: list[np.ndarray | None]  # [N] of [V, K]; None where several patterns count as one


@dataclass(frozen=True)
class After:
    """An `After` holds lower bounds on the time between the pipeline's last pass and the end of the step (gradients,
    weights, optimizer). The time after the last pass depends on the slowest stage.
    """

    least: float  # ms of any plan
    # ([N, stages] layers of the first of two types, other layers, [N] ms of a micro-batch on the slowest stage without
    # receiving, [N] ms of the pipeline) -> [N, stages] ms that no plan with these layers, that recomputes as much or
    # more, is under if this stage is the slowest; infinite where it cannot be
    of: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def pattern_bound(
    instance: Instance, goal: float, budget: Budget, after: After | None = None
) -> tuple[float, np.ndarray | None]:
    """Return a lower bound in ms (limited to `goal`) on the step time of every plan, and a plan [K, C] that reaches the
    bound if one was found. Both `goal` and the bound include the time `after` the pipeline's last pass (gradients,
    weights, optimizer). The bound is 0 if none can be computed: for schedules other than 1F1B, for more than two types
    of layers, or if the budget does not suffice for one stage.
    """
    sure = after.least if after else 0.0
    stages = patterns_of(instance, goal, budget, after)
    if stages is None:
        return 0.0, None
    if any(len(stage.columns) == 0 for stage in stages):
        return goal, None
    held = [stage.layers[: len(stage.columns)].sum(axis=1) for stage in stages]
    most, fewest = (np.array([ends(one) for one in held]) for ends in (np.max, np.min))
    total = sum(kind.count for kind in instance.types)
    picks, times = np.full((1, instance.stages), -1), np.zeros(1)
    for stage in reversed(range(instance.stages)):
        if len(picks) * len(stages[stage].columns) > _ROWS:
            return min(goal, float(times.min())), None
        new = np.repeat(picks, len(stages[stage].columns), axis=0)
        new[:, stage] = np.tile(np.arange(len(stages[stage].columns)), len(picks))
        layers = _gather(stages, new, "layers").sum(axis=1)[:, stage:].sum(axis=1)
        good = (layers + most[:stage].sum() >= total) & (layers + fewest[:stage].sum() <= total)
        good &= _types_in_order(instance, stages, new, stage)
        new, left = new[good], total - layers[good]
        for other in range(stage):  # it has what the others that have no pattern yet cannot hold
            needed = left - (most[:stage].sum() - most[other])
            new[:, other] = len(stages[other].columns) + np.clip(needed, 0, most[other])
        cost = _OPERATION * instance.table.work.size * len(new)
        if cost > budget.left:
            return min(goal, float(times.min())), None
        budget.spend(cost)
        took = _simulated(instance, stages, new)
        took += sure if stage or after is None else _after(instance, stages, new, after, took)
        kept = took < goal * (1 - _SLACK)
        picks, times = new[kept], took[kept]
        if not len(picks):
            return goal, None
    best = int(times.argmin())
    columns = [stage.columns[pick] for stage, pick in zip(stages, picks[best], strict=True)]
    some = [one for one in columns if one is not None]
    plan = np.array(some).transpose(2, 1, 0).reshape(len(instance.columns), -1) if len(some) == len(columns) else None
    return float(times[best]), plan


def patterns_of(instance: Instance, goal: float, budget: Budget, after: After | None = None) -> list[Stage] | None:
    """Return for each stage the patterns (choices of layers and their recomputation for the stage's chunks) that allow
    a step of less than `goal` ms. Return None if there are too many patterns, or if the problem is not supported.
    """
    if instance.schedule not in SCHEDULES or len(instance.types) > 2:
        return None
    known: Choices = {}
    stages: list[Stage] = []
    for number in range(instance.stages):
        found = _patterns(instance, number, goal - (after.least if after else 0.0), known, budget)
        if found is None:
            return None
        stages.append(found)
    return stages


def _gather(stages: list[Stage], picks: np.ndarray, name: str) -> np.ndarray:
    """Return [N, V, stages] of the picked patterns, and the least of a stage that has none."""
    return np.stack([getattr(stage, name)[pick] for stage, pick in zip(stages, picks.T, strict=True)], axis=2)


def _after(instance: Instance, stages: list[Stage], picks: np.ndarray, after: After, took: np.ndarray) -> np.ndarray:
    """Return [N] ms after the pipeline."""
    work = (_gather(stages, picks, "forward") + _gather(stages, picks, "backward")).sum(axis=1) - instance.received
    early, layers = (_gather(stages, picks, name).sum(axis=1) for name in ("early", "layers"))
    return after.of(early, layers - early, work.max(axis=1), took).min(axis=1)


def _simulated(instance: Instance, stages: list[Stage], picks: np.ndarray) -> np.ndarray:
    """Return [N] step times."""
    many = max(1, _CELLS // instance.table.work.size)
    parts = [picks[first : first + many] for first in range(0, len(picks), many)]
    rows = [(_gather(stages, part, "forward"), _gather(stages, part, "backward")) for part in parts]
    return np.concatenate([np.zeros(0), *(makespans(instance.table, *times) for times in rows)])


def _types_in_order(instance: Instance, stages: list[Stage], picks: np.ndarray, first: int) -> np.ndarray:
    """Return [N] whether types keep their order on the stages from `first` on, in numbers that can be."""
    if len(instance.types) < 2:
        return np.ones(len(picks), bool)
    early, layers = _gather(stages, picks, "early"), _gather(stages, picks, "layers")
    number = early[:, :, first:].sum(axis=(1, 2))
    good = number <= instance.types[0].count if first else number == instance.types[0].count
    after = np.zeros(len(picks), bool)
    for chunk, stage in itertools.product(reversed(range(instance.chunks)), reversed(range(first, instance.stages))):
        good &= ~(after & (early[:, chunk, stage] < layers[:, chunk, stage]))
        after |= early[:, chunk, stage] > 0
    return good


def _patterns(instance: Instance, stage: int, goal: float, known: Choices, budget: Budget) -> Stage | None:
    """Return the patterns of a stage with which a step can be under the goal; None where the budget is over."""
    rows: list[tuple[tuple[int, ...], tuple[int, ...], np.ndarray, np.ndarray, np.ndarray | None]] = []
    ends = instance.ends.reshape(2, instance.chunks, instance.stages)[:, :, stage]
    per_layer = np.array([[kind.forward, kind.backward] for kind in instance.types])
    most = goal / instance.micro_batches - ends.sum()
    for counts in _counts(instance, stage, most):
        budget.spend(_COUNT)
        if budget.over:
            return None
        both = np.array(counts)  # [V, types]
        base = both @ per_layer  # [V, 2]
        if base.sum() >= most:
            continue
        budget.spend(_TRIED)
        early = tuple(map(int, both[:, 0])) if len(instance.types) > 1 else (0,) * len(both)
        for extra, columns in _ways(instance, stage, both, most - float(base.sum()), known, budget):
            rows.append((tuple(map(int, both.sum(axis=1))), early, base[:, 0], base[:, 1] + extra, columns))
    if not rows:
        none = np.zeros((0, instance.chunks))
        return Stage(none, none, none, none, [])
    first_four = [np.array(values) for values in list(zip(*rows, strict=True))[:4]]
    held = first_four[0].sum(axis=1)
    layers, early_layers, forward, backward = (
        np.array([*values, *(values[held >= number].min(axis=0) for number in range(held.max() + 1))])
        for values in first_four
    )
    return Stage(layers, early_layers, forward + ends[0], backward + ends[1], [row[4] for row in rows])


def _counts(instance: Instance, stage: int, most: float) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield [V, types] layers of a stage's chunks, as far as chunks, types and `most` ms of work allow."""
    least = least_layers(instance).reshape(instance.chunks, instance.stages)
    total, each = sum(k.count for k in instance.types), min(kind.forward + kind.backward for kind in instance.types)
    room = min(total - int(least.sum() - least[:, stage].sum()), int(max(0.0, most) / each))
    early = instance.types[0].count if len(instance.types) > 1 else 0
    # no more early layers than the chunks before leave: the first may be empty, the others hold their least
    before = np.concatenate([[0], np.cumsum(least.ravel())[:-1]]).reshape(least.shape)[:, stage]
    first = [max(0, early - int(n)) for n in before]

    def longer(chunk: int, left: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        if chunk == instance.chunks:
            yield ()
            return
        rest = int(least[chunk + 1 :, stage].sum())
        for count in range(int(least[chunk, stage]), left - rest + 1):
            for some in range(min(count, first[chunk]) + 1):
                if stage == chunk == 0 and some < min(count, early):
                    continue  # the model's first chunk begins with all of them
                if count - some > total - early:
                    continue
                own = (some, count - some) if early or len(instance.types) > 1 else (count,)
                yield from ((own, *others) for others in longer(chunk + 1, left - count))

    yield from longer(0, room)


def _ways(
    instance: Instance, stage: int, counts: np.ndarray, most: float, known: Choices, budget: Budget
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yield ([V] ms of recomputation, [V, K] layers of each column) that keep the memory and are under `most` ms: of
    those with the same layers none takes more in every chunk than another one.
    """
    if not updates_within(instance, stage, counts):
        return
    peaks = instance.peaks[stage].astype(float)
    parameters = float((counts @ np.array([kind.parameters for kind in instance.types])).sum())
    most_held = instance.cap + CAP_TOLERANCE - float(instance.least_static[stage]) - parameters
    room = most_held - instance.kept_by_ends[stage]  # for the activations of layers, [vectors]
    choices = []
    for chunk, row in enumerate(counts):
        key = tuple(map(int, row)), stage == instance.stages - 1 and chunk == len(counts) - 1
        if key not in known:
            known[key] = _choices(instance, *key)
        choices.append(known[key])
    if not all(len(extra) for extra, _, _ in choices):
        return
    least = np.array([held.min() for _, held, _ in choices])
    if (peaks @ least > room).any():
        return
    # what a chunk may hold at most, if the others hold their least
    spare = room - peaks @ least  # [vectors]
    small = []
    for chunk, (extra, held, columns) in enumerate(choices):
        good = (np.outer(held - least[chunk], peaks[:, chunk]) <= spare).all(axis=1)
        small.append((extra[good], held[good], columns[good]))
    lows = np.array([extra.min() for extra, _, _ in small])
    if lows.sum() >= most:
        return
    ways = int(np.prod([float(len(extra)) for extra, _, _ in small]))
    if ways > _WAYS:
        yield lows, None
        return
    budget.spend(_WAY * ways)
    picks = np.indices([len(extra) for extra, _, _ in small]).reshape(len(small), -1)
    held = np.stack([one[1][pick] for one, pick in zip(small, picks, strict=True)])
    extras = np.stack([one[0][pick] for one, pick in zip(small, picks, strict=True)], axis=1)  # [ways, V]
    there = np.any([one[2][pick] > 0 for one, pick in zip(small, picks, strict=True)], axis=0)  # [ways, K]
    once = sum((there * more).max(axis=1) for more in instance.more[:, stage])
    good = (peaks @ held + once <= room[:, None]).all(axis=0) & (extras.sum(axis=1) < most)
    extras, picks = extras[good], picks[:, good]
    front = _front(extras)
    if front is None:
        yield extras.min(axis=0), None
        return
    for way in front:
        yield extras[way], np.array([one[2][pick] for one, pick in zip(small, picks[:, way], strict=True)])


def _front(extras: np.ndarray) -> list[int] | None:
    """Return the rows that no other row is at most as large as in every place; None where they are too many."""
    found: list[int] = []
    left = np.arange(len(extras))
    while len(left):
        if len(found) == _FRONT:
            return None
        found.append(int(left[extras[left].sum(axis=1).argmin()]))
        left = left[(extras[left] < extras[found[-1]] - 1e-12).any(axis=1)]
    return found


def _choices(instance: Instance, counts: tuple[int, ...], last: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ([ways] ms of recomputation, [ways] memory held, [ways, K] layers of each column) of a chunk's layers:
    those that no other way beats in both and in what a stage needs once.
    """
    every = np.zeros((1, len(instance.columns)), int)
    for index, count in enumerate(counts):
        columns = instance.type_columns(index)
        own = (
            compositions(count, columns.stop - columns.start) if count else np.zeros((1, columns.stop - columns.start))
        )
        place = np.zeros((len(own), len(instance.columns)), int)
        place[:, columns] = own
        every = (every[:, None] + place[None]).reshape(-1, every.shape[1])
    if last:
        every = every[~every[:, instance.kept_out].any(axis=1)]
    if instance.order:
        every = every[instance.in_order(every[:, :, None])]
    extra = every @ np.array([instance.types[t].options[o].extra_backward for t, o in instance.columns])
    held = every @ instance.costs[3]
    more = np.unique(instance.more.reshape(-1, len(instance.columns)), axis=0)  # [needs of stages, K]
    needs, need = np.unique([((way > 0) * more).max(axis=1) for way in every], axis=0, return_inverse=True)
    no_more = [np.flatnonzero((needs <= one).all(axis=1)) for one in needs]
    kept, least = [], np.full(len(needs), np.inf)  # of each need the least memory held so far
    for way in np.lexsort((held, extra)):
        if held[way] < least[no_more[need[way]]].min() - 1e-12:
            kept.append(int(way))
            least[need[way]] = float(held[way])
    return extra[kept], held[kept], every[kept]
