"""Activations that a stage holds: how many micro-batches of each chunk at once, and the memory over time.

An operation counts from its start: a chunk's activations are there while its forward runs, and until its backward ends
(its weight gradients, where they are split off).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tools.pipeline.operation import Op
from tools.pipeline.simulate import Simulation

_IRREGULAR = ("gpipe", "seqpipe", "seqvpp", "seqsmartvpp")


def in_flight(order: Sequence[Op], chunks: int) -> np.ndarray:
    """Return [operations, chunks]: micro-batches whose activations are held while each operation runs.

    Of sequences in parts each part counts as its share of a micro-batch. A pair holds what both its operations do: its
    forward comes first.
    """
    split = {op[1:] for op in order if op.kind == "W"}
    parts = 1 + max(op.part for op in order)
    taken, freed = np.zeros((len(order), chunks), int), np.zeros((len(order) + 1, chunks), int)
    for index, op in enumerate(order):
        if op.kind == "F":
            taken[index, op.chunk] += 1
        elif op.kind == "W" or op[1:] not in split:
            freed[index + 1, op.chunk] += 1
    held = taken.cumsum(axis=0) - freed[:-1].cumsum(axis=0)
    return held if parts == 1 else held / parts


def enough(schedule: str, stages: int, micro_batches: Any) -> Any:
    """Micro-batches of a run (a number or an array) that is as full as one of `micro_batches`, but short.

    What does not fill a round of most schedules is added to their first round, and later ones repeat the second. GPipe
    has one round; seqpipe, seqvpp and seqsmartvpp spread the rest over rounds: the first depends on their number.
    """
    if schedule in _IRREGULAR:
        return micro_batches
    return np.minimum(micro_batches, 4 * stages + micro_batches % stages)


def peak_vectors(order: Sequence[Op], chunks: int) -> np.ndarray:
    """Return [vectors, chunks]: the moments of `in_flight` that no other moment exceeds in every chunk.

    Whatever a chunk's activation takes, the stage's peak is at one of them: one memory row each makes a solver's
    memory exact.
    """
    distinct = np.unique(in_flight(order, chunks), axis=0)
    exceeds = (distinct[:, None] <= distinct[None]).all(axis=2) & (distinct[:, None] != distinct[None]).any(axis=2)
    return distinct[~exceeds.any(axis=1)]


def memory_over_time(
    simulation: Simulation, stage: int, static: float, activation: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return (times, memory) of a stage: memory[i] is held from times[i] to times[i + 1] or the end of the step.

    `activation` is what one micro-batch of each chunk holds; the peak is ``memory.max()``.
    """
    order, held = simulation.orders[stage], np.asarray(activation, float)
    split = {op[1:] for op in order if op.kind == "W"}
    share = 1 / (1 + max(op.part for op in order))
    events = [(0.0, 0, 0.0)]
    for op, start, end in zip(order, simulation.starts[stage], simulation.ends[stage], strict=True):
        if op.kind == "F":
            events.append((float(start), 1, share * held[op.chunk]))
        elif op.kind == "W" or op[1:] not in split:
            events.append((float(end), 0, -share * held[op.chunk]))
    # at one moment memory is freed before the next operation takes some
    events.sort(key=lambda event: event[:2])
    return np.array([event[0] for event in events]), static + np.cumsum([event[2] for event in events])
