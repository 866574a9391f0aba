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

from plugins.cpu_backend.network import frames
from plugins.cpu_backend.network.transport import Mesh
from plugins.errors import ClusterError
from tests.plugins.cpu_backend.network.ranks import meshes, on_ranks

ROOT = Path(__file__).resolve().parents[3]


def test_wrong_row_count_names_the_rank_and_both_counts():
    with meshes(2) as mesh:
        parts = [np.ones((3, 2)), np.ones((5, 2))]
        other = threading.Thread(target=mesh[1].all_to_all_v, args=([0, 1], 9, parts))
        other.start()
        with pytest.raises(ClusterError, match="rank 0, tag 9: rank 1 sent 3 rows where 4 were planned"):
            mesh[0].all_to_all_v([0, 1], 9, parts, rows=[3, 4])
        other.join(20)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (np.ones((2, 3), np.float16), r"rank 1 sent float16 \[rows, 3\] where float32 \[rows, 3\] is due"),
        (np.ones((2, 4), np.float32), r"rank 1 sent float32 \[rows, 4\] where float32 \[rows, 3\] is due"),
        (np.ones((2, 3, 1), np.float32), r"rank 1 sent float32 \[rows, 3, 1\] where float32 \[rows, 3\] is due"),
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
            done.result(20)


def test_another_tag_is_a_time_out_that_names_the_rank_and_what_it_sent():
    with meshes(2, timeout=1.5) as mesh:

        def work(rank):
            with pytest.raises(ClusterError) as caught:
                mesh[rank].all_to_all_v([0, 1], 40 + rank, [np.ones((1, 1))] * 2)
            return str(caught.value)

        told = on_ranks(2, work)
    assert told[0] == "rank 0, tag 40: no end after 1.5 s; rank 1 sent nothing of this tag, but of tags [41]"
    assert told[1] == "rank 1, tag 41: no end after 1.5 s; rank 0 sent nothing of this tag, but of tags [40]"


def test_an_exchange_after_a_time_out_is_refused_not_answered_with_the_late_frame():
    with meshes(2, timeout=0.2) as mesh:
        ones = [np.ones((1, 1))] * 2
        with pytest.raises(ClusterError, match="rank 1 sent nothing"):
            mesh[0].all_to_all_v([0, 1], 1, ones)
        late = threading.Thread(target=mesh[1].all_to_all_v, args=([0, 1], 1, ones))
        late.start()
        late.join(20)
        with pytest.raises(ClusterError, match="rank 1 is at exchange 0 of this tag where 1 is due"):
            mesh[0].all_to_all_v([0, 1], 1, ones)


def test_a_peer_that_never_reads_is_a_time_out_for_the_sender():
    mesh = Mesh(0, 2, timeout=0.3)
    address = mesh.listen()
    with mesh, socket.create_connection(address) as deaf:
        frames.greet(deaf, 1, 2)
        mesh.connect([address, address])
        frames.send(deaf, frames.pack(1, 0, np.ones((1, 1))))
        huge = np.ones((4 << 20, 1))
        with pytest.raises(ClusterError, match="rank 1 does not take what is sent to it"):
            mesh.all_to_all_v([0, 1], 1, [huge, huge])


def test_bytes_that_are_no_frame_lose_the_peer():
    mesh = Mesh(0, 2, timeout=20)
    address = mesh.listen()
    with mesh, socket.create_connection(address) as liar:
        frames.greet(liar, 1, 2)
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
        on_ranks(2, lambda rank: every[rank].connect(addresses, timeout=20))
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
    with pytest.raises(ClusterError, match=f"rank 1 cannot connect to rank 0 at 127.0.0.1:{address[1]}: .*refused"):
        upper.connect([address, own], timeout=20)
    mesh, middle, upper = Mesh(0, 2), Mesh(1, 3), Mesh(2, 3)
    address, between, own = mesh.listen(), middle.listen(), upper.listen()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(upper.connect, [address, between, own], 20)
        with pytest.raises(ClusterError, match="rank 2 of 3 connected to rank 0 of 2: the ranks do not belong to one"):
            mesh.connect([address, own], timeout=20)
        other.result(20)
    upper.close()
    middle.close()


def test_a_group_without_this_rank_is_refused():
    with pytest.raises(ClusterError, match=r"rank 0 exchanges in the group \[1, 2\]"):
        Mesh(0, 3).all_to_all_v([1, 2], 1, [np.ones((1, 1))] * 2)


def test_close_ends_threads_and_exchanges_in_flight():
    before = threading.active_count()
    with meshes(4) as mesh:
        assert threading.active_count() == before + 4 * 3 * 2
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(mesh[0].all_to_all_v, [0, 1], 1, [np.ones((1, 1))] * 2)
            time.sleep(0.1)
            mesh[0].close()
            with pytest.raises(ClusterError, match="rank 0, tag 1: the mesh of this rank was closed"):
                waiting.result(20)
        with pytest.raises(ClusterError, match="closed"):
            mesh[0].all_to_all_v([0, 1], 1, [np.ones((1, 1))] * 2)
        mesh[0].close()
    assert threading.active_count() == before


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
from plugins.cpu_backend.network.transport import Mesh
from plugins.errors import ClusterError
rank, size = int(sys.argv[1]), int(sys.argv[2])
mesh = Mesh(rank, size, timeout=60)
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
            out, _ = ranks[rank].communicate(timeout=20)
            told = out.splitlines()[-1]
            assert told.startswith(f"error rank {rank}, tag 1: ") and "rank 2 " in told, told
            assert ranks[rank].returncode == 0
    finally:
        for worker in ranks:
            worker.kill()
            worker.communicate()
