"""Chunks partition the tokens, orders are valid on every rank, and the choice is the best of all that it could try."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plugins.ep_overlap.plan import (
    FORWARD_STEPS,
    Layer,
    Links,
    candidates,
    choose,
    chunk_shares,
    chunk_slices,
    cut_layer,
    issue_order,
    layer_ops,
    stages,
)
from plugins.ep_overlap.timeline import STREAMS, simulate
from plugins.errors import RecipeError
from plugins.hierarchical_ep.plan import MODES
from plugins.hierarchical_ep.topology import Topology
from plugins.hierarchical_ep.traffic import backward, expected_steps

LINKS = Links(inter_bytes_per_s=2e10, intra_bytes_per_s=1e11, inter_latency=5e-6, intra_latency=2e-6, launch=1e-5)
sizes = st.integers(1, 40)


def layer(mode="hierarchical", tokens=2048, topology=None, experts=6e-3, shared=7e-4, **more):
    forward = expected_steps(mode, topology or Topology(2, 8, 64), tokens, 8, 2048, 2)
    return Layer(forward, backward(forward), experts, shared, **more)


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


@pytest.mark.parametrize(("chunks", "word"), [((3, 1), r"chunks\[0\].*1 to 2"), ((1, 0), r"chunks\[1\].*1 to 4")])
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("replay", [False, True])
def test_a_chunk_goes_through_the_planned_steps_around_the_experts(mode, replay):
    one = layer(mode, replay=replay)
    forward, back = ([[stage.name for stage in phase] for phase in way] for way in stages(one, LINKS))
    steps = [step.name for step in one.forward]
    half = len(steps) // 2
    assert forward == [[*steps[:half], "experts", *steps[half:]]]
    gradients = [step.name for step in one.backward]
    again = [[*(f"{name}.replay" for name in steps[:half]), "experts.replay"]] if replay else []
    assert back == [*again, [*gradients[:half], "experts.backward", *gradients[half:]]]
    if mode != "global":
        assert tuple(forward[0]) == FORWARD_STEPS


def test_the_layer_is_replayed_before_gradients_are_taken():
    phases = stages(layer(replay=True), LINKS)[1]
    names = [(op.chunk, op.name) for op in layer_ops(phases, (0.5, 0.5), 1)]
    assert names.index((1, "experts.replay")) < names.index((0, "combine.inter.backward"))


@given(st.integers(1, 6), st.integers(0, 6))
def test_differentiation_keeps_the_order_with_chunks_counted_from_the_last(chunks, stride):
    back = FORWARD_STEPS[::-1]
    mirrored = [(chunks - 1 - chunk, step) for chunk, step in reversed(issue_order(chunks, FORWARD_STEPS, stride))]
    places = {pair: stride * pair[0] + back.index(pair[1]) for pair in mirrored}
    assert [places[pair] for pair in mirrored] == sorted(places.values())


def test_seconds_of_a_step():
    """Bytes shrink with the chunk, launch and latency do not; over both classes of links the slower one counts."""
    one = layer("global")
    step, stage = one.forward[0], stages(one, LINKS)[0][0][0]
    assert stage.stream == step.stream == "both"
    for share in (1.0, 0.25):
        inter = 1e-5 + step.inter_peers * 5e-6 + share * step.inter_bytes / 2e10
        intra = 1e-5 + step.intra_peers * 2e-6 + share * step.intra_bytes / 1e11
        assert stage.seconds(share) == pytest.approx(max(inter, intra))


def test_seconds_of_the_experts():
    """Matmuls and permutation shrink with the chunk; no chunk is done before it has read the weights."""
    one = layer(experts=8e-3, permutation=1e-3, weights=3e-3, replay=True)
    (forward,), (replay, gradient) = stages(one, LINKS)
    for phase, times in ((forward, 1), (replay, 1), (gradient, 2)):
        (experts,) = [stage for stage in phase if stage.stream == "compute"]
        assert experts.seconds(1.0) == pytest.approx(1e-5 + times * 9e-3)
        assert experts.seconds(0.5) == pytest.approx(1e-5 + times * 4.5e-3)
        assert experts.seconds(0.25) == pytest.approx(1e-5 + times * 3.25e-3)


def test_inside_one_node_nothing_runs_between_nodes():
    one = layer("hierarchical", topology=Topology(1, 8, 64))
    assert [stage.name for stage in stages(one, LINKS)[0][0]] == ["dispatch.intra", "experts", "combine.intra"]


@given(
    st.sampled_from(MODES),
    st.tuples(st.integers(1, 4), st.integers(1, 8)),
    st.floats(1e-5, 1e-1),
    st.floats(0, 1e-2),
    st.booleans(),
)
def test_a_cut_is_within_its_bounds(mode, chunks, experts, shared, replay):
    one = layer(mode, experts=experts, shared=shared, replay=replay)
    choice = cut_layer(mode, one, LINKS, chunks, chunk_shares(4, 8, chunks))
    assert choice.makespan_before == pytest.approx(choice.ep_seconds + choice.compute_seconds)
    assert choice.exposed_fraction(choice.exposed_before) == pytest.approx(1)
    for timeline in choice.after:
        assert timeline.makespan >= max(timeline.busy(stream) for stream in STREAMS)
    assert choice.exposed_after >= -1e-12  # cutting computation only adds launches
    if chunks == (1, 1):
        assert choice.after == choice.before


@given(st.sampled_from(MODES), st.integers(1, 8), st.booleans(), st.floats(1e-5, 1e-1))
def test_the_order_is_the_best_stride_and_all_of_them_run(mode, chunks, replay, experts):
    assume(chunks > 1)
    one = layer(mode, experts=experts, shared=0.0, replay=replay)
    shares = chunk_shares(1, 64, (1, chunks))
    ways = stages(one, LINKS)
    every = [sum(simulate(layer_ops(phases, shares, stride)).makespan for phases in ways) for stride in range(6)]
    choice = cut_layer(mode, one, LINKS, (1, chunks), shares)
    best = min(every[: len(one.forward) + 2])
    assert choice.makespan_after == every[choice.stride] == pytest.approx(best, abs=1e-12)
    assert choice.stride == 1 or every[1] > best


def test_the_choice_is_the_shortest_of_all():
    layers = {mode: layer(mode, replay=True) for mode in MODES}
    choice = choose(layers, LINKS, 2, 1024)
    every = {
        (mode, cut): cut_layer(mode, layers[mode], LINKS, cut, chunk_shares(2, 1024, cut)).makespan_after
        for mode in MODES
        for cut in candidates(2, 1024)
    }
    assert choice.makespan_after == min(every.values()) == every[choice.mode, choice.chunks]
    assert choice.exposed_after < choice.exposed_before
    assert choose({"global": layers["global"]}, LINKS, 2, 1024, [(1, 1)]).chunks == (1, 1)


def test_what_pays_and_what_does_not():
    """Launches or weights as dear as the bytes, or nothing to hide behind: one chunk. Else several."""
    links = replace(LINKS, launch=1e-2)
    assert choose({"hierarchical": layer(shared=0.0)}, links, 1, 2048).chunks == (1, 1)
    assert choose({"hierarchical": layer(shared=0.0, weights=6e-3)}, LINKS, 1, 2048).chunks == (1, 1)
    assert choose({"hierarchical": layer(tokens=8, experts=1e-6, shared=0.0)}, LINKS, 1, 8).chunks == (1, 1)
    assert choose({"hierarchical": layer()}, LINKS, 1, 2048).chunks != (1, 1)


def test_dearer_launches_never_ask_for_more_chunks():
    counts = []
    for launch in (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2):
        b, s = choose({"hierarchical": layer(shared=0.0)}, replace(LINKS, launch=launch), 4, 512).chunks
        counts.append(b * s)
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 1


@pytest.mark.parametrize(("batch", "sequence"), [(1, 1), (1, 4096), (2, 3), (8, 4096)])
def test_candidates_fit(batch, sequence):
    found = candidates(batch, sequence)
    assert found[0] == (1, 1) and len(found) == len(set(found))
    assert all(b <= batch and s <= sequence and b * s <= 8 for b, s in found)


def test_the_shared_expert_fills_the_first_dispatch():
    after = choose({"hierarchical": layer()}, LINKS, 1, 2048).after[0]
    first = after.on("compute")[0]
    assert (first.op.name, first.start) == ("shared", 0.0)
    beside = cut_layer("hierarchical", layer(shared_beside=True), LINKS, (1, 1), (1.0,))
    assert beside.makespan_before < cut_layer("hierarchical", layer(), LINKS, (1, 1), (1.0,)).makespan_before
