from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import ClusterError
from plugins.hierarchical_ep.plan import MODES, make_plan
from plugins.hierarchical_ep.programs import Call, check_groups, check_programs, creation_orders, programs_of
from plugins.hierarchical_ep.topology import Topology
from tests.plugins.hierarchical_ep.cases import cases, route

many = settings(max_examples=150)


@pytest.mark.slow
@many
@given(st.sampled_from(MODES), cases(), st.integers(1, 3))
def test_planned_programs_pass(mode, case, chunks):
    topology, routing, _ = case
    plans = [make_plan(mode, topology, [ids[c::chunks] for ids in routing]) for c in range(chunks)]
    programs = programs_of(*plans)
    check_programs(programs)
    check_groups(creation_orders(topology))
    if topology.ep > 1:
        assert any(programs)
        created = creation_orders(topology)
        assert all(call.group in created[rank] for rank, program in enumerate(programs) for call in program)


def example(mode="deduplicated"):
    topology, rng = Topology(2, 2, 8), np.random.default_rng(0)
    return programs_of(make_plan(mode, topology, route(topology, 2, [6, 5, 4, 7], "uniform", rng)))


def index_of(program, tag):
    return next(index for index, call in enumerate(program) if tag in call.tag)


def test_calls_are_those_of_the_dispatcher_and_backward_mirrors_them():
    tags = [call.tag.removeprefix("chunk 0 ") for call in example()[0]]
    assert tags == [
        "dispatch.inter.counts",
        "dispatch.inter.meta",
        "dispatch.inter.rows",
        "dispatch.intra.counts",
        "dispatch.intra.meta",
        "dispatch.intra.rows",
        "combine.intra.rows",
        "combine.inter.rows",
        "combine.inter.rows.backward",
        "combine.intra.rows.backward",
        "dispatch.intra.rows.backward",
        "dispatch.intra.meta.backward",
        "dispatch.inter.rows.backward",
        "dispatch.inter.meta.backward",
    ]
    gathered = [call.op for call in example("hierarchical")[0] if "inter.rows" in call.tag]
    assert gathered == ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"]


def test_chunks_run_in_a_wavefront():
    topology, rng = Topology(2, 2, 8), np.random.default_rng(0)
    plans = [make_plan("hierarchical", topology, route(topology, 2, [3] * 4, "uniform", rng)) for _ in range(2)]
    tags = [call.tag for call in programs_of(*plans)[0] if call.tag.endswith("rows")]
    assert tags[:3] == ["chunk 0 dispatch.inter.rows", "chunk 0 dispatch.intra.rows", "chunk 1 dispatch.inter.rows"]
    one_by_one = programs_of(*plans, order=[(chunk, step) for chunk in range(2) for step in range(4)])
    check_programs(one_by_one)
    assert one_by_one != programs_of(*plans)
    mixed = programs_of(*plans)[:3] + one_by_one[3:]
    with pytest.raises(ClusterError, match=r"rank 1, call .* rank 3"):
        check_programs(mixed)


def test_a_rank_with_a_reversed_group_is_found():
    programs = example()
    at = index_of(programs[2], "dispatch.inter.rows")
    programs[2][at] = replace(programs[2][at], group=programs[2][at].group[::-1])
    with pytest.raises(
        ClusterError, match=r"rank 0, call 2 .*\(0, 2\)\): rank 2, call 2 lists the group.s ranks in the order \(2, 0\)"
    ):
        check_programs(programs)


def test_a_wrong_split_list_is_found():
    programs = example()
    at = index_of(programs[3], "dispatch.intra.rows")
    call = programs[3][at]
    programs[3][at] = replace(call, send=(call.send[0] + 1, *call.send[1:]))
    wrong, right = call.send[0] + 1, call.send[0]
    with pytest.raises(ClusterError, match=rf"rank 3 sends {wrong} rows to rank 2, which expects {right}"):
        check_programs(programs)
    programs[3][at] = replace(call, recv=call.recv[:1])
    with pytest.raises(ClusterError, match=r"rank 3, call 5 .* the recv list has 1 entries for 2 members"):
        check_programs(programs)


def test_every_single_wrong_split_is_found():
    for rank, program in enumerate(example("global")):
        for at, call in enumerate(program):
            for member in range(len(call.group) if call.send else 0):
                if call.group[member] != rank:
                    programs = example("global")
                    send = list(call.send)
                    send[member] += 1
                    programs[rank][at] = replace(call, send=tuple(send))
                    with pytest.raises(ClusterError, match=f"rank {rank} sends {send[member]} rows"):
                        check_programs(programs)


def test_every_missing_call_is_found():
    complete = example("hierarchical")
    for rank, program in enumerate(complete):
        for at in range(len(program)):
            programs = [list(calls) for calls in complete]
            lost = programs[rank].pop(at)
            with pytest.raises(ClusterError, match=f"rank {rank}\\b") as error:
                check_programs(programs)
            assert lost.tag in str(error.value)


def test_a_call_too_few_of_the_same_kind_is_found():
    call = Call("all_gather", (0, 1))
    with pytest.raises(
        ClusterError, match=r"rank 0, call 1 .*no call of rank 1 matches this call; rank 1 makes 1 calls"
    ):
        check_programs([[call, call], [call]])


def swap(programs, rank):
    inter, intra = (index_of(programs[rank], f"combine.{leg}.rows") for leg in ("inter", "intra"))
    programs[rank][inter], programs[rank][intra] = programs[rank][intra], programs[rank][inter]
    return intra


def test_swapped_calls_on_two_groups_are_found_where_they_close_a_circle():
    programs = example("hierarchical")
    at = swap(programs, 1)
    check_programs(programs)  # rank 1 waits for 3, 0 for 1, and 3 is on its way: late, but no hang
    swap(programs, 2)
    with pytest.raises(ClusterError, match="wait for each other") as error:
        check_programs(programs)
    assert f"rank 1 is in call {at} (reduce_scatter" in str(error.value)
    assert "waits for rank 3" in str(error.value)


def test_a_circle_of_three_groups_is_found():
    programs = [
        [Call("all_gather", (0, 1)), Call("all_gather", (2, 0))],
        [Call("all_gather", (1, 2)), Call("all_gather", (0, 1))],
        [Call("all_gather", (2, 0)), Call("all_gather", (1, 2))],
    ]
    with pytest.raises(ClusterError, match=r"rank 0 is in call 0 .* rank 1 is in call 0 .* rank 2 is in call 0"):
        check_programs(programs)
    programs[2].reverse()
    check_programs(programs)


@many
@given(st.data(), st.integers(2, 5))
def test_the_verdict_on_two_group_orders_is_that_of_a_search_for_a_circle(data, ranks):
    """Each pair of groups gets an edge where some rank calls one before the other; a hang is a circle of edges."""
    groups = data.draw(
        st.lists(
            st.sets(st.integers(0, ranks - 1), min_size=2).map(lambda g: tuple(sorted(g))), unique=True, max_size=4
        )
    )
    orders = [data.draw(st.permutations([group for group in groups if rank in group])) for rank in range(ranks)]
    after = {group: set() for group in groups}
    for order in orders:
        for first, second in pairwise(order):
            after[first].add(second)
    left = set(groups)
    while removable := {group for group in left if not after[group] & left}:
        left -= removable
    if left:
        with pytest.raises(ClusterError, match="wait for each other"):
            check_groups(orders)
    else:
        check_groups(orders)


def test_members_who_do_not_agree_on_the_group_are_found():
    with pytest.raises(ClusterError, match=r"rank 0, call 0 .*rank 0 is not a member"):
        check_programs([[Call("all_gather", (1, 2))], [], []])
    with pytest.raises(
        ClusterError,
        match=r"rank 1 has no collective in group \(0, 1\), but call 0 of rank 0 is in this group; .*\[\(1, 2\)\]",
    ):
        check_programs([[Call("all_gather", (0, 1))], [Call("all_gather", (1, 2))], [Call("all_gather", (1, 2))]])
    with pytest.raises(ClusterError, match=r"different ranks from 0 to 1"):
        check_programs([[Call("all_gather", (0, 7))], []])
    with pytest.raises(
        ClusterError,
        match=r"this call meets rank 1, call 0 \(reduce_scatter",
    ):
        check_programs([[Call("all_gather", (0, 1))], [Call("reduce_scatter", (0, 1))]])


def test_group_creation_must_be_in_one_order_once_and_by_all_members():
    orders = creation_orders(Topology(2, 2, 4))
    assert orders[3] == [(0, 1, 2, 3), (1, 3), (2, 3)]
    check_groups(orders)
    with pytest.raises(ClusterError, match="wait for each other"):
        check_groups([*orders[:1], orders[1][::-1], *orders[2:]])
    with pytest.raises(ClusterError, match=r"rank 2, group 3: a group of the ranks \(0, 2\) is created twice"):
        check_groups([*orders[:2], [*orders[2], (0, 2)], orders[3]])
    with pytest.raises(ClusterError, match=r"rank 3 has no collective in group \(2, 3\)"):
        check_groups([*orders[:3], orders[3][:2]])
