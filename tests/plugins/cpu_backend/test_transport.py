import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.cpu_backend import mailbox
from plugins.cpu_backend.transport import Mesh
from plugins.errors import ClusterError
from tests.plugins.cpu_backend.ranks import LONG, has, heard, meshes, on_ranks, stopped_clock, until, waits


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
    early.join(LONG)
    assert not early.is_alive()


def test_64_mebibytes_both_ways_at_once(mesh):
    pair = [2, 3]
    rows = 64 * 2**20 // (8 * 1024)
    data = [np.full((rows, 1024), rank, np.float64) for rank in range(2)]
    received = on_ranks(2, lambda i: mesh[pair[i]].all_to_all_v(pair, 8, [data[i], data[i]], rows=[rows, rows]))
    assert received[0][1].nbytes == 64 * 2**20
    assert (received[0][1] == 1).all() and (received[1][0] == 0).all()


def test_sends_of_a_tag_arrive_in_order_with_their_notes_and_are_copies():
    with meshes(2) as mesh:
        x = np.arange(6).reshape(2, 3)
        for number in range(3):
            mesh[0].send(1, 5, x + number, f"number {number}")
        mesh[0].send(1, 6, x[:, ::2], "another tag")
        mesh[0].send(1, 5, x, "last")
        x[:] = 77
        got = mesh[1].receive(0, 6, "here")
        np.testing.assert_array_equal(got.array(x.dtype), [[0, 2], [3, 5]])
        for number in range(3):
            frame = mesh[1].receive(0, 5, "here")
            assert frame.note == f"number {number}" and frame.array(x.dtype)[0, 0] == number
        assert mesh[1].receive(0, 5, "here").array(x.dtype)[1, 2] == 5


def test_a_send_leaves_before_its_mesh_closes():
    with meshes(2) as mesh:
        big = np.ones(1 << 21)
        mesh[0].send(1, 1, big, "big")
        mesh[0].close()
        assert mesh[1].receive(0, 1, "here").array(big.dtype).sum() == big.size
        with pytest.raises(ClusterError, match=r"^here: rank 0 closed its connection$"):
            mesh[1].receive(0, 1, "here")


def test_a_send_to_a_rank_that_is_gone_neither_raises_nor_keeps_close_waiting(monkeypatch):
    monkeypatch.setattr(mailbox, "LEAVING", 3600.0)  # seconds, for which a close that waited would hang
    with meshes(2, timeout=3600.0) as mesh:
        mesh[1].close()
        for _ in range(3):
            mesh[0].send(1, 1, np.ones(1 << 20), "lost")
        mesh[0].close()


def test_an_exchange_hands_over_whatever_its_peer_sent():
    with meshes(2) as mesh:
        parts = [{1: np.ones(3, np.int32)}, {0: np.empty(0)}]
        got = on_ranks(2, lambda rank: mesh[rank].exchange(1, parts[rank], f"note of {rank}", "here"))
        assert (got[0][1].dtype, got[0][1].shape, got[0][1].note) == ("float64", (0,), "note of 1")
        assert (got[1][0].dtype, got[1][0].shape, got[1][0].note) == ("int32", (3,), "note of 0")


def test_a_rank_that_waits_tells_the_others_and_takes_it_back(monkeypatch):
    clock = stopped_clock(monkeypatch)
    with meshes(3, timeout=2.4) as mesh, ThreadPoolExecutor(2) as pool:
        mails = [each._mail for each in mesh]
        waiting = pool.submit(mesh[1].receive, 2, 4, "rank 1, supper")
        until(lambda: waits(mails[1]))
        clock.passes(0.5, mails[1])
        assert heard(mesh[0], 1) is None  # it has not waited for a quarter of the time yet
        clock.passes(0.2, mails[1])
        until(lambda: heard(mesh[0], 1) == "waits in supper")
        mesh[2].send(1, 4, np.ones(1), "supper")
        waiting.result(LONG)
        until(lambda: heard(mesh[0], 1) == "")
        late = pool.submit(mesh[0].receive, 1, 9, "rank 0, breakfast")
        until(lambda: waits(mails[0]))
        clock.passes(2.5, mails[0])
        with pytest.raises(ClusterError, match=r"^rank 0, breakfast: no end after 2.4 s; rank 1 has not come$"):
            late.result(LONG)
        lunch = pool.submit(mesh[1].receive, 2, 5, "rank 1, lunch")
        until(lambda: waits(mails[1]))
        clock.passes(0.7, mails[1])
        until(lambda: heard(mesh[0], 1) == "waits in lunch")
        tea = pool.submit(mesh[0].receive, 1, 8, "rank 0, tea")
        until(lambda: waits(mails[0]))
        clock.passes(2.5, *mails)
        with pytest.raises(ClusterError, match=r"rank 1 has not come \(it waits in lunch\)$"):
            tea.result(LONG)
        with pytest.raises(ClusterError, match=r"^rank 1, lunch: "):
            lunch.result(LONG)


def test_what_a_lost_rank_said_and_sent_is_told():
    with meshes(2) as mesh:
        mesh[0].send(1, 3, np.ones(2), "a send of tag 3")
        mesh[0].tell("failed: out of cheese")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(mesh[1].receive, 0, 4, "here")
            until(lambda: waits(mesh[1]._mail))
            mesh[0].close()
            with pytest.raises(ClusterError) as caught:
                waiting.result(LONG)
    assert str(caught.value) == (
        "here: rank 0 closed its connection (it failed: out of cheese; what it sent and nobody took: a send of tag 3)"
    )


def test_names_of_any_length_and_letters_travel():
    with meshes(2) as mesh:
        mesh[0].send(1, 1, np.ones(1), "é" * 5000)
        note = mesh[1].receive(0, 1, "here").note
        assert note == "é" * 2048


ROOT = Path(__file__).resolve().parents[3]


def test_wrong_row_count_names_the_rank_and_both_counts():
    with meshes(2) as mesh:
        parts = [np.ones((3, 2)), np.ones((5, 2))]
        other = threading.Thread(target=mesh[1].all_to_all_v, args=([0, 1], 9, parts))
        other.start()
        with pytest.raises(
            ClusterError,
            match="rank 0, exchange with tag 9: other ranks sent wrong numbers of rows: "
            "rank 1 sent 3 rows where 4 were planned",
        ):
            mesh[0].all_to_all_v([0, 1], 9, parts, rows=[3, 4])
        other.join(LONG)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (np.ones((2, 3), np.float16), r"rank 1 sent float16 \[rows, 3\], but float32 \[rows, 3\] was expected"),
        (np.ones((2, 4), np.float32), r"rank 1 sent float32 \[rows, 4\], but float32 \[rows, 3\] was expected"),
        (np.ones((2, 3, 1), np.float32), r"rank 1 sent float32 \[rows, 3, 1\], but float32 \[rows, 3\] was expected"),
    ],
)
def test_other_dtype_or_trailing_shape_names_the_rank(sent, message):
    with meshes(2) as mesh:

        def other():
            with pytest.raises(ClusterError, match="rank 0 sent float32"):
                mesh[1].all_to_all_v([0, 1], 9, [sent, sent])

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(other)
            with pytest.raises(ClusterError, match=message):
                mesh[0].all_to_all_v([0, 1], 9, [np.ones((2, 3), np.float32)] * 2)
            done.result(LONG)


def test_another_tag_is_a_time_out_that_names_the_rank_and_what_it_sent(monkeypatch):
    clock = stopped_clock(monkeypatch)
    with meshes(2, timeout=1.5) as mesh:

        def work(rank):
            with pytest.raises(ClusterError) as caught:
                mesh[rank].all_to_all_v([0, 1], 40 + rank, [np.ones((1, 1))] * 2)
            return str(caught.value)

        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(work, rank) for rank in range(2)]
            until(lambda: has(mesh[0], 1, 41) and has(mesh[1], 0, 40))
            until(lambda: all(waits(each._mail) for each in mesh))
            clock.passes(1.5, *(each._mail for each in mesh))
            told = [each.result(LONG) for each in both]
    assert told[0] == "rank 0, tag 40: no end after 1.5 s; rank 1 sent nothing of this tag, but of tags [41]"
    assert told[1] == "rank 1, tag 41: no end after 1.5 s; rank 0 sent nothing of this tag, but of tags [40]"


def test_an_exchange_after_a_time_out_is_refused_not_answered_with_the_late_frame(monkeypatch):
    clock = stopped_clock(monkeypatch)
    with meshes(2, timeout=0.2) as mesh, ThreadPoolExecutor(1) as pool:
        ones = [np.ones((1, 1))] * 2
        first = pool.submit(mesh[0].all_to_all_v, [0, 1], 1, ones)
        until(lambda: waits(mesh[0]._mail))
        clock.passes(0.3, mesh[0]._mail)
        with pytest.raises(ClusterError, match="rank 1 sent nothing"):
            first.result(LONG)
        mesh[1].all_to_all_v([0, 1], 1, ones)
        with pytest.raises(
            ClusterError, match="rank 1 sent its exchange number 0 with this tag, but number 1 was expected"
        ):
            mesh[0].all_to_all_v([0, 1], 1, ones)


def test_a_peer_that_never_reads_is_a_time_out_for_the_sender(monkeypatch):
    clock = stopped_clock(monkeypatch)
    mesh = Mesh(0, 2, timeout=0.3)
    address = mesh.listen()
    with ThreadPoolExecutor(1) as pool, mesh, socket.create_connection(address) as deaf:
        mailbox.greet(deaf, 1, 2)
        mesh.connect([address, address])
        mailbox.send(deaf, mailbox.pack(1, 0, np.ones((1, 1))))
        until(lambda: has(mesh, 1, 1))
        huge = np.ones((4 << 20, 1))
        sending = pool.submit(mesh.all_to_all_v, [0, 1], 1, [huge, huge])
        until(lambda: waits(mesh._mail))
        clock.passes(0.3, mesh._mail)
        with pytest.raises(ClusterError, match="rank 1 does not take what is sent to it"):
            sending.result(LONG)


def test_bytes_that_are_no_frame_lose_the_peer():
    mesh = Mesh(0, 2, timeout=LONG)
    address = mesh.listen()
    with mesh, socket.create_connection(address) as liar:
        mailbox.greet(liar, 1, 2)
        mesh.connect([address, address])
        liar.sendall(b"GET / HTTP/1.1\r\n" * 20)
        with pytest.raises(ClusterError, match="rank 1 sent bytes that are not a frame"):
            mesh.all_to_all_v([0, 1], 1, [np.ones((1, 1))] * 2)


def test_strangers_are_hung_up_on_and_do_not_disturb():
    every = [Mesh(rank, 2) for rank in range(2)]
    addresses = [mesh.listen() for mesh in every]
    with socket.create_connection(addresses[0]) as stranger, socket.create_connection(addresses[0]) as silent:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        silent.close()
        on_ranks(2, lambda rank: every[rank].connect(addresses, timeout=LONG))
        # its unread bytes may turn the hang-up into a reset
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    for mesh in every:
        mesh.close()


def test_connecting_names_who_is_absent_unreachable_or_of_another_run():
    mesh = Mesh(0, 3)
    address = mesh.listen()
    with pytest.raises(ClusterError, match=r"rank 0: ranks \[1, 2\] did not connect in time"):
        mesh.connect([address] * 3, timeout=0.2)
    upper = Mesh(1, 2)
    own = upper.listen()
    with socket.socket() as deaf:  # has a port, at which it does not listen, and which nobody else gets
        deaf.bind(("127.0.0.1", 0))
        where = deaf.getsockname()
        with pytest.raises(ClusterError, match=f"rank 1 cannot connect to rank 0 at 127.0.0.1:{where[1]}: .*refused"):
            upper.connect([where, own], timeout=LONG)
    mesh, middle, upper = Mesh(0, 2), Mesh(1, 3), Mesh(2, 3)
    address, between, own = mesh.listen(), middle.listen(), upper.listen()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(upper.connect, [address, between, own], LONG)
        with pytest.raises(ClusterError, match="rank 2 of 3 connected to rank 0 of 2: the ranks do not belong to one"):
            mesh.connect([address, own], timeout=LONG)
        other.result(LONG)
    upper.close()
    middle.close()


def test_a_group_without_this_rank_is_refused():
    with pytest.raises(ClusterError, match=r"rank 0 exchanges data in the group \[1, 2\]"):
        Mesh(0, 3).all_to_all_v([1, 2], 1, [np.ones((1, 1))] * 2)


def test_close_ends_threads_and_exchanges_in_flight():
    before = set(threading.enumerate())

    def ours():
        return [each for each in threading.enumerate() if each not in before and each.name.startswith("mesh rank ")]

    with meshes(4) as mesh:
        assert len(ours()) == 4 * 3 * 2
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(mesh[0].all_to_all_v, [0, 1], 1, [np.ones((1, 1))] * 2)
            until(lambda: waits(mesh[0]._mail))
            mesh[0].close()
            with pytest.raises(ClusterError, match="rank 0, tag 1: the mesh of this rank was closed"):
                waiting.result(LONG)
        with pytest.raises(ClusterError, match="closed"):
            mesh[0].all_to_all_v([0, 1], 1, [np.ones((1, 1))] * 2)
        mesh[0].close()
    assert not ours()


def test_a_peer_may_close_as_soon_as_it_has_its_parts():
    for _ in range(20):
        with meshes(2) as mesh:

            def work(rank, mesh=mesh):
                received = mesh[rank].all_to_all_v([0, 1], 1, [np.full((5000, 8), rank)] * 2)
                mesh[rank].close()
                return received

            assert [int(received[1][0, 0]) for received in on_ranks(2, work)] == [1, 1]


WORKER = """
import sys
import numpy as np
from plugins.cpu_backend.transport import Mesh
from plugins.errors import ClusterError
rank, size = int(sys.argv[1]), int(sys.argv[2])
mesh = Mesh(rank, size, timeout=600)
print(mesh.listen()[1], flush=True)
mesh.connect([("127.0.0.1", int(port)) for port in input().split()])
try:
    while True:
        mesh.all_to_all_v(range(size), 1, [np.ones((64, 64))] * size)
        print("turn", flush=True)
except ClusterError as error:
    print("error", error, flush=True)
# no close: an exit must not hang on what is open
"""


def test_a_killed_process_is_named_by_all_others():
    command = [sys.executable, "-c", WORKER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    ranks = [subprocess.Popen([*command, str(rank), "4"], **pipes) for rank in range(4)]
    try:
        ports = " ".join(worker.stdout.readline().strip() for worker in ranks)
        for worker in ranks:
            worker.stdin.write(ports + "\n")
            worker.stdin.flush()
        assert ranks[2].stdout.readline() == "turn\n"
        ranks[2].send_signal(signal.SIGKILL)
        for rank in (0, 1, 3):
            out, _ = ranks[rank].communicate(timeout=LONG)
            told = out.splitlines()[-1]
            assert told.startswith(f"error rank {rank}, tag 1: ") and re.search(r"rank 2\b", told), told
            assert ranks[rank].returncode == 0
    finally:
        for worker in ranks:
            worker.kill()
            worker.communicate()
