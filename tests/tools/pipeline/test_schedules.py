"""Orders: everything once, no circle, MindSpore's warm-ups, its remainders, its refusals."""

import re
from collections import defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import RecipeError
from plugins.pipeline_layout import one_forward_one_backward
from tools.pipeline.orders import KINDS, Op
from tools.pipeline.schedules import (
    PAPER_SCHEDULES,
    SCHEDULES,
    check_schedule,
    operations,
    schedule_of,
    scheduler_of,
)
from tools.pipeline.simulate import Durations, in_flight, memory_over_time, simulate
from tools.pipeline.timetable import timetable

TOOLS = Path(__file__).resolve().parents[3] / "tools"
many = settings(max_examples=60)


@many
@given(
    st.sampled_from((*SCHEDULES, *PAPER_SCHEDULES)),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 20),
    st.sampled_from([1, 1, 2, 3]),
)
def test_each_operation_once_and_no_stage_waits_for_ever(schedule, stages, chunks, micro_batches, parts):
    try:
        check_schedule(schedule, stages, chunks, micro_batches, parts)
    except RecipeError:
        return
    ways = [(m, v, part) for m in range(micro_batches) for v in range(chunks) for part in range(parts)]
    if schedule == "dual_pipe":  # each half of the micro-batches has a chunk of its own
        ways = [(m, v, part) for m, v, part in ways if v == (m >= micro_batches // 2)]
    table = timetable(schedule, stages, chunks, micro_batches, parts)
    for order, numbers in zip(table.orders, table.tables, strict=True):
        assert len(set(order)) == len(order)
        assert {op for op in order if op.kind != "W"} == {Op(kind, *way) for kind in "FB" for way in ways}
        seen: dict[str, list] = {"F": [], "B": [], "W": []}
        for op in order:
            assert op.kind != "W" or op._replace(kind="B") in seen["B"]
            seen[op.kind].append(op)
        for m, v in {(m, v) for m, v, _ in ways}:  # keys and values of earlier parts are there; backwards in reverse
            forwards, backwards = ([op.part for op in seen[kind] if op[1:3] == (m, v)] for kind in "FB")
            assert forwards == list(range(parts)) == backwards[::-1]
        joined = np.flatnonzero(numbers[:, -1])
        assert {KINDS[kind] for kind in numbers[joined, 0]} <= {"B"} >= {"B" for _ in joined}
        assert {KINDS[kind] for kind in numbers[joined - 1, 0]} <= {"F"}


def test_1f1b_by_hand():
    assert "".join(f"{op.kind}{op.micro_batch}" for op in operations("1f1b", 1, 3, 1, 4)) == "F0F1B0F2B1F3B2B3"


def test_interleaved_by_hand():
    """Stage 0 of 2, 2 chunks: Megatron's figure; chunk 0 is written small."""
    order = operations("interleaved_1f1b", 0, 2, 2, 4)
    assert "".join(f"{op.kind if op.chunk else op.kind.lower()}{op.micro_batch}" for op in order) == (
        "f0f1F0F1" + "f2B0f3B1" + "F2b0F3b1" + "B2B3b2b3"
    )


@pytest.mark.parametrize(
    ("schedule", "warm_up"),
    [
        ("interleaved_1f1b", lambda p, v, s: (v - 1) * p + 2 * (p - s - 1)),
        ("seqvpp", lambda p, v, s: (v - 1) * p + 2 * (p - s - 1)),
        ("interleaved_1f1b_less_memory", lambda p, v, s: (v - 1) * p + p - s - 1),
        ("seqsmartvpp", lambda p, v, s: (v - 1) * p + p - s - 1),
    ],
)
def test_warm_up(schedule, warm_up):
    for stage in range(8):
        order = operations(schedule, stage, 8, 3, 32)
        # one more forward runs before the first backward
        assert [op.kind for op in order].index("B") == warm_up(8, 3, stage) + 1


def test_micro_batches_that_fill_no_round():
    """9 on 4 stages: MindSpore's 1f1b puts the odd one into the first round, seqvpp spreads 5 + 4 (here the same);
    11: 7 + 4 against 6 + 5."""

    def first_round(schedule, micro_batches):
        order = operations(schedule, 3, 4, 2, micro_batches)
        forward = [op for op in order if op.kind == "F"]
        return [op.chunk for op in forward].index(1)

    assert [first_round("interleaved_1f1b", m) for m in (8, 9, 11)] == [4, 5, 7]
    assert [first_round("seqvpp", m) for m in (8, 9, 11)] == [4, 5, 6]


def test_full_rounds_make_the_seq_schedules_the_interleaved_ones():
    for stage in range(4):
        for one, other in (("seqvpp", "interleaved_1f1b"), ("seqsmartvpp", "interleaved_1f1b_less_memory")):
            assert operations(one, stage, 4, 3, 16) == operations(other, stage, 4, 3, 16)


def test_less_memory_holds_fewer():
    def most(schedule, stage):
        return in_flight(operations(schedule, stage, 8, 2, 32), 2).sum(axis=1).max()

    assert most("interleaved_1f1b", 0) == 8 + 14 + 1
    assert most("interleaved_1f1b_less_memory", 0) == 8 + 7 + 1
    # chunks of a V start and end on the first stage: every stage holds the same
    assert {most("zero_bubble_v", stage) for stage in range(8)} == {2 * 8}


def test_zero_bubble_v_splits_what_mindspore_detaches():
    """`InferNeedDetachInfo`: P-s-1 first and (s+1)//2 last micro-batches of chunk 1, P-(s+1)//2 last of chunk 0."""
    for stage in range(4):
        split = {op[1:3] for op in operations("zero_bubble_v", stage, 4, 2, 10) if op.kind == "W"}
        half = (stage + 1) // 2
        want = (
            {(m, 1) for m in range(3 - stage)}
            | {(9 - i, 1) for i in range(half)}
            | {(9 - i, 0) for i in range(4 - half)}
        )
        assert split == want


def test_dual_pipe_v_splits_what_mindspores_v_does():
    """Two readings of one schedule: DeepSeek's steps and MindSpore's list of what it detaches."""
    for stage in range(6):
        every = (operations(name, stage, 6, 2, 14) for name in ("dual_pipe_v", "zero_bubble_v"))
        ours, theirs = ({op for op in order if op.kind == "W"} for order in every)
        assert ours == theirs


@pytest.mark.parametrize(
    ("numbers", "want"),
    [
        (("1f1d", 4, 1, 8), "did you mean '1f1b'"),
        (("1f1b", 4, 2, 8), "one chunk a stage"),
        (("interleaved_1f1b", 4, 2, 3), "at least 4 micro-batches"),
        (("seqvpp", 4, 1, 8), "several chunks"),
        (("seqsmartvpp", 3, 2, 8), "even number of stages"),
        (("zero_bubble_v", 4, 2, 7), "at least 8 micro-batches"),
        (("zero_bubble_v", 4, 3, 8), "2 chunks"),
        (("dual_pipe_v", 4, 2, 7), "at least 8 micro-batches"),
        (("dual_pipe", 4, 2, 9), "an even one of micro-batches"),
        (("zb_h1", 4, 2, 8), "one chunk a stage"),
        (("zb_v", 4, 1, 8), "2 chunks"),
        (("gpipe", 0, 1, 8), "at least 1"),
    ],
)
def test_refusals(numbers, want):
    with pytest.raises(RecipeError, match=want):
        operations(numbers[0], 0, *numbers[1:])


def test_no_such_stage():
    with pytest.raises(RecipeError, match="must lie between 0 and 3"):
        operations("1f1b", 4, 4, 1, 8)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_mindformers_word_for_a_schedule_and_back(schedule):
    """It says 1f1b with one chunk and with several; which order then saves memory is up to the environment."""
    back = schedule_of(scheduler_of(schedule), 1 if schedule == "1f1b" else 2)
    assert back == schedule.removesuffix("_less_memory")
    assert schedule_of("1f1b", 1) == "1f1b" and scheduler_of("interleaved_1f1b_less_memory") == "1f1b"


def test_one_tool_knows_that_word():
    alias = re.compile(r'"interleaved_1f1b" if .*1f1b')
    assert [path.name for path in TOOLS.rglob("*.py") if alias.search(path.read_text())] == ["schedules.py"]


@given(stages=st.integers(1, 8), micro_batches=st.integers(1, 20))
def test_1f1b_is_the_one_table_of_plugins(stages, micro_batches):
    for stage in range(stages):
        ours = operations("1f1b", stage, stages, 1, micro_batches)
        assert [("FB".index(op.kind), op.micro_batch) for op in ours] == [
            tuple(row) for row in one_forward_one_backward(stage, stages, micro_batches).tolist()
        ]
        assert {op.chunk for op in ours} == {0}


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
        (("1f1b", 4, 1, 8, 2), "needs whole sequences .parts of them: seqpipe"),
        (("seqvpp", 4, 2, 8, 3), "a number of parts that divides 4"),
        (("seqpipe", 4, 1, 8, 0), "each number must be at least 1"),
    ],
)
def test_seqpipe_refusals(numbers, want):
    with pytest.raises(RecipeError, match=want):
        check_schedule(*numbers)
