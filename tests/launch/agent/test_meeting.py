"""Agents that meet in a folder: who is there, one plan, signs of life, one verdict."""

import os
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.agent.disk import Disk, LostDiskError
from launch.agent.lookout import Around
from launch.agent.meeting import Meeting, Watch
from launch.agent.part import Part
from launch.agent.phases import Limits
from launch.agent.planning import Job
from launch.run.failure import Failure
from launch.run.supervise import Outcome
from plugins.errors import ClusterError, DataError
from tests.launch.agent.clock import LONG, Clock, ClockedDisk
from tools.recipe.load import Recipe
from tools.runs.attempts import BEAT, END, Beat, End, Plan, Verdict, file_of, folder_of, read_attempt, write

LOOKS = st.lists(st.tuples(st.integers(0, 3), st.floats(-1e4, 1e4)), max_size=40)  # a mark, seconds since the last look


def test_quiet_for_as_long_as_nothing_changed():
    watch = Watch(2.0)
    assert [watch.unchanged("a", 1, time) for time in (10.0, 11.0, 12.5)] == [0.0, 1.0, 2.5]
    assert watch.unchanged("b", 1, 13.0) == 0.0
    assert watch.unchanged("a", 2, 13.0) == 0.0


@given(looks=LOOKS)
def test_never_more_than_the_looks_since_the_last_change_allow(looks):
    watch, now, before, since, passed = Watch(2.0), 0.0, None, 0, 0.0
    for mark, seconds in looks:
        now += seconds
        since, passed = (since + 1, passed + max(seconds, 0.0)) if mark == before else (0, 0.0)
        quiet = watch.unchanged("a", mark, now)
        assert 0.0 <= quiet <= min(2.0 * since, passed) + 1e-6
        before = mark


@given(start=st.floats(-1e9, 1e9), period=st.floats(0.1, 2.0))
def test_who_never_changes_is_found_whatever_the_clock_says(start, period):
    watch = Watch(2.0)
    quiet = [watch.unchanged("a", None, start + look * period) for look in range(50)]
    assert next(look for look, seconds in enumerate(quiet) if seconds >= 4.0 - 1e-3) <= 4.0 / period + 1


LOST = 0.8  # seconds of the clock
AGENT = """
import sys, time
from pathlib import Path
from launch.agent.meeting import Meeting
from tests.launch.agent.clock import Clock, ClockedDisk
from tools.runs.attempts import Plan
folder, host, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
clock = Clock()
meeting = Meeting(folder, host, lost_after=1.0, disk=ClockedDisk(clock))
meeting.come(0)
(folder / f"came-{host}").touch()
def wanted(there):
    if len(there) < count:
        return None
    (folder / f"asked-{host}").touch()
    if len(list(folder.glob("asked-*"))) == 1:
        time.sleep(3600)  # the first one is killed here, between claim and plan
    return Plan(0, meeting.now(), there, 1, host, 1)
for line in sys.stdin:  # the time until which we may look once more
    clock.now = float(line)
    plan = meeting.plan(0, wanted)
    print(plan.master if plan else "", flush=True)
"""
CLOCK = Clock()
until = CLOCK.until


def meetings(folder, *hosts, lost_after=LOST):
    """Agents that came."""
    found = [Meeting(folder, host, lost_after=lost_after, disk=ClockedDisk(CLOCK)) for host in hosts]
    for meeting in found:
        meeting.come(0)
    return found


def plan_of(*hosts):
    return Plan(0, 1.0, list(hosts), 1, hosts[0], 9000)


class Other:
    """An agent in a process of its own, whose clock we set."""

    def __init__(self, folder, host):
        words = [sys.executable, "-c", AGENT, folder, host, "5"]
        self.host = host
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def look(self, now):
        self.process.stdin.write(f"{now}\n")
        self.process.stdin.flush()

    def answer(self):
        """Return the master of the plan that it found, or ""."""
        line = self.process.stdout.readline()
        assert line, "it has ended"
        return line.strip()

    def end(self):
        self.process.kill()
        self.process.communicate()


def test_a_planner_that_is_killed_is_followed_by_exactly_one(tmp_path):
    hosts = [f"node{number}" for number in range(5)]
    agents = [Other(tmp_path, host) for host in hosts]
    try:
        await_files(tmp_path, "came-*", 5, agents)
        for agent in agents:  # all at once
            agent.look(1000.0)
        await_files(tmp_path, "asked-*", 1, agents)
        (first,) = tmp_path.glob("asked-*")
        killed = agents.pop(hosts.index(first.name.removeprefix("asked-")))
        killed.end()
        assert {agent.answer() for agent in agents} == {""}
        agents.append(Other(tmp_path, "late"))
        await_files(tmp_path, "came-late", 1, agents)
        now, told = 1000.0, [""]
        while not all(told):
            now += 0.05
            assert now < 1060.0
            for agent in agents:
                agent.look(now)
            told = [agent.answer() for agent in agents]
    finally:
        for agent in agents:
            agent.end()
    assert set(told) == {read_attempt(tmp_path, 0).plan.master} and set(told).isdisjoint({killed.host, ""})
    assert len(list(tmp_path.glob("asked-*"))) == 2
    assert sorted(path.name for path in folder_of(tmp_path, 0).glob("claim-plan-*")) == ["claim-plan-0", "claim-plan-1"]


@pytest.mark.parametrize("broken", ["", "\0" * 60, "[]", '{"host": "a", "pro'])
def test_a_file_that_a_power_cut_left_broken_stops_no_agent(tmp_path, broken):
    """Signs of life are not flushed to the disk; each of the other agents ended with a traceback."""
    (meeting,) = meetings(tmp_path, "a")
    for name in ("there-b.json", "over.json"):
        (folder_of(tmp_path, 0) / name).write_text(broken)
    assert "a" in meeting.there(0)
    assert meeting.over(0) == "an unknown host"


def await_files(folder, pattern, count, agents):
    while len(list(folder.glob(pattern))) < count:
        assert all(agent.process.poll() is None for agent in agents), "one has ended"
        time.sleep(0.01)


def test_a_slow_planner_goes_by_the_plan_of_the_one_that_followed_it(tmp_path):
    slow, quick = meetings(tmp_path, "a", "b")

    def wanted(there):
        until(lambda: quick.plan(0, lambda there: plan_of("b", "a")))
        return plan_of("a", "b")

    plan, _ = until(lambda: slow.plan(0, wanted))
    assert plan.hosts == quick.plan(0, None).hosts == ["b", "a"]
    assert len(list(folder_of(tmp_path, 0).glob("claim-plan-*"))) == 2


def test_no_plan_and_no_verdict_takes_the_place_of_another_one(tmp_path):
    """A planner that was stopped between its last look at its claim and its writing is late by any time."""
    (one,) = meetings(tmp_path, "a")

    def late(name, other, own):
        write(folder_of(tmp_path, 0) / name, other)
        return own

    first, second = Verdict(1.0, "restart", "first"), Verdict(2.0, "give up", "second")
    plan, _ = until(lambda: one.plan(0, lambda there: late("plan.json", plan_of("b", "a"), plan_of("a", "b"))))
    assert plan.hosts == ["b", "a"]
    for host in plan.hosts:
        one.end(0, End(host, 1.0, "done", "end"))
    assert until(lambda: one.verdict(0, lambda attempt: late("verdict.json", first, second)))[0] == first


def test_there_are_those_who_came_and_neither_left_nor_died(tmp_path):
    here, left, _, waits = meetings(tmp_path, "b", "a", "c", "d/../e:1")
    assert here.there(0) == ["a", "b", "c", "d/../e:1"]
    left.gone(0)
    assert here.there(0) == ["b", "c", "d/../e:1"]

    def look():
        for meeting in (here, waits):
            meeting.plan(0, lambda there: None)
        return "c" not in here.there(0)

    _, seconds = until(look)
    assert here.there(0) == ["b", "d/../e:1"] and seconds >= 0.7 * LOST


@settings(max_examples=50)
@given(host=st.text(min_size=1, max_size=12), other=st.text(min_size=1, max_size=12))
def test_any_name_of_a_host_is_a_file_of_its_own(tmp_path_factory, host, other):
    folder = tmp_path_factory.getbasetemp()
    try:
        one, two = file_of(folder, END, host), file_of(folder, END, other)
    except UnicodeEncodeError:
        return
    assert one.parent == folder and one.name.isascii() and "/" not in one.name and "\0" not in one.name
    assert (one == two) == (host == other)


@pytest.mark.parametrize("host", ["", "n" * 181, "節" * 30, "\ud800"])
def test_what_cannot_be_a_host_is_refused(tmp_path, host):
    with pytest.raises(ClusterError, match="--host"):
        Meeting(tmp_path, host)


def test_two_agents_of_one_name_are_refused(tmp_path):
    (first,) = meetings(tmp_path, "node0")
    second = Meeting(tmp_path, "node0", lost_after=LOST, disk=ClockedDisk(CLOCK))
    second.disk.pause = lambda seconds: (CLOCK.sleep(seconds), first.plan(0, lambda there: None))
    with pytest.raises(ClusterError, match="--host node0: an agent with this name already runs"):
        second.come(0)
    second.gone(0)  # it said that another agent had replaced it, and the user read only that
    plan, _ = until(lambda: first.plan(0, plan_of_all))
    assert plan.hosts == ["node0"] and first.over(0) is None  # which is not disturbed


def lost():
    raise LostDiskError("the shared disk cannot be used")


def test_an_end_of_a_host_that_could_not_ask_for_the_time_is_known(tmp_path):
    """It was written with a time that no reader takes, so that its cause was lost, and nobody heard of the end."""
    one, other = meetings(tmp_path, "node0", "node1")
    until(lambda: one.plan(0, plan_of_all))
    now, one.now = one.now(), lost
    part = Part(Job(Recipe({}), tmp_path, "node0"), one.plan(0, plan_of_all), one, Limits())
    one.end(0, part._end(Outcome(1, Failure("lost disk: it stalled", tmp_path, cause="lost disk")), None))
    assert other.over(0) == "node0" and other.ended(0, "node0").cause == "lost disk"
    assert 0 <= other.ended(0, "node0").time - now < 60


def test_an_agent_comes_although_another_of_its_name_removes_the_folder(tmp_path):
    """It said that the shared disk cannot be used: the other one was refused, and took the folder with it."""
    (first,) = meetings(tmp_path, "node0")
    second = Meeting(tmp_path, "node0", lost_after=LOST, disk=ClockedDisk(CLOCK, bound=1.0))
    second.disk.pause = lambda seconds: (CLOCK.sleep(seconds), first.withdraw(0))
    second.come(0)
    assert second.there(0) == ["node0"]


def plan_of_all(there):
    return plan_of(*there)


def test_an_agent_that_comes_back_says_that_its_part_is_over(tmp_path):
    old, other = meetings(tmp_path, "node0", "node1")
    until(lambda: other.plan(0, plan_of_all))
    old.beat(0, Beat("node0", old.now(), "step", 1.0, 7))
    new = Meeting(tmp_path, "node0", lost_after=LOST, disk=ClockedDisk(CLOCK))
    began = CLOCK.now
    new.come(0)
    assert LOST <= CLOCK.now - began < 2.5 * LOST
    assert other.over(0) == "node0"
    end = read_attempt(tmp_path, 0).ends["node0"]
    assert (end.outcome, end.cause, end.phase, end.step) == ("failed", "lost node", "step", 7)
    with pytest.raises(ClusterError, match="another agent of host node0"):  # it was only stopped, and wakes up
        old.beat(0, Beat("node0", 1.0, "step", 1.0, 8))
    with pytest.raises(ClusterError, match="another agent of host node0"):
        old.gone(0)
    old.gone(1)  # where it never came
    new.come(0)  # again: nothing new
    new.beat(0, Beat("node0", new.now(), "start", 1.0))


def test_who_comes_back_before_the_plan_takes_part(tmp_path):
    meetings(tmp_path, "node0")
    (new,) = meetings(tmp_path, "node0")
    plan, _ = until(lambda: new.plan(0, plan_of_all))
    new.come(0)  # it is there already
    assert plan.hosts == ["node0"] and new.over(0) is None


def test_who_is_held_up_after_it_said_that_it_is_there_follows_the_plan_made_meanwhile(tmp_path):
    (other,) = meetings(tmp_path, "node1")

    class HeldUp(ClockedDisk):
        def keep_room(self, path):
            """Take so long that the other agent plans."""
            until(lambda: other.plan(0, plan_of_all))
            super().keep_room(path)

    late = Meeting(tmp_path, "node0", lost_after=60.0, disk=HeldUp(CLOCK))
    late.come(0)
    plan = late.plan(0, plan_of_all)
    assert plan and set(plan.hosts) == {"node0", "node1"}
    assert late.over(0) is None and read_attempt(tmp_path, 0).ends == {}


def test_a_silent_host_is_stale_after_a_while_and_one_that_ended_is_not(tmp_path):
    one, two, three = meetings(tmp_path, "a", "b", "c")
    for meeting in (one, two, three):
        meeting.beat(0, Beat(meeting.host, 1.0, "step", 1.0))
    three.end(0, End("c", 1.0, "done", "end"))
    began = CLOCK.now
    while CLOCK.now - began < 2 * LOST:
        two.beat(0, Beat("b", 1.0, "step", 1.0))
        assert not one.stale(0, "b") and not one.stale(0, "c")
        CLOCK.sleep(0.02)
    _, seconds = until(lambda: one.stale(0, "b"))
    assert seconds >= 0.7 * LOST


def test_a_host_that_never_beats_is_stale(tmp_path):
    (one,) = meetings(tmp_path, "a")
    _, seconds = until(lambda: one.stale(0, "never"))
    assert seconds >= 0.7 * LOST


def test_the_first_bad_end_stays(tmp_path):
    one, two = meetings(tmp_path, "a", "b")
    one.end(0, End("a", 1.0, "told to end", "step"))
    assert two.over(0) is None
    one.end(0, End("b", 2.0, "failed", "step", cause="lost node", by="a"))
    two.end(0, End("b", 3.0, "failed", "step", cause="exit"))
    one.end(0, End("c", 4.0, "failed", "step"))
    ends = read_attempt(tmp_path, 0).ends
    assert one.over(0) == two.over(0) == "b" and ends["b"].by == "a" and ends["c"].time == 4.0


@pytest.mark.parametrize("judge", [False, True])
def test_a_host_that_dies_between_its_end_and_the_word_of_it_is_heard(tmp_path, judge):
    one, _, three = meetings(tmp_path, "a", "b", "c")
    plan, _ = until(lambda: one.plan(0, plan_of_all))
    write(file_of(folder_of(tmp_path, 0), END, "b"), End("b", 1.0, "failed", "step", cause="exit"))
    if judge:
        one.end(0, End("a", 1.0, "done", "end"))
        until(lambda: (three.beat(0, Beat("c", 1.0, "step", 1.0)), one.verdict(0, None), three.over(0))[2])
    else:
        around = Around(one, plan, "a")
        assert (around.look(), around.look()) == (None, "b ended attempt 0")


def test_hosts_look_after_the_next_one_and_spares_after_some(tmp_path):
    plan = plan_of("a", "b", "c")
    around = {host: Around(None, plan, host) for host in "abcxyz"}
    assert [around[host]._neighbour() for host in "abc"] == ["b", "c", "a"]
    assert {around[host]._neighbour() for host in "xyz"} == {"a", "b", "c"}
    around["a"].finished.add("b")
    assert around["a"]._neighbour() == "c"
    assert Around(None, plan_of("a"), "a")._neighbour() is None


def test_who_said_that_all_went_well_is_not_lost_afterwards(tmp_path):
    one, two = meetings(tmp_path, "a", "b")
    two.end(0, End("b", 1.0, "done", "end"))
    one.end(0, End("b", 2.0, "failed", "step", cause="lost node", by="a"))
    assert one.over(0) is None and read_attempt(tmp_path, 0).ends["b"].outcome == "done"


def test_the_verdict_waits_for_the_living_and_names_the_dead(tmp_path):
    one, two, _ = meetings(tmp_path, "a", "b", "c")
    until(lambda: one.plan(0, plan_of_all))
    one.end(0, End("a", one.now(), "done", "end"))
    asked = []

    def decide(attempt):
        asked.append(attempt)
        return Verdict(1.0, "restart", "because", "c")

    def look():
        two.beat(0, Beat("b", 1.0, "step", 1.0, 3))  # works on for long
        return one.verdict(0, decide) or one.over(0)

    assert until(look)[0] == "c"  # lost
    found, seconds = until(lambda: (two.beat(0, Beat("b", 1.0, "step", 1.0, 4)), one.verdict(0, decide))[1])
    assert seconds >= 0.7 * LOST and found.initiator == "c"
    assert asked[0].ends.keys() == {"a", "c"} and asked[0].beats["b"].step == 4 and len(asked) == 1
    assert two.verdict(0, decide) == found and len(asked) == 1


def test_hosts_whose_names_begin_with_the_words_of_file_names_are_themselves(tmp_path):
    """The last sign of life of end-1 was read as that of a host 1, and end-1 counted as one that never came."""
    hosts = ["end-1", "1", "beat-1", "there-1"]
    one, *_ = meetings(tmp_path, *hosts)
    for step, host in enumerate(hosts):
        folder = folder_of(tmp_path, 0)
        write(file_of(folder, BEAT, host), Beat(host, 1.0, "step", 1.0, step))
        write(file_of(folder, END, host), End(host, 2.0, "done", "end", step))
    found = one._attempt(0)
    assert {host: beat.step for host, beat in found.beats.items()} == {host: at for at, host in enumerate(hosts)}
    assert {host: end.host for host, end in found.ends.items()} == {host: host for host in hosts}


def test_a_run_that_goes_well_is_judged_when_the_last_one_is_done(tmp_path):
    one, two = meetings(tmp_path, "a", "b")
    until(lambda: one.plan(0, plan_of_all))
    one.end(0, End("a", 1.0, "done", "end"))
    began = CLOCK.now
    while CLOCK.now - began < 3 * LOST:
        two.beat(0, Beat("b", 1.0, "save", 1.0, 3))
        assert one.verdict(0, lambda attempt: 1 / 0) is None
        CLOCK.sleep(0.02)
    two.end(0, End("b", 1.0, "done", "end"))
    assert until(lambda: one.verdict(0, lambda attempt: Verdict(1.0, "done", "all done")))[0].decision == "done"


def test_the_clock(tmp_path):
    before = time.time()
    now = Meeting(tmp_path / "new", "a", disk=Disk(LONG)).now()
    assert before - 2 < now < time.time() + 2  # some file systems keep whole seconds


def test_a_broken_plan_is_named(tmp_path):
    (meeting,) = meetings(tmp_path, "a")
    (folder_of(tmp_path, 0) / "plan.json").write_text("{")
    with pytest.raises(DataError, match=r"plan\.json cannot be read"):
        meeting.plan(0, plan_of_all)


def test_a_disk_that_hangs_ends_the_loop(tmp_path):
    meeting = Meeting(tmp_path, "a", disk=Disk(LONG))
    meeting.come(0)
    meeting.disk.bound = 0.2
    os.mkfifo(folder_of(tmp_path, 0) / "over.json")
    with pytest.raises(LostDiskError, match=r"over\.json"):
        meeting.over(0)
