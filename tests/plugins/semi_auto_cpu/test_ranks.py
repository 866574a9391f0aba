"""Which ranks a group has whose name is all that MindSpore's C++ tells, and which place a rank has in it."""

from itertools import chain, combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import ClusterError
from plugins.semi_auto_cpu.communication import CollectiveManager
from plugins.semi_auto_cpu.ranks import Ranks, made_up_name, members_of

# read off MindSpore 2.9.0: parameter_layout_dict of compiles for 4 and 8 devices
NAMED = {
    (0, 2): "2-5208665662337742843",
    (1, 3): "2-4190060298023907007",
    (0, 1): "2-5004544844489628105",
    (1, 3, 5, 7): "4-2688051859485673701",
}
MESHES = ((2, 2), (4, 2), (2, 4), (2, 2, 2), (2, 2, 2, 2), (3, 2), (2, 3), (6, 4), (2, 3, 2), (5, 3), (4, 2, 3, 2))


def groups_of(mesh, shards):
    """Slowly: every group of ranks that differ along some axes of a mesh only, cut into groups of `shards` ranks."""
    places = list(product(*(range(length) for length in mesh)))  # rank -> coordinates
    axes = chain.from_iterable(combinations(range(len(mesh)), count) for count in range(1, len(mesh) + 1))
    for varied in axes:
        together = {}
        for rank, place in enumerate(places):
            together.setdefault(tuple(x for axis, x in enumerate(place) if axis not in varied), []).append(rank)
        for group in together.values():
            size = shards if len(group) % shards == 0 else len(group)
            yield from (tuple(group[start : start + size]) for start in range(0, len(group), size))


def test_names_are_those_that_mindspore_gives():
    assert {ranks: made_up_name(ranks) for ranks in NAMED} == NAMED


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shards", [2, 3, 4, 1000])
def test_a_rank_knows_its_place_in_every_group_of_a_mesh(mesh, shards):
    devices = len(list(product(*(range(length) for length in mesh))))
    for group in set(groups_of(mesh, shards)):
        for place, rank in enumerate(group):
            ranks = Ranks(devices, rank)
            name = made_up_name(group)
            assert (ranks.ranks_of(name), ranks.rank_in(name), ranks.size_of(name)) == (group, place, len(group))


@settings(deadline=None)
@given(st.data(), st.integers(2, 48))
def test_pairs_of_any_ranks_are_known_and_other_ranks_groups_are_not(data, devices):
    first, second = sorted(data.draw(st.lists(st.integers(0, devices - 1), min_size=2, max_size=2, unique=True)))
    name = made_up_name((first, second))
    for rank in range(devices):
        assert members_of(name, devices, rank) == ((first, second) if rank in (first, second) else None)


def test_a_place_that_nothing_tells_is_refused():
    """No answer is better than a wrong one: it decides which slice of a weight a rank has."""
    ranks = Ranks(8, 1)
    told = r"rank 1 needs its place in group '3-77', whose ranks are unknown: MindSpore itself named"
    for ask in (ranks.rank_in, CollectiveManager(ranks).get_rank_id, CollectiveManager(ranks).get_group_ranks):
        with pytest.raises(ClusterError, match=told):
            ask("3-77")
    assert ranks.ranks_of("3-77") is None and ranks.size_of("3-77") == 3
    with pytest.raises(ClusterError, match="unknown"):
        ranks.rank_in(made_up_name((0, 2)))  # a group of others


def test_a_rank_of_many_devices_is_found():
    devices, rank = 6144, 3000
    group = tuple(range(rank % 8, devices, 8))
    assert members_of(made_up_name(group), devices, rank) == group
