import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.errors import RecipeError
from plugins.hierarchical_ep.topology import Topology, of_mesh

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
        (12, 8, 64, "use 8 or 16"),
        (3, 8, 64, r"\[1, 2, 4, 8\]"),
        (0, 8, 64, "expert_parallel is 0"),
        (8, 0, 64, "devices_per_node is 0"),
        (8, 8, 0, "experts is 0"),
    ],
)
def test_nonsense_is_refused(ep, devices, experts, message):
    with pytest.raises(RecipeError, match=message):
        of_mesh(ep, devices, experts)
