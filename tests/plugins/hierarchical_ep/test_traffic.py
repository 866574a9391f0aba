from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plugins.errors import RecipeError
from plugins.hierarchical_ep.plan import MODES, make_plan
from plugins.hierarchical_ep.topology import Topology
from plugins.hierarchical_ep.traffic import (
    LINKS,
    _step,
    backward,
    break_even,
    expected_steps,
    hit_probability,
    per_rank_bytes,
    step_bytes,
)
from tests.plugins.hierarchical_ep.cases import cases, route

many = settings(max_examples=100)
modes = st.sampled_from(MODES)


def planned_steps(plan, hidden, itemsize):
    """The steps of the forward pass with the exact bytes of a plan, where `expected_steps` has expected ones."""
    steps = []
    for transfer in plan.forward:
        parts = [step_bytes(plan.topology, transfer, plan.top_k, hidden, itemsize, back) for back in (False, True)]
        steps.append(_step(plan.topology, transfer, *({link: part.busiest(link) for link in LINKS} for part in parts)))
    return tuple(steps)


def by_hand(mode, topology, routing, hidden, itemsize):
    """Bytes of the dispatch, one message after the other: {(link, sender, receiver): bytes}, all steps together."""
    sent = np.zeros((2, topology.ep, topology.ep))

    def send(source, to, size):
        if source != to:
            sent[int(topology.node_of(source) == topology.node_of(to)), source, to] += size

    row, devices = hidden * itemsize, topology.devices_per_node
    for source, ids in enumerate(routing):
        for chosen in ids:
            owners = topology.owner(chosen).tolist()
            nodes = {owner // devices for owner in owners}
            if mode == "hierarchical":
                nodes = set(range(topology.nodes))
            for node in nodes if mode != "global" else ():
                send(source, node * devices + source % devices, row + len(chosen) * (4 + 4))
            for owner in owners:
                at = source if mode == "global" else owner // devices * devices + source % devices
                send(at, owner, row + 4 + 4)
    for s, d in np.ndindex(topology.ep, topology.ep):
        if mode == "global" or s // devices == d // devices:
            send(s, d, 4 * topology.experts_per_rank[d])
        if mode == "deduplicated" and s % devices == d % devices:
            send(s, d, 4)
    return {"inter": sent[0], "intra": sent[1]}


@many
@given(modes, cases())
def test_planned_bytes_are_those_counted_message_by_message(mode, case):
    topology, routing, _ = case
    plan = make_plan(mode, topology, routing)
    expected = by_hand(mode, topology, routing, 5, 2)
    steps = per_rank_bytes(plan, 5, 2)
    for link in LINKS:
        dispatch = sum(getattr(step, link) for step in steps[: len(plan.dispatch)])
        np.testing.assert_array_equal(dispatch, expected[link])
    for step, whole in zip(planned_steps(plan, 5, 2), steps, strict=True):
        assert step.inter_bytes == max(whole.inter.sum(0).max(), whole.inter.sum(1).max())
        assert step.intra_bytes == max(whole.intra.sum(0).max(), whole.intra.sum(1).max())


@many
@given(modes, cases())
def test_backward_is_the_adjoint_without_counts(mode, case):
    topology, routing, _ = case
    plan, hidden = make_plan(mode, topology, routing), 5
    forward, back = per_rank_bytes(plan, hidden, 2), per_rank_bytes(plan, hidden, 2, "backward")
    assert [step.name for step in back] == [f"{step.name}.backward" for step in reversed(forward)]
    for one, other, step in zip(forward, reversed(back), plan.forward, strict=True):
        moved = step.rows * (1 - np.eye(topology.ep))
        meta = 8 * plan.top_k if one.name == "dispatch.inter" else 8 if one.name.startswith("dispatch") else 0
        np.testing.assert_array_equal(other.inter + other.intra, (moved * (hidden * 2 + meta)).T)
        assert (other.inter <= one.inter.T).all()
    for step, whole in zip(backward(planned_steps(plan, hidden, 2)), back, strict=True):
        assert (step.inter_bytes, step.intra_bytes) == (whole.busiest("inter"), whole.busiest("intra"))


@many
@given(cases())
def test_deduplicated_ranks_send_at_most_what_hierarchical_ranks_send(case):
    topology, routing, _ = case
    inter = {mode: per_rank_bytes(make_plan(mode, topology, routing), 5, 2) for mode in MODES}
    counts = 4 * (topology.nodes - 1)
    for end in ("sent", "received"):
        ours, theirs = (getattr(inter[mode][0], end)("inter") for mode in ("deduplicated", "hierarchical"))
        assert (ours <= theirs + counts).all()
        assert (
            getattr(inter["deduplicated"][-1], end)("inter") <= getattr(inter["hierarchical"][-1], end)("inter")
        ).all()


TOPOLOGIES = [Topology(2, 4, 32), Topology(3, 2, 17), Topology(4, 1, 9), Topology(1, 4, 10), Topology(2, 3, 5)]


def mean_bytes(mode, topology, top_k, tokens, hidden, itemsize, kind="uniform", draws=40):
    """Bytes between ranks, averaged over random routings; every `draws` uses its own routing."""
    rng = np.random.default_rng(1)
    total = None
    for _ in range(draws):
        plan = make_plan(mode, topology, route(topology, top_k, [tokens] * topology.ep, kind, rng))
        steps = per_rank_bytes(plan, hidden, itemsize)
        total = (
            steps
            if total is None
            else [
                replace(a, inter=a.inter + b.inter, intra=a.intra + b.intra) for a, b in zip(total, steps, strict=True)
            ]
        )
    return [replace(step, inter=step.inter / draws, intra=step.intra / draws) for step in total]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_expected_bytes_are_the_mean_over_random_routings(mode, topology):
    tokens, top_k, hidden, draws = 48, 3, 16, 40
    expected = expected_steps(mode, topology, tokens, top_k, hidden, 2)
    measured = mean_bytes(mode, topology, top_k, tokens, hidden, 2, draws=draws)
    assert [step.name for step in expected] == [step.name for step in measured]
    for step, mean in zip(expected, measured, strict=True):
        for link, size in (("inter", step.inter_bytes), ("intra", step.intra_bytes)):
            rows = max(draws * size / (hidden * 2), 1)  # their count scatters by at most its square root
            assert mean.busiest(link) == pytest.approx(size, rel=4 / np.sqrt(rows), abs=1e-9), (step.name, link)


@pytest.mark.parametrize("mode", MODES)
def test_expected_steps_have_the_shape_of_planned_ones(mode):
    for topology in TOPOLOGIES:
        plan = make_plan(mode, topology, route(topology, 2, [4] * topology.ep, "uniform", np.random.default_rng(0)))
        for ours, planned in zip(expected_steps(mode, topology, 4, 2, 8, 4), planned_steps(plan, 8, 4), strict=True):
            for name in ("name", "stream", "inter_peers", "intra_peers"):
                assert getattr(ours, name) == getattr(planned, name)
            if topology.nodes > 1 and topology.devices_per_node > 1:
                assert ours.stream == ("both" if mode == "global" else ours.name.split(".")[1])


@pytest.mark.parametrize("mode", MODES)
def test_expected_bytes_grow_with_the_tokens_also_where_less_than_one_copy_is_expected(mode):
    few, many = (expected_steps(mode, Topology(2, 4, 32), tokens, 2, 16, 2, 1.5) for tokens in (0.125, 1024))
    for one, other in zip(few, many, strict=True):
        for link in ("inter", "intra"):
            sizes = [getattr(each, f"{link}_bytes") - getattr(each, f"{link}_forward_only") for each in (one, other)]
            assert sizes[0] * 8192 == pytest.approx(sizes[1])


def test_skew_multiplies_what_the_busiest_rank_receives():
    topology, tokens, top_k, hidden = Topology(2, 4, 32), 400, 2, 16
    rng = np.random.default_rng(0)
    routing = route(topology, top_k, [tokens] * topology.ep, "uniform", rng)
    for ids in routing:  # a part of the tokens goes to two experts of rank 5 instead
        moved = rng.random(len(ids)) < 0.2
        ids[moved] = [20, 21]
    load = np.bincount(topology.owner(np.concatenate(routing)).ravel(), minlength=topology.ep)
    skew = load.max() / load.mean()
    assert skew > 2
    plan = make_plan("global", topology, routing)
    expected, measured = (
        expected_steps("global", topology, tokens, top_k, hidden, 2, skew),
        planned_steps(plan, hidden, 2),
    )
    for ours, exact in zip(expected, measured, strict=True):
        assert ours.inter_bytes == pytest.approx(exact.inter_bytes, rel=0.05)
        assert ours.intra_bytes == pytest.approx(exact.intra_bytes, rel=0.05)
    intra = expected_steps("hierarchical", topology, tokens, top_k, hidden, 2, skew)[1]
    exact = planned_steps(make_plan("hierarchical", topology, routing), hidden, 2)[1]
    assert intra.intra_bytes == pytest.approx(exact.intra_bytes, rel=0.05)

    visits = make_plan("deduplicated", topology, routing).dispatch[0].rows.reshape(2, 4, 2, 4).sum((1, 3))
    uniform = hit_probability(32, 16, top_k) * 4 * tokens
    node_skew = visits[0, 1] / uniform
    rows = expected_steps("deduplicated", topology, tokens, top_k, hidden, 2, node_skew)[0]
    exact = planned_steps(make_plan("deduplicated", topology, routing), hidden, 2)[0]
    assert node_skew > 1.02
    assert rows.inter_bytes == pytest.approx(exact.inter_bytes, rel=0.05)


shapes = st.tuples(
    st.builds(Topology, st.integers(1, 9), st.integers(1, 8), st.integers(1, 80)),
    st.integers(1, 16),
    st.integers(4, 64),
)
skews = st.floats(1, 4)


def inter_bytes(mode, topology, top_k, hidden, itemsize, skew):
    """Forward, for so many tokens that the count lists do not matter."""
    steps = expected_steps(mode, topology, 1e12, top_k, hidden, itemsize, skew)
    return sum(step.inter_bytes for step in steps)


@many
@given(shapes, skews, st.sampled_from([2, 4]))
def test_break_even_is_where_expected_bytes_cross(shape, skew, itemsize):
    topology, top_k, hidden = shape
    assume(top_k <= topology.experts and topology.nodes > 1)
    even = break_even(topology, top_k, hidden, itemsize, skew)
    moved = {mode: inter_bytes(mode, topology, top_k, hidden, itemsize, skew) for mode in MODES}
    assert even.hierarchical_over_global == pytest.approx(moved["hierarchical"] / moved["global"], rel=1e-6)
    assert even.deduplicated_over_hierarchical == pytest.approx(moved["deduplicated"] / moved["hierarchical"], rel=1e-6)
    assert even.deduplicated_over_global == pytest.approx(moved["deduplicated"] / moved["global"], rel=1e-6)
    assert even.deduplicated_over_hierarchical <= 1
    assert (even.hierarchical_over_global < 1) == (topology.nodes < even.nodes_limit)


@many
@given(shapes, skews, skews)
def test_skew_favours_the_gather(shape, one, other):
    topology, top_k, hidden = shape
    assume(top_k <= topology.experts)
    low, high = (break_even(topology, top_k, hidden, 2, skew) for skew in sorted((one, other)))
    assert low.nodes_limit <= high.nodes_limit
    assert low.hierarchical_over_global >= high.hierarchical_over_global


@pytest.mark.parametrize(("nodes", "top_k", "wins"), [(2, 4, True), (4, 8, True), (4, 2, False), (8, 4, False)])
def test_break_even_agrees_with_exact_plans(nodes, top_k, wins):
    topology, hidden = Topology(nodes, 2, 32), 64
    moved = {}
    for mode in MODES:
        steps = mean_bytes(mode, topology, top_k, 32, hidden, 2, draws=5)
        moved[mode] = sum(step.inter.sum() for step in steps)
    even = break_even(topology, top_k, hidden, 2)
    assert (even.hierarchical_over_global < 1) == wins == (moved["hierarchical"] < moved["global"])
    assert moved["hierarchical"] / moved["global"] == pytest.approx(even.hierarchical_over_global, rel=0.05)
    assert moved["deduplicated"] / moved["hierarchical"] == pytest.approx(even.deduplicated_over_hierarchical, rel=0.05)


def test_the_closed_form_where_experts_divide():
    even = break_even(Topology(2, 8, 192), 8, 2560, 2, skew=1.25)
    assert even.load == 1.25 * 8
    ratio = (2 * 2560 * 2 + 8 * 8) / (2 * 2560 * 2 + 8)
    assert even.metadata_ratio == pytest.approx(ratio - 1)
    assert even.hierarchical_over_global == pytest.approx(2 * ratio / 10)
    assert even.ep_limit == pytest.approx(8 * 10 / ratio)
    assert even.deduplicated_over_hierarchical == 1, "1.25 * 0.997: no more than every row"


def test_hit_probability_by_enumeration():
    # 2 of 4 experts, 1 on the node: 3 of the 6 pairs hold it
    assert hit_probability(4, 1, 2) == pytest.approx(3 / 6)
    assert hit_probability(4, 0, 2) == 0
    assert hit_probability(4, 3, 2) == 1


def test_one_node_sends_nothing_to_another_and_bf16_is_half():
    for mode in MODES:
        steps = expected_steps(mode, Topology(1, 8, 64), 128, 4, 32, 4)
        assert all(step.inter_bytes == step.inter_peers == 0 for step in steps)
        assert any(step.intra_bytes for step in steps)
        half = expected_steps(mode, Topology(1, 8, 64), 128, 4, 32, 2)
        assert steps[-2].name == half[-2].name
        combine = [(a, b) for a, b in zip(steps, half, strict=True) if a.name.startswith("combine")]
        assert all(a.intra_bytes == 2 * b.intra_bytes for a, b in combine)


@pytest.mark.parametrize(
    ("mode", "top_k", "skew", "message"),
    [("globl", 2, 1, "did you mean 'global'"), ("global", 9, 1, "1 to 8"), ("global", 2, 0.5, "1 or more")],
)
def test_nonsense_is_refused(mode, top_k, skew, message):
    with pytest.raises(RecipeError, match=message):
        expected_steps(mode, Topology(2, 2, 8), 4, top_k, 8, 4, skew)
