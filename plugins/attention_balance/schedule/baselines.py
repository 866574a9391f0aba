"""What others do: the schedulers that tests and benchmarks compare with, in plain Python as they are published.

Each takes the costs [batch] of one global batch and returns [ranks, micro_batches, slots] of positions in it. All but
the first two decide only which rank gets a sample. Their ranks then order their own samples falling, so that the heavy
ones of all ranks fall into the same micro-batches: the kindest reading for a barrier in each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

import numpy as np

from plugins.attention_balance.schedule.assign import unscheduled

Scheduler = Callable[[np.ndarray, int, int, int], np.ndarray]


def none(costs: np.ndarray, ranks: int, micro_batches: int, slots: int) -> np.ndarray:
    """No scheduling: the order of the dataset."""
    return unscheduled(ranks, micro_batches, slots)


def shuffled(costs: np.ndarray, ranks: int, micro_batches: int, slots: int) -> np.ndarray:
    """A random order, the same for each size."""
    return np.random.default_rng(0).permutation(len(costs)).reshape(ranks, micro_batches, slots)


def sort_snake(costs: np.ndarray, ranks: int, micro_batches: int, slots: int) -> np.ndarray:
    """Sort falling and deal to the ranks back and forth."""
    rounds = np.argsort(-costs, kind="stable").reshape(-1, ranks)
    rounds[1::2] = rounds[1::2, ::-1]
    return rounds.T.reshape(ranks, micro_batches, slots)


def longest_first(costs: np.ndarray, ranks: int, micro_batches: int, slots: int) -> np.ndarray:
    """LPT with equal counts: the heaviest sample left goes to the lightest rank that is not full."""
    size = micro_batches * slots
    heap = [(0.0, rank) for rank in range(ranks)]
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    values = costs.tolist()
    for sample in sorted(range(len(values)), key=lambda i: -values[i]):
        load, rank = heappop(heap)
        chosen[rank].append(sample)
        if len(chosen[rank]) < size:
            heappush(heap, (load + values[sample], rank))
    return np.array(chosen).reshape(ranks, micro_batches, slots)


def karmarkar_karp(costs: np.ndarray, ranks: int, micro_batches: int, slots: int) -> np.ndarray:
    """Largest differencing with equal counts.

    Each `ranks` consecutive samples of the sorted batch begin as one state, a sample a rank. The two states with the
    largest spread (heaviest minus lightest part) are merged, heaviest part with lightest, until one is left.
    """
    values = costs.tolist()
    order = sorted(range(len(values)), key=lambda i: -values[i])
    states = []
    for number, start in enumerate(range(0, len(order), ranks)):
        parts = [(values[i], [i]) for i in order[start : start + ranks]]
        states.append((parts[-1][0] - parts[0][0], number, parts))
    heapify(states)
    number = len(states)
    while len(states) > 1:
        _, _, first = heappop(states)
        _, _, second = heappop(states)
        parts = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        parts.sort(key=lambda part: -part[0])
        heappush(states, (parts[-1][0] - parts[0][0], number, parts))
        number += 1
    own = [sorted(samples, key=lambda i: -values[i]) for _, samples in states[0][2]]
    return np.array(own).reshape(ranks, micro_batches, slots)


BASELINES: dict[str, Scheduler] = {
    "no scheduling": none,
    "random": shuffled,
    "sort + snake": sort_snake,
    "LPT": longest_first,
    "Karmarkar-Karp": karmarkar_karp,
}
