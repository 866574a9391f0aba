"""The simulator against stepping through time tick by tick, and against bounds that hold for any schedule."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.ep_overlap.timeline import STREAMS, Op, simulate


def stepped(ops):
    """The obvious simulation: at every whole second, start what can start. Returns key -> (start, end)."""
    waiting, running, done, times = list(ops), {}, set(), {}
    now = 0
    while waiting or running:
        for op in [op for op, end in running.items() if end == now]:
            done.add(op.key)
            del running[op]
        started = True
        while started:
            started = False
            for op in waiting:
                first = all(next(other for other in waiting if stream in other.streams) is op for stream in op.streams)
                free = not any(set(op.streams) & set(other.streams) for other in running)
                if first and free and set(op.after) <= done:
                    times[op.key] = (now, now + op.seconds)
                    waiting.remove(op)
                    running[op] = now + op.seconds
                    started = True
                    break
        now += 1
        assert now < 10_000
    return times


@st.composite
def schedules(draw):
    """Ops in order of issue that depend on earlier ones only."""
    count = draw(st.integers(1, 14))
    ops = []
    for index in range(count):
        stream = draw(st.sampled_from([*STREAMS, "both"]))
        after = draw(st.lists(st.sampled_from(ops), unique=True, max_size=3)) if ops else []
        ops.append(Op(f"op{index}", index % 3, stream, draw(st.integers(1, 6)), tuple(op.key for op in after)))
    return ops


def longest_path(ops):
    ends = {}
    for op in ops:  # dependencies point backwards
        ends[op.key] = op.seconds + max((ends[key] for key in op.after), default=0)
    return max(ends.values())


@given(schedules())
def test_equals_stepping_through_time(ops):
    timeline = simulate(ops)
    assert {span.op.key: (span.start, span.end) for span in timeline.spans} == stepped(ops)


@given(schedules())
def test_streams_do_not_overlap_and_dependencies_are_kept(ops):
    timeline = simulate(ops)
    ends = {span.op.key: span.end for span in timeline.spans}
    assert [span.op for span in timeline.spans] == ops
    for stream in STREAMS:
        spans = timeline.on(stream)
        assert all(before.end <= after.start for before, after in pairwise(spans))
    for span in timeline.spans:
        assert all(ends[key] <= span.start for key in span.op.after)
    assert timeline.makespan >= longest_path(ops)
    assert all(timeline.makespan >= timeline.busy(stream) for stream in STREAMS)
    assert timeline.makespan <= sum(op.seconds for op in ops)


@given(schedules(), st.randoms(use_true_random=False))
def test_any_order_of_issue_runs_or_is_called_endless(ops, random):
    """Dependencies on what is issued later: fine on another stream, endless on the same one."""
    random.shuffle(ops)
    try:
        timeline = simulate(ops)
    except ValueError as error:
        assert "wait for each other" in str(error)
        # it is endless indeed: stream order and dependencies together hold a circle
        assert has_circle(ops)
    else:
        assert not has_circle(ops)
        assert {span.op.key: (span.start, span.end) for span in timeline.spans} == stepped(ops)


def has_circle(ops):
    edges = {op.key: set(op.after) for op in ops}
    for stream in STREAMS:
        queue = [op.key for op in ops if stream in op.streams]
        for before, after in pairwise(queue):
            edges[after].add(before)
    while ready := [key for key, needs in edges.items() if not needs]:
        for key in ready:
            del edges[key]
        for needs in edges.values():
            needs.difference_update(ready)
    return bool(edges)


def test_two_streams_that_wait_for_each_other():
    ops = [
        *(Op("a", 0, "inter", 1.0, ((0, "b"),)), Op("c", 0, "inter", 1.0)),
        *(Op("b", 0, "intra", 1.0, ((0, "c"),)),),
    ]
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(ops)


@pytest.mark.parametrize(
    ("ops", "word"),
    [
        ([Op("a", 0, "disk", 1.0)], "stream 'disk' does not exist"),
        ([Op("a", 0, "inter", 1.0), Op("a", 0, "intra", 1.0)], "issued twice"),
        ([Op("a", 0, "inter", 1.0, ((0, "b"),))], "never issued"),
    ],
)
def test_wrong_ops(ops, word):
    with pytest.raises(ValueError, match=word):
        simulate(ops)


def test_nothing_takes_no_time():
    assert simulate([]).makespan == 0
    assert simulate([Op("a", 0, "compute", 0.0), Op("b", 0, "compute", 0.0, ((0, "a"),))]).makespan == 0
