"""These tests check what an agent notices while its workers run: the lost link of its host, a stopped worker, and the
fault that made a worker fail.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from launch.agent import lookout as module
from launch.agent import lookout as stuck
from launch.agent.decide import initiator
from launch.agent.disk import Disk
from launch.agent.lookout import Around, Link, Lookout, Place, link_to, place_of, stopped_worker, worker_places
from launch.agent.meeting import Meeting
from launch.agent.part import last_words
from launch.agent.phases import Limits
from launch.run.failure import worker_failure
from launch.run.msrun import ROOT
from tests.launch.agent.clock import LONG
from tests.launch.agent.ends import attempt
from tools.runs.attempts import BEAT, Beat, End, Plan, file_of, folder_of


@pytest.fixture
def interfaces(monkeypatch):
    """A node with loopback, docker's bridge without a link, and eth0; returns what is up."""
    up = {"lo": True, "docker0": False, "eth0": True}
    addresses = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.1"}
    known = {name: [types.SimpleNamespace(address=address)] for name, address in addresses.items()}
    monkeypatch.setattr(module.psutil, "net_if_addrs", lambda: known)
    stats = types.SimpleNamespace
    monkeypatch.setattr(module.psutil, "net_if_stats", lambda: {name: stats(isup=each) for name, each in up.items()})

    class Probe(socket.socket):
        def connect(self, address):
            self.own = "10.0.0.1" if address[0].startswith("10.") else "127.0.0.1"

        def getsockname(self):
            return self.own, 1

    monkeypatch.setattr(module.socket, "socket", Probe)
    return up


@pytest.fixture
def unknown(monkeypatch):
    """A name service that knows no name; returns the names that it was asked for."""
    asked, ask = [], socket.getaddrinfo

    def getaddrinfo(host, *rest, **more):
        if host[0].isdecimal():
            return ask(host, *rest, **more)
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(module.socket, "getaddrinfo", getaddrinfo)
    return asked


def test_a_lost_link_is_said_by_its_own_node(interfaces, unknown):
    link = link_to(["no-such-host.invalid", "10.0.0.2"])
    assert link == Link("eth0") and link.lost() == []
    interfaces["eth0"] = False
    assert link.lost() == ["network interface eth0 has no link"]


def test_a_name_service_that_knows_nobody_is_asked_a_few_times_only(unknown):
    """An agent of 512 nodes waited two minutes for one that was slow, before it gave its first sign of life."""
    assert link_to(f"n{number}" for number in range(512)) == Link(None)
    assert unknown == ["n0", "n1", "n2"]


def test_without_others_or_by_loopback_there_is_no_link_to_lose(interfaces):
    assert link_to([]) == link_to(["127.0.0.1"]) == Link(None)
    assert Link(None).lost() == []
    del interfaces["eth0"]
    assert Link("eth0").lost() == [], "one that is gone altogether was renamed or replaced, which ends no run"


MINDSPORE = find_spec("mindspore").submodule_search_locations[0]
WAITS = f"{MINDSPORE}/common/api.py"
CODE = f"""
import sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from launch.workers import lifetime
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
{{answer}}
def load_next_batch():
    print("ready", flush=True)
    time.sleep(3600)
load_next_batch()
"""


@pytest.fixture
def worker(tmp_path):
    """Start a worker that says when it is where it stays."""
    started = []

    def start(rank, answer="lifetime.answer_with_stacks()"):
        log = tmp_path / f"worker_{rank}.log"
        environ = {**os.environ, "MS_ROLE": "MS_WORKER", "RANK_ID": str(rank)}
        with log.open("wb") as file:
            code = CODE.format(answer=answer)
            process = subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=file, stderr=file)
        started.append(process)
        while "ready" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_each_worker_says_where_it_is_and_lives_on(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ANSWER", LONG)  # seconds: a busy machine's workers take long to say it
    processes = [worker(2), worker(3, answer="pass")]
    found = worker_places(tmp_path, [2, 3])
    assert list(found) == [2], "the other one has no answer, and would have died of the question"
    assert found[2].function == "load_next_batch" and not found[2].waits
    assert [process.poll() for process in processes] == [None, None]


def test_a_stopped_worker_is_found(worker):
    process = worker(5)
    assert stopped_worker() is None
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert stopped_worker() == 5


def test_who_is_in_mindspore_waits():
    said = b"""Step 3
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Thread 0x00007f02 (most recent call first):
  File "%b", line 10 in run_graph
  File "/repo/launch/train.py", line 3 in train
"""
    place = place_of(said % WAITS.encode())
    assert place == Place(WAITS, 10, "run_graph") and place.waits
    assert str(place) == "run_graph (common/api.py:10)"
    assert not Place(f"{MINDSPORE}/dataset/engine/iterators.py", 1, "__next__").waits, "for its own data"
    elsewhere = "/opt/envs/mindspore/lib/python3.11/site-packages/numpy/core/memmap.py"
    assert not Place(elsewhere, 1, "__getitem__").waits, "an environment may have the name of MindSpore"
    assert place_of(b"Step 4\n") is None and place_of(b"Current thread 0x1 (most recent call first):\n") is None


WAITING = Place(WAITS, 10, "run_graph")
LOADING = Place("/data/corpus.py", 7, "read")


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node with workers 8 and 9: what it says of a hang, given its link, who is stopped, and where workers are."""

    def said(lost=(), stopped=None, places=None, behind=None):
        monkeypatch.setattr(Link, "lost", lambda self: list(lost))
        monkeypatch.setattr(stuck, "stopped_worker", lambda: stopped)
        monkeypatch.setattr(stuck, "worker_places", lambda logs, ranks: places or {})
        phases = SimpleNamespace(logs=tmp_path, ranks=range(8, 10), behind=behind, phase="step")
        lookout = Lookout(phases, None, None, lambda: None, None, Link())
        return lookout._own_fault() or lookout._hang(31.0, 30.0)

    return said


@pytest.mark.parametrize(
    ("given", "cause", "rank", "message"),
    [
        ({"lost": ["eth0 has no link"], "stopped": 9}, "lost node", None, "eth0 has no link"),
        ({"stopped": 9, "places": {8: LOADING}}, "hang", 9, "hang: worker 9 is stopped"),
        ({"places": {8: WAITING, 9: LOADING}}, "hang", 9, "hang: worker 9 is in read (data/corpus.py:7)"),
        (
            {"places": {8: WAITING, 9: WAITING}},
            "hang",
            None,
            "hang: nothing moved for 31 s in phase step (limit 30 s); worker 8 waits in run_graph (common/api.py:10)",
        ),
        ({"behind": 8}, "hang", 8, "hang: worker 8 does not move for 31 s in phase step (limit 30 s)"),
    ],
)
def test_the_fault_that_it_knows_best(node, given, cause, rank, message):
    failure = node(**given)
    assert (failure.cause, failure.rank, failure.message) == (cause, rank, message)


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Two nodes of one worker each, whose logs are those of a run under MindSpore whose node b was unplugged.

    (What the lookout of `host` says of the end of its worker, or of the other one's.)
    """
    here = ROOT / "tests/launch/agent/recorded"
    for node, name in ((0, "scheduler"), (0, "worker_0"), (1, "worker_1")):
        (tmp_path / f"node_{node}").mkdir(exist_ok=True)
        shutil.copy(here / f"link_down_{name}.txt", tmp_path / f"node_{node}" / f"{name}.log")
    plan = Plan(0, 1.0, ["a", "b"], 1, "a", 9000)

    def lookout(rank, lost=(), stopped=None, first=None):
        monkeypatch.setattr(Link, "lost", lambda self: list(lost))
        monkeypatch.setattr(stuck, "stopped_worker", lambda: stopped)
        monkeypatch.setattr(
            stuck, "worker_places", lambda logs, ranks: pytest.fail("its workers may be in a save: no hang")
        )
        phases = SimpleNamespace(
            logs=tmp_path / f"node_{rank}", ranks=range(rank, rank + 1), look=lambda: None, clock=lambda: 130.0,
            since=100.0, phase="step", step=12,
        )  # fmt: skip
        meeting = SimpleNamespace(
            now=lambda: 1000.0, beat=lambda *_: None, over=lambda _: "a" if first else None, ended=lambda *_: first
        )
        return Lookout(phases, Around(meeting, plan, "ab"[rank]), Limits(), lambda: None, None, Link())

    def failure(rank, code):
        return worker_failure(tmp_path / f"node_{rank}" / f"worker_{rank}.log", rank, code)

    return lookout, failure


def ended(host, time, failure):
    words = last_words(failure)
    return End(host, time, "failed", "step", 12, failure.cause, failure.rank, failure.code, words)


@pytest.mark.parametrize(
    ("found", "cause"),
    [({"lost": ["network interface eth0 has no link"]}, "lost node"), ({"stopped": 1}, "hang"), ({}, None)],
)
def test_a_worker_that_mindspore_ends_for_anothers_sake_is_not_blamed(recorded, found, cause):
    """Thirty seconds after node b fell silent the scheduler has told worker 0, which ended itself."""
    lookout, failure = recorded
    words = lookout(0).explain(failure(0, -signal.SIGTERM))
    assert "worker 1 of b timed out" in words.message
    first = ended("a", 1030.0, words)
    other = lookout(1, **found, first=first)
    other._look()
    assert other.told is (cause is None)
    ends = [first, ended("b", 1031.8, other.tick()) if cause else End("b", 1031.8, "told to end", "step", 12)]
    beats = [Beat(host, 1030.0, "step", 1000.0, 12) for host in "ab"]
    began = initiator(attempt(*ends, hosts=["a", "b"], beats=beats))
    assert (began.host, began.cause) == ("b" if cause else None, cause)


def test_a_worker_that_fails_for_its_own_hosts_link_says_so(recorded):
    """Worker 1 ends with "Launch kernel failed" before its agent has heard of the other host's end."""
    lookout, failure = recorded
    assert lookout(1, lost=["eth0 has no link"]).explain(failure(1, 1)).cause == "lost node"
    unknown = lookout(1).explain(failure(1, 1))
    told = End("a", 1032.0, "told to end", "step", 12)
    began = initiator(attempt(told, ended("b", 1031.0, unknown), hosts=["a", "b"]))
    assert began.host is None, "a collective that fails says nothing of its own host"


def test_what_only_one_host_can_have_done_needs_no_explanation(recorded):
    lookout, failure = recorded
    killed = failure(0, -signal.SIGKILL)
    assert lookout(0, lost=["eth0 has no link"]).explain(killed) is killed
    told = lookout(1, lost=["eth0 has no link"], first=ended("a", 1030.0, killed))
    told._look()
    assert told.told


def test_a_node_that_ends_its_workers_still_gives_signs_of_life(tmp_path, monkeypatch):
    """Workers may take ten seconds to end; a node that falls silent meanwhile would be written down as lost."""
    monkeypatch.setattr("launch.agent.lookout.BEAT", 0.1)
    own, other = (Meeting(tmp_path, host, disk=Disk(LONG)) for host in ("a", "b"))
    for meeting in (own, other):
        meeting.come(0)
    plan = Plan(0, 1.0, ["a", "b"], 1, "a", 9000)
    phases = SimpleNamespace(
        look=lambda: None, clock=time.monotonic, since=0.0, phase="step", step=3, logs=tmp_path, ranks=[0]
    )
    with Lookout(phases, Around(own, plan, "a"), None, lambda: None, None, Link()) as lookout:
        other.end(0, End("b", 1.0, "failed", "step", cause="exit"))
        while lookout.tick() is None:
            time.sleep(0.02)
        assert lookout.told
        beat = file_of(folder_of(tmp_path, 0), BEAT, "a")
        beats = {beat.stat().st_mtime_ns}
        while len(beats) < 4:
            time.sleep(0.05)
            beats.add(beat.stat().st_mtime_ns)
    lookout.join(LONG)
    assert not lookout.is_alive()
