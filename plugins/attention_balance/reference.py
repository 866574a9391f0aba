"""The obvious computation of each thing that this plugin does cleverly: token by token, operation by operation."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np

from plugins.attention_balance.samples.gpt_index import GPTIndex
from plugins.attention_balance.schedule.objective import Objective
from plugins.pipeline_layout.order import FORWARD, one_forward_one_backward


def segments_of_tokens(tokens: list[int], end_of_document: int) -> list[int]:
    """Segment lengths of one sample, walking its tokens: a segment ends behind each end-of-document token."""
    lengths = [0]
    for token in tokens:
        lengths[-1] += 1
        if token == end_of_document:
            lengths.append(0)
    return lengths if lengths[-1] else lengths[:-1]


def sample_tokens(index: GPTIndex, documents: list[list[int]], item: int) -> list[int]:
    """The tokens of the dataset's item, joining all documents in the order of `document_index`."""
    stream = [token for document in index.document_index for token in documents[document]]
    start = int(index.shuffle_index[item]) * index.sequence_length
    return stream[start : start + index.sequence_length]


def pairs_of_tokens(tokens: list[int], end_of_document: int) -> int:
    """Attending pairs of one sample, from its block-diagonal causal mask."""
    document = np.cumsum([0] + [token == end_of_document for token in tokens[:-1]])
    position = np.arange(len(tokens))
    return int(((document[:, None] == document) & (position[:, None] >= position)).sum())


def makespan(times: list[float], stages: int, forward_share: float) -> float:
    """1F1B of one rank: run whatever can run, stage by stage, until nothing is left."""
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
    """Time of one step; costs: [batch], plan: [ranks, micro_batches, slots]."""
    ranks, micro_batches, _ = plan.shape
    times = []
    for first in range(0, ranks, objective.ranks_per_barrier):
        group = range(first, first + objective.ranks_per_barrier)
        slowest = [max(float(costs[plan[rank, m]].sum()) for rank in group) for m in range(micro_batches)]
        one_stage = objective.stages == 1
        times.append(sum(slowest) if one_stage else makespan(slowest, objective.stages, objective.forward_share))
    return max(times)


def shortest_step(costs: np.ndarray, ranks: int, micro_batches: int, slots: int, objective: Objective) -> float:
    """The best time over all assignments; for a handful of samples.

    Bins (a rank's micro-batch) are filled in turn with every set of samples that remain. Of orders of bins that only
    rename micro-batches one is enough without a pipeline.
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
    """The best makespan over all orders."""
    return min(makespan(list(order), stages, forward_share) for order in permutations(times))


def context_pairs(segments: list[int], ranges: list[np.ndarray]) -> tuple[list[int], list[int]]:
    """Tokens and attending pairs of each context-parallel rank, token by token.

    segments: tokens of each document; ranges: for each rank [n, 2] as in `ContextPlan`.
    """
    keys = [offset + 1 for length in segments for offset in range(length)]
    tokens = [[token for start, stop in own for token in range(start, stop)] for own in ranges]
    return [len(own) for own in tokens], [sum(keys[token] for token in own) for own in tokens]
