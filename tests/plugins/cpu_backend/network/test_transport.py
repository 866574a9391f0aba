import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plugins.cpu_backend.network.ranks import meshes, on_ranks


def random_parts(rng, group, width, dtype="float32", most=5):
    """parts[sender][j]: what group[sender] sends to group[j]; the reference is its transpose."""
    return [
        [rng.integers(0, 100, (rng.integers(0, most), width)).astype(dtype) for _ in group]
        for _ in group
    ]  # fmt: skip


def assert_same(received, expected):
    assert len(received) == len(expected)
    for got, want in zip(received, expected, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_random_parts_arrive_and_exactly_their_bytes_are_sent(size):
    rng = np.random.default_rng(size)
    steps = [random_parts(rng, range(size), width=3) for _ in range(5)]
    with meshes(size) as mesh:

        def work(rank):
            return [mesh[rank].all_to_all_v(range(size), 7, parts[rank]) for parts in steps]

        results = on_ranks(size, work)
        for rank in range(size):
            for step, received in zip(steps, results[rank], strict=True):
                assert_same(received, [step[sender][rank] for sender in range(size)])
            plan = [sum(step[rank][to].nbytes for step in steps) if to != rank else 0 for to in range(size)]
            assert mesh[rank].sent_bytes == plan


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.permutations(range(4)), st.integers(1, 4))
def test_any_group_in_any_order(mesh, seed, order, members):
    group = order[:members]
    parts = random_parts(np.random.default_rng(seed), group, width=2)
    received = on_ranks(members, lambda i: mesh[group[i]].all_to_all_v(group, 1, parts[i]))
    for me in range(members):
        assert_same(received[me], [parts[sender][me] for sender in range(members)])


@pytest.fixture(scope="module")
def mesh():
    with meshes(4) as mesh:
        yield mesh


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int32", "int64", "uint8", "bool", "complex64"])
def test_dtypes(mesh, dtype):
    parts = random_parts(np.random.default_rng(0), range(4), 3, dtype)
    received = on_ranks(4, lambda rank: mesh[rank].all_to_all_v(range(4), 2, parts[rank]))
    assert_same(received[2], [parts[sender][2] for sender in range(4)])


def test_bfloat16(mesh):
    bfloat16 = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    parts = random_parts(np.random.default_rng(0), range(4), 3, bfloat16)
    received = on_ranks(4, lambda rank: mesh[rank].all_to_all_v(range(4), 3, parts[rank]))
    assert_same(received[1], [parts[sender][1] for sender in range(4)])


def test_shapes_of_one_and_three_axes_and_views_that_are_not_contiguous(mesh):
    table = np.arange(4 * 6 * 5 * 2, dtype=np.float32).reshape(4, 6, 5, 2)
    views = [[table[rank, j::2, ::-1].transpose(0, 2, 1) for j in range(4)] for rank in range(4)]
    assert not views[0][0].flags.c_contiguous
    received = on_ranks(4, lambda rank: mesh[rank].all_to_all_v(range(4), 4, views[rank]))
    assert_same(received[3], [views[sender][3] for sender in range(4)])
    flat = [[np.arange(10 * rank + j) for j in range(4)] for rank in range(4)]
    received = on_ranks(4, lambda rank: mesh[rank].all_to_all_v(range(4), 4, flat[rank]))
    assert_same(received[0], [flat[sender][0] for sender in range(4)])


def test_no_rows_at_all_and_the_own_part_is_not_copied(mesh):
    parts = [[np.zeros((0, 7), np.float32) for _ in range(4)] for _ in range(4)]
    before = list(mesh[0].sent_bytes)
    received = on_ranks(4, lambda rank: mesh[rank].all_to_all_v(range(4), 5, parts[rank], rows=[0] * 4))
    assert [part.shape for part in received[0]] == [(0, 7)] * 4
    assert received[2][2] is parts[2][2]
    assert mesh[0].sent_bytes == before


def test_received_parts_can_be_written_to(mesh):
    received = on_ranks(4, lambda rank: mesh[rank].all_to_all_v(range(4), 6, [np.ones((2, 2))] * 4))
    received[0][1] += 1
    assert received[0][1].sum() == 8 and received[0][2].sum() == 4


def test_tags_in_flight_from_several_threads_in_different_orders(mesh):
    tags, rounds = 5, 6
    rng = np.random.default_rng(3)
    steps = {(tag, turn): random_parts(rng, range(4), 4) for tag in range(tags) for turn in range(rounds)}

    def work(rank):
        got = {}

        def branch(tag):
            time.sleep(0.005 * ((tag + rank) % tags))
            for turn in range(rounds):
                got[tag, turn] = mesh[rank].all_to_all_v(range(4), 100 + tag, steps[tag, turn][rank])

        with ThreadPoolExecutor(tags) as pool:
            list(pool.map(branch, range(tags)))
        return got

    results = on_ranks(4, work)
    for rank in range(4):
        for key, step in steps.items():
            assert_same(results[rank][key], [step[sender][rank] for sender in range(4)])


def test_opposite_order_of_tags_on_one_thread_each_does_not_block_the_other_direction(mesh):
    # rank 0 has sent tag 1 before rank 1 asks for it: it must wait in memory, not in front of tag 2
    pair = [0, 1]
    big = np.ones((1 << 20, 1), np.float32)
    early = threading.Thread(target=mesh[0].all_to_all_v, args=(pair, 201, [big, big]))
    early.start()
    both = on_ranks(2, lambda rank: mesh[rank].all_to_all_v(pair, 202, [big + rank] * 2))
    assert both[0][1][0, 0] == 2 and both[1][0][0, 0] == 1
    assert_same(mesh[1].all_to_all_v(pair, 201, [big, big]), [big, big])
    early.join(20)
    assert not early.is_alive()


def test_64_mebibytes_both_ways_at_once(mesh):
    pair = [2, 3]
    rows = 64 * 2**20 // (8 * 1024)
    data = [np.full((rows, 1024), rank, np.float64) for rank in range(2)]
    received = on_ranks(2, lambda i: mesh[pair[i]].all_to_all_v(pair, 8, [data[i], data[i]], rows=[rows, rows]))
    assert received[0][1].nbytes == 64 * 2**20
    assert (received[0][1] == 1).all() and (received[1][0] == 0).all()
