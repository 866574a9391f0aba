"""This module places the layers of an instance in a fraction of a second, without a solver, and bounds the instance
from below.

A stage's work is the time of its layers and of what they recompute. A stage that holds given layers recomputes as
little as its memory allows (`StageCosts`), whatever the other stages do. What is left is to share out the layers.

1. `stage_sizes`: for each time that the slowest stage may take, dynamic programming over the stages finds the layers of
   each that take the least time together, with no stage over that time. The closed form of 1F1B chooses among them.
2. `starts` divides a stage's layers among its chunks in several ways.
3. `place_fast` moves single layers between chunks while the simulator says that this helps, and lets annealing
   (`tools.layout.optimise`) look at what recomputes, for a fixed amount of work.

With one chunk per stage and few layers everything but the closed form is exact; with more chunks the division among
them is a search. `floor_of` bounds every plan: whole layers, memory with layers that may be divided in what they
recompute, and with one chunk what fills and drains the pipeline. The slow references are all plans of small instances
(`tests/tools/layout/pipeline_instances.py`) and the solver (`tools.layout.optimise.optimise`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np

from tools.layout.budget import Budget
from tools.layout.ilp import Incumbent, work_bound
from tools.layout.instance import CAP_TOLERANCE, Instance
from tools.layout.optimise import anneal

Chunk = tuple[int, ...]  # layers of each type
Stage = tuple[Chunk, ...]  # of each chunk
_MOST = 20_000  # ways to recompute a stage's layers that are all tried; beyond that the cheapest memory is freed first
_SLOWEST = 40  # times of the slowest stage, from the least that is possible
_FIRST, _ROUNDS, _WIDTH = 24, 12, 48  # plans simulated at first; rounds of moves, and plans simulated in each
_STARTS = 4  # counts that are made to fit where none does
_ALL_MOVES = 12  # chunks up to which a layer may move from any chunk to any other
_ANNEAL = 0.1  # effort
_FAR = 1.1  # times the time to beat: no more work is spent on what starts slower than that


@lru_cache(maxsize=1024)
def compositions(count: int, options: int) -> np.ndarray:
    """Return [ways, options] all ways to give `count` layers one of the options each."""
    every = list(itertools.combinations(range(count + options - 1), options - 1))
    bars = np.array(every, int).reshape(len(every), options - 1)
    edges = np.column_stack([np.full(len(bars), -1), bars, np.full(len(bars), count + options - 1)])
    return np.diff(edges, axis=1) - 1


class StageCosts:
    """This finds the least work of each stage, by the layers that it holds."""

    def __init__(self, instance: Instance):
        self.instance = instance
        self.layers = sum(kind.count for kind in instance.types)
        self.row = [index for index, kind in enumerate(instance.types) for _ in range(kind.count)]
        self.base = np.array([kind.forward + kind.backward for kind in instance.types])
        self.parameters = np.array([kind.parameters for kind in instance.types])
        self.extra = [np.array([o.extra_backward for o in kind.options]) for kind in instance.types]
        self.held = [np.array([o.activation for o in kind.options]) for kind in instance.types]
        ends = instance.by_stage(instance.ends.sum(axis=0)).reshape(instance.chunks, instance.stages)
        self.ends = ends.sum(axis=0)
        self.room = instance.cap + CAP_TOLERANCE - instance.static
        self._last = int(instance.stage_of[-1])
        self._known: dict[tuple[int, Stage], tuple[float, np.ndarray] | None] = {}
        self._prefix = np.array(
            [[self.row[:n].count(t) for t in range(len(instance.types))] for n in range(self.layers + 1)]
        )

    def content(self, first: int, count: int) -> Chunk:
        """Return the layers of each type among `count` layers of the model from `first` on."""
        return tuple(int(n) for n in self._prefix[first + count] - self._prefix[first])

    def least(self, stage: int, layers: Stage) -> tuple[float, np.ndarray] | None:
        """Return (work, [chunks, K] layers of each column) of a stage with `layers`; None where they do not fit."""
        key = stage, layers
        if key not in self._known:
            self._known[key] = self._least(stage, layers)
        return self._known[key]

    def _least(self, stage: int, layers: Stage) -> tuple[float, np.ndarray] | None:
        counts = np.array(layers)
        room = self.room[stage] - float((counts @ self.parameters).sum())
        items = [(c, t, int(n)) for (c, t), n in np.ndenumerate(counts) if n]
        choices = [self._choices(stage, *item) for item in items]
        found: tuple[float, list[np.ndarray]] | None
        if not items:
            found = (0.0, []) if room >= 0 else None
        elif math.prod(_MOST + 1 if choice is None else len(choice) for choice in choices) <= _MOST:
            found = self._every(stage, room, items, choices)
        else:
            tried = [self._greedy(stage, room, items, lock) for lock in self._locks(stage, layers)]
            found = min((one for one in tried if one), key=lambda one: one[0], default=None)
        if found is None:
            return None
        extra, given = found
        columns = np.zeros((len(layers), len(self.instance.columns)), int)
        for (c, t, _), by in zip(items, given, strict=True):
            columns[c, self.instance.type_columns(t)] = by
        return float(self.ends[stage] + (counts @ self.base).sum() + extra), columns

    def _locked(self, stage: int, chunk: int, kind: int) -> int | None:
        """The only option that layers of the last chunk may have."""
        if stage == self._last and chunk == self.instance.chunks - 1 and self.instance.last_option:
            names = [option.name for option in self.instance.types[kind].options]
            return names.index(self.instance.last_option) if self.instance.last_option in names else None
        return None

    def _choices(self, stage: int, chunk: int, kind: int, count: int) -> np.ndarray | None:
        """[ways, options] of the layers of one type in a chunk; None where there are too many to try."""
        options, locked = len(self.extra[kind]), self._locked(stage, chunk, kind)
        if locked is not None:
            return count * np.eye(options, dtype=int)[[locked]]
        return compositions(count, options) if math.comb(count + options - 1, count) <= _MOST else None

    def _every(
        self, stage: int, room: float, items: list[tuple[int, int, int]], choices: list[np.ndarray | None]
    ) -> tuple[float, list[np.ndarray]] | None:
        """The cheapest of all ways that fit."""
        every = [choice for choice in choices if choice is not None]
        places = np.indices([len(choice) for choice in every]).reshape(len(every), -1)
        extra = np.zeros(places.shape[1])
        kept = np.zeros((places.shape[1], self.instance.chunks))
        for place, choice, (c, t, _) in zip(places, every, items, strict=True):
            extra += (choice @ self.extra[t])[place]
            kept[:, c] += (choice @ self.held[t])[place]
        good = (kept @ self.instance.peaks[stage].T).max(axis=1) <= room
        if self.instance.order:
            for (one, (c, t, _)), (two, (d, u, _)) in itertools.combinations(enumerate(items), 2):
                if c == d:
                    weak = self._strength(t, every[one], True)[places[one]]
                    strong = self._strength(u, every[two], False)[places[two]]
                    good &= weak <= strong
        if not good.any():
            return None
        best = np.flatnonzero(good)[extra[good].argmin()]
        return float(extra[best]), [choice[place[best]] for place, choice in zip(places, every, strict=True)]

    def _strength(self, kind: int, choice: np.ndarray, weakest: bool) -> np.ndarray:
        """[ways] the place in `order` of the weakest or the strongest option that is used."""
        places = self.instance.strengths[self.instance.type_columns(kind)]
        if weakest:
            return np.where(choice > 0, places, -1).max(axis=1)
        return np.where(choice > 0, places, len(self.instance.order)).min(axis=1)

    def _locks(self, stage: int, layers: Stage) -> list[dict[tuple[int, int], int]]:
        """For `_greedy`: (chunk, type) -> the one option of these layers, so that the order of options is kept."""
        fixed = {
            (c, t): locked
            for c, row in enumerate(layers)
            for t in range(len(row))
            if (locked := self._locked(stage, c, t)) is not None
        }
        mixed = [(c, [t for t, n in enumerate(row) if n]) for c, row in enumerate(layers)]
        mixed = [(c, some) for c, some in mixed if len(some) > 1 and self.instance.order and (c, some[0]) not in fixed]
        first: dict[tuple[int, int], int] = dict(fixed)
        second = dict(fixed)
        for c, some in mixed:
            places = [self.instance.strengths[self.instance.type_columns(t)] for t in some]
            for t, own in zip(some[:-1], places, strict=False):  # the earlier ones as strong as can be
                first[c, t] = int(own.argmin())
            for t, own in zip(some[1:], places[1:], strict=False):  # or the later ones as weak
                second[c, t] = int(own.argmax())
        return [first, second] if mixed else [fixed]

    def _greedy(
        self, stage: int, room: float, items: list[tuple[int, int, int]], lock: dict[tuple[int, int], int]
    ) -> tuple[float, list[np.ndarray]] | None:
        """Free the cheapest memory first, layer by layer, then give back what was too much."""
        peaks = self.instance.peaks[stage].astype(float)
        given, need, extra = [], np.zeros(len(peaks)), 0.0
        for c, t, n in items:
            option = lock.get((c, t), int(np.lexsort((self.held[t], self.extra[t]))[0]))
            given.append(n * np.eye(len(self.extra[t]), dtype=int)[option])
            need += peaks[:, c] * n * self.held[t][option]
            extra += n * self.extra[t][option]
        free = [place for place, (c, t, _) in enumerate(items) if (c, t) not in lock]
        while (over := float(need.max() - room)) > 0:
            worst, best = int(need.argmax()), None
            for place in free:
                c, t, _ = items[place]
                for a, b in itertools.permutations(np.arange(len(self.extra[t])), 2):
                    gain = peaks[worst, c] * (self.held[t][a] - self.held[t][b])
                    if given[place][a] and gain > 0:
                        cost = self.extra[t][b] - self.extra[t][a]
                        price = cost / min(gain, over)
                        if best is None or price < best[0]:
                            best = price, place, a, b, gain, cost
            if best is None:
                return None
            _, place, a, b, gain, cost = best
            c, t, _ = items[place]
            many = max(1, min(int(given[place][a]), int(over / gain)))
            given[place][a] -= many
            given[place][b] += many
            need += peaks[:, c] * many * (self.held[t][b] - self.held[t][a])
            extra += many * cost
        for place in free:
            c, t, _ = items[place]
            slow = self.extra[t].argsort(kind="stable")[::-1]
            for b, a in ((b, a) for at, b in enumerate(slow) for a in reversed(slow[at + 1 :])):
                more = peaks[:, c] * (self.held[t][a] - self.held[t][b])
                while given[place][b] and (need + more).max() <= room:
                    need, extra = need + more, extra - (self.extra[t][b] - self.extra[t][a])
                    given[place][b] -= 1
                    given[place][a] += 1
        return extra, given

    def split(self, counts: Iterable[int]) -> list[Stage]:
        """Return what each stage holds of [C] layers of each chunk in model order."""
        rows: list[list[Chunk]] = [[] for _ in range(self.instance.stages)]
        first = 0
        for chunk, count in enumerate(counts):
            rows[int(self.instance.stage_of[chunk])].append(self.content(first, count))
            first += count
        return [tuple(row) for row in rows]

    def works(self, counts: Iterable[int]) -> np.ndarray | None:
        """Return [stages] least work with [C] layers of each chunk; None where a stage's layers do not fit."""
        found = [self.least(stage, layers) for stage, layers in enumerate(self.split(counts))]
        works = [one[0] for one in found if one]
        return np.array(works) if len(works) == len(found) else None

    def plan(self, counts: Iterable[int]) -> np.ndarray:
        """Return the plan [K, C] with the least work of each stage, for counts that fit."""
        plan = np.zeros((len(self.instance.columns), len(self.instance.stage_of)), int)
        for stage, layers in enumerate(self.split(counts)):
            one = self.least(stage, layers)
            assert one is not None
            plan[:, self.instance.stage_of == stage] = one[1].T
        return plan

    def closed(self, works: np.ndarray) -> float:
        """Return the closed form of the pipeline (`tools.estimate.time_model.pipeline_of`)."""
        top = float(works.max())
        return self.instance.micro_batches * top + (float(works.sum()) - top) / self.instance.chunks


def least_layers(instance: Instance) -> np.ndarray:
    """Return [C] layers that each chunk must hold at least."""
    found = np.full(len(instance.stage_of), instance.least_layers)
    found[[0, -1]] = 0
    found[-1] = max(found[-1], instance.last_layers)
    return found


def stage_sizes(costs: StageCosts, beat: float = np.inf) -> list[list[int]]:
    """Return [stages] layers of each stage, the best by the closed form first; none can be over `beat` ms of a step.

    With several chunks the layers before a stage are taken as equally many in each chunk.
    """
    instance, layers = costs.instance, costs.layers
    stages, chunks = instance.stages, instance.chunks
    least = instance.by_stage(least_layers(instance)).reshape(chunks, stages).sum(axis=0)
    most = beat / instance.micro_batches
    table = np.full((stages, layers + 1, layers + 1), np.inf)  # [stage, layers with it, layers before it]
    for stage in range(stages):
        for count in range(int(least[stage]), layers - int(least.sum() - least[stage]) + 1):
            if costs.ends[stage] + count * costs.base.min() > most:
                break
            for before in range(int(least[:stage].sum()), layers - count + 1):
                one = costs.least(stage, _even(costs, before, count))
                if one:
                    table[stage, before + count, before] = one[0]
    times = np.unique(table[np.isfinite(table)].round(9))
    times = times[times <= most]
    found: dict[tuple[int, ...], float] = {}
    first, last = 0, len(times)
    while first < last:  # the least time of the slowest stage
        middle = (first + last) // 2
        first, last = (first, middle) if _solve(table, times[middle]) else (middle + 1, last)
    for time in times[first : first + _SLOWEST]:
        if found and instance.micro_batches * time > min(found.values()):
            break
        solved = _solve(table, time)
        assert solved is not None
        total, sizes = solved
        found.setdefault(tuple(sizes), instance.micro_batches * float(time) + (total - float(time)) / chunks)
    return [list(sizes) for sizes in sorted(found, key=lambda sizes: found[sizes])]


def _solve(table: np.ndarray, slowest: float) -> tuple[float, list[int]] | None:
    """(Least sum of work, layers of each stage) with no stage over `slowest`; None where there is no way."""
    stages, size, _ = table.shape
    best, choices = np.where(np.arange(size) == 0, 0.0, np.inf), []
    for stage in range(stages):
        every = np.where(table[stage] <= slowest + 1e-9, table[stage], np.inf) + best
        choices.append(every.argmin(axis=1))
        best = every.min(axis=1)
    if not np.isfinite(best[-1]):
        return None
    sizes, at = [], size - 1
    for choice in reversed(choices):
        sizes.append(at - int(choice[at]))
        at = int(choice[at])
    return float(best[-1]), sizes[::-1]


def _even(costs: StageCosts, before: int, count: int) -> Stage:
    """A stage's layers shared evenly among its chunks, with so many layers on the stages before it; what is not of the
    last type is in the first chunk.
    """
    chunks = costs.instance.chunks
    first = before if chunks == 1 else min(round(before / chunks), costs.layers - count)
    early = count - costs.content(first, count)[-1]
    sizes = [(count + chunk) // chunks for chunk in range(chunks)]  # the later ones are longer: fewer are in flight
    sizes[-1] -= max(0, min(early - sizes[0], sizes[-1])) if chunks > 1 else 0
    sizes[0] = count - sum(sizes[1:])
    head = costs.content(first, min(early, sizes[0]))
    rest = tuple([0] * (len(head) - 1))
    own = [(*head[:-1], head[-1] + sizes[0] - sum(head)), *((*rest, size) for size in sizes[1:])]
    return tuple(own)


def starts(costs: StageCosts, beat: float = np.inf) -> list[tuple[int, ...]]:
    """Return [C] layers of each chunk in model order, in several ways, to begin with."""
    instance, stages, chunks = costs.instance, costs.instance.stages, costs.instance.chunks
    every = stage_sizes(costs, beat)
    shapes: list[np.ndarray] = []  # [chunks, stages]
    numbers = np.arange(chunks)[:, None]
    for sizes in every[: _SLOWEST if chunks == 1 else 3]:
        each, more = np.divmod(np.array(sizes), chunks)
        shapes += [each + (numbers >= chunks - more), each + (numbers < more)]
    for sizes, share in itertools.product(every[:2] if chunks > 2 else [], (0.0, 0.3, 0.6, 0.8)):
        shape = np.ones((chunks, stages), int)  # one in each chunk but the first and the last of a stage
        more = np.array(sizes) - chunks
        shape[0] += np.round(share * more).astype(int)
        shape[-1] += more - np.round(share * more).astype(int)
        shapes.append(shape)
    for first, last, late in itertools.product(range(3), range(3), (True, False)):  # equal chunks but for the ends
        size = stages * chunks
        every_one, rest = divmod(costs.layers - first + last, size)
        row = np.array([every_one + (c >= size - rest if late else c < rest) for c in range(size)])
        row[0] += first
        row[-1] -= last
        shapes.append(instance.by_stage(row).reshape(chunks, stages))
    least = least_layers(instance)
    rows = (instance.by_stage(shape.ravel()) for shape in shapes)
    return [
        counts
        for counts in dict.fromkeys(tuple(map(int, row)) for row in rows if (row >= least).all())
        if sum(counts) == costs.layers
    ]


def moves(costs: StageCosts, counts: tuple[int, ...], slowest: int) -> Iterator[tuple[int, ...]]:
    """Yield the counts with one layer in another chunk: any, or of many chunks near ones, and any from the slowest."""
    least, stage_of = least_layers(costs.instance), costs.instance.stage_of
    for a, b in itertools.permutations(range(len(counts)), 2):
        near = len(counts) <= _ALL_MOVES or abs(a - b) <= 2 or stage_of[a] == stage_of[b] or stage_of[a] == slowest
        if near and counts[a] > least[a]:
            yield tuple(n - (c == a) + (c == b) for c, n in enumerate(counts))


def fitting(costs: StageCosts, begin: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return counts near those of `begin` that fit if every layer keeps as little as it can; [] if none were found."""
    found, instance = [], costs.instance
    least = [instance.type_columns(t).start + int(held.argmin()) for t, held in enumerate(costs.held)]

    def excess(many: list[tuple[int, ...]]) -> np.ndarray:
        """[N, stages] memory over the cap."""
        plans = np.zeros((len(many), len(instance.columns), len(instance.stage_of)), int)
        for plan, counts in zip(plans, many, strict=True):
            first = 0
            for chunk, count in enumerate(counts):
                plan[least, chunk] = costs.content(first, count)
                first += count
        return np.maximum(0.0, instance.peak_memory(plans) - instance.cap - CAP_TOLERANCE)

    for counts in begin[:_STARTS]:
        over = excess([counts])[0]
        for _ in range(4 * _ROUNDS):
            some = list(moves(costs, counts, int(over.argmax()))) if over.any() else []
            if not some:
                break
            every = excess(some)
            best = int(every.sum(axis=1).argmin())
            if every[best].sum() >= over.sum():
                break
            counts, over = some[best], every[best]
        if not over.any():
            found.append(counts)
    return found


def place_fast(instance: Instance, beat: float = np.inf) -> np.ndarray | None:
    """Return a plan [K, C] that keeps every rule, or None if none was found.

    The amount of work is fixed by the instance and `beat`: no clock is asked.

    Args:
        beat: ms of a step. Plans that can only be far slower are not improved further.
    """
    costs = StageCosts(instance)
    begin = starts(costs, _FAR * beat)
    known = {counts: works for counts in begin if (works := costs.works(counts)) is not None}
    if not known:
        known = {counts: works for counts in fitting(costs, begin) if (works := costs.works(counts)) is not None}
    first = sorted(known, key=lambda counts: costs.closed(known[counts]))[:_FIRST]
    if not first:
        return None
    times = dict(zip(first, instance.short_times(np.array([costs.plan(counts) for counts in first])), strict=True))
    done: set[tuple[int, ...]] = set()
    while len(done) < _ROUNDS and min(times.values()) <= _FAR * beat:
        best = min(times, key=lambda counts: (times[counts], counts))
        if best in done:
            break
        done.add(best)
        fresh = {}
        for counts in moves(costs, best, int(known[best].argmax())):
            if counts not in times and (works := costs.works(counts)) is not None:
                fresh[counts] = known[counts] = works
        some = sorted(fresh, key=lambda counts: costs.closed(fresh[counts]))[:_WIDTH]
        if some:
            times.update(
                zip(some, instance.short_times(np.array([costs.plan(counts) for counts in some])), strict=True)
            )
    found = Incumbent(instance)
    ranked = sorted(times, key=lambda counts: (times[counts], counts))[:4]
    plans = [costs.plan(counts) for counts in ranked]
    for plan in plans:
        found.offer(plan)
    if found.plan is not None and found.time <= _FAR * beat and instance.chunks > 1:
        anneal(found, np.array(plans), Budget(_ANNEAL), np.random.default_rng(0), instance.short_times)
    return found.plan


def floor_of(instance: Instance) -> tuple[float, float]:
    """Return (ms of a step that no plan is under, ms of its slowest stage that no plan is under); infinite where no
    plan can fit.

    A stage's own layers are whole. What they recompute may be divided, at the price of the convex hull of the options.
    Of several chunks each holds its least number of layers and the others are where the fewest are in flight.
    """
    if len(instance.types) > 2:
        work = work_bound(instance)
        return work, work / instance.micro_batches
    costs = StageCosts(instance)
    low = _low(costs)
    times = np.unique(low[np.isfinite(low)].round(9))
    first, last = 0, len(times)
    while first < last:
        middle = (first + last) // 2
        first, last = (first, middle) if _holds(costs, low, times[middle]) else (middle + 1, last)
    if first == len(times):
        return np.inf, np.inf
    slowest, many = float(times[first]), instance.micro_batches
    if instance.chunks > 1 or instance.schedule != "1f1b" or many < instance.stages:
        return many * slowest, slowest
    # with one chunk the work of all stages fills and drains the pipeline, but for forwards (or backwards) that the
    # slowest stage does meanwhile
    share = max(
        *(k.forward / (k.forward + k.backward) for k in instance.types),
        *(one[0] / sum(one) for one in instance.ends.T if sum(one)),
    )
    best, table = np.inf, _by_position(costs, low)
    for time in map(float, times[first:]):
        if many * time >= best:
            break
        solved = _solve(table, time)
        if solved is None:
            continue
        able = [s for s in range(instance.stages) if (np.abs(low[s] - time) < 1e-8).any()]
        after = max((instance.stages - s - 1 for s in range(instance.stages) if s in able), default=instance.stages - 1)
        best = min(best, max(many * time, solved[0] + (many - 1) * time - after * share * time))
    return best, slowest


def _low(costs: StageCosts) -> np.ndarray:
    """[stages, early + 1, layers + 1] no stage that holds so many layers, of them so many early ones (of the first of
    two types), takes less; infinite where they cannot fit.
    """
    instance, counts = costs.instance, np.arange(costs.layers + 1)
    early = instance.types[0].count if len(instance.types) > 1 else 0
    least = instance.by_stage(least_layers(instance)).reshape(instance.chunks, instance.stages)
    free = [float(extra.min()) for extra in costs.extra]
    kept = [float(held[extra == extra.min()].min()) for extra, held in zip(costs.extra, costs.held, strict=True)]
    hulls = [_hull(extra, held) for extra, held in zip(costs.extra, costs.held, strict=True)]
    found = np.full((instance.stages, early + 1, costs.layers + 1), np.inf)
    for stage in range(instance.stages):
        # the stages before one with early layers have some, too, where no chunk may be empty
        for number in range(early + 1 if not instance.least_layers or stage <= early else 1):
            late = counts - number
            work = costs.ends[stage] + number * (costs.base[0] + free[0]) + late * (costs.base[-1] + free[-1])
            room = costs.room[stage] - number * costs.parameters[0] - late * costs.parameters[-1]
            # chunks that surely hold late layers: early ones may fill the first chunk, or all of them
            sure = least[:, stage].copy()
            sure[: 1 if number and early < instance.stages else 0 if not number else None] = 0
            extra = np.zeros(len(counts))
            for peaks in instance.peaks[stage].astype(float):
                fewest = peaks.min()
                parts = [
                    (hulls[-1], kept[-1], held, np.full(len(counts), n)) for held, n in zip(peaks, sure, strict=True)
                ]
                parts.append((hulls[-1], kept[-1], fewest, late - sure.sum()))
                parts.append((hulls[0], kept[0], fewest, np.full(len(counts), number)))
                extra = np.maximum(extra, _freeing(parts, room))
            least_count = max(number + int(sure.sum()), int(least[:, stage].sum()))
            found[stage, number] = np.where(counts < least_count, np.inf, work + extra)
    return found


Part = tuple[list[tuple[float, float]], float, float, np.ndarray]  # hull, activation, in flight, [n] layers


def _freeing(parts: list[Part], room: np.ndarray) -> np.ndarray:
    """[n] the least ms of recomputation, which may be divided, that keeps `room`; infinite where nothing does."""
    over = sum((kept * held * count for _, kept, held, count in parts), -room)
    pieces = [(ms / (gib * held), gib * held * count) for hull, _, held, count in parts for ms, gib in hull if held]
    cost = np.zeros(len(room))
    for price, most in sorted(pieces, key=lambda piece: piece[0]):
        taken = np.clip(over, 0.0, np.maximum(most, 0.0))
        over, cost = over - taken, cost + price * taken
    return np.where(over > 1e-9, np.inf, cost)


def _hull(extra: np.ndarray, held: np.ndarray) -> list[tuple[float, float]]:
    """[(ms, memory)] pieces of the lower convex hull of a layer's recomputation over the memory that it frees."""
    first = np.lexsort((held, extra))[0]
    points = [(float(held[first] - a), float(x - extra[first])) for x, a in zip(extra, held, strict=True)]
    pieces, at = [], (0.0, 0.0)
    while further := [point for point in points if point[0] > at[0] + 1e-12]:
        best = min(further, key=lambda point: ((point[1] - at[1]) / (point[0] - at[0]), -point[0]))
        pieces.append((best[1] - at[1], best[0] - at[0]))
        at = best
    return pieces


def _holds(costs: StageCosts, low: np.ndarray, slowest: float) -> bool:
    """Return whether all layers find a place if no stage may take longer."""
    stages, early, size = low.shape
    most = np.where(low <= slowest + 1e-9, np.arange(size), -size * stages).max(axis=2)  # [stages, early]
    best = np.full(early, -size * stages)
    best[0] = 0
    for row in most:
        best = np.array([max(best[k - d] + row[d] for d in range(k + 1)) for k in range(early)])
    return bool(best[-1] >= costs.layers)


def _by_position(costs: StageCosts, low: np.ndarray) -> np.ndarray:
    """`low` of one chunk per stage as [stages, layers with the stage, layers before it]: early layers come first."""
    early, size = low.shape[1] - 1, low.shape[2]
    after, before = np.indices((size, size))
    count = after - before
    number = np.clip(early - before, 0, np.maximum(count, 0))
    return np.where(count >= 0, low[:, number, count], np.inf)
