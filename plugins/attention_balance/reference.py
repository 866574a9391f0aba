"""This module holds, as references for tests, slow and obvious versions of the plugin's fast computations, and other
published schedulers.

The functions of the first half go through the sample token by token, or through the schedule operation by operation.
The second half, `BASELINES`, contains other published schedulers of samples, in plain Python. Each scheduler takes the
costs [batch] of one global batch and returns the positions in this batch as [ranks, micro_batches, slots]. Except for
the first two, these schedulers decide only which rank gets a sample. The ranks then sort their own samples by falling
cost, so that the heavy samples of all ranks are in the same micro-batches; with a barrier in each micro-batch this is
the most favourable order for such a scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import combinations, permutations

import numpy as np

from plugins.attention_balance.assign import unscheduled
from plugins.attention_balance.objective import Objective
from plugins.attention_balance.samples import GPTIndex
from plugins.pipeline_layout import FORWARD, one_forward_one_backward

Scheduler = Callable[[np.ndarray, int, int, int], np.ndarray]


def segments_of_tokens(tokens: list[int], end_of_document: int) -> list[int]:
    """Return the lengths of the documents in one sample by walking through its tokens: a document ends after each
    end-of-document token.
    """
    lengths = [0]
    for token in tokens:
        lengths[-1] += 1
        if token == end_of_document:
            lengths.append(0)
    return lengths if lengths[-1] else lengths[:-1]


def sample_tokens(index: GPTIndex, documents: list[list[int]], item: int) -> list[int]:
    """Return the tokens of one item of the dataset by joining all documents in the order of `document_index`."""
    stream = [token for document in index.document_index for token in documents[document]]
    start = int(index.shuffle_index[item]) * index.sequence_length
    return stream[start : start + index.sequence_length]


def pairs_of_tokens(tokens: list[int], end_of_document: int) -> int:
    """Return the number of pairs (query, key) that the block-diagonal causal mask of one sample allows."""
    document = np.cumsum([0] + [token == end_of_document for token in tokens[:-1]])
    position = np.arange(len(tokens))
    return int(((document[:, None] == document) & (position[:, None] >= position)).sum())


def makespan(times: list[float], stages: int, forward_share: float) -> float:
    """Return the 1F1B makespan of one rank's micro-batches, whose times are `times`: run any operation that can run,
    stage by stage, until none is left.
    """
    waiting = [one_forward_one_backward(stage, stages, len(times)).tolist() for stage in range(stages)]
    ends: dict[tuple[bool, int, int], float] = {}
    free = [0.0] * stages
    while any(waiting):
        for stage in range(stages):
            if not waiting[stage]:
                continue
            kind, m = waiting[stage][0]
            forward = kind == FORWARD
            source = stage - 1 if forward else stage + 1
            if 0 <= source < stages and (forward, source, m) not in ends:
                continue
            waiting[stage].pop(0)
            start = max(free[stage], ends.get((forward, source, m), 0.0))
            free[stage] = start + times[m] * (forward_share if forward else 1 - forward_share)
            ends[forward, stage, m] = free[stage]
    return max(ends.values())


def step_time(costs: np.ndarray, plan: np.ndarray, objective: Objective) -> float:
    """Return the time of one step; costs is [batch], plan is [ranks, micro_batches, slots]."""
    ranks, micro_batches, _ = plan.shape
    times = []
    for first in range(0, ranks, objective.ranks_per_barrier):
        group = range(first, first + objective.ranks_per_barrier)
        slowest = [max(float(costs[plan[rank, m]].sum()) for rank in group) for m in range(micro_batches)]
        one_stage = objective.stages == 1
        times.append(sum(slowest) if one_stage else makespan(slowest, objective.stages, objective.forward_share))
    return max(times)


def shortest_step(costs: np.ndarray, ranks: int, micro_batches: int, slots: int, objective: Objective) -> float:
    """Return the shortest step time over all possible assignments; the search is feasible only for a handful of
    samples.

    The search fills the bins (a bin is a micro-batch of a rank) one after the other with every set of samples that
    remain. Assignments that differ only in the numbering of micro-batches are all tried, too.
    """
    best = float("inf")

    def fill(remaining: tuple[int, ...], bins: list[tuple[int, ...]]) -> None:
        nonlocal best
        if not remaining:
            plan = np.array(bins).reshape(micro_batches, ranks, slots).transpose(1, 0, 2)
            best = min(best, step_time(costs, plan, objective))
            return
        for chosen in combinations(remaining, slots):
            fill(tuple(sample for sample in remaining if sample not in chosen), [*bins, chosen])

    fill(tuple(range(len(costs))), [])
    return best


def shortest_pipeline(times: list[float], stages: int, forward_share: float) -> float:
    """Return the shortest 1F1B makespan over all orders of the micro-batches."""
    return min(makespan(list(order), stages, forward_share) for order in permutations(times))


def context_pairs(segments: list[int], ranges: list[np.ndarray]) -> tuple[list[int], list[int]]:
    """Return the numbers of tokens and of attending token pairs of each context-parallel rank, counted token by token.

    Args:
        segments: the number of tokens of each document.
        ranges: for each rank [n, 2], as in `ContextPlan`.
    """
    keys = [offset + 1 for length in segments for offset in range(length)]
    tokens = [[token for start, stop in own for token in range(start, stop)] for own in ranges]
    return [len(own) for own in tokens], [sum(keys[token] for token in own) for own in tokens]


def none(costs: np.ndarray, ranks: int, micro_batches: int, slots: int) -> np.ndarray:
    """Return the plan without balancing, in which the samples keep the order of the dataset."""
    return unscheduled(ranks, micro_batches, slots)


def shuffled(costs: np.ndarray, ranks: int, micro_batches: int, slots: int) -> np.ndarray:
    """Return a plan that assigns the samples in a random order, which is the same in each call."""
    return np.random.default_rng(0).permutation(len(costs)).reshape(ranks, micro_batches, slots)


def sort_snake(costs: np.ndarray, ranks: int, micro_batches: int, slots: int) -> np.ndarray:
    """Sort the samples by falling cost, and assign them one by one to ranks 0 to n - 1, then n - 1 to 0, and so on."""
    rounds = np.argsort(-costs, kind="stable").reshape(-1, ranks)
    rounds[1::2] = rounds[1::2, ::-1]
    return rounds.T.reshape(ranks, micro_batches, slots)


def longest_first(costs: np.ndarray, ranks: int, micro_batches: int, slots: int) -> np.ndarray:
    """Assign samples by LPT (longest processing time first) with equal counts: the heaviest remaining sample goes to
    the lightest rank that is not full.
    """
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
    """Plan by the largest differencing method (Karmarkar-Karp) with an equal number of samples for each rank.

    At first, each `ranks` consecutive samples of the sorted batch form one state, which gives one sample to each rank.
    The two states with the largest spread (the heaviest part minus the lightest) are merged, the heaviest part of one
    with the lightest part of the other, until only one state is left.
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
