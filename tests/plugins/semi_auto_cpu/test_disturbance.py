"""Delays change nothing; faults are named, or change the result in the way that they should."""

import numpy as np
import pytest

from plugins.errors import ClusterError
from plugins.semi_auto_cpu.exchange.disturbance import Disturbance
from tests.plugins.semi_auto_cpu.collecting import attributes, collectives, on_ranks
from tests.plugins.semi_auto_cpu.test_failures import LINK, PAIR, gather, messages, receive, reduce, send

WORLD = attributes((0, 1, 2), op="sum")


def step(one, rank):
    """A small pipeline behind sums of all: what a rank has at its end."""
    rng = np.random.default_rng(rank)
    x = rng.normal(size=(6, 4)).astype("f4")
    for micro in range(6):
        if rank:
            arrived = np.zeros_like(x)
            link = attributes((rank - 1, rank), sr_tag=micro % 2, src_rank=0)
            one.run("Receive", link, [], [arrived])
            x = x * np.float32(0.9) + arrived
        if rank < 2:
            one.run("Send", attributes((rank, rank + 1), sr_tag=micro % 2, dest_rank=1), [x], [])
        total, part, whole = np.empty_like(x), np.empty((2, 4), "f4"), np.empty((6, 4), "f4")
        if micro == 5:
            one.run("AllReduce", WORLD, [x], [total])
            one.run("ReduceScatter", WORLD, [total], [part])
            one.run("AllGather", WORLD, [part], [whole])
            x = x + whole
    return x.tobytes()


def test_results_do_not_depend_on_delays():
    results = set()
    for test in ("", "delay=4 seed=1", "delay=4 seed=2"):
        with collectives(3, test=test) as every:
            results.add(tuple(on_ranks(3, lambda rank, every=every: step(every[rank], rank))))
    assert len(results) == 1


def test_delays_differ_by_rank_and_repeat_by_seed(monkeypatch):
    waited = []
    monkeypatch.setattr("plugins.semi_auto_cpu.exchange.disturbance.time.sleep", waited.append)
    for rank in (0, 1, 0):
        Disturbance("delay=20 seed=3", rank).begin("AllReduce")
    assert waited[0] == waited[2] != waited[1] and max(waited) <= 0.02


def test_a_dropped_send_is_named_by_the_next_of_its_tag():
    told = messages([[send(), send()], [receive(), receive()]], timeout=20, test="drop:Send:0@0")
    assert told[1] == (
        "rank 1, Receive 0 of sr_tag 3 from rank 0 to rank 1: float32 [4] is due, "
        "and arrived is Send 1 of sr_tag 3 from rank 0 to rank 1: float32 [4]"
    )


def test_a_dropped_last_send_is_named_when_its_rank_waits_elsewhere():
    told = messages([[send(), reduce()], [receive(), reduce()]], test="drop:Send")
    assert any("rank 1, Receive 0 of sr_tag 3 from rank 0 to rank 1: float32 [4]" in line for line in told)
    assert any("AllReduce, call 0 of ranks 0, 1" in line for line in told)


def test_a_receive_that_is_left_out_shifts_those_behind_it_and_hangs_where_sends_wait():
    with collectives(2, test="skip:Receive:0@1") as every:

        def work(rank):
            out = np.ones((2, 4), "f4")
            for number in range(2):
                if rank:
                    every[1].run("Receive", LINK | {"src_rank": "0"}, [], [out[number]])
                else:
                    every[0].run("Send", LINK | {"dest_rank": "1"}, [np.full(4, number + 5, "f4")], [])
            return out[:, 0].tolist()

        assert on_ranks(2, work)[1] == [0, 5]
    told = messages([[send(), send()], [receive(), receive()]], test="skip:Receive:0@1 synchronous")
    assert told[0].startswith("rank 0, Send 1 of sr_tag 3 from rank 0 to rank 1: float32 [4]: rank 1 closed")


def test_the_wrong_order_of_a_group_is_named_on_one_rank_and_shows_in_the_result_on_all():
    told = messages([[gather()], [gather()]], timeout=20, test="reverse:AllGather@1")
    assert "AllGather, call 0 of ranks 0, 1: float32 [4], where rank 1 is at AllGather, call 0 of ranks 1, 0" in told[0]
    with collectives(2, test="reverse:AllGather:1") as every:

        def gathered(rank):
            first, second = np.zeros(2), np.zeros(2)
            every[rank].run("AllGather", PAIR, [np.array([rank])], [first])
            every[rank].run("AllGather", PAIR, [np.array([rank])], [second])
            return first.tolist(), second.tolist()

        assert on_ranks(2, gathered) == [([0, 1], [1, 0])] * 2


def test_a_missing_all_reduce_is_named_on_one_rank_and_gives_back_its_input_on_all():
    told = messages([[reduce(), gather()], [reduce(), gather()]], timeout=20, test="skip:AllReduce:0@0")
    assert "rank 0 is at AllGather, call 0" in told[0] and "rank 1 is at AllReduce, call 0" in told[0]
    with collectives(2, test="skip:AllReduce") as every:

        def work(rank):
            out = np.zeros(2)
            every[rank].run("AllReduce", PAIR, [np.full(2, rank + 1.0)], [out])
            return out.tolist()

        assert on_ranks(2, work) == [[1, 1], [2, 2]]


def test_crossing_sends_run_through_buffered_and_wait_for_ever_synchronous():
    """What the dry run's check refuses: on NPUs it depends on how much a Send may leave behind."""
    to, back = send(), ("Receive", LINK | {"src_rank": "1"}, [], [np.ones(4, "f4")])
    other = ("Send", LINK | {"dest_rank": "0"}, [np.ones(4, "f4")], [])
    programs = [[to, back], [other, receive()]]
    assert messages(programs, timeout=20) == ["", ""]
    told = messages(programs, test="synchronous")
    assert all("Send 0 of sr_tag 3" in line for line in told)
    assert messages([[to, back], [receive(), other]], timeout=20, test="synchronous") == ["", ""]


def test_words_that_mean_nothing_are_refused():
    with pytest.raises(ClusterError, match="TC3_COLLECTIVES_TEST='drop:'"):
        Disturbance("drop:", 0)
    assert Disturbance("", 0).begin("Send") == ""


def test_the_environment_names_faults_for_processes(monkeypatch):
    monkeypatch.setenv("TC3_COLLECTIVES_TEST", "skip:AllReduce")
    with collectives(2, test=None) as every:
        out = np.zeros(1)
        every[1].run("AllReduce", PAIR, [np.full(1, 5.0)], [out])
        assert out == 5
