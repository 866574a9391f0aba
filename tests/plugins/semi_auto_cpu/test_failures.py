"""These tests check that an error between ranks names the operator, the group and the rank, on each of these ranks.

Delays change nothing; faults are named, or change the result in the way that they should.
"""

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from plugins.errors import ClusterError
from plugins.semi_auto_cpu.collectives import Disturbance
from plugins.semi_auto_cpu.ranks import made_up_name
from tests.plugins.cpu_backend.ranks import heard, stopped_clock, until, waits
from tests.plugins.semi_auto_cpu.collecting import LONG, attributes, collectives, on_ranks

SECONDS = 2.0  # for which a call waits whose end is not to come
OF_TWO, OF_THREE = made_up_name((0, 1)), made_up_name((0, 1, 2))

WORLD = attributes((0, 1, 2), op="sum")
PAIR = attributes((0, 1), op="sum")
LINK = attributes((0, 1), sr_tag=3)


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


def messages(programs, timeout=LONG, test="", meanwhile=lambda every: None):
    """Rank -> what its ClusterError says, "" where it ran through. programs: rank -> calls of `Collectives.run`.
    `meanwhile` is called with the meshes while the ranks run.
    """
    with collectives(len(programs), timeout, test) as every:

        def work(rank):
            try:
                for call in programs[rank]:
                    every[rank].run(*call)
            except ClusterError as error:
                every[rank].mesh.close()
                return str(error)
            every[rank].mesh.close()
            return ""

        with ThreadPoolExecutor(len(programs)) as pool:
            ends = [pool.submit(work, rank) for rank in range(len(programs))]
            meanwhile([each.mesh for each in every])
            return [each.result(LONG) for each in ends]


def stuck(monkeypatch, programs, where, test=""):
    """As `messages`, of ranks that wait for ever: their time is up once each has told the others that it waits in the
    call whose name begins with `where[rank]`.
    """
    clock = stopped_clock(monkeypatch)

    def is_there(mail):
        return clock.places.get(mail, "").startswith(f"rank {mail.rank}, {where[mail.rank]}") and waits(mail)

    def tells(mesh, peer):
        return mesh.rank == peer or (heard(mesh, peer) or "").startswith(f"waits in {where[peer]}")

    def meanwhile(every):
        mails = [mesh._mail for mesh in every]
        until(lambda: all(map(is_there, mails)))
        clock.passes(SECONDS / 2, *mails)
        until(lambda: all(tells(mesh, peer) for mesh in every for peer in range(len(every))))
        clock.passes(SECONDS, *mails)

    return messages(programs, SECONDS, test, meanwhile)


def reduce(attrs=PAIR, size=4, dtype="float32"):
    return "AllReduce", attrs, [ones(size, dtype=dtype)], [ones(size, dtype=dtype)]


def gather(attrs=PAIR, size=4, members=2):
    return "AllGather", attrs, [ones(size)], [ones(size * members)]


def send(tag=3, size=4):
    return "Send", LINK | {"sr_tag": str(tag), "dest_rank": "1"}, [ones(size)], []


def receive(tag=3, size=4, **more):
    return "Receive", LINK | {"sr_tag": str(tag), "src_rank": "0"} | more, [], [ones(size)]


def test_another_operator_at_the_same_place_is_a_mismatch_not_a_hang():
    told = messages([[reduce(), reduce()], [reduce(), gather()]])
    assert told[0] == (
        "rank 0 is at AllReduce, call 1 of ranks 0, 1: sum of float32 [4], "
        "but rank 1 is at AllGather, call 1 of ranks 0, 1: float32 [4]"
    )
    assert told[1].startswith("rank 1 is at AllGather, call 1")


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (reduce(size=5), r"sum of float32 \[5\]"),
        (reduce(dtype="int32"), r"sum of int32 \[4\]"),
        (reduce(PAIR | {"op": "max"}), r"max of float32 \[4\]"),
    ],
)
def test_other_bytes_types_and_operations_are_named(other, what):
    told = messages([[reduce()], [other]])
    assert re.search(rf"rank 0 is at AllReduce.*but rank 1 is at AllReduce, call 0 of ranks 0, 1: {what}", told[0])


def test_another_order_of_the_group_is_named():
    told = messages([[gather()], [gather(attributes((1, 0)))]])
    assert told[0].startswith("rank 0 is at AllGather, call 0 of ranks 0, 1: float32 [4]")
    assert "but rank 1 is at AllGather, call 0 of ranks 1, 0" in told[0]


def test_a_missing_all_reduce_is_found_at_the_next_call():
    told = messages([[reduce(), gather()], [gather()]])
    assert "rank 0 is at AllReduce, call 0" in told[0] and "rank 1 is at AllGather, call 0" in told[0]


def test_counts_that_do_not_meet_are_named():
    def swap(send, receive):
        return "AlltoAllV", attributes((0, 1), block_size=3), [ones(9), np.array(send), receive], [ones(12)]

    told = messages([[swap([1, 2], [1, 1])], [swap([2, 1], [2, 1])]])
    assert "rank 1 sends 6 elements, but the receive counts say 3 (a block has 3 elements)" in told[0]
    assert f"AlltoAllV, call 0 of ranks 0, 1 (group {OF_TWO!r})" in told[0]
    told = messages([[swap([1, 3], [1, 1])], []])
    assert "the send counts add up to 12 elements, but the input has only 9" in told[0]


def test_an_earlier_call_is_not_taken_for_the_one_that_is_due():
    """A member that left out a Broadcast of another's is told at its next call."""
    out = ones(4)
    told = messages([[("Broadcast", PAIR | {"root_rank": "0"}, [out], [out])], [gather()]])
    assert "is at Broadcast, call 0" in told[0] and "rank 1 is at AllGather" in told[0]


def test_a_receive_without_its_send_says_who_waits_for_what_and_who_ended():
    told = messages([[], [receive(micro="2")]])
    where = "rank 1, Receive 0 of sr_tag 3 from rank 0 to rank 1 of micro-batch 2: float32 [4]"
    assert told == ["", f"{where}: rank 0 closed its connection"]


def test_a_time_out_names_operator_group_and_what_the_missing_one_waits_for(monkeypatch):
    programs = [[reduce(WORLD)], [receive(), reduce(WORLD)], [reduce(WORLD)]]
    told = stuck(monkeypatch, programs, ["AllReduce", "Receive", "AllReduce"])
    waits = "Receive 0 of sr_tag 3 from rank 0 to rank 1: float32 [4]"
    ours = f"AllReduce, call 0 of ranks 0, 1, 2 (group {OF_THREE!r}): sum of float32 [4]: no end after 2 s"
    ours += f"; rank 1 has not come (it waits in {waits})"
    # the first to give up takes the others with it; which one that is depends on the machine
    firsts = (f"rank 0, {ours}", f"rank 2, {ours}", f"rank 1, {waits}: no end after 2 s")
    assert any(line.startswith(first) for line in told for first in firsts), told
    assert all("AllReduce, call 0 of ranks 0, 1, 2" in line for line in told)


def test_ranks_in_different_groups_name_both(monkeypatch):
    programs = [[gather(), reduce(WORLD)], [reduce(WORLD), gather()], [reduce(WORLD)]]
    told = stuck(monkeypatch, programs, ["AllGather", "AllReduce", "AllReduce"])
    assert any("what it sent and nobody took: AllReduce, call 0 of ranks 0, 1, 2: sum of float32 [4]" in line
               for line in told)  # fmt: skip


def test_another_tag_of_a_send_names_both_and_who_ended():
    told = messages([[send(tag=4)], [receive(tag=3)]])
    assert told[1] == (
        "rank 1, Receive 0 of sr_tag 3 from rank 0 to rank 1: float32 [4]: rank 0 closed its connection "
        "(what it sent and nobody took: Send 0 of sr_tag 4 from rank 0 to rank 1: float32 [4])"
    )


def test_another_shape_of_a_send_is_named():
    told = messages([[send(size=5)], [receive(size=4)]])
    assert told[1].endswith("expected, but this message arrived: Send 0 of sr_tag 3 from rank 0 to rank 1: float32 [5]")


def test_three_ranks_at_three_operators_each_name_both_others():
    told = messages([[reduce(WORLD | {"op": "median"})], [gather(WORLD, members=3)], [reduce(WORLD)]])
    call = "call 0 of ranks 0, 1, 2:"
    median = f"rank 0 is at AllReduce, {call} median of float32 [4]"
    gathering = f"rank 1 is at AllGather, {call} float32 [4]"
    summing = f"rank 2 is at AllReduce, {call} sum of float32 [4]"
    assert told == [
        f"{median}, but {gathering} and {summing}",
        f"{gathering}, but {median} and {summing}",
        f"{summing}, but {median} and {gathering}",
    ]


def test_a_receive_from_oneself_is_refused():
    told = messages([[("Receive", LINK | {"src_rank": "0"}, [], [ones(4)])], []])
    assert f"rank 0, Receive in group {OF_TWO!r} of ranks [0, 1]: index 0 does not name another member" in told[0]


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
    monkeypatch.setattr("plugins.semi_auto_cpu.collectives.time.sleep", waited.append)
    for rank in (0, 1, 0):
        Disturbance("delay=20 seed=3", rank).begin("AllReduce")
    assert waited[0] == waited[2] != waited[1] and max(waited) <= 0.02


def test_a_dropped_send_is_named_by_the_next_of_its_tag():
    told = messages([[send(), send()], [receive(), receive()]], test="drop:Send:0@0")
    assert told[1] == (
        "rank 1, Receive 0 of sr_tag 3 from rank 0 to rank 1: float32 [4] was expected, "
        "but this message arrived: Send 1 of sr_tag 3 from rank 0 to rank 1: float32 [4]"
    )


def test_a_dropped_last_send_is_named_when_its_rank_waits_elsewhere(monkeypatch):
    programs = [[send(), reduce()], [receive(), reduce()]]
    told = stuck(monkeypatch, programs, ["AllReduce", "Receive"], test="drop:Send")
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
    told = messages([[gather()], [gather()]], test="reverse:AllGather@1")
    assert "AllGather, call 0 of ranks 0, 1: float32 [4], but rank 1 is at AllGather, call 0 of ranks 1, 0" in told[0]
    with collectives(2, test="reverse:AllGather:1") as every:

        def gathered(rank):
            first, second = np.zeros(2), np.zeros(2)
            every[rank].run("AllGather", PAIR, [np.array([rank])], [first])
            every[rank].run("AllGather", PAIR, [np.array([rank])], [second])
            return first.tolist(), second.tolist()

        assert on_ranks(2, gathered) == [([0, 1], [1, 0])] * 2


def test_a_missing_all_reduce_is_named_on_one_rank_and_gives_back_its_input_on_all():
    told = messages([[reduce(), gather()], [reduce(), gather()]], test="skip:AllReduce:0@0")
    assert "rank 0 is at AllGather, call 0" in told[0] and "rank 1 is at AllReduce, call 0" in told[0]
    with collectives(2, test="skip:AllReduce") as every:

        def work(rank):
            out = np.zeros(2)
            every[rank].run("AllReduce", PAIR, [np.full(2, rank + 1.0)], [out])
            return out.tolist()

        assert on_ranks(2, work) == [[1, 1], [2, 2]]


def test_crossing_sends_run_through_buffered_and_wait_for_ever_synchronous(monkeypatch):
    """Two Sends that cross each other end if Sends are buffered and wait for ever if they are synchronous; the dry run
    refuses them, because on NPUs the result depends on how much a Send may buffer.
    """
    to, back = send(), ("Receive", LINK | {"src_rank": "1"}, [], [np.ones(4, "f4")])
    other = ("Send", LINK | {"dest_rank": "0"}, [np.ones(4, "f4")], [])
    programs = [[to, back], [other, receive()]]
    assert messages(programs) == ["", ""]
    assert messages([[to, back], [receive(), other]], test="synchronous") == ["", ""]
    told = stuck(monkeypatch, programs, ["Send", "Send"], test="synchronous")
    assert all("Send 0 of sr_tag 3" in line for line in told)


def test_words_that_mean_nothing_are_refused():
    with pytest.raises(ClusterError, match="TC3_COLLECTIVES_TEST='drop:'"):
        Disturbance("drop:", 0)
    assert Disturbance("", 0).begin("Send") == ""
    with pytest.raises(ClusterError, match=r"TC3_COLLECTIVES_TEST=@gone\.txt: the file cannot be read"):
        Disturbance("@gone.txt", 0)


def test_more_faults_than_a_variable_holds_are_read_from_a_file(tmp_path):
    faults = [f"skip:AllReduce:{number}@{rank}" for number in range(4000) for rank in (0, 1)]
    (tmp_path / "faults.txt").write_text(" ".join([*faults, "reverse:AllGather:0@1"]))
    assert (tmp_path / "faults.txt").stat().st_size > 128 * 1024
    test = Disturbance(f"@{tmp_path}/faults.txt", 1)
    assert [test.begin("AllReduce") for _ in range(2)] == ["skip"] * 2 and test.begin("AllGather") == "reverse"


def test_the_environment_names_faults_for_processes(monkeypatch):
    monkeypatch.setenv("TC3_COLLECTIVES_TEST", "skip:AllReduce")
    with collectives(2, test=None) as every:
        out = np.zeros(1)
        every[1].run("AllReduce", PAIR, [np.full(1, 5.0)], [out])
        assert out == 5
