"""Workers as processes: asked, given up on, ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from tools.doctor.probe.run import ROOT, Seat, Team

CORE = min(os.sched_getaffinity(0))
# answers as a worker does, in ways that a real one cannot be made to
FAKE = """
import json, os, sys, time
for line in sys.stdin:
    command = json.loads(line)["do"]
    if command == "hang": time.sleep(600)
    if command == "end": print("out of memory", file=sys.stderr); os._exit(3)
    print("words of a library"); print("tc3-probe " + json.dumps({"value": command}), flush=True)
"""


@pytest.fixture
def fake(monkeypatch):
    """Seats whose workers are FAKE."""
    monkeypatch.setattr(Seat, "command", lambda seat: [sys.executable, "-c", FAKE])
    return [Seat(0), Seat(1)]


def test_what_a_library_prints_is_no_answer(fake):
    with Team(fake) as team:
        assert team.ask({0: {"do": "a"}, 1: {"do": "b"}}) == {0: "a", 1: "b"}


def test_a_worker_that_does_not_answer_is_given_up_and_the_others_go_on(fake):
    with Team(fake) as team:
        team.ask({0: {"do": "a"}, 1: {"do": "b"}})  # both are up
        began = time.monotonic()
        assert team.ask({0: {"do": "hang"}, 1: {"do": "b"}}, patience=5) == {1: "b"}
        assert time.monotonic() - began < 60
        assert [member.failed for member in team.members] == ["hang: no answer within 5 s", ""]
        assert team.ask({0: {"do": "a"}, 1: {"do": "b"}}) == {1: "b"}


def test_a_worker_that_ends_says_why(fake):
    with Team(fake) as team:
        assert team.ask({0: {"do": "end"}, 1: {"do": "b"}}) == {1: "b"}
        assert team.members[0].failed == "end: ended with exit code 3: out of memory"


def test_a_seat_that_cannot_be_taken_leaves_no_other_worker_behind(fake, monkeypatch):
    commands = iter([[sys.executable, "-c", FAKE], ["no-such-command"]])
    monkeypatch.setattr(Seat, "command", lambda seat: next(commands))
    before = set(psutil.Process().children())
    with pytest.raises(FileNotFoundError), Team(fake):
        pass
    assert set(psutil.Process().children()) == before


def test_a_real_worker_is_bound_and_says_what_it_cannot_do(tmp_path):
    with Team([Seat(0, [CORE])]) as team:
        start = {"do": "start", "cores": [CORE], "npu": False, "folder": str(tmp_path / "missing"), "kind": ""}
        assert team.ask({0: start})[0]["kind"].endswith(", 1 core")
        worker = psutil.Process(team.members[0].process.pid)
        assert {tuple(os.sched_getaffinity(thread.id)) for thread in worker.threads()} == {(CORE,)}
        assert team.ask({0: {"do": "disk", "size": 1024}}) == {}
        assert team.members[0].failed.startswith("disk: FileNotFoundError")
    assert not worker.is_running()


def test_workers_end_with_whoever_started_them():
    """Also where that one was killed and could clean up nothing."""
    parent = """
import sys, time
from tools.doctor.probe.run import Seat, Team
with Team([Seat(0), Seat(1)]) as team:
    print(*(member.process.pid for member in team.members), flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with process:
        workers = [psutil.Process(int(word)) for word in process.stdout.readline().split()]
        process.kill()
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == []


def test_each_worker_has_as_many_threads_as_cores_and_its_npu():
    assert Seat(0, [4, 5, 6]).environment()["OPENBLAS_NUM_THREADS"] == "3"
    assert Seat(0).environment()["OMP_NUM_THREADS"] == "1"
    assert Seat(0, npu=5).environment()["ASCEND_RT_VISIBLE_DEVICES"] == "5"
