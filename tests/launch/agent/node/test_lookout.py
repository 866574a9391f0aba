"""What a node says of itself when nothing moves: its link, a stopped worker, one that is not where the others wait."""

import time
from types import SimpleNamespace

import pytest

from launch.agent.meeting import Meeting
from launch.agent.node import stuck
from launch.agent.node.around import Around
from launch.agent.node.link import Link
from launch.agent.node.lookout import Lookout
from launch.agent.node.stuck import Place
from tools.runs.attempts import BEAT, End, Plan, file_of, folder_of

WAITING = Place("/x/mindspore/common/api.py", 10, "run_graph")
LOST = 2.0  # seconds
LOADING = Place("/data/corpus.py", 7, "read")


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node with workers 8 and 9: what it says of a hang, given its link, who is stopped, and where workers are."""

    def said(lost=(), stopped=None, places=None, behind=None):
        monkeypatch.setattr(Link, "lost", lambda self: list(lost))
        monkeypatch.setattr(stuck, "stopped", lambda: stopped)
        monkeypatch.setattr(stuck, "places", lambda logs, ranks: places or {})
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


def test_a_node_that_ends_its_workers_still_gives_signs_of_life(tmp_path, monkeypatch):
    """Workers may take ten seconds to end; a node that falls silent meanwhile would be written down as lost."""
    monkeypatch.setattr("launch.agent.node.lookout.BEAT", 0.1)
    own, other = (Meeting(tmp_path, host) for host in ("a", "b"))
    for meeting in (own, other):
        meeting.come(0)
    plan = Plan(0, 1.0, ["a", "b"], 1, "a", 9000)
    phases = SimpleNamespace(
        look=lambda: None, clock=time.monotonic, since=0.0, phase="step", step=3, logs=tmp_path, ranks=[0]
    )
    with Lookout(phases, Around(own, plan, "a"), None, lambda: None, LOST, Link()) as lookout:
        other.end(0, End("b", 1.0, "failed", "step", cause="exit"))
        until = time.monotonic() + 30
        while lookout.tick() is None:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert lookout.told
        beats = {file_of(folder_of(tmp_path, 0), BEAT, "a").stat().st_mtime_ns}
        while len(beats) < 4:
            assert time.monotonic() < until
            time.sleep(0.05)
            beats.add(file_of(folder_of(tmp_path, 0), BEAT, "a").stat().st_mtime_ns)
    assert not lookout.is_alive()
