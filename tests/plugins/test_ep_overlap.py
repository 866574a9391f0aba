"""Chunks partition the tokens, orders are valid on every rank, and the choice is the best of all that it could try.

The simulator against stepping through time tick by tick, and against bounds that hold for any schedule.
"""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plugins.ep_overlap import plan
from plugins.ep_overlap.plan import (
    FORWARD_STEPS,
    Layer,
    Stage,
    candidates,
    choose,
    chunk_shares,
    chunk_slices,
    cut_layer,
    issue_order,
    layer_ops,
)
from plugins.ep_overlap.timeline import STREAMS, Op, simulate
from plugins.errors import RecipeError
from plugins.hierarchical_ep.plan import MODES
from plugins.hierarchical_ep.topology import Topology
from plugins.hierarchical_ep.traffic import backward, expected_steps

LAUNCH = 1e-5
sizes = st.integers(1, 40)


def sent(steps, launch, suffix=""):
    """Communication over links of 20 and 100 GB/s with 5 and 2 microseconds a message; the slower one counts."""

    def seconds(step, share):
        inter = step.inter_peers * 5e-6 + share * step.inter_bytes / 2e10
        return launch + max(inter, step.intra_peers * 2e-6 + share * step.intra_bytes / 1e11)

    steps = [step for step in steps if step.inter_peers or step.intra_peers]
    return [Stage(step.name + suffix, step.stream, partial(seconds, step)) for step in steps]


def computed(name, seconds, least, launch):
    return Stage(name, "compute", lambda share: launch + max(share * seconds, least))


def layer(mode="hierarchical", tokens=2048, topology=None, experts=6e-3, shared=7e-4, replay=False, **more):
    """A layer of known seconds; `weights` is the least that a chunk's matmuls take."""
    launch, least = more.pop("launch", LAUNCH), more.pop("weights", 0.0)
    forward = expected_steps(mode, topology or Topology(2, 8, 64), tokens, 8, 2048, 2)
    half = len(forward) // 2
    back = backward(forward)
    there, home = sent(forward[:half], launch), sent(forward[half:], launch)
    again = [*sent(forward[:half], launch, ".replay"), computed("experts.replay", experts, least, launch)]
    return Layer(
        (*there, computed("experts", experts, least, launch), *home),
        (
            *sent(back[:half], launch),
            computed("experts.backward", 2 * experts, 2 * least, launch),
            *sent(back[half:], launch),
        ),
        tuple(again) if replay else (),
        shared=(shared + launch, 2 * shared + launch) if shared else (0.0, 0.0),
        **more,
    )


def makespan(timelines):
    return timelines.forward.makespan + timelines.replayed.makespan


@given(sizes, sizes, st.data())
def test_chunks_are_a_partition_that_can_be_undone(batch, sequence, data):
    b, s = data.draw(st.integers(1, batch)), data.draw(st.integers(1, sequence))
    chunks = chunk_slices(batch, sequence, (b, s))
    assert len(chunks) == b * s
    order = np.concatenate(chunks)
    tokens = np.random.default_rng(0).random((batch * sequence, 3))
    assert np.array_equal(np.sort(order), np.arange(batch * sequence))
    assert np.array_equal(tokens[order][np.argsort(order)], tokens)
    places = [divmod(chunk, sequence) for chunk in chunks]
    # each chunk is a rectangle; along each axis sizes differ by at most one
    rows, columns = ({len(set(part)) for part in parts} for parts in zip(*places, strict=True))
    assert max(rows) - min(rows) <= 1 and max(columns) - min(columns) <= 1
    for chunk in chunks:
        i, j = divmod(chunk, sequence)
        assert len(chunk) == len(set(i)) * len(set(j)) and (np.diff(chunk) > 0).all()
    assert sum(chunk_shares(batch, sequence, (b, s))) == pytest.approx(1)


def test_chunks_of_a_small_list():
    assert [part.tolist() for part in chunk_slices(2, 3, (1, 2))] == [[0, 1, 3, 4], [2, 5]]
    assert [part.tolist() for part in chunk_slices(2, 3, (2, 1))] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("chunks", "word"),
    [((3, 1), r"chunks: 2 samples .*3 parts.*chunks\[0\].*1 to 2"), ((1, 0), r"chunks\[1\].*1 to 4")],
)
def test_more_chunks_than_rows(chunks, word):
    with pytest.raises(RecipeError, match=word):
        chunk_slices(2, 4, chunks)


@given(st.integers(1, 9), st.integers(0, 7), st.sampled_from([FORWARD_STEPS, ("dispatch", "experts", "combine")]))
def test_an_order_holds_every_step_once_and_after_the_one_before(chunks, stride, steps):
    order = issue_order(chunks, steps, stride)
    assert sorted(order) == sorted((chunk, step) for chunk in range(chunks) for step in steps)
    for chunk in range(chunks):
        assert [step for other, step in order if other == chunk] == list(steps)
    for step in steps:  # chunks meet a collective in the same order everywhere
        assert [chunk for chunk, other in order if other == step] == list(range(chunks))


def test_named_orders():
    steps = ("d", "e", "c")
    assert issue_order(2, steps, 0) == [(0, "d"), (1, "d"), (0, "e"), (1, "e"), (0, "c"), (1, "c")]
    assert issue_order(2, steps, 1) == [(0, "d"), (0, "e"), (1, "d"), (0, "c"), (1, "e"), (1, "c")]
    assert issue_order(2, steps, 3) == [(0, "d"), (0, "e"), (0, "c"), (1, "d"), (1, "e"), (1, "c")]


def test_the_layer_is_replayed_before_gradients_are_taken():
    chains = layer(replay=True).passes.replayed[0]
    names = [(op.chunk, op.name) for op in layer_ops(chains, (0.5, 0.5), 1)]
    assert names.index((1, "experts.replay")) < names.index((0, "combine.inter.backward"))
    assert len(layer().passes.replayed[0]) == 1


@given(st.integers(1, 6), st.integers(0, 6))
def test_differentiation_keeps_the_order_with_chunks_counted_from_the_last(chunks, stride):
    back = FORWARD_STEPS[::-1]
    mirrored = [(chunks - 1 - chunk, step) for chunk, step in reversed(issue_order(chunks, FORWARD_STEPS, stride))]
    places = {pair: stride * pair[0] + back.index(pair[1]) for pair in mirrored}
    assert [places[pair] for pair in mirrored] == sorted(places.values())


@given(
    st.sampled_from(MODES),
    st.tuples(st.integers(1, 4), st.integers(1, 8)),
    st.integers(0, 6),
    st.floats(1e-5, 1e-1),
    st.floats(0, 1e-2),
    st.booleans(),
)
def test_a_cut_is_within_its_bounds(mode, chunks, stride, experts, shared, replay):
    one = layer(mode, experts=experts, shared=shared, replay=replay)
    choice = cut_layer(one, chunks, stride, chunk_shares(4, 8, chunks))
    for name in ("forward", "backward", "replayed"):
        before, after = getattr(choice.before, name), getattr(choice.after, name)
        compute, communication = getattr(choice.compute, name), getattr(choice.communication, name)
        assert before.makespan == pytest.approx(compute + communication)
        assert after.makespan >= (1 - 1e-12) * max(after.busy(stream) for stream in STREAMS)  # up to rounding
        assert after.makespan == pytest.approx(
            compute + getattr(choice.waited_after, name) + getattr(choice.cutting, name)
        )
        assert getattr(choice.cutting, name) >= -1e-12  # cutting computation only adds launches
    if chunks == (1, 1):
        assert choice.after == choice.before
    if not replay:
        assert choice.after.replayed == choice.after.backward


@given(st.sampled_from(MODES), st.integers(1, 8), st.booleans(), st.floats(1e-5, 1e-1))
def test_the_order_is_the_best_stride_and_all_of_them_run(mode, chunks, replay, experts):
    assume(chunks > 1)
    one = layer(mode, experts=experts, shared=0.0, replay=replay)
    shares = chunk_shares(1, 64, (1, chunks))
    ways = [one.passes.forward[0], one.passes.replayed[0]]
    every = [sum(simulate(layer_ops(chains, shares, stride)).makespan for chains in ways) for stride in range(6)]
    choice = choose(one, 1, 64, [(1, chunks)])
    best = min(every[: len(one.forward) + 1])
    assert makespan(choice.after) == every[choice.stride] == pytest.approx(best, abs=1e-12)
    assert choice.stride == 1 or every[1] > best
    assert makespan(choose(one, 1, 64, [(1, chunks)], stride=0).after) == every[0]


def test_the_choice_is_the_shortest_of_all():
    one = layer(replay=True)
    choice = choose(one, 2, 1024)
    every = {cut: makespan(choose(one, 2, 1024, [cut]).after) for cut in candidates(2, 1024)}
    assert makespan(choice.after) == min(every.values()) == every[choice.chunks]
    assert choice.waited_after.forward < choice.communication.forward
    assert choose(one, 2, 1024, [(1, 1)]).chunks == (1, 1)


def test_what_pays_and_what_does_not():
    """Launches or weights as dear as the bytes, or nothing to hide behind: one chunk. Else several."""
    assert choose(layer(shared=0.0, launch=1e-2), 1, 2048).chunks == (1, 1)
    assert choose(layer(shared=0.0, weights=6e-3), 1, 2048).chunks == (1, 1)
    assert choose(layer(tokens=8, experts=1e-6, shared=0.0), 1, 8).chunks == (1, 1)
    assert choose(layer(), 1, 2048).chunks != (1, 1)


def test_dearer_launches_never_ask_for_more_chunks():
    counts = []
    for launch in (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2):
        b, s = choose(layer(shared=0.0, launch=launch), 4, 512).chunks
        counts.append(b * s)
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 1


@pytest.mark.parametrize(("batch", "sequence"), [(1, 1), (1, 4096), (2, 3), (8, 4096)])
def test_candidates_fit(batch, sequence):
    found = candidates(batch, sequence)
    assert found[0] == (1, 1) and len(found) == len(set(found))
    assert all(b <= batch and s <= sequence and b * s <= 8 for b, s in found)


@given(sizes, sizes, st.data())
def test_shares_are_those_of_the_slices(batch, sequence, data):
    chunks = data.draw(st.integers(1, batch)), data.draw(st.integers(1, sequence))
    slices = chunk_slices(batch, sequence, chunks)
    assert chunk_shares(batch, sequence, chunks) == tuple(len(part) / (batch * sequence) for part in slices)


def test_the_shared_expert_fills_the_first_dispatch():
    after = choose(layer(), 1, 2048).after.forward
    first = after.on("compute")[0]
    assert (first.op.name, first.start) == ("shared", 0.0)
    beside = cut_layer(layer(shared_beside=True), (1, 1), 1, (1.0,))
    assert makespan(beside.before) < makespan(cut_layer(layer(), (1, 1), 1, (1.0,)).before)


def test_what_is_written_is_read():
    assert plan.read({"chunks": [2, 4], "stride": 2}) == ((2, 4), 2)
    assert plan.read({"chunks": "auto"}) == ("auto", 1)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({}, "write `chunks:`"),
        (True, "write `chunks:`"),
        ({"chunk": [1, 2]}, "write `chunks:`"),
        ({"chunks": [1, 2], "strides": 1}, "did you mean 'stride'"),
        ({"chunks": [0, 2]}, r"\(1 or more\)"),
        ({"chunks": 4}, "neither auto"),
        ({"chunks": [1, 2.0]}, "neither auto"),
        ({"chunks": [1, 2], "stride": -1}, "whole number"),
    ],
)
def test_wrong_settings_are_refused(written, message):
    with pytest.raises(RecipeError, match=message):
        plan.read(written)


def test_slices_are_of_the_sequence_that_a_rank_holds():
    config = SimpleNamespace(seq_length=64, tensor_model_parallel_size=2, context_parallel_size=4)
    slices = plan.slices(2, (2, 4), config)
    assert sorted(np.concatenate(slices)) == list(range(2 * 64 // 8))
    assert slices[1].tolist() == [2, 3]


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
