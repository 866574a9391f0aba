"""These tests probe this host, and check the pairs of a ring and workers that fail."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from tools.doctor import probe
from tools.doctor.outliers import gate
from tools.doctor.probe import ROOT, Member, Seat, Team

LONG = 300.0  # seconds: a bound against hangs
CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture
def short(monkeypatch):
    """Pieces of a few milliseconds."""
    for piece in ("MATMUL", "MEMORY", "LINK"):
        monkeypatch.setattr(probe, piece, 0.01)
    monkeypatch.setattr(probe, "DISK", 4096)


@pytest.mark.slow
def test_a_probe_of_two_workers_here(tmp_path, short):
    report = probe.measure([Seat(rank, [CORES[rank % len(CORES)]]) for rank in range(2)], tmp_path / "new" / "run", 2)
    assert report["folder"] == str(tmp_path) and not list(tmp_path.iterdir()) and report["device"] == "CPU"
    for worker in report["workers"]:
        assert worker["failed"] == "" and worker["kind"].endswith(", 1 core")
        for measure in ("matmul", "memory", "disk"):
            assert len(worker[measure]) == 2 and min(worker[measure]) > 0
        assert all(0 <= share <= 1 for share in worker["waited"] + worker["throttled"])
    assert [(link["source"], link["target"]) for link in report["links"]] == [(0, 1), (1, 0)]
    assert [len(link["bandwidth"]) for link in report["links"]] == [2, 2]
    assert all(0 <= share <= 1 for link in report["links"] for share in link["waited"])
    assert [len(link["latency"]) for link in report["links"]] == [2, 0]


def test_a_worker_that_cannot_write_fails_the_gate(tmp_path, short, monkeypatch):
    seats = [Seat(0), Seat(1)]
    start = probe._start
    monkeypatch.setattr(probe, "_start", lambda seat, folder: start(seat, folder + "/missing" * seat.rank))
    verdict = gate({"": probe.measure(seats, tmp_path, 1)})
    assert verdict.verdict == "fail" and verdict.reasons[0].startswith("worker 1: disk: FileNotFoundError")


@pytest.mark.slow
def test_a_link_that_cannot_be_reached_is_named_and_the_workers_go_on(tmp_path, short, monkeypatch):
    """127.0.0.2 is this host's, too, but the second worker listens only at 127.0.0.1."""
    monkeypatch.setattr(probe.Course, "_address", lambda course, index: ["127.0.0.1", "127.0.0.2"][index])
    report = probe.measure([Seat(0), Seat(1)], tmp_path, 2)
    assert [len(worker["matmul"]) for worker in report["workers"]] == [2, 2]
    assert [worker["failed"] for worker in report["workers"]] == ["", ""]
    assert [bool(link["failed"]) for link in report["links"]] == [True, False]
    assert "refused" in report["links"][0]["failed"] and len(report["links"][1]["bandwidth"]) == 2


@pytest.mark.parametrize(("count", "links"), [(1, 0), (2, 1), (3, 3), (4, 6), (5, 10), (8, 20), (64, 64 * 5 + 32)])
def test_pairs_of_a_ring(count, links):
    found = probe.pairs(count)
    assert len(found) == len(set(found)) == links and all(0 <= a < b < count for a, b in found)
    if count > 1:
        assert {worker for pair in found for worker in pair} == set(range(count))


def test_workers_that_nobody_counted_are_one_a_core(monkeypatch, tmp_path):
    asked = {}

    def measure(seats, folder, rounds, notes):
        asked.update(seats=seats, notes=notes)

    monkeypatch.setattr(probe, "measure", measure)
    probe.probe(None, None, tmp_path)
    assert len(asked["seats"]) == min(probe.MOST, len(CORES))
    assert sorted(core for seat in asked["seats"] for core in seat.cores)[: len(asked["seats"])]
    probe.probe(None, len(CORES) + 1, tmp_path)
    assert [list(seat.cores) for seat in asked["seats"]] == [[]] * (len(CORES) + 1) and "none is bound" in asked[
        "notes"
    ][0]


CORE = min(os.sched_getaffinity(0))
# answers as a worker does, in ways that a real one cannot be made to
FAKE = """
import json, os, sys, time
for line in sys.stdin:
    command = json.loads(line)["do"]
    if command == "hang": time.sleep(3600)
    if command == "end": print("out of memory", file=sys.stderr); os._exit(3)
    sys.stdout.write("words of a library\\ntc3-probe " + json.dumps({"value": command}) + "\\n")  # at once
    sys.stdout.flush()
"""


@pytest.fixture
def fake(monkeypatch):
    """Seats whose workers are FAKE."""
    monkeypatch.setattr(Seat, "command", lambda seat: [sys.executable, "-c", FAKE])
    return [Seat(0), Seat(1)]


def test_what_a_library_prints_is_no_answer(fake):
    with Team(fake) as team:
        assert team.ask({0: {"do": "a"}, 1: {"do": "b"}}) == {0: "a", 1: "b"}


def test_a_worker_that_does_not_answer_is_given_up_and_the_others_go_on(fake, monkeypatch):
    clock, take = [0.0], Team._take

    def taken(*arguments):
        take(*arguments)
        clock[0] += 5.0  # the time of the second question is up with the first answer to it

    monkeypatch.setattr(Team, "_take", taken)
    monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with Team(fake) as team:
        assert team.ask({0: {"do": "a"}, 1: {"do": "b"}}, patience=LONG) == {0: "a", 1: "b"}
        assert team.ask({0: {"do": "hang"}, 1: {"do": "b"}}, patience=5) == {1: "b"}
        assert [member.failed for member in team.members] == ["hang: no answer within 5 s", ""]
        assert team.ask({0: {"do": "a"}, 1: {"do": "b"}}, patience=LONG) == {1: "b"}


def test_an_answer_that_came_while_we_were_held_up_counts(fake, monkeypatch):
    """This process may be stopped, or wait for a core, until the time is up."""
    send, times = Member.send, iter([0.0])

    def slowly(member, command):
        send(member, command)
        select.select([member.process.stdout], [], [])

    monkeypatch.setattr(Member, "send", slowly)
    monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=lambda: next(times, 1e6)))
    with Team(fake) as team:
        assert team.ask({0: {"do": "a"}, 1: {"do": "b"}}) == {0: "a", 1: "b"}


def test_a_worker_that_ends_says_why(fake):
    with Team(fake) as team:
        assert team.ask({0: {"do": "end"}, 1: {"do": "b"}}) == {1: "b"}
        assert team.members[0].failed == "end: ended with exit code 3: out of memory"


def test_a_seat_that_cannot_be_taken_leaves_no_other_worker_behind(fake, monkeypatch):
    commands = iter([[sys.executable, "-c", FAKE], ["no-such-command"]])
    monkeypatch.setattr(Seat, "command", lambda seat: next(commands))
    before = set(psutil.Process().children())  # of other tests
    with pytest.raises(FileNotFoundError), Team(fake):
        pass
    assert set(psutil.Process().children()) <= before


def test_a_real_worker_is_bound_and_says_what_it_cannot_do(tmp_path):
    with Team([Seat(0, [CORE])]) as team:
        start = {"do": "start", "cores": [CORE], "npu": False, "folder": str(tmp_path / "missing"), "kind": ""}
        assert team.ask({0: start})[0]["kind"].endswith(", 1 core")
        worker = psutil.Process(team.members[0].process.pid)
        assert {tuple(os.sched_getaffinity(thread.id)) for thread in worker.threads()} == {(CORE,)}
        assert team.ask({0: {"do": "disk", "size": 1024}}) == {}
        assert team.members[0].failed.startswith("disk: FileNotFoundError")
    assert not worker.is_running()


@pytest.mark.slow
def test_workers_end_with_whoever_started_them():
    """Also where that one was killed and could clean up nothing."""
    parent = """
import sys, time
from tools.doctor.probe import Seat, Team
with Team([Seat(0), Seat(1)]) as team:
    print(*(member.process.pid for member in team.members), flush=True)
    time.sleep(3600)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with process:
        workers = [psutil.Process(int(word)) for word in process.stdout.readline().split()]
        process.kill()
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=LONG)
    assert alive == []


def test_each_worker_has_as_many_threads_as_cores_and_its_npu():
    assert Seat(0, [4, 5, 6]).environment()["OPENBLAS_NUM_THREADS"] == "3"
    assert Seat(0).environment()["OMP_NUM_THREADS"] == "1"
    assert Seat(0, npu=5).environment()["ASCEND_RT_VISIBLE_DEVICES"] == "5"
