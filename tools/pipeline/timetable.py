"""A schedule as a timetable of levels, so that NumPy can simulate all stages, and many plans, at once.

An operation's level is the longest chain of operations that must come before it. A stage has at most one operation on a
level, and operations of one level never wait for each other: the simulation is one step for each level, whatever the
times are. The timetable depends on the orders alone and is kept for the next plan with the same schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from plugins.errors import RecipeError
from tools.pipeline.schedules import KINDS as ORDER_KINDS
from tools.pipeline.schedules import Op, as_table, is_v_shaped, order_table

# rows of a table of durations, each of chunks x stages; SPLIT: the backward that leaves weight gradients for later
FORWARD, BACKWARD, SPLIT, WEIGHT = range(4)
KINDS = 4


@dataclass(frozen=True)
class Timetable:
    """Operations by level and stage; idle places take no time. C is chunks x stages.

    work      [levels, stages] which duration: (kind * chunks + chunk) * stages + stage; KINDS * C when idle
    needs     [levels, stages] the place ((level + 1) * stages + stage) whose output it waits for; 0: none
    moves     [levels, stages] whether that output comes from another stage
    sends     [levels, stages] whether its own output goes to another stage
    paired    [levels, stages] 1: runs right after a backward as a forward; 2: a backward with such a forward after it
    places    for each stage, the level of each of its operations in order
    tables    the operations of each stage as numbers (`tools.pipeline.schedules.order_table`)
    """

    stages: int
    chunks: int
    work: np.ndarray
    needs: np.ndarray
    moves: np.ndarray
    sends: np.ndarray
    paired: np.ndarray
    places: tuple[np.ndarray, ...]
    tables: tuple[np.ndarray, ...]

    @cached_property
    def orders(self) -> tuple[tuple[Op, ...], ...]:
        """The operations of each stage."""
        return tuple(tuple(Op(ORDER_KINDS[kind], *rest) for kind, *rest in table.tolist()) for table in self.tables)


@lru_cache(maxsize=32)
def timetable(schedule: str, stages: int, chunks: int, micro_batches: int) -> Timetable:
    """Return the timetable of a schedule of `tools.pipeline.schedules`.

    Raises:
        RecipeError: as `operations`.
    """
    tables = [order_table(schedule, stage, stages, chunks, micro_batches) for stage in range(stages)]
    return _lay_out(tables, chunks, is_v_shaped(schedule))


def lay_out(orders: Sequence[Sequence[Op]], chunks: int, v_shaped: bool = False) -> Timetable:
    """Return the timetable of own orders, one for each stage; the model runs through chunk 0, then chunk 1, ...

    Raises:
        RecipeError: the orders wait for each other in a circle, or leave out what another operation needs.
    """
    return _lay_out([as_table(order) for order in orders], chunks, v_shaped)


def _lay_out(tables: list[np.ndarray], chunks: int, v_shaped: bool) -> Timetable:
    stages, micro_batches = len(tables), 1 + max(int(table[:, 1].max()) for table in tables)
    before, after = _neighbours(stages, chunks, v_shaped)
    made_on = [-1] * (2 * chunks * micro_batches * stages)
    rows = [_rows(table, stage, stages, micro_batches, chunks, before, after) for stage, table in enumerate(tables)]
    places = _places(rows, made_on, tables)
    return _table(rows, places, np.array(made_on), tables, chunks)


def _neighbours(stages: int, chunks: int, v_shaped: bool) -> tuple[dict, dict]:
    """(chunk, stage) -> the one before and the one after it in the model."""
    path = []
    for chunk in range(chunks):
        walk = range(stages) if not (v_shaped and chunk % 2) else reversed(range(stages))
        path += [(chunk, stage) for stage in walk]
    pairs = list(pairwise(path))
    return {later: earlier for earlier, later in pairs}, dict(pairs)


def _rows(
    table: np.ndarray, stage: int, stages: int, micro_batches: int, chunks: int, before: dict, after: dict
) -> np.ndarray:
    """[6, operations]: what each makes, what it needs, kind, chunk, whether it waits for a transfer, whether it sends.

    What an operation makes has one number, from backward?, chunk, micro-batch and stage; -1 stands for nothing.
    """
    span = micro_batches * stages
    size = chunks * span
    letter, micro_batch, chunk = table.T
    forward, weights = letter == ORDER_KINDS.index("F"), letter == ORDER_KINDS.index("W")
    here = chunk * span + micro_batch * stages + stage
    split = np.zeros(size, bool)
    split[here[weights]] = True

    def beside(neighbours: dict) -> tuple[np.ndarray, np.ndarray]:
        """The number of a neighbour's forward, -1 without one; whether it is on another stage."""
        found = [neighbours.get((index, stage)) for index in range(chunks)]
        first = np.array([-1 if place is None else place[0] * span + place[1] for place in found])[chunk]
        apart = np.array([place is not None and place[1] != stage for place in found])[chunk]
        return np.where(first < 0, -1, first + micro_batch * stages), apart

    (earlier, from_earlier), (later, to_later) = beside(before), beside(after)
    need = np.where(forward, earlier, np.where(later < 0, here, size + later))
    kind = np.where(forward, FORWARD, np.where(split[here], SPLIT, BACKWARD))
    moves, sends = np.where(forward, from_earlier, to_later), np.where(forward, to_later, from_earlier)
    return np.array(
        [
            np.where(weights, -1, here + np.where(forward, 0, size)),
            np.where(weights, size + here, need),
            np.where(weights, WEIGHT, kind),
            chunk,
            moves & ~weights,
            sends & ~weights,
        ]
    )


def _places(rows: list[np.ndarray], made_on: list[int], tables: list[np.ndarray]) -> list[list[int]]:
    """The level of each operation of each stage; fills `made_on`.

    Goes round the stages, each as far as it can, until all are done or none moves.
    """
    places: list[list[int]] = [[] for _ in rows]
    walks = [_walk(row, done, made_on) for row, done in zip(rows, places, strict=True)]
    before = -1
    while (total := sum(map(len, places))) > before:
        before = total
        for walk in walks:
            next(walk, None)
    stuck = [stage for stage, done in enumerate(places) if len(done) < len(tables[stage])]
    if stuck:
        at = {stage: tables[stage][len(places[stage])].tolist() for stage in stuck}
        waits = "; ".join(f"stage {stage} at {(ORDER_KINDS[kind], *rest)}" for stage, (kind, *rest) in at.items())
        raise RecipeError(f"pipeline orders wait for each other, or for work that no stage does: {waits}")
    return places


def _walk(row: np.ndarray, done: list[int], made_on: list[int]) -> Iterator[None]:
    """Place a stage's operations one after the other; yields where one needs what is not made yet."""
    level = -1
    for made, need in zip(*row[:2].tolist(), strict=True):
        level += 1
        if need >= 0:
            while (known := made_on[need]) < 0:
                yield
            if known >= level:
                level = known + 1
        if made >= 0:
            made_on[made] = level
        done.append(level)


def _table(
    rows: list[np.ndarray], places: list[list[int]], made_on: np.ndarray, tables: list[np.ndarray], chunks: int
) -> Timetable:
    stages = len(tables)
    idle = KINDS * chunks * stages
    shape = (1 + max(levels[-1] for levels in places), stages)
    work = np.full(shape, idle)
    needs, moves_at, sends_at, paired = (np.zeros(shape, int) for _ in range(4))
    for stage, levels in enumerate(places):
        _, need, kind, chunk, moves, sends = rows[stage]
        level = np.array(levels)
        work[level, stage] = (kind * chunks + chunk) * stages + stage
        needs[level, stage] = np.where(need >= 0, (made_on[need] + 1) * stages + need % stages, 0)
        moves_at[level, stage], sends_at[level, stage] = moves, sends
        follows = (kind[1:] == FORWARD) & (kind[:-1] != FORWARD) & (kind[:-1] != WEIGHT)
        paired[level[1:][follows], stage] = 1
        paired[level[:-1][follows], stage] = 2
    levels_of = tuple(np.array(levels) for levels in places)
    return Timetable(stages, chunks, work, needs, moves_at > 0, sends_at > 0, paired, levels_of, tuple(tables))
