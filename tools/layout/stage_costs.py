"""This module computes the least work of a pipeline stage with given layers under a memory cap. The work of a stage is
the time of all its layers for one micro-batch, with recomputation.

The work of a stage is the time of its layers including recomputation. A stage that holds given layers recomputes as
little as its memory allows, independently of the other stages: for few layers all combinations of recompute options are
tried, and for many layers the recomputation that costs the least time per freed byte is chosen first. `least_sum`
distributes the layers over the stages by dynamic programming.

The quick placement (`tools.layout.fast`) and the lower bounds of an instance (`tools.layout.floor`) use the work of
stages and `least_sum`. The tests compare the work of a stage with the best of all plans of small instances
(`tests/tools/layout/test_fast.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from tools.layout.instance import CAP_TOLERANCE, Instance

Chunk = tuple[int, ...]  # layers of each type
Stage = tuple[Chunk, ...]  # of each chunk
_MOST = 20_000  # ways to recompute a stage's layers that are all tried; beyond that the cheapest memory is freed first


@lru_cache(maxsize=1024)
def compositions(count: int, options: int) -> np.ndarray:
    """Return all ways to distribute `count` layers over the recompute options, as numbers of layers [ways, options]."""
    every = list(itertools.combinations(range(count + options - 1), options - 1))
    bars = np.array(every, int).reshape(len(every), options - 1)
    edges = np.column_stack([np.full(len(bars), -1), bars, np.full(len(bars), count + options - 1)])
    return np.diff(edges, axis=1) - 1


class StageCosts:
    """A `StageCosts` computes the least work of a pipeline stage for any layers that the stage may hold. The work of a
    stage is the time of all its layers for one micro-batch, with recomputation.
    """

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
        self.room = instance.cap + CAP_TOLERANCE - instance.least_static
        self._last = int(instance.stage_of[-1])
        self._known: dict[tuple[int, Stage], tuple[float, np.ndarray] | None] = {}
        self._prefix = np.array(
            [[self.row[:n].count(t) for t in range(len(instance.types))] for n in range(self.layers + 1)]
        )

    def content(self, first: int, count: int) -> Chunk:
        """Return the number of layers of each type among the `count` layers of the model that begin with layer number
        `first`.
        """
        return tuple(int(n) for n in self._prefix[first + count] - self._prefix[first])

    def least(self, stage: int, layers: Stage) -> tuple[float, np.ndarray] | None:
        """Return the least work (time for one micro-batch) of a stage with the given layers, and the recomputation that
        reaches it, as numbers of layers [chunks, K]. Return None if the layers do not fit in the stage's memory.
        """
        key = stage, layers
        if key not in self._known:
            self._known[key] = self._least(stage, layers)
        return self._known[key]

    def _least(self, stage: int, layers: Stage) -> tuple[float, np.ndarray] | None:
        counts = np.array(layers)
        room = self.room[stage] - float((counts @ self.parameters).sum())
        if not updates_within(self.instance, stage, counts):
            return None
        items = [(c, t, int(n)) for (c, t), n in np.ndenumerate(counts) if n]
        choices = [self._choices(stage, *item) for item in items]
        found: tuple[float, list[np.ndarray]] | None
        if not items:
            found = (0.0, []) if room >= self.instance.kept_by_ends[stage].max() else None
        elif math.prod(_MOST + 1 if choice is None else len(choice) for choice in choices) <= _MOST:
            found = self._every(stage, room, items, choices)
        else:
            tried = [
                self._greedy(stage, room - once, items, lock, able)
                for once, able in self._able(stage, items)
                for lock in self._locks(stage, layers)
                if all(able[t][option] for (c, t), option in lock.items() if layers[c][t])
            ]
            found = min((one for one in tried if one), key=lambda one: one[0], default=None)
        if found is None:
            return None
        extra, given = found
        columns = np.zeros((len(layers), len(self.instance.columns)), int)
        for (c, t, _), by in zip(items, given, strict=True):
            columns[c, self.instance.type_columns(t)] = by
        return float(self.ends[stage] + (counts @ self.base).sum() + extra), columns

    def _locked(self, stage: int, chunk: int, kind: int) -> int | None:
        """Return the only option that layers of the last chunk may have."""
        if stage == self._last and chunk == self.instance.chunks - 1 and self.instance.last_option:
            names = [option.name for option in self.instance.types[kind].options]
            return names.index(self.instance.last_option) if self.instance.last_option in names else None
        return None

    def _able(self, stage: int, items: list[tuple[int, int, int]]) -> list[tuple[float, list[np.ndarray]]]:
        """Return what layers of these types can need once on a stage, each with the options that need no more."""
        spans = [self.instance.type_columns(t) for t in range(len(self.instance.types))]
        (passes, buffers), own = self.instance.more[:, stage], sorted({t for _, t, _ in items})
        held = max(float(buffers[spans[t]].max()) for t in own)
        found = []
        for level in np.unique(np.concatenate([passes[spans[t]] for t in own])):
            able = [passes[span] <= level for span in spans]
            if all(able[t].any() for t in own):
                found.append((float(level) + held, able))
        return found

    def _choices(self, stage: int, chunk: int, kind: int, count: int) -> np.ndarray | None:
        """Return [ways, options] of the layers of one type in a chunk; None where there are too many to try."""
        options, locked = len(self.extra[kind]), self._locked(stage, chunk, kind)
        if locked is not None:
            return count * np.eye(options, dtype=int)[[locked]]
        return compositions(count, options) if math.comb(count + options - 1, count) <= _MOST else None

    def _every(
        self, stage: int, room: float, items: list[tuple[int, int, int]], choices: list[np.ndarray | None]
    ) -> tuple[float, list[np.ndarray]] | None:
        every = [choice for choice in choices if choice is not None]
        places = np.indices([len(choice) for choice in every]).reshape(len(every), -1)
        extra = np.zeros(places.shape[1])
        kept = np.zeros((places.shape[1], self.instance.chunks))
        once = np.zeros((2, places.shape[1]))
        for place, choice, (c, t, _) in zip(places, every, items, strict=True):
            extra += (choice @ self.extra[t])[place]
            kept[:, c] += (choice @ self.held[t])[place]
            more = self.instance.more[:, stage, self.instance.type_columns(t)]
            once = np.maximum(once, ((choice > 0) * more[:, None]).max(axis=2)[:, place])
        held = kept @ self.instance.peaks[stage].T + self.instance.kept_by_ends[stage]
        good = held.max(axis=1) + once.sum(axis=0) <= room
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
        """Return [ways] the place in `order` of the weakest or the strongest option that is used."""
        places = self.instance.strengths[self.instance.type_columns(kind)]
        if weakest:
            return np.where(choice > 0, places, -1).max(axis=1)
        return np.where(choice > 0, places, len(self.instance.order)).min(axis=1)

    def _locks(self, stage: int, layers: Stage) -> list[dict[tuple[int, int], int]]:
        """Return for `_greedy` (chunk, type) -> the only option of these layers that keeps the order of options."""
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
        self,
        stage: int,
        room: float,
        items: list[tuple[int, int, int]],
        lock: dict[tuple[int, int], int],
        able: list[np.ndarray],
    ) -> tuple[float, list[np.ndarray]] | None:
        """Free the cheapest memory first, layer by layer, by `able` options; then give back what was too much."""
        peaks = self.instance.peaks[stage].astype(float)
        given, need, extra = [], self.instance.kept_by_ends[stage].astype(float), 0.0
        for c, t, n in items:
            option = lock.get((c, t), int(np.lexsort((self.held[t], self.extra[t], ~able[t]))[0]))
            given.append(n * np.eye(len(self.extra[t]), dtype=int)[option])
            need += peaks[:, c] * n * self.held[t][option]
            extra += n * self.extra[t][option]
        free = [place for place, (c, t, _) in enumerate(items) if (c, t) not in lock]
        while (over := float(need.max() - room)) > 0:
            worst, best = int(need.argmax()), None
            for place in free:
                c, t, _ = items[place]
                for a, b in itertools.permutations(np.flatnonzero(able[t]), 2):
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
            slow = [option for option in self.extra[t].argsort(kind="stable")[::-1] if able[t][option]]
            for b, a in ((b, a) for at, b in enumerate(slow) for a in reversed(slow[at + 1 :])):
                more = peaks[:, c] * (self.held[t][a] - self.held[t][b])
                while given[place][b] and (need + more).max() <= room:
                    need, extra = need + more, extra - (self.extra[t][b] - self.extra[t][a])
                    given[place][b] -= 1
                    given[place][a] += 1
        return extra, given

    def split(self, counts: Iterable[int]) -> list[Stage]:
        """Return the number of layers of each type in each chunk of each stage, given the number of layers of every
        chunk ([C], in model order).
        """
        rows: list[list[Chunk]] = [[] for _ in range(self.instance.stages)]
        first = 0
        for chunk, count in enumerate(counts):
            rows[int(self.instance.stage_of[chunk])].append(self.content(first, count))
            first += count
        return [tuple(row) for row in rows]

    def works(self, counts: Iterable[int]) -> np.ndarray | None:
        """Return the least work (time for one micro-batch) of each stage, given the number of layers of every chunk
        [C]. Return None if the layers of a stage do not fit in its memory.
        """
        found = [self.least(stage, layers) for stage, layers in enumerate(self.split(counts))]
        works = [one[0] for one in found if one]
        return np.array(works) if len(works) == len(found) else None

    def plan(self, counts: Iterable[int]) -> np.ndarray:
        """Return the plan [K, C] in which each stage has the least work (time for one micro-batch), given the number of
        layers of every chunk [C]. The layers must fit in the memory of the stages.
        """
        plan = np.zeros((len(self.instance.columns), len(self.instance.stage_of)), int)
        for stage, layers in enumerate(self.split(counts)):
            one = self.least(stage, layers)
            assert one is not None
            plan[:, self.instance.stage_of == stage] = one[1].T
        return plan

    def closed(self, works: np.ndarray) -> float:
        """Return the step time by a closed formula, without a simulation, from the work (time for one micro-batch) of
        each stage.
        """
        top = float(works.max())
        return self.instance.micro_batches * top + (float(works.sum()) - top) / self.instance.chunks


def updates_within(instance: Instance, stage: int, counts: np.ndarray) -> bool:
    """Return whether a stage with these layers [chunks, types] keeps the memory cap in the optimizer's update."""
    if not instance.updates:
        return True
    memory = instance.in_update(counts.sum(axis=0)[:, None], slice(stage, stage + 1))
    return bool(instance.within(memory)[0])


def least_layers(instance: Instance) -> np.ndarray:
    """Return the smallest number of layers that each model chunk must hold, as an array [C]."""
    found = np.full(len(instance.stage_of), instance.least_layers)
    found[[0, -1]] = 0
    found[-1] = max(found[-1], instance.last_layers)
    return found


def least_sum(table: np.ndarray, slowest: float) -> tuple[float, list[int]] | None:
    """Among all distributions of layers in which no stage has more work than `slowest`, find the distribution with the
    least total work. Return the total work and the number of layers of each stage; return None if every distribution
    has a stage with more work.
    """
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
