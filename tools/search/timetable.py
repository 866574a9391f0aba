"""A schedule as a timetable of levels, so that NumPy can simulate all stages, and many plans, at once.

An operation's level is the longest chain of operations that must come before it. A stage has at most one operation on a
level, and operations of one level never wait for each other: the simulation is one step for each level, whatever the
times are. The timetable depends on the orders alone and is kept for the next plan with the same schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from plugins.errors import RecipeError
from tools.search.schedules import Op, is_v_shaped, operations

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
    orders    the operations of each stage
    """

    stages: int
    chunks: int
    work: np.ndarray
    needs: np.ndarray
    moves: np.ndarray
    sends: np.ndarray
    paired: np.ndarray
    places: tuple[np.ndarray, ...]
    orders: tuple[tuple[Op, ...], ...]


@lru_cache(maxsize=32)
def timetable(schedule: str, stages: int, chunks: int, micro_batches: int) -> Timetable:
    """Return the timetable of a schedule of `tools.search.schedules`.

    Raises:
        RecipeError: as `operations`.
    """
    orders = [operations(schedule, stage, stages, chunks, micro_batches) for stage in range(stages)]
    return lay_out(orders, chunks, is_v_shaped(schedule))


def lay_out(orders: Sequence[Sequence[Op]], chunks: int, v_shaped: bool = False) -> Timetable:
    """Return the timetable of own orders, one for each stage; the model runs through chunk 0, then chunk 1, ...

    Raises:
        RecipeError: the orders wait for each other in a circle, or leave out what another operation needs.
    """
    stages, micro_batches = len(orders), 1 + max(op.micro_batch for order in orders for op in order)
    before, after = _neighbours(stages, chunks, v_shaped)
    size = chunks * micro_batches * stages
    rows = [_rows(order, stage, stages, micro_batches, chunks, before, after) for stage, order in enumerate(orders)]
    made_on = [-1] * (2 * size)
    places = _places(rows, made_on, orders)
    return _table(rows, places, np.array(made_on), orders, chunks)


def _neighbours(stages: int, chunks: int, v_shaped: bool) -> tuple[dict, dict]:
    """(chunk, stage) -> the one before and the one after it in the model."""
    path = []
    for chunk in range(chunks):
        walk = range(stages) if not (v_shaped and chunk % 2) else reversed(range(stages))
        path += [(chunk, stage) for stage in walk]
    pairs = list(pairwise(path))
    return {later: earlier for earlier, later in pairs}, dict(pairs)


def _rows(
    order: Sequence[Op], stage: int, stages: int, micro_batches: int, chunks: int, before: dict, after: dict
) -> list[tuple]:
    """For each operation: what it makes, what it needs, kind, chunk, whether it waits for a transfer, whether it sends.

    What an operation makes has one number, from backward?, chunk, micro-batch and stage; -1 stands for nothing.
    """
    span = micro_batches * stages
    size = chunks * span
    split = {(op.micro_batch, op.chunk) for op in order if op.kind == "W"}
    rows = []
    for kind, micro_batch, chunk in order:
        here = chunk * span + micro_batch * stages + stage
        if kind == "W":
            rows.append((-1, size + here, WEIGHT, chunk, False, False))
            continue
        forward = kind == "F"
        source, target = (before, after) if forward else (after, before)
        near, following = source.get((chunk, stage)), target.get((chunk, stage))
        if near is None:
            need = -1 if forward else here
        else:
            need = (0 if forward else size) + near[0] * span + micro_batch * stages + near[1]
        code = FORWARD if forward else SPLIT if (micro_batch, chunk) in split else BACKWARD
        moves = near is not None and near[1] != stage
        sends = following is not None and following[1] != stage
        rows.append((here if forward else size + here, need, code, chunk, moves, sends))
    return rows


def _places(rows: list[list[tuple]], made_on: list[int], orders: Sequence[Sequence[Op]]) -> list[list[int]]:
    """The level of each operation of each stage; fills `made_on`.

    Goes round the stages, each as far as it can, until all are done or none moves.
    """
    places: list[list[int]] = [[] for _ in rows]
    moved = True
    while moved:
        moved = False
        for todo, done in zip(rows, places, strict=True):
            level = done[-1] if done else -1
            for made, need, *_ in todo[len(done) :]:
                level += 1
                if need >= 0:
                    known = made_on[need]
                    if known < 0:
                        break
                    if known >= level:
                        level = known + 1
                if made >= 0:
                    made_on[made] = level
                done.append(level)
                moved = True
    stuck = [stage for stage, done in enumerate(places) if len(done) < len(rows[stage])]
    if stuck:
        waits = "; ".join(f"stage {stage} at {tuple(orders[stage][len(places[stage])])}" for stage in stuck)
        raise RecipeError(f"pipeline orders wait for each other, or for work that no stage does: {waits}")
    return places


def _table(
    rows: list[list[tuple]], places: list[list[int]], made_on: np.ndarray, orders: Sequence[Sequence[Op]], chunks: int
) -> Timetable:
    stages = len(orders)
    idle = KINDS * chunks * stages
    shape = (1 + max(levels[-1] for levels in places), stages)
    work = np.full(shape, idle)
    needs, moves_at, sends_at, paired = (np.zeros(shape, int) for _ in range(4))
    for stage, levels in enumerate(places):
        _, need, kind, chunk, moves, sends = np.array(rows[stage]).T
        level = np.array(levels)
        work[level, stage] = (kind * chunks + chunk) * stages + stage
        needs[level, stage] = np.where(need >= 0, (made_on[need] + 1) * stages + need % stages, 0)
        moves_at[level, stage], sends_at[level, stage] = moves, sends
        follows = (kind[1:] == FORWARD) & (kind[:-1] != FORWARD) & (kind[:-1] != WEIGHT)
        paired[level[1:][follows], stage] = 1
        paired[level[:-1][follows], stage] = 2
    frozen = tuple(np.array(levels) for levels in places), tuple(tuple(order) for order in orders)
    return Timetable(stages, chunks, work, needs, moves_at > 0, sends_at > 0, paired, *frozen)
