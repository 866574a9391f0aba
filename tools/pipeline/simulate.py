"""Simulate a pipeline schedule: how long a step takes, who waits, and how much memory each stage holds when.

Rules of the simulation, all stated here:
* a stage runs its operations one after the other in the schedule's order, each as soon as what it needs is there;
* the forward of a chunk needs the forward of the chunk before it in the model, the backward that of the chunk after it
  (the last chunk's own forward), weight gradients their own backward;
* what moves to another stage takes `transfer`. With overlap "full" it moves beside the computation. With "none" it
  keeps both stages busy, the sender after its operation and the receiver before its own; a sender does not wait for its
  receiver. With "1f1b" (report section 4.1; MindSpore's 1b1f overlap) a backward and the forward right after it
  are run together, so that neither that backward's sending nor that forward's receiving keeps the stage busy;
* activations of a chunk are held from the start of its forward to the end of its backward, or of its weight gradients
  where these are split off.
No contention between transfers, no variation between micro-batches. Times and memory are in the caller's units.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plugins.errors import RecipeError, did_you_mean
from tools.pipeline.schedules import Op
from tools.pipeline.timetable import KINDS, Timetable, timetable

OVERLAPS = ("none", "1f1b", "full")


@dataclass(frozen=True)
class Durations:
    """How long each operation takes: [chunks, stages] arrays in one unit of time.

    backward    the whole backward, weight gradients and recomputation included
    weight      the part of it that is weight gradients (needed by zero_bubble_v only)
    transfer    one activation, or its gradient, to another stage
    """

    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray | None = None
    transfer: float = 0.0
    overlap: str = "full"


@dataclass(frozen=True)
class Simulation:
    """What happened: a step's time, and per stage its work, idle share and operations with start and end."""

    makespan: float
    busy: np.ndarray  # [stages] time of computation
    starts: tuple[np.ndarray, ...]  # for each stage, by operation
    ends: tuple[np.ndarray, ...]
    table: Timetable

    @property
    def orders(self) -> tuple[tuple[Op, ...], ...]:
        """The operations of each stage."""
        return self.table.orders

    @property
    def bubble_ratio(self) -> float:
        """Idle time over working time of all stages: (p-1)/m for 1F1B with equal stages."""
        return self.makespan * len(self.busy) / float(self.busy.sum()) - 1

    @property
    def idle_share(self) -> float:
        """Idle time over all time: (p-1)/(m+p-1) for 1F1B with equal stages."""
        return 1 - float(self.busy.sum()) / (self.makespan * len(self.busy))


def simulate(schedule: str, micro_batches: int, durations: Durations) -> Simulation:
    """Simulate one step of a schedule of `tools.pipeline.schedules`.

    Raises:
        RecipeError: the schedule cannot run, or `overlap` is none of `OVERLAPS`.
    """
    chunks, stages = np.shape(durations.forward)
    return simulate_timetable(timetable(schedule, stages, chunks, micro_batches), durations)


def simulate_timetable(table: Timetable, durations: Durations) -> Simulation:
    """Simulate own orders (see `tools.pipeline.timetable.lay_out`).

    Raises:
        RecipeError: `overlap` is none of `OVERLAPS`.
    """
    times = duration_table(durations)[table.work]
    sending, receiving, lag = _transfers(table, durations)
    free = _run(table, receiving + times + sending, lag)
    ends = free - sending
    by_stage = list(enumerate(table.places))
    return Simulation(
        makespan=float(ends.max()),
        busy=times.sum(axis=0),
        starts=tuple((ends - times)[levels, stage] for stage, levels in by_stage),
        ends=tuple(ends[levels, stage] for stage, levels in by_stage),
        table=table,
    )


def makespans(table: Timetable, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Return the step times [plans] of many plans at once, without transfers or split backwards.

    `forward` and `backward` are [plans, chunks, stages].
    """
    plans, size = len(forward), table.chunks * table.stages
    rows = np.zeros((KINDS * size + 1, plans))
    rows[:size] = forward.reshape(plans, size).T
    rows[size : 2 * size] = backward.reshape(plans, size).T
    height = len(table.work)
    free = np.zeros((height + 1, table.stages, plans))
    cells = free.reshape(-1, plans)
    ready = np.empty((table.stages, plans))
    for level, (needs, work) in enumerate(zip(table.needs, table.work, strict=True)):
        cells.take(needs, axis=0, out=ready, mode="clip")
        np.maximum(ready, free[level], out=ready)
        np.add(ready, rows.take(work, axis=0), out=free[level + 1])
    return free[height].max(axis=0)


def duration_table(durations: Durations) -> np.ndarray:
    """Return durations by the numbers of `Timetable.work`, 0 last for idle."""
    forward, backward = (np.asarray(part, float) for part in (durations.forward, durations.backward))
    weight = np.zeros_like(forward) if durations.weight is None else np.asarray(durations.weight, float)
    return np.concatenate([np.ravel([forward, backward, backward - weight, weight]), [0.0]])


def _transfers(table: Timetable, durations: Durations) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[levels, stages] time that a stage is busy sending after and receiving before an operation, and what an
    operation waits after its input has left the other stage's hands."""
    if durations.overlap not in OVERLAPS:
        near = did_you_mean(durations.overlap, list(OVERLAPS))
        raise RecipeError(f"overlap {durations.overlap!r}: want one of {', '.join(OVERLAPS)}{near}")
    send_hidden = receive_hidden = np.full(table.work.shape, durations.overlap == "full")
    if durations.overlap == "1f1b":
        send_hidden, receive_hidden = table.paired == 2, table.paired == 1
    sending = np.where(table.sends & ~send_hidden, durations.transfer, 0.0)
    receiving = np.where(table.moves & ~receive_hidden, durations.transfer, 0.0)
    # `free` below counts a sender's transfer; its output is ready before that
    sent_before = np.concatenate([np.zeros(table.stages), sending.ravel()])[table.needs]
    return sending, receiving, np.where(table.moves & receive_hidden, durations.transfer, 0.0) - sent_before


def _run(table: Timetable, cost: np.ndarray, lag: np.ndarray) -> np.ndarray:
    """[levels, stages] when each stage is free again after each level."""
    free = np.zeros((len(cost) + 1, table.stages))
    cells = free.ravel()
    delayed = bool(lag.any())
    for level, needs in enumerate(table.needs):
        ready = cells.take(needs)
        if delayed:
            ready += lag[level]
        np.maximum(ready, free[level], out=ready)
        np.add(ready, cost[level], out=free[level + 1])
    return free[1:]
