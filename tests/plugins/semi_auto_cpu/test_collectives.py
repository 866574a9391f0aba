import functools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import ClusterError
from plugins.semi_auto_cpu.collectives import Groups
from plugins.semi_auto_cpu.ranks import Ranks, made_up_name
from tests.plugins.semi_auto_cpu.collecting import attributes, collectives, on_ranks


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
    told = rf"the attributes of AllGather say that group .* MindSpore would name a .*'{made_up_name((2, 6))}'"
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
    with pytest.raises(
        ClusterError, match=r"rank 2: AllToAll uses group 'ep', .* known groups are tp, hccl_world_group"
    ):
        groups.members("AllToAll", {"group": "ep"})
    with pytest.raises(ClusterError, match=r"rank 2 runs AllGather in group '2-9' of ranks \[0, 1\], but is not one"):
        groups.members("AllGather", {"group": "2-9", "rank_list": "(0, 1)"})
    with pytest.raises(
        ClusterError,
        match=r"Send: group '2-9' of ranks \[2, 9\] is not possible: a rank is listed twice",
    ):
        groups.members("Send", {"group": "2-9", "group_ranks": "2-9"})


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WORLD = (0, 1, 2)


@pytest.fixture(scope="module")
def three():
    with collectives(3) as every:
        yield every


def run(every, name, attrs, inputs, shapes, dtype=None, members=WORLD):
    """The first output of each member: inputs[i] are those of members[i]."""

    def work(place):
        outs = [np.full(shape, 77, dtype or inputs[place][0].dtype) for shape in shapes]
        every[members[place]].run(name, attrs, inputs[place], outs)
        return outs

    return on_ranks(len(members), work)


def numbers(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).normal(size=(3, *shape)).astype(dtype)


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8", "bool"])
def test_all_reduce_in_the_order_of_the_group(three, op, dtype):
    x = (numbers(0, 4, 5) * 3).astype(dtype)
    function = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}[op]
    expected = functools.reduce(function, x)
    for (out,) in run(three, "AllReduce", attributes(WORLD, op=op), [[part] for part in x], [(4, 5)]):
        assert out.dtype == dtype
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("float16")])
@pytest.mark.parametrize("size", [7, 50_001])
def test_low_precision_is_added_in_float32_and_rounded_once(three, dtype, size):
    x = numbers(1, size, dtype=dtype)
    expected = (x[0].astype("f4") + x[1].astype("f4") + x[2].astype("f4")).astype(dtype)
    results = run(three, "AllReduce", attributes(WORLD, op="sum"), [[part] for part in x], [(size,)])
    for (out,) in results:
        assert out.tobytes() == expected.tobytes()


def test_a_large_sum_moves_pieces_and_has_the_bits_of_the_sum_in_order(three):
    x = numbers(2, 100, 1001)
    before = [list(one.mesh.sent_bytes) for one in three]
    results = run(three, "AllReduce", attributes(WORLD, op="sum"), [[part] for part in x], [(100, 1001)])
    for (out,) in results:
        assert out.tobytes() == ((x[0] + x[1]) + x[2]).tobytes()
    for one, sent in zip(three, before, strict=True):
        moved = sum(one.mesh.sent_bytes) - sum(sent)
        assert moved == pytest.approx(2 * x[0].nbytes * 2 / 3, rel=1e-3)


def test_a_sum_may_overwrite_its_input(three):
    x = numbers(3, 6)
    expected = (x[0] + x[1]) + x[2]
    mine = x.copy()
    on_ranks(3, lambda rank: three[rank].run("AllReduce", attributes(WORLD, op="sum"), [mine[rank]], [mine[rank]]))
    for rank in range(3):
        assert mine[rank].tobytes() == expected.tobytes()


def test_several_tensors_and_numbers_without_axes(three):
    x, y = numbers(4, 3), numbers(5)
    results = run(three, "AllReduce", attributes(WORLD, op="sum"), [[x[i], y[i]] for i in range(3)], [(3,), ()])
    for first, second in results:
        np.testing.assert_array_equal(first, (x[0] + x[1]) + x[2])
        np.testing.assert_array_equal(second, (y[0] + y[1]) + y[2])


@pytest.mark.parametrize("name", ["AllGather", "_MiniStepAllGather", "_MicroStepAllGather"])
def test_all_gather_ignores_a_second_input(three, name):
    x = numbers(6, 2, 5)
    inputs = [[part] + [np.zeros(9)] * (name == "_MicroStepAllGather") for part in x]
    for (out,) in run(three, name, attributes(WORLD), inputs, [(6, 5)]):
        np.testing.assert_array_equal(out, x.reshape(6, 5))


@pytest.mark.parametrize("op", ["sum", "max"])
def test_reduce_scatter(three, op):
    x = numbers(7, 6, 5)
    expected = (x[0] + x[1]) + x[2] if op == "sum" else x.max(0)
    results = run(three, "ReduceScatter", attributes(WORLD, op=op), [[part] for part in x], [(2, 5)])
    np.testing.assert_array_equal(np.concatenate([out for (out,) in results]), expected)


@pytest.mark.parametrize(("split", "concat"), [(0, 1), (1, 0), (0, 0), (-1, -2), (2, 1)])
def test_all_to_all(three, split, concat):
    x = numbers(8, 3, 6, 9)
    attrs = attributes(WORLD, split_count=3, split_dim=split, concat_dim=concat)
    pieces = [np.split(part, 3, split) for part in x]
    expected = [np.concatenate([pieces[source][me] for source in range(3)], concat) for me in range(3)]
    results = run(three, "AlltoAll", attrs, [[part] for part in x], [expected[0].shape])
    for (out,), due in zip(results, expected, strict=True):
        np.testing.assert_array_equal(out, due)


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=3, max_size=3), st.integers(1, 3))
def test_all_to_all_v_of_uneven_and_empty_parts(three, counts, block):
    counts = np.array(counts)
    x = [np.arange(counts[rank].sum() * block, dtype=np.float32) + 100 * rank for rank in range(3)]
    pieces = [np.split(x[rank], np.cumsum(counts[rank] * block)[:-1]) for rank in range(3)]
    expected = [np.concatenate([pieces[source][me] for source in range(3)]) for me in range(3)]

    def work(rank):
        out = np.full(expected[rank].size + 2, 77, np.float32)
        three[rank].run(
            "AlltoAllV", attributes(WORLD, block_size=block), [x[rank], counts[rank], tuple(counts[:, rank])], [out]
        )
        return out

    for out, due in zip(on_ranks(3, work), expected, strict=True):
        np.testing.assert_array_equal(out, [*due, 0, 0])


@pytest.mark.parametrize(("members", "root"), [((0, 1, 2), 2), ((0, 2), 2), ((0, 2), 1)])
def test_broadcast_from_a_global_rank_or_a_place(three, members, root):
    x = numbers(9, 4)
    inputs = [[x[rank]] for rank in members]
    for (out,) in run(three, "Broadcast", attributes(members, root_rank=root), inputs, [(4,)], members=members):
        np.testing.assert_array_equal(out, x[2])


@pytest.mark.parametrize("name", ["AllReduce", "AllGather", "ReduceScatter", "Broadcast"])
def test_nothing_at_all_is_exchanged_too(three, name):
    inputs = [[np.zeros((0, 4), np.float32)]] * 3
    for (out,) in run(three, name, attributes(WORLD, op="sum", root_rank=0), inputs, [(0, 4)]):
        assert out.shape == (0, 4)


def test_barrier_waits_for_all(three):
    on_ranks(3, lambda rank: three[rank].run("Barrier", {"group": "hccl_world_group"}, [], []))


def test_a_group_of_one_and_no_group_give_back_what_they_got(three):
    for attrs in (attributes([1]), {}):
        out = np.zeros(3, np.float32)
        three[1].run("AllReduce", attrs, [np.arange(3, dtype=np.float32)], [out])
        np.testing.assert_array_equal(out, [0, 1, 2])


def test_micro_batches_that_share_a_tag_arrive_in_order_and_sends_do_not_wait(three):
    to, back = attributes((0, 2), sr_tag=3, dest_rank=1), attributes((0, 2), sr_tag=3, src_rank=0)
    for micro in range(4):
        three[0].run("Send", to, [np.full(3, micro)], [])
    three[0].run("Send", to | {"sr_tag": "4"}, [np.full(3, 9)], [np.zeros(1)])
    for attrs, due in [(back | {"sr_tag": "4"}, 9), (back, 0), (back, 1), (back, 2), (back, 3)]:
        out = np.zeros(3, int)
        three[2].run("Receive", attrs, [], [out])
        assert (out == due).all()


def test_what_is_sent_may_change_at_once(three):
    x = np.ones(1 << 20)
    three[0].run("Send", attributes((0, 1), sr_tag=9, dest_rank=1), [x], [])
    x[:] = 2
    out = np.zeros_like(x)
    three[1].run("Receive", attributes((0, 1), sr_tag=9, src_rank=0), [], [out])
    assert (out == 1).all()


def test_calls_are_recorded_where_somebody_asks(three):
    one = three[1]

    def gather():
        one.run("AllGather", attributes([1]), [np.zeros((2, 3), np.float32)], [np.zeros((2, 3), np.float32)])

    gather()
    one.begin_recording()
    gather()
    one.run("Send", attributes((1, 2), sr_tag=5, dest_rank=1), [np.zeros(4, BFLOAT16)], [])
    one.run("Barrier", attributes([1]), [], [], record=False)
    first, second = one.end_recording()
    gather()
    assert first == ("AllGather", (1,), 24, (2, 3), "float32", None, None)
    assert second == ("Send", (1, 2), 8, (4,), "bfloat16", 2, 5)
    one.begin_recording()
    assert one.end_recording() == []


def test_an_unknown_operator_lists_the_known():
    with collectives(1) as (one,), pytest.raises(ClusterError, match=r"collective 'CollectiveScatter'.*AllReduce"):
        one.run("CollectiveScatter", attributes([0]), [], [])
