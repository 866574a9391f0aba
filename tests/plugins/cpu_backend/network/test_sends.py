"""Buffered sends, exchanges that have a name, and what ranks tell each other while they wait."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from plugins.cpu_backend.network import mailbox
from plugins.errors import ClusterError
from tests.plugins.cpu_backend.network.ranks import meshes, on_ranks


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
    monkeypatch.setattr(mailbox, "PATIENCE", 60.0)
    with meshes(2) as mesh:
        mesh[1].close()
        begin = time.monotonic()
        for _ in range(3):
            mesh[0].send(1, 1, np.ones(1 << 20), "lost")
        mesh[0].close()
        assert time.monotonic() - begin < 15


def test_an_exchange_hands_over_whatever_its_peer_sent():
    with meshes(2) as mesh:
        parts = [{1: np.ones(3, np.int32)}, {0: np.empty(0)}]
        got = on_ranks(2, lambda rank: mesh[rank].exchange(1, parts[rank], f"note of {rank}", "here"))
        assert (got[0][1].dtype, got[0][1].shape, got[0][1].note) == ("float64", (0,), "note of 1")
        assert (got[1][0].dtype, got[1][0].shape, got[1][0].note) == ("int32", (3,), "note of 0")


def test_a_rank_that_waits_tells_the_others_and_takes_it_back():
    with meshes(3, timeout=2.4) as mesh, ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(mesh[1].receive, 2, 4, "rank 1, supper")
        time.sleep(0.9)  # more than the quarter of the time after which it tells
        mesh[2].send(1, 4, np.ones(1), "supper")
        waiting.result(20)
        late = pool.submit(mesh[0].receive, 1, 9, "rank 0, breakfast")
        with pytest.raises(ClusterError, match=r"^rank 0, breakfast: no end after 2.4 s; rank 1 has not come$"):
            late.result(20)
        both = [pool.submit(mesh[1].receive, 2, 5, "rank 1, lunch"), pool.submit(mesh[0].receive, 1, 8, "rank 0, tea")]
        with pytest.raises(ClusterError, match=r"rank 1 has not come \(it waits in lunch\)$"):
            both[1].result(20)
        with pytest.raises(ClusterError, match=r"^rank 1, lunch: "):
            both[0].result(20)


def test_what_a_lost_rank_said_and_sent_is_told():
    with meshes(2) as mesh:
        mesh[0].send(1, 3, np.ones(2), "a send of tag 3")
        mesh[0].tell("failed: out of cheese")
        closing = threading.Timer(0.2, mesh[0].close)
        closing.start()
        with pytest.raises(ClusterError) as caught:
            mesh[1].receive(0, 4, "here")
        closing.join()
    assert str(caught.value) == (
        "here: rank 0 closed its connection (it failed: out of cheese; what it sent and nobody took: a send of tag 3)"
    )


def test_names_of_any_length_and_letters_travel():
    with meshes(2) as mesh:
        mesh[0].send(1, 1, np.ones(1), "é" * 5000)
        note = mesh[1].receive(0, 1, "here").note
        assert note == "é" * 2048
