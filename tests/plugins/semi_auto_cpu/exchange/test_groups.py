import pytest

from plugins.errors import ClusterError
from plugins.semi_auto_cpu.exchange.groups import Groups
from plugins.semi_auto_cpu.ranks import Ranks, made_up_name


@pytest.fixture
def groups():
    ranks = Ranks(8, 2)
    ranks.create("tp", [2, 3])
    return Groups(ranks)


def test_what_python_created_comes_before_attributes(groups):
    assert groups.members("AllGather", {"group": "tp", "rank_list": "(0, 1, 2, 3)"}) == (2, 3)


@pytest.mark.parametrize(
    "stated", [{"rank_list": "(2, 6)"}, {"group_rank_ids": "[2, 6]"}, {"group_ranks": "2-6"},
               {"rank_list": "(0, 1)", "group_rank_ids": "(2, 6)"}]
)  # fmt: skip
def test_attributes_state_the_ranks_of_what_nobody_created(groups, stated):
    assert groups.members("AllReduce", {"group": made_up_name((2, 6))} | stated) == (2, 6)


def test_a_name_that_mindspore_makes_of_other_ranks_is_refused(groups):
    """Weights are cut by the name, and gathered from the ranks that the operator states."""
    told = rf"rank 2: AllGather says that group .* of which .* '{made_up_name((2, 6))}'"
    with pytest.raises(ClusterError, match=told):
        groups.members("AllGather", {"group": made_up_name((1, 2)), "rank_list": "(2, 6)"})


def test_the_world(groups):
    attrs = {"group": "hccl_world_group", "group_ranks": "WORLD_GROUP"}
    assert groups.members("AllReduce", attrs) == tuple(range(8))


def test_a_group_created_later_is_found(groups):
    with pytest.raises(ClusterError):
        groups.members("AllGather", {"group": "late"})
    groups.ranks.create("late", [1, 2])
    assert groups.members("AllGather", {"group": "late"}) == (1, 2)


def test_unknown_groups_and_strangers_are_told(groups):
    with pytest.raises(ClusterError, match=r"rank 2: AllToAll uses group 'ep', .* known are tp, hccl_world_group"):
        groups.members("AllToAll", {"group": "ep"})
    with pytest.raises(ClusterError, match=r"rank 2 runs AllGather in group '2-9' of ranks \[0, 1\]: it is none"):
        groups.members("AllGather", {"group": "2-9", "rank_list": "(0, 1)"})
    with pytest.raises(ClusterError, match=r"Send: group '2-9' of ranks \[2, 9\] is no group of 8 processes"):
        groups.members("Send", {"group": "2-9", "group_ranks": "2-9"})
