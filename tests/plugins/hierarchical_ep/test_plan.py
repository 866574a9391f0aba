from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import RecipeError
from plugins.hierarchical_ep import reference
from plugins.hierarchical_ep.plan import MODES, make_plan
from plugins.hierarchical_ep.topology import Topology, of_mesh
from tests.plugins.hierarchical_ep.cases import cases, route
from tests.plugins.hierarchical_ep.simulated import execute, execute_backward

HIDDEN, WIDTH = 3, 2
many = settings(max_examples=150)
modes = st.sampled_from(MODES)


class Experts:
    """The experts of every rank on its sorted rows, keeping the gradients of their weights."""

    def __init__(self, topology, rng):
        self.bounds = topology.expert_bounds
        self.w1 = rng.standard_normal((topology.experts, HIDDEN, 2 * WIDTH))
        self.w2 = rng.standard_normal((topology.experts, WIDTH, HIDDEN))
        self.d_w1, self.d_w2 = np.zeros_like(self.w1), np.zeros_like(self.w2)

    def blocks(self, rank, ends):
        starts = [0, *ends[:-1]]
        return zip(range(self.bounds[rank], self.bounds[rank + 1]), starts, ends, strict=False)

    def forward(self, rank, rows, ends):
        out = np.full_like(rows, np.nan)
        for e, start, end in self.blocks(rank, ends):
            out[start:end] = reference.expert(rows[start:end], self.w1[e], self.w2[e])
        return out

    def vjp(self, rank, rows, ends, d_out):
        d_rows = np.full_like(rows, np.nan)
        for e, start, end in self.blocks(rank, ends):
            gradients = reference.expert_backward(rows[start:end], self.w1[e], self.w2[e], d_out[start:end])
            d_rows[start:end] = gradients[0]
            self.d_w1[e] += gradients[1]
            self.d_w2[e] += gradients[2]
        return d_rows


def values(routing, rng):
    tokens = [rng.standard_normal((len(ids), HIDDEN)) for ids in routing]
    probs = [rng.random(ids.shape) for ids in routing]
    return tokens, probs


@pytest.mark.slow
@many
@given(modes, cases())
def test_every_mode_equals_the_reference_forward_and_backward(mode, case):
    topology, routing, rng = case
    tokens, probs = values(routing, rng)
    experts = Experts(topology, rng)
    d_out = [rng.standard_normal(rows.shape) for rows in tokens]
    plan = make_plan(mode, topology, routing)
    out = execute(plan, tokens, probs, experts.forward)
    d_tokens, d_probs = execute_backward(plan, tokens, probs, experts.forward, experts.vjp, d_out)

    whole = [np.concatenate(parts) for parts in (tokens, probs, routing)]
    expected = reference.moe(*whole, experts.w1, experts.w2)
    gradients = reference.moe_backward(*whole, experts.w1, experts.w2, np.concatenate(d_out))
    np.testing.assert_allclose(np.concatenate(out), expected, rtol=0, atol=1e-10)
    ours = (np.concatenate(d_tokens), np.concatenate(d_probs), experts.d_w1, experts.d_w2)
    for value, gradient in zip(ours, gradients, strict=True):
        np.testing.assert_allclose(value, gradient, rtol=0, atol=1e-10)


@many
@given(modes, cases())
def test_no_copy_is_lost_duplicated_or_misrouted(mode, case):
    topology, routing, _ = case
    names = [np.stack([np.full(len(ids), rank), np.arange(len(ids))], 1) for rank, ids in enumerate(routing)]
    arrived = Counter()

    def record(rank, rows, ends):
        start = topology.expert_bounds[rank]
        assert len(rows) == (ends[-1] if len(ends) else 0)
        expert = start + np.searchsorted(ends, np.arange(len(rows)), side="right")
        arrived.update((int(e), int(source), int(token)) for e, (source, token) in zip(expert, rows, strict=True))
        return rows

    execute(make_plan(mode, topology, routing), names, [np.ones(ids.shape, int) for ids in routing], record)
    wanted = Counter(
        (int(e), rank, token) for rank, ids in enumerate(routing) for token, row in enumerate(ids) for e in row
    )
    assert arrived == wanted


@many
@given(modes, cases())
def test_combine_inverts_dispatch(mode, case):
    topology, routing, rng = case
    tokens, probs = values(routing, rng)
    probs = [p / p.sum(1, keepdims=True) for p in probs]
    out = execute(make_plan(mode, topology, routing), tokens, probs, lambda rank, rows, ends: rows)
    for ours, rows in zip(out, tokens, strict=True):
        np.testing.assert_allclose(ours, rows, rtol=0, atol=1e-12)


@many
@given(modes, cases())
def test_counts_match(mode, case):
    topology, routing, _ = case
    plan = make_plan(mode, topology, routing)
    load = np.bincount(np.concatenate(routing).ravel(), minlength=topology.experts)
    for rank, index in enumerate(plan.ranks):
        np.testing.assert_array_equal(index.counts, load[slice(*topology.expert_bounds[rank : rank + 2])])
        copies = plan.dispatch[-1]
        assert plan.send_counts(copies, rank).sum() == len(index.copy_row)
        assert plan.recv_counts(copies, rank).sum() == len(index.order) == index.counts.sum()
        np.testing.assert_array_equal(index.order[index.inverse], np.arange(len(index.order)))
        for step in plan.dispatch[:-1]:
            assert plan.recv_counts(step, rank).sum() == len(index.row_rank)
    for step in plan.forward + plan.backward:
        allowed = np.zeros_like(step.rows, bool)
        for group in step.groups:
            allowed[np.ix_(group, group)] = True
        assert not step.rows[~allowed].any(), "rows leave the group"
    for forward, back in zip(plan.dispatch, reversed(plan.combine), strict=True):
        np.testing.assert_array_equal(forward.rows, back.rows.T)
    kinds = [step.kind for step in plan.forward]
    if mode == "hierarchical":
        assert kinds == ["all_gather", "all_to_all_v", "all_to_all_v", "reduce_scatter"]


@many
@given(cases())
def test_a_deduplicated_row_crosses_once_to_each_node_that_needs_it(case):
    topology, routing, _ = case
    inter = make_plan("deduplicated", topology, routing).dispatch[0]
    for rank, ids in enumerate(routing):
        needed = [set(topology.node_of(topology.owner(row)).tolist()) for row in ids]
        visits = Counter(node for nodes in needed for node in nodes)
        for member in topology.inter_group(rank):
            assert inter.rows[rank, member] == visits[int(topology.node_of(member))]


@many
@given(cases())
def test_deduplicated_rows_are_at_most_the_gathered_and_at_most_the_copies(case):
    topology, routing, _ = case
    rows = {mode: make_plan(mode, topology, routing).dispatch[0].rows for mode in MODES}
    gathered, deduplicated = rows["hierarchical"], rows["deduplicated"]
    assert (deduplicated <= gathered).all()
    copies_to_node = rows["global"].reshape(topology.ep, topology.nodes, -1).sum(2)
    for rank in range(topology.ep):
        assert (deduplicated[rank, list(topology.inter_group(rank))] <= copies_to_node[rank]).all()


def test_copies_are_sorted_by_expert_then_row_then_choice():
    routing = [np.array([[2, 0], [0, 1]]), np.array([[0, 2]])]
    plan = make_plan("global", Topology(1, 2, 3), routing)
    first = plan.ranks[0]
    assert list(zip(first.copy_expert, first.copy_row, first.copy_choice, strict=True)) == [
        (0, 0, 1),
        (0, 1, 0),
        (1, 1, 1),
        (2, 0, 0),
    ]
    assert plan.dispatch[0].rows.tolist() == [[3, 1], [1, 1]]
    assert first.order.tolist() == [0, 1, 3, 2], "expert 0 of both ranks, then expert 1"
    assert first.ends.tolist() == [3, 4]


def test_repeated_experts_in_a_row_are_computed_twice():
    topology, rng = Topology(2, 1, 2), np.random.default_rng(0)
    routing = [np.array([[1, 1]]), np.array([[0, 1]])]
    tokens, probs = values(routing, rng)
    for mode in MODES:
        out = execute(make_plan(mode, topology, routing), tokens, probs, lambda rank, rows, ends: rows)
        np.testing.assert_allclose(out[0], probs[0].sum() * tokens[0])


def test_the_plan_of_a_real_size_is_quick():
    topology, rng = Topology(2, 8, 192), np.random.default_rng(0)
    plan = make_plan("deduplicated", topology, route(topology, 8, [1024] * 16, "skewed", rng))
    assert sum(index.counts.sum() for index in plan.ranks) == 16 * 1024 * 8


def test_an_unknown_mode_is_refused():
    with pytest.raises(RecipeError, match="did you mean 'hierarchical'"):
        make_plan("hierachical", Topology(1, 1, 1), [np.zeros((1, 1), int)])


def layer(seed=0, tokens=11, hidden=4, width=3, experts=6, top_k=3):
    rng = np.random.default_rng(seed)
    ids = np.array([rng.permutation(experts - 1)[:top_k] for _ in range(tokens)])  # the last expert stays empty
    shapes = [(tokens, hidden), (tokens, top_k), (experts, hidden, 2 * width), (experts, width, hidden)]
    x, probs, w1, w2 = (rng.standard_normal(shape) for shape in shapes)
    return x, probs, ids, w1, w2, rng.standard_normal((tokens, hidden))


def test_a_token_is_the_weighted_sum_of_its_experts():
    x, probs, ids, w1, w2, _ = layer()
    for token, out in enumerate(reference.moe(x, probs, ids, w1, w2)):
        parts = [
            share * reference.expert(x[token, None], w1[e], w2[e])[0]
            for e, share in zip(ids[token], probs[token], strict=True)
        ]
        np.testing.assert_allclose(out, sum(parts), rtol=0, atol=1e-12)


@pytest.mark.parametrize("which", [0, 1, 3, 4])
def test_gradients_are_finite_differences(which):
    *inputs, d_out = layer(seed=which)
    gradients = dict(zip((0, 1, 3, 4), reference.moe_backward(*inputs, d_out), strict=True))
    direction = np.random.default_rng(9).standard_normal(inputs[which].shape)
    ends = []
    for step in (1e-6, -1e-6):
        moved = list(inputs)
        moved[which] = inputs[which] + step * direction
        ends.append((reference.moe(*moved) * d_out).sum())
    assert (gradients[which] * direction).sum() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6)


topologies = st.builds(Topology, st.integers(1, 6), st.integers(1, 9), st.integers(1, 70))


@given(topologies)
def test_every_expert_has_one_owner_and_blocks_differ_by_at_most_one(topology):
    owner = topology.owner(np.arange(topology.experts))
    np.testing.assert_array_equal(np.bincount(owner, minlength=topology.ep), topology.experts_per_rank)
    assert (np.diff(owner) >= 0).all(), "blocks are contiguous"
    counts = topology.experts_per_rank
    assert counts.sum() == topology.experts
    assert (np.diff(counts) <= 0).all()
    assert counts.max() - counts.min() <= 1


@given(topologies)
def test_ranks_are_node_major_and_groups_cover_them(topology):
    ranks = np.arange(topology.ep)
    np.testing.assert_array_equal(topology.node_of(ranks) * topology.devices_per_node + topology.local_of(ranks), ranks)
    for groups in (topology.inter_groups, topology.intra_groups):
        assert sorted(rank for group in groups for rank in group) == ranks.tolist()
    for rank in ranks.tolist():
        assert set(topology.inter_group(rank)) & set(topology.intra_group(rank)) == {rank}
        assert len(set(topology.node_of(np.array(topology.intra_group(rank))))) == 1
        assert len(set(topology.local_of(np.array(topology.inter_group(rank))))) == 1
        assert len(topology.inter_group(rank)) == topology.nodes


@given(topologies)
def test_experts_of_nodes_are_those_of_their_ranks(topology):
    node = topology.node_of(topology.owner(np.arange(topology.experts)))
    for n in range(topology.nodes):
        first, last = topology.experts_of_node(n)
        np.testing.assert_array_equal(np.flatnonzero(node == n), np.arange(first, last))
        assert last - first == topology.experts_per_node[n]


def test_the_layout_of_mindformers():
    topology = of_mesh(16, 8, 192)
    assert (topology.nodes, topology.devices_per_node) == (2, 8)
    assert topology.inter_group(11) == (3, 11)
    assert topology.intra_group(11) == tuple(range(8, 16))
    assert topology.experts_of_node(1) == (96, 192)
    assert of_mesh(4, 8, 192) == Topology(1, 4, 192)


@pytest.mark.parametrize(
    ("ep", "devices", "experts", "message"),
    [
        (12, 8, 64, r"^parallel_config\.expert_parallel: 12 .* write 8 or 16"),
        (3, 8, 64, r"^parallel_config\.expert_parallel: 3 .* write 2 or 4"),
        (20, 8, 24, r"20 is not a multiple of the 8 devices of a node; write 8 or 24"),
        (3, 8, 9, r"3 does not divide .*; no degree above 1 fits 9 experts on such nodes"),
        (0, 8, 64, "expert_parallel is 0"),
        (8, 0, 64, "devices_per_node is 0"),
        (8, 8, 0, "experts is 0"),
    ],
)
def test_nonsense_is_refused(ep, devices, experts, message):
    with pytest.raises(RecipeError, match=message):
        of_mesh(ep, devices, experts)
