"""This module assigns the layers of a pipeline-balance problem to stages in a fraction of a second, without a solver.

The recomputation of each stage follows from its layers (`tools.layout.stage_costs`). Therefore only the distribution of
the layers over stages and chunks is searched for:

1. `stage_sizes`: for each limit on the time of the slowest stage, dynamic programming over the stages finds the
   distribution of layers with the least total time in which no stage exceeds the limit. The closed form of the 1F1B
   step time chooses among these distributions.
2. `starts` divides a stage's layers among its chunks in several ways.
3. `place_fast` moves single layers between chunks as long as the simulator shows that this makes the step faster, and
   then lets annealing (`tools.layout.anneal`) search for a better recomputation with a fixed amount of work.

With one chunk per stage and few layers every step except the closed form is exact; with more chunks the division of a
stage's layers among its chunks is a heuristic search. The tests compare the results with an enumeration of all plans of
small instances (`tests/tools/layout/pipeline_instances.py`) and with the solver (`tools.layout.optimise.optimise`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from tools.layout.anneal import anneal
from tools.layout.budget import Budget
from tools.layout.ilp import Incumbent
from tools.layout.instance import CAP_TOLERANCE, Instance
from tools.layout.stage_costs import Stage, StageCosts, least_layers, least_sum

_SLOWEST = 40  # times of the slowest stage, from the least that is possible
_FIRST, _ROUNDS, _WIDTH = 24, 12, 48  # plans simulated at first; rounds of moves, and plans simulated in each
_STARTS = 4  # counts that are made to fit where none does
_ALL_MOVES = 12  # chunks up to which a layer may move from any chunk to any other
_ANNEAL = 0.1  # effort
_FAR = 1.1  # times the time to beat: no more work is spent on what starts slower than that


def stage_sizes(costs: StageCosts, beat: float = np.inf) -> list[list[int]]:
    """Return several distributions of the layers over the stages, each as the number of layers of every stage. The
    distributions are sorted by the step time that a closed formula for pipelines gives. Distributions whose step
    certainly takes `beat` ms or longer are left out. With several chunks per stage, the layers of earlier stages are
    assumed to be distributed equally over the chunks.
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
    # the least time of the slowest stage
    first = bisect_left(times, True, key=lambda time: least_sum(table, time) is not None)
    for time in times[first : first + _SLOWEST]:
        if found and instance.micro_batches * time > min(found.values()):
            break
        solved = least_sum(table, time)
        assert solved is not None
        total, sizes = solved
        found.setdefault(tuple(sizes), instance.micro_batches * float(time) + (total - float(time)) / chunks)
    return [list(sizes) for sizes in sorted(found, key=lambda sizes: found[sizes])]


def _even(costs: StageCosts, before: int, count: int) -> Stage:
    """Return a stage's layers, evenly by chunk, with `before` layers on earlier stages; early types come first."""
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
    """Return the distributions of layers from which a search starts, each as the number of layers of every chunk [C] in
    model order.
    """
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
    """Yield every distribution of layers that results from `counts` if one layer moves to another chunk, as the number
    of layers of every chunk. If there are many chunks, a layer moves only to a near chunk, within its stage, or away
    from the slowest stage.
    """
    least, stage_of = least_layers(costs.instance), costs.instance.stage_of
    for a, b in itertools.permutations(range(len(counts)), 2):
        near = len(counts) <= _ALL_MOVES or abs(a - b) <= 2 or stage_of[a] == stage_of[b] or stage_of[a] == slowest
        if near and counts[a] > least[a]:
            yield tuple(n - (c == a) + (c == b) for c, n in enumerate(counts))


def fitting(costs: StageCosts, begin: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return a distribution of layers over the chunks, close to `begin`, that fits the memory cap with the recompute
    options that keep the least memory. Return [] if no such distribution was found.
    """
    found, instance = [], costs.instance
    least = [instance.type_columns(t).start + int(held.argmin()) for t, held in enumerate(costs.held)]

    def excess(many: list[tuple[int, ...]]) -> np.ndarray:
        """Return the memory by which each stage exceeds the memory cap under each distribution, as [distributions,
        stages].
        """
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
    """Return a plan [K, C] that obeys every rule of a pipeline-balance problem (such as the memory limit); return None
    if no plan was found. Plans whose step certainly takes far longer than `beat` ms are not improved. The function does
    an amount of work that depends only on the problem and on `beat`, and not on the speed of the machine.
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
