import copy
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.dryrun.order import Call, check_order, count_groups, programs_of

HIERARCHICAL = "hierarchical_ep/dispatcher.py:10"
DISPATCHER = "moe/token_dispatcher.py:321"


def gather(members, what="4x8 Float32", where=DISPATCHER):
    return Call("AllGather", members, what, where)


def p2p(source, destination, tag):
    return Call("p2p", (source, destination), f"8 Float32, tag {tag}", "Send")


def test_equal_programs_pass():
    group = (0, 1, 2, 3)
    assert check_order({0: [gather(group)] * 3, 2: [gather(group)] * 3}) == []


def test_groups_with_several_compiled_members_are_counted():
    programs = {0: [gather((0, 1)), gather((0, 4)), p2p(0, 4, 1)], 4: [gather((0, 4)), gather((4, 5))]}
    assert count_groups(programs) == {"all": 3, "compared": 1}


def test_ranks_that_were_not_compiled_come_when_needed():
    assert check_order({0: [gather((0, 7)), p2p(0, 9, 1), gather((0, 1))]}) == []


def test_swapped_operators_on_a_group_name_the_key():
    first, second = gather((0, 1)), Call("AlltoAllV", (0, 1), "8 Float32", HIERARCHICAL)
    (line,) = check_order({0: [first, second], 1: [second, first]})
    assert line.startswith("model.model_config.moe_token_dispatcher_type: group of 2 (0, 1): call 1 is AllGather")
    assert "AlltoAllV" in line


def test_swapped_groups_wait_in_a_circle_and_name_the_plugin():
    inner, outer = gather((0, 1), where=HIERARCHICAL), gather((0, 1, 2, 3), where=HIERARCHICAL)
    (line,) = check_order({0: [inner, outer], 1: [outer, inner]})
    assert line.startswith(
        "plugins.hierarchical_ep: these calls wait for each other for ever: rank 0 waits in AllGather"
    )


def test_a_missing_call_is_found():
    (line,) = check_order({0: [gather((0, 1))] * 2, 1: [gather((0, 1))]})
    assert "rank 0's call 2" in line and "rank 1 makes 1 calls" in line


def test_send_without_receive_and_with_another_tag():
    (line,) = check_order({0: [p2p(0, 1, 5)], 1: []})
    assert line.startswith("parallel.pipeline_config.pipeline_scheduler: ") and "no partner" in line
    (line,) = check_order({0: [p2p(0, 1, 5), p2p(0, 1, 6)], 1: [p2p(0, 1, 6), p2p(0, 1, 5)]})
    assert "tag 5" in line and "tag 6" in line


def test_crossing_sends_wait_for_ever():
    """Both send first: as the blocking Sends of a pipeline would."""
    (line,) = check_order({0: [p2p(0, 1, 1), p2p(1, 0, 2)], 1: [p2p(1, 0, 2), p2p(0, 1, 1)]})
    assert "wait for each other" in line


@given(st.integers(2, 5), st.integers(1, 30), st.integers(0, 10**6))
def test_programs_from_one_order_pass_and_a_missing_call_is_seen(ranks, calls, seed):
    """Members that follow one order of the world finish; one that leaves out its last call is found."""
    chosen = random.Random(seed)
    world = [tuple(sorted(chosen.sample(range(ranks), chosen.randint(2, ranks)))) for _ in range(calls)]
    programs = {rank: [gather(members) for members in world if rank in members] for rank in range(ranks)}
    assert check_order(programs) == []
    rank = chosen.randrange(ranks)
    broken = copy.copy(programs)
    if programs[rank]:
        broken[rank] = programs[rank][:-1]
        assert check_order(broken) != []


def test_programs_of_reports():
    report = {
        "rank": 4,
        "graph": {
            "groups": [[4, 5], [0, 4]],
            "collectives": [
                {"op": "AllReduce", "group": 0, "shape": [], "dtype": "Float32", "source": ""},
                {"op": "Send", "group": 1, "shape": [2, 3], "dtype": "Float32", "source": "", "peer": 0, "tag": 1,
                 "micro": 0, "chunk": 1},
                {"op": "Receive", "group": 1, "shape": [2, 3], "dtype": "Float32", "source": "", "peer": 0, "tag": 2,
                 "micro": 0, "chunk": 1},
            ],
        },
    }  # fmt: skip
    reduce, send, receive = programs_of([report])[4]
    assert (reduce.op, reduce.members, reduce.what) == ("AllReduce", (4, 5), "one number Float32")
    assert (send.members, receive.members) == ((4, 0), (0, 4))
    assert send.what == "2x3 Float32, tag 1, micro-batch 0"
    assert send.key == "parallel.pipeline_config.pipeline_scheduler"
    assert reduce.key == "parallel"


@pytest.mark.parametrize(
    ("where", "key"), [("ep_overlap/adapter.py:3", "plugins.ep_overlap"), ("layers.py:1", "parallel")]
)
def test_key_of_a_source(where, key):
    assert gather((0, 1), where=where).key == key
