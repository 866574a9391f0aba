"""This module converts a pipeline schedule to a timetable for simulation with NumPy. Each row (level) of the timetable
holds one operation of each stage, so that all stages and many plans are simulated together.

The level of an operation is the length of the longest chain of operations that must come before it. A stage has at most
one operation, or one pair, on a level, and operations of one level never wait for each other; therefore the simulation
computes one level at a time, whatever the times of operations are. The timetable depends only on the orders, and is
reused for the next plan with the same schedule.

The levels also give the longest chain of operations, which determines the time of a step.

The step time is the length of the longest chain of operations through the schedule, and the length of a chain is a sum
of durations. The longest chain of one plan visits each kind of operation a number of times, and with these visits it is
a lower bound on the step time of every other plan: ``time >= (visits * times).sum()``, linear in the durations and
therefore in the layers of each chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from plugins.errors import RecipeError
from tools.pipeline.orders import KINDS as ORDER_KINDS
from tools.pipeline.orders import LOOP, Op, as_operations, neighbours
from tools.pipeline.schedules import order_table, shape_of

# rows of a table of durations, each of parts x chunks x stages; SPLIT: the backward that leaves weight gradients
FORWARD, BACKWARD, SPLIT, WEIGHT = range(4)
KINDS = 4
PAIR = 3  # in `Timetable.paired`
_WORDS = {"F": "the forward pass", "B": "the backward pass", "W": "the weight gradients"}


@dataclass(frozen=True)
class Timetable:
    """A `Timetable` holds the operations of a pipeline schedule as a table [levels, stages]. Each operation stands on a
    later level than the operations for which it waits. Places of the table without an operation take no time. In the
    shapes below, C is the number of parts of a sequence times chunks times stages.

    A pair (a forward and a backward pass that run together) takes one place of the timetable.

    work      [levels, stages] the number of each operation's duration: ((kind * parts + part) * chunks + chunk) *
              stages + stage; KINDS * C for an idle place; for a pair KINDS * C + 1 + (chunk of the forward pass *
              chunks + chunk of the backward pass) * stages + stage
    needs     [levels, stages] the place ((level + 1) * stages + stage) for whose output each operation waits; 0: none
    moves     [levels, stages] whether this output comes from another stage
    sends     [levels, stages] whether the operation's own output goes to another stage
    paired    [levels, stages] 1: a forward pass that runs right after a backward pass; 2: the backward pass before such
              a forward pass; 3: a pair
    also      None without pairs; else `needs` and `moves` [2, levels, stages] of the backward passes of pairs
    places    for each stage, the level of each of its operations in order
    tables    the operations of each stage as integers (`tools.pipeline.schedules.order_table`)
    """

    stages: int
    chunks: int
    parts: int
    work: np.ndarray
    needs: np.ndarray
    moves: np.ndarray
    sends: np.ndarray
    paired: np.ndarray
    also: np.ndarray | None
    places: tuple[np.ndarray, ...]
    tables: tuple[np.ndarray, ...]

    @cached_property
    def orders(self) -> tuple[tuple[Op, ...], ...]:
        """Return the operations of each stage, in the order in which the stage runs them."""
        return tuple(tuple(as_operations(table)) for table in self.tables)

    @cached_property
    def micro_batches(self) -> np.ndarray:
        """Return the number of each operation's micro-batch, [levels, stages]. The number for a pair is the micro-batch
        of its backward pass, and the number for an idle place is 0.
        """
        found = np.zeros(self.work.shape, int)
        for stage, (levels, table) in enumerate(zip(self.places, self.tables, strict=True)):
            found[levels, stage] = table[:, 1]
        return found


@lru_cache(maxsize=32)
def timetable(schedule: str, stages: int, chunks: int, micro_batches: int, parts: int = 1) -> Timetable:
    """Return the timetable of a schedule. The function raises the same errors as
    `tools.pipeline.schedules.operations`.
    """
    tables = [order_table(schedule, stage, stages, chunks, micro_batches, parts) for stage in range(stages)]
    return lay_out(tables, chunks, shape_of(schedule))


def lay_out(tables: list[np.ndarray], chunks: int, shape: str = LOOP) -> Timetable:
    """Return the timetable of a pipeline, given for each stage the order of its operations (in the form of
    `tools.pipeline.orders.as_table`).

    With `LOOP` the model runs through chunk 0 of all stages, then chunk 1, and so on; with `V` the model turns round at
    the last stage; with `BOTH_WAYS` the chunks with the same number form a separate model, which runs from the last
    stage to the first if the number is odd.

    Raises:
        RecipeError: operations of the orders wait for each other in a cycle, or an operation that another operation
            needs is missing.
    """
    stages, parts = len(tables), 1 + max(int(table[:, 3].max()) for table in tables)
    size = chunks * parts * (1 + max(int(table[:, 1].max()) for table in tables)) * stages
    before, after = neighbours(stages, chunks, shape)
    made_on = [-1] * (2 * size)
    rows = [_rows(table, stage, stages, (parts, chunks, size), before, after) for stage, table in enumerate(tables)]
    places = _places(rows, made_on, tables)
    return _table(rows, places, np.array(made_on), tables, (parts, chunks))


def _rows(
    table: np.ndarray, stage: int, stages: int, sizes: tuple[int, int, int], before: dict, after: dict
) -> np.ndarray:
    """Return [8, operations]: for each operation the number of its result, the number of the result that it needs, its
    kind, part and chunk, whether it forms a pair with the operation before it, whether it waits for a transfer, and
    whether it sends.

    What an operation makes has one number, from backward?, chunk, micro-batch, part and stage; -1 stands for nothing.
    """
    parts, chunks, size = sizes
    span = size // chunks
    letter, micro_batch, chunk, part, joined = table.T
    forward, weights = letter == ORDER_KINDS.index("F"), letter == ORDER_KINDS.index("W")
    piece = (micro_batch * parts + part) * stages
    here = chunk * span + piece + stage
    split = np.zeros(size, bool)
    split[here[weights]] = True

    def beside(neighbours: dict) -> tuple[np.ndarray, np.ndarray]:
        """Return for each operation the index of its micro-batch's forward pass in a neighbouring chunk (-1 if there is
        no such chunk), and whether this chunk is on another stage.
        """
        found = [neighbours.get((index, stage)) for index in range(chunks)]
        first = np.array([-1 if place is None else place[0] * span + place[1] for place in found])[chunk]
        apart = np.array([place is not None and place[1] != stage for place in found])[chunk]
        return np.where(first < 0, -1, first + piece), apart

    (earlier, from_earlier), (later, to_later) = beside(before), beside(after)
    need = np.where(forward, earlier, np.where(later < 0, here, size + later))
    kind = np.where(forward, FORWARD, np.where(split[here], SPLIT, BACKWARD))
    moves, sends = np.where(forward, from_earlier, to_later), np.where(forward, to_later, from_earlier)
    return np.array(
        [
            np.where(weights, -1, here + np.where(forward, 0, size)),
            np.where(weights, size + here, need),
            np.where(weights, WEIGHT, kind),
            part,
            chunk,
            joined,
            moves & ~weights,
            sends & ~weights,
        ]
    )


def _places(rows: list[np.ndarray], made_on: list[int], tables: list[np.ndarray]) -> list[list[int]]:
    """Return the level of each operation of each stage, and write into `made_on` the level on which each result is
    made.

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
        waits = "; ".join(f"stage {stage} at {_in_words(tables[stage][len(places[stage])])}" for stage in stuck)
        raise RecipeError(
            f"these passes of pipeline stages wait for each other, or for a pass that no stage runs: {waits}"
        )
    return places


def _in_words(operation: np.ndarray) -> str:
    """Return in words which operation a row of an order's table is."""
    kind, micro_batch, chunk, part = operation.tolist()[:4]
    of_part = f", part {part} of the sequence" if part else ""
    return f"{_WORDS[ORDER_KINDS[kind]]} of micro-batch {micro_batch} in chunk {chunk}{of_part}"


def _walk(row: np.ndarray, done: list[int], made_on: list[int]) -> Iterator[None]:
    """Assign levels to the operations of a stage one after another; yield when an operation needs a result that has no
    level yet.
    """
    level = -1
    for cell in _cells(row):
        level += 1
        for _, need in cell:
            if need >= 0:
                while (known := made_on[need]) < 0:
                    yield
                if known >= level:
                    level = known + 1
        for made, _ in cell:
            if made >= 0:
                made_on[made] = level
            done.append(level)


def _cells(row: np.ndarray) -> list[list[tuple[int, int]]]:
    """Return for each group of operations that run together the pairs (number of the result, number of the needed
    result).
    """
    cells: list[list[tuple[int, int]]] = []
    for made, need, joined in zip(*row[[0, 1, 5]].tolist(), strict=True):
        if joined:
            cells[-1].append((made, need))
        else:
            cells.append([(made, need)])
    return cells


def _table(
    rows: list[np.ndarray],
    places: list[list[int]],
    made_on: np.ndarray,
    tables: list[np.ndarray],
    sizes: tuple[int, int],
) -> Timetable:
    stages, (parts, chunks) = len(tables), sizes
    idle = KINDS * parts * chunks * stages
    shape = (1 + max(levels[-1] for levels in places), stages)
    work = np.full(shape, idle)
    needs, moves_at, sends_at, paired = (np.zeros(shape, int) for _ in range(4))
    also = np.zeros((2, *shape), int) if any(table[:, -1].any() for table in tables) else None
    for stage, levels in enumerate(places):
        _, need, kind, part, chunk, joined, moves, sends = rows[stage]
        level, alone = np.array(levels), joined == 0
        at = np.where(need >= 0, (made_on[need] + 1) * stages + need % stages, 0)
        work[level[alone], stage] = (((kind * parts + part) * chunks + chunk) * stages + stage)[alone]
        needs[level[alone], stage], moves_at[level[alone], stage] = at[alone], moves[alone]
        np.maximum.at(sends_at[:, stage], level, sends)
        lone = alone & (np.append(joined[1:], 0) == 0)
        follows = (kind[1:] == FORWARD) & (kind[:-1] != FORWARD) & (kind[:-1] != WEIGHT) & lone[1:] & lone[:-1]
        paired[level[1:][follows], stage] = 1
        paired[level[:-1][follows], stage] = 2
        if also is not None:
            second = np.flatnonzero(~alone)
            work[level[second], stage] = idle + 1 + (chunk[second - 1] * chunks + chunk[second]) * stages + stage
            also[:, level[second], stage] = at[second], moves[second]
            paired[level[second], stage] = PAIR
    levels_of = tuple(np.array(levels) for levels in places)
    return Timetable(
        stages, chunks, parts, work, needs, moves_at > 0, sends_at > 0, paired, also, levels_of, tuple(tables)
    )


def play(
    table: Timetable, costs: Iterable[np.ndarray], plans: tuple[int, ...] = (), lags: Sequence[np.ndarray] = ()
) -> np.ndarray:
    """Simulate a timetable: return the time at which each stage finishes the operation on each level, as an array
    [levels + 1, stages, *plans].

    Args:
        costs: for each level the times of its operations, [stages, *plans].
        plans: the shape of the plans that are simulated at the same time.
        lags: two arrays [levels, stages] with the times that operations wait after their input is available: for all
            operations, and for the backward passes of pairs; () for no such times.
    """
    free = np.zeros((len(table.work) + 1, table.stages, *plans))
    cells, ready = free.reshape(-1, *plans), np.empty((table.stages, *plans))
    for level, (needs, cost) in enumerate(zip(table.needs, costs, strict=True)):
        cells.take(needs, axis=0, out=ready, mode="clip")
        if lags:
            ready += lags[0][level]
        if table.also is not None:
            other = cells.take(table.also[0, level], axis=0)
            np.maximum(ready, other + lags[1][level] if lags else other, out=ready)
        np.maximum(ready, free[level], out=ready)
        np.add(ready, cost, out=free[level + 1])
    return free


def critical_path(table: Timetable, times: np.ndarray, sending: float = 0.0) -> tuple[float, np.ndarray]:
    """Return the step time, and how often the critical path (the longest chain of operations) runs the forward pass and
    the backward pass of each chunk. The array of counts has the shape of the argument `times`.

    `times` is [2, C] with the forward and backward times of the chunks at chunk * stages + stage, or [3, C] for
    schedules that split backward passes, with the weight gradients (a part of the backward times) in the third row. The
    visits of the third row are the number of weight gradients on the chain minus the number of backward passes without
    weight gradients, so that (visits * times).sum() is the step time. The time of a pair is the sum of the times of its
    operations. Of several chains of equal length, the function chooses those that stay on a stage.

    Args:
        sending: the time for which a stage is busy with sending the result of an operation that belongs to no pair; the
            receiver has the result before this time. The time of sending counts in the step time, but not in (visits *
            times).sum(). The time of receiving must be part of `times`.
    """
    size, stages = table.chunks * table.stages, table.stages
    meaning = _meaning(table.chunks, stages, len(times), table.also is not None)
    busy = sending * table.sends
    sent = np.where(table.moves, np.concatenate([np.zeros(stages), busy.ravel()])[table.needs], 0.0)
    free = play(table, (meaning @ times.ravel())[table.work] + busy, lags=[-sent] if sending else ())
    work, values = table.work.ravel().tolist(), free.ravel().tolist()
    needed = [(table.needs.ravel().tolist(), sent.ravel().tolist())]
    if table.also is not None:
        needed.append((table.also[0].ravel().tolist(), [0.0] * len(work)))
    ends = [free[-1, stage] - busy[levels[-1], stage] for stage, levels in enumerate(table.places)]
    visits = np.zeros(len(meaning))
    place = len(values) - stages + int(np.argmax(ends))
    while place >= stages:
        here = place - stages
        visits[work[here]] += 1
        inputs = ((needs[here], values[needs[here]] - before[here]) for needs, before in needed if needs[here])
        latest, ready = max(inputs, key=lambda pair: pair[1], default=(0, 0.0))
        place = latest if latest and ready > values[here] else here
    return float(max(ends)), (visits @ meaning).round().astype(int).reshape(len(times), size)


@lru_cache(maxsize=16)
def _meaning(chunks: int, stages: int, rows: int, pairs: bool) -> np.ndarray:
    """Return [numbers of `Timetable.work`, rows x C]: for each kind of work, which of the given times it takes, and how
    often.
    """
    size = chunks * stages
    one, none = np.eye(size), np.zeros((size, size))
    if rows == 2:
        kinds = [[one, none], [none, one], *[[none, none]] * (KINDS - 2)]
    else:
        kinds = [[one, none, none], [none, one, none], [none, one, -one], [none, none, one]]
    found = [np.block(kinds), np.zeros((1, rows * size))]
    if pairs:  # by forward's chunk, backward's chunk and stage
        forward, backward, stage = np.indices((chunks, chunks, stages)).reshape(3, -1)
        both = np.zeros((len(stage), rows, size))
        both[np.arange(len(stage)), 0, forward * stages + stage] = 1
        both[np.arange(len(stage)), 1, backward * stages + stage] = 1
        found.append(both.reshape(len(stage), -1))
    return np.concatenate(found)
