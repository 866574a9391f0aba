"""Who writes what, and what it costs, against slow counting."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.weights.test_reshard import slices_of
from tools.weights.reshard_plan import Plan, numbers, plan_moves
from tools.weights.reshard_target import Layout


@st.composite
def layouts(draw, axes):
    """A layout of a tensor of `axes` axes whose lengths 8 divides: a matrix of up to eight devices, on one stage."""
    devices = tuple(draw(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3)))
    cutting = draw(st.permutations(range(len(devices))))
    count = draw(st.integers(0, len(devices)))
    owners = [draw(st.integers(0, axes - 1)) for _ in range(count)]
    own = tuple(tuple(a for a, o in zip(cutting, owners, strict=False) if o == axis) for axis in range(axes))
    return Layout(devices, own, draw(st.sampled_from([0, 2])))


def slow_places(layout):
    """rank -> its slice, as MindFormers' `_get_global_offset_and_replica_id_from_layout` counts: digit by digit."""
    found = {}
    for rank, index in enumerate(np.ndindex(*layout.devices)):
        place, stride = 0, 1
        for axis in reversed([axis for own in layout.axes for axis in own]):
            place += index[axis] * stride
            stride *= layout.devices[axis]
        found[layout.first + rank] = place
    return found


@settings(max_examples=60)
@given(layouts(2), layouts(2))
def test_the_costs_of_a_plan_are_those_of_moving_each_number(old, new):
    shape, world = (8, 16), 10
    whole = np.arange(math.prod(shape)).reshape(shape)
    moves = plan_moves([("a", "F32", "model", old.lying(shape), new)], world)
    found = numbers(Plan(moves, (), world, "x"))
    before, after = slices_of(whole, old.cuts), slices_of(whole, new.cuts)
    had, gets = slow_places(old), slow_places(new)
    online = dict.fromkeys(range(world), 0)
    for rank, place in gets.items():
        online[rank] = sum(part.size for part in before if np.isin(part, after[place]).any())
    stays = sum(
        np.isin(after[place], before[had[rank]]).sum() for place, rank in enumerate(moves[0].writers) if rank in had
    )
    assert all(gets[rank] == place for place, rank in enumerate(moves[0].writers)), "a writer is a holder"
    assert found.bytes == 4 * whole.size and found.changing == 4 * (whole.size - stays)
    assert (found.online, found.online_rank) == (4 * sum(online.values()), 4 * max(online.values()))
    assert found.loading == 4 * sum(after[place].size for place in gets.values())


def test_copies_are_written_once_and_dealt_evenly():
    layout = Layout((4,), ((),), 0)
    moves = plan_moves([(str(i), "F32", "model", layout.lying((8,)), layout) for i in range(8)], 4)
    assert sorted(move.writers for move in moves) == sorted([(rank,) for rank in range(4)] * 2)


def test_a_layout_in_mindspores_words():
    layout = Layout((2, 1, 2), ((2, 0), ()), 4)
    assert layout.lying((8, 6)).holders == ((4,), (6,), (5,), (7,))
    assert layout.as_metadata() == {
        "device_matrix": [2, 1, 2],
        "tensor_map": [[0, 2], -1],
        "interleaved_parallel": False,
        "alias_name": ["a", "b", "c"],
        "rank_list": [4, 5, 6, 7],
    }
