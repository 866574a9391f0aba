"""Who began the end of an attempt: the fault table, as ends that hosts write."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.launch.agent.ends import A, B, C, attempt, end, judge, told
from tools.runs.attempts import Beat

# the fault table: (ends, beats with the time of the last step where that is another, who began it, cause, decision)
LOST = "Connection to worker 1 timed out"
TABLE = {
    "worker 0 killed": ([end(A, 100, "signal", rank=0, code=-9), told(B)], [], A, "signal", "restart"),
    "worker 1 killed": ([told(A), end(B, 100, "signal", rank=1, code=-9)], [], B, "signal", "restart"),
    "worker 1 killed, the victim is seen first": (
        [end(A, 99.7, "exit", rank=0, code=1), end(B, 100, "signal", rank=1, code=-9)], [], B, "signal", "restart"),
    "worker 1 killed, the victim complains first": (
        [end(A, 70, "exit", rank=0, code=1, message=LOST), end(B, 100, "signal", rank=1, code=-9)], [], B, "signal",
        "restart"),
    "a worker killed, whose log spoke of a lost connection": (
        [end(A, 100.2, "exit", code=1), end(B, 100, "signal", code=-9, message=LOST)], [], B, "signal", "restart"),
    "worker 1 stopped": ([told(A), end(B, 130, "hang", rank=1)], [], B, "hang", "restart"),
    "worker 1 stopped, the other agent sees the hang first": (
        [end(A, 129, "hang"), end(B, 130, "hang", rank=1)], [], B, "hang", "restart"),
    "worker 1 stopped, its agent was told before it saw the hang": (
        [end(A, 129, "hang"), told(B, rank=1)], [], B, "hang", "restart"),
    "worker 1 hangs a step behind": ([end(A, 130, "hang", step=21), told(B, step=20)], [], B, "hang", "restart"),
    "worker 1 still compiles": (
        [end(A, 130, "hang", phase="step", step=8), told(B, phase="compile", step=8)], [], B, "hang", "restart"),
    "a hang without a trace": ([end(A, 130, "hang"), told(B)], [], None, "hang", "restart"),
    "the link is down": ([end(A, 133, "exit", code=1, message=LOST), told(B)], [], None, None, "restart"),
    "the link is down, both complain": (
        [end(A, 133, "exit", code=1, message=LOST), end(B, 133.2, "exit", code=1, message="Broken pipe")], [], None,
        None, "restart"),
    "the link is down, and its host says so": (
        [end(A, 133, "exit", code=1, message=LOST), end(B, 135, "lost node", message="eth0 has no carrier")], [], B,
        "lost node", "restart"),
    "the link is down: MindSpore ends the other host's worker, and its own host says so when it is told": (
        [end(A, 100, "signal", rank=0, code=-15), end(B, 101.7, "lost node", message="no link")], [(B, 101, 70)], B,
        "lost node", "restart"),
    "the link is down: the other host's worker fails with words that nobody knows": (
        [end(A, 100, "exit", code=1, message="odd"), end(B, 101.7, "lost node", message="no link")],
        [(B, 101, 70)], B, "lost node", "restart"),
    "the link is down: a collective of MindSpore's fails": (
        [end(A, 100, "exit", rank=0, code=1, message="RuntimeError: Launch kernel failed, name:Default/AllReduce-op62"),
         told(B)], [], None, None, "restart"),
    "a worker stopped: MindSpore ends the other host's": (
        [end(A, 100, "signal", rank=0, code=-15), end(B, 101.7, "hang", rank=1)], [(B, 101, 70)], B, "hang", "restart"),
    "a worker ended by SIGTERM, and nothing else is known": (
        [end(A, 100, "signal", rank=0, code=-15), told(B)], [], None, None, "restart"),
    "a kernel of one's own fails": (
        [end(A, 100, "exit", rank=0, code=1, message="RuntimeError: Launch kernel failed, name:Default/MatMul-op2"),
         told(B)], [], A, "exit", "restart"),
    "all of node 1 dead": ([told(A), end(B, 104.5, "lost node", by=A)], [(B, 100)], B, "lost node", "restart"),
    "all of node 0 dead": ([end(A, 104.5, "lost node", by=B), told(B)], [(A, 100)], A, "lost node", "restart"),
    "node 1 dead, the other's worker ends before it is missed": (
        [end(A, 101.5, "exit", code=1), end(B, 104.5, "lost node", by=A)], [(B, 100)], B, "lost node", "restart"),
    "node 1 dead, nobody has written so": ([end(A, 103, "exit", code=1)], [(A, 102.5), (B, 100)], B, "lost node",
                                           "restart"),
    "worker 0 killed, and then its whole node": (
        [end(A, 100, "signal", rank=0, code=-9), end(B, 109, "lost node", by=A)], [(B, 105)], A, "signal", "restart"),
    "the scheduler dead": (
        [end(A, 100, "signal", message="msrun's scheduler failed"), told(B)], [], A, "signal", "restart"),
    "disk full in a save": (
        [told(A, phase="save"), end(B, 100, "exit", phase="save", code=1, message="No space left on device")], [], B,
        "exit", "restart"),
    "a host has lost the disk": ([told(A), end(B, 104, "lost disk")], [], B, "lost disk", "restart"),
    "port taken": ([end(A, 20, "port", phase="start", step=8), told(B, 21)], [], A, "port", "restart"),
    "NaN": ([end(A, 100, "not finite", rank=0, code=1), told(B)], [], A, "not finite", "give up"),
    "NaN, seen by all": ([end(A, 100, "not finite"), end(B, 100.1, "not finite")], [], None, "not finite", "give up"),
    "spike, rolled back": ([end(A, 100, "spike", rank=0), told(B)], [], A, "spike", "restart"),
    "user error": ([end(A, 20, "user error", phase="start", step=8, code=2), told(B)], [], A, "user error", "give up"),
    "never came": ([told(A)], [(A, 99)], B, "never came", "restart"),
    "two hosts exit alike": (
        [end(A, 100, "exit", code=1), end(B, 100.4, "exit", code=1)], [], None, "exit", "restart"),
    "two nodes lost at once": (
        [end(A, 104, "lost node", by=C), end(B, 104, "lost node", by=C), told(C)], [(A, 100), (B, 100.3)], None,
        "lost node", "restart"),
}  # fmt: skip


@pytest.mark.parametrize("row", TABLE)
def test_the_fault_table(row):
    ends, beats, host, cause, decision = TABLE[row]
    signs = [Beat(name, time, "step", *(since or [time]), 20) for name, time, *since in beats]
    said = judge(attempt(*ends, hosts=[A, B, C] if any(each.host == C for each in ends) else [A, B], beats=signs))
    assert (said.initiator, said.cause, said.decision) == (host, cause, decision)
    assert said.why
    assert host not in said.victims


def test_victims_are_those_that_failed_without_beginning_it():
    ends = [end(A, 100.2, "exit", code=1), end(B, 100, "signal", code=-9, rank=1), told(C)]
    said = judge(attempt(*ends, hosts=[A, B, C]))
    assert (said.initiator, said.rank, said.victims) == (B, 1, [A])


@given(st.permutations([A, B, C]), st.floats(0.0, 5.0), st.booleans())
def test_a_kill_is_named_whatever_its_victims_say(hosts, later, complains):
    """Victims fail up to MARGIN before (looks of agents) and at any time after the kill."""
    message = LOST if complains else "worker failed with exit code 1"
    victims = [end(host, 99.0 + later, "exit", code=1, message=message) for host in hosts[1:]]
    assert judge(attempt(end(hosts[0], 100, "signal", code=-9), *victims, hosts=[A, B, C])).initiator == hosts[0]


def test_a_host_that_is_slow_to_write_its_end_is_not_gone():
    hang = attempt(end(A, 130, "hang"), beats=[Beat(B, 129, "step", 80, 20)])
    assert judge(hang, now=134.0).initiator is None
    said = judge(hang, now=141.0)
    assert (said.initiator, said.cause) == (B, "lost node")


def test_a_host_that_lost_the_disk_knows_no_time():
    ends = [end(A, float("nan"), "lost disk"), told(B)]
    assert judge(attempt(*ends)).initiator == A
    killed = [end(A, float("nan"), "lost disk"), end(B, 100, "signal", code=-9)]
    assert judge(attempt(*killed, told(C, 110), hosts=[A, B, C])).initiator == B
