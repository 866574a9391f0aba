"""V-shaped schedules with controllable memory (arXiv 2405.15362): V-Min, V-Half and V-ZB.

Each stage holds two chunks of the model, which goes from the first stage to the last and back. A schedule is a
building block, the times at which one micro-batch passes each stage when every forward, backward and weight gradient
takes one unit, repeated every six units. How long the block keeps activations decides the memory: a third of
1F1B's (V-Min), a half (V-Half) or all of it (V-ZB, without a bubble).
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

import numpy as np

from tools.pipeline.operation import Op, as_table

_PERIOD = 6  # forward, backward and weight gradient of two chunks
_BLOCK = (("F", 0), ("F", 1), ("B", 1), ("B", 0))  # in the order in which a micro-batch comes


def v_min(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """A stage's operations one unit after its neighbour's, forth and back: (p + 4) // 3 micro-batches in flight."""
    turn = 2 if stages % 3 == 0 else 0  # without it two operations of a stage would fall on one time
    times = (stage, 2 * stages - 1 - stage, 2 * stages + turn + stage, 4 * stages + turn - 1 - stage)
    return _repeated(times, micro_batches)


def v_half(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Two units on the way forth, one on the way back: (p + 2) // 2 micro-batches in flight."""
    turn = 3 if stages % 2 == 0 else 0
    there, back = 3 * stages + turn - 1 + 2 * stage, 6 * stages + turn - 2 - stage
    return _repeated((2 * stage, 3 * stages - 2 - stage, there, back), micro_batches)


def _repeated(times: tuple[int, ...], micro_batches: int) -> np.ndarray:
    """The block again every period; weight gradients where nothing else is."""
    slots = {
        time + _PERIOD * number: Op(kind, number, chunk)
        for (kind, chunk), time in zip(_BLOCK, times, strict=True)
        for number in range(micro_batches)
    }
    order: list[Op] = []
    waiting: deque[Op] = deque()
    for slot in range(max(slots) + 1):
        if slot in slots:
            order.append(slots[slot])
            if slots[slot].kind == "B":
                waiting.append(slots[slot]._replace(kind="W"))
        elif waiting:
            order.append(waiting.popleft())
    return as_table([*order, *waiting])


def zb_v(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Four units forth, two back, warm-up and end filled: p micro-batches in flight."""
    return _filled(stages, micro_batches)[stage]


@lru_cache(maxsize=16)
def _filled(stages: int, micro_batches: int) -> tuple[np.ndarray, ...]:
    """All stages' orders: of what can run, what the repeated block has first; else, or when memory is short, weights.

    The paper fills the block's warm-up and end by reordering, too, by rules of its own. With these a stage idles at
    most one unit between its first and its last operation.
    """
    times = _zb_v_times(stages)
    done: dict[tuple[Op, int], int] = {}
    counts = dict.fromkeys(times, 0)
    orders: list[list[Op]] = [[] for _ in range(stages)]
    waiting: list[deque[Op]] = [deque() for _ in range(stages)]
    held = [0] * stages
    time = 0
    while sum(map(len, orders)) < _PERIOD * micro_batches * stages:
        chosen = [_choice(stage, micro_batches, time, times, counts, done, held) for stage in range(stages)]
        for stage, op in enumerate(chosen):
            short = held[stage] >= 2 * stages - 1
            if waiting[stage] and (op is None or short):
                op = waiting[stage].popleft()
                held[stage] -= 1
            elif op is not None:
                counts[op.kind, op.chunk, stage] += 1
                held[stage] += op.kind == "F"
                if op.kind == "B":
                    waiting[stage].append(op._replace(kind="W"))
            if op is not None:
                orders[stage].append(op)
                done[op, stage] = time + 1
        time += 1
    return tuple(as_table(order) for order in orders)


def _zb_v_times(stages: int) -> dict[tuple[str, int, int], int]:
    """When the block's operations start, by kind, chunk and stage."""
    last = stages - 1
    return {
        (kind, chunk, stage): time
        for stage in range(stages)
        for (kind, chunk), time in zip(
            _BLOCK,
            (4 * stage, 6 * last + 1 - 2 * stage, 6 * last + 2 + 4 * stage, 12 * last + 3 - 2 * stage),
            strict=True,
        )
    }


def _choice(
    stage: int, micro_batches: int, time: int, times: dict, counts: dict, done: dict, held: list[int]
) -> Op | None:
    """What the block has first of the forwards and backwards that this stage could start now."""
    ready, stages = [], len(held)
    for kind, chunk in _BLOCK:
        number = counts[kind, chunk, stage]
        if number == micro_batches or (kind == "F" and held[stage] == 2 * stages):
            continue
        need = _needed(Op(kind, number, chunk), stage, stages)
        if need is None or done.get(need, time + 1) <= time:
            ready.append((times[kind, chunk, stage] + _PERIOD * number, Op(kind, number, chunk)))
    return min(ready)[1] if ready else None


def _needed(op: Op, stage: int, stages: int) -> tuple[Op, int] | None:
    """The operation, and its stage, that the model has before this one; None for the first."""
    first, last = 0, stages - 1
    if op.kind == "F" and op.chunk == 0:
        return None if stage == first else (op, stage - 1)
    if op.kind == "F":
        return (op._replace(chunk=0), last) if stage == last else (op, stage + 1)
    if op.chunk == 1:
        return (op._replace(kind="F"), first) if stage == first else (op, stage - 1)
    return (op._replace(chunk=1), last) if stage == last else (op, stage + 1)
