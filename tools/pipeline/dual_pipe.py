"""DualPipe and DualPipeV of DeepSeek (arXiv 2412.19437, figure 5; the public DualPipe repository), and pairs.

A pair is a forward and a backward of different micro-batches that run together: the expert parallel communication of
one hides behind the computation of the other. How long a pair takes is `tools.pipeline.pair`.

DualPipe feeds micro-batches from both ends: stage r holds chunk 0, the r-th of the model for one half of them, and
chunk 1, the (p - 1 - r)-th for the other, so parameters exist twice. DualPipeV is one half of its stages, where the
model makes a V; each stage then does what stage r and its mirror did.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from tools.pipeline.mindspore_orders import interleaved_1f1b
from tools.pipeline.operation import KINDS, Op, as_table, widened


def dual_pipe_v(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """The eight steps of the public `dualpipev.py`, read as a figure of its schedule."""
    return as_table(_steps(stage, stages, micro_batches))


def dual_pipe(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """DualPipe: a stage and its mirror do what DualPipeV of half as many stages does; the far half swaps chunks."""
    near = stage < stages // 2
    half, mirror = micro_batches // 2, min(stage, stages - 1 - stage)
    table = as_table(_steps(mirror, stages // 2, half))
    table[:, 2] = table[:, 2] if near else 1 - table[:, 2]
    table[:, 1] += half * table[:, 2]  # micro-batches of chunk 1 are the second half
    return table


def _steps(stage: int, stages: int, micro_batches: int) -> list[Op | tuple[Op, Op]]:
    counts: Counter[tuple[str, int]] = Counter()
    waiting: deque[Op] = deque()  # weight gradients that were split off
    order: list[Op | tuple[Op, Op]] = []
    after = stages - 1 - stage

    def take(kind: str, chunk: int) -> Op:
        counts[kind, chunk] += 1
        return Op(kind, counts[kind, chunk] - 1, chunk)

    def split_backward(chunk: int, split: bool = True) -> Op:
        op = take("B", chunk)
        if split:
            waiting.append(op._replace(kind="W"))
        return op

    for _ in range(2 * after):  # 1
        order.append(take("F", 0))
    for _ in range(stage + 1):  # 2
        order += [take("F", 0), take("F", 1)]
    for _ in range(after):  # 3: weight gradients at once, so that the next stage's backward need not wait for them
        order += [split_backward(1), waiting.popleft(), take("F", 1)]
    for number in range(micro_batches - 2 * stages + stage + 1):  # 4: the steady phase
        if number == 0 and stage == stages - 1:  # these two one after the other: the next stage waits for the backward
            order += [take("F", 0), take("B", 1)]
        else:
            order.append((take("F", 0), take("B", 1)))
        order.append((take("F", 1), take("B", 0)))
    for _ in range(after):  # 5
        order += [take("B", 1), (take("F", 1), take("B", 0))]
    for place in range(1, 2 * stage + 3):  # 6: the second half is split
        order.append(split_backward(place % 2, split=place > stage + 1))
    for _ in range(after):  # 7
        order += [waiting.popleft(), split_backward(0)]
    return [*order, *waiting]  # 8


def interleaved_1f1b_pairs(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Interleaved 1F1B with its steady phase in pairs: a backward runs together with the forward after it.

    The report (section 4.1) and Pangu Ultra MoE (arXiv 2505.04519) overlap the communication of adjacent forwards
    and backwards of different micro-batches; which of the two neighbours of a backward is its partner, they do not say.
    The forward before it is not: on the last stage the backward needs it.
    """
    plain = widened(interleaved_1f1b(stage, stages, chunks, micro_batches))
    backward = plain[:, 0] == KINDS.index("B")
    # a backward and the forward after it become the forward and, joined to it, the backward
    firsts = np.flatnonzero(backward[:-1] & ~backward[1:])
    paired = plain.copy()
    paired[firsts], paired[firsts + 1] = plain[firsts + 1], plain[firsts]
    paired[firsts + 1, -1] = 1
    return paired
