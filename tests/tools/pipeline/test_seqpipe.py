"""Sequences in parts: MindSpore's order with queue and stacks, bubble, memory, unequal parts."""

from collections import defaultdict, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import RecipeError
from tools.pipeline.in_flight import in_flight, memory_over_time
from tools.pipeline.operation import Op
from tools.pipeline.schedules import check_schedule, operations
from tools.pipeline.simulate import Durations, simulate

many = settings(max_examples=60)


def by_queue_and_stacks(schedule, stage, stages, chunks, micro_batches, parts):
    """As MindSpore's `MakeExecuteOrder` goes about it: a backward takes the micro-batch that has waited longest, and of
    it what came last."""
    size = stages if schedule == "seqpipe" else stages // parts
    rounds = [size] * max(1, micro_batches // size) if micro_batches >= size else [micro_batches]
    for extra in range(micro_batches - sum(rounds)):
        rounds[extra % len(rounds)] += 1
    factor = 1 if schedule == "seqsmartvpp" or (schedule == "seqpipe" and chunks == 1) else 2
    warm_up = (stages - 1 - stage) * factor + (chunks - 1) * rounds[0] * parts + parts - 1
    warm_up = min(warm_up, chunks * micro_batches * parts - 1)
    order, queue, stacks, first = [], deque(), defaultdict(list), 0
    forwards = []
    for size in rounds:
        forwards += [(first + m, v, q) for v in range(chunks) for m in range(size) for q in range(parts)]
        first += size
    for index, way in enumerate(forwards):
        order.append(Op("F", *way))
        queue.append(way[0])
        stacks[way[0]].append(way)
        if index >= warm_up:
            order.append(Op("B", *stacks[queue.popleft()].pop()))
    return order + [Op("B", *stacks[m].pop()) for m in queue]


@many
@given(
    st.sampled_from(["seqpipe", "seqvpp", "seqsmartvpp"]),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(1, 3),
)
def test_order_is_that_of_queue_and_stacks(schedule, stages, chunks, micro_batches, parts):
    try:
        check_schedule(schedule, stages, chunks, micro_batches, parts)
    except RecipeError:
        return
    for stage in range(stages):
        want = by_queue_and_stacks(schedule, stage, stages, chunks, micro_batches, parts)
        assert operations(schedule, stage, stages, chunks, micro_batches, parts) == want


@many
@given(st.integers(1, 8), st.integers(1, 3), st.integers(1, 4))
def test_bubble_and_memory_against_1f1b(stages, rounds, parts):
    """(p - 1)(f + b) / s of bubble, and p - 1 + s parts of a micro-batch in flight instead of s p."""
    times = Durations(np.full((1, stages), 12.0), np.full((1, stages), 24.0))
    found = simulate("seqpipe", stages * rounds + 1, times, parts)
    assert found.makespan - found.busy.max() == pytest.approx((stages - 1) * 36 / parts)
    held = in_flight(found.orders[0], 1).max()
    assert held * parts == pytest.approx(min(stages - 1 + parts, parts * (stages * rounds + 1)))
    # the curve over time counts the same
    assert memory_over_time(found, 0, 0.0, [1.0])[1].max() == pytest.approx(held)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_whole_sequences_are_1f1b(stages):
    for stage in range(stages):
        sizes = stage, stages, 1, 2 * stages
        assert operations("seqpipe", *sizes) == operations("1f1b", *sizes)
        sizes = stage, stages, 2, 2 * stages
        assert operations("seqpipe", *sizes) == operations("interleaved_1f1b", *sizes)


def test_later_parts_that_take_longer_cost_a_bubble():
    """Causal attention: the second half attends to three times as many pairs as the first."""
    even = np.full((2, 1, 4), 6.0)
    uneven = np.array([3.0, 9.0])[:, None, None] * np.ones((2, 1, 4))
    times = [simulate("seqpipe", 8, Durations(part, 2 * part), 2).makespan for part in (even, uneven)]
    assert times[0] < times[1]
    assert simulate("1f1b", 8, Durations(2 * even[0], 4 * even[0])).makespan > times[0]


@pytest.mark.parametrize(
    ("numbers", "want"),
    [
        (("1f1b", 4, 1, 8, 2), "want whole sequences .parts of them: seqpipe"),
        (("seqvpp", 4, 2, 8, 3), "a number of parts that divides 4"),
        (("seqpipe", 4, 1, 8, 0), "each must be at least 1"),
    ],
)
def test_refusals(numbers, want):
    with pytest.raises(RecipeError, match=want):
        check_schedule(*numbers)
