"""The shared disk: whole files, one winner, one clock, and an error in time when it is gone."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import launch.agent.disk
from launch.agent import loop, part, planning
from launch.agent.disk import Disk, LostDiskError
from launch.agent.lookout import Link, Lookout
from launch.agent.loop import Agent
from launch.agent.phases import Limits
from launch.agent.planning import Job
from launch.run.failure import Failure
from launch.run.msrun import ROOT
from launch.run.supervise import Outcome
from plugins.errors import ClusterError
from tests.launch.agent.clock import LONG, Clock, ClockedDisk
from tools.recipe.load import load_recipe
from tools.runs.attempts import Plan

ROUNDS, WRITERS, READS = 60, 6, 200
WRITER = """
import sys, time
from pathlib import Path
from launch.agent.disk import Disk
folder, name, disk = Path(sys.argv[1]), sys.argv[2], Disk(600)
(folder / f"ready-{name}").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
for number in range(int(sys.argv[3])):
    won = disk.publish(folder / f"round-{number}", name * 20000)
    disk.replace(folder / "last", name * 20000)
    print(int(won), end=" ")
while not (folder / "enough").exists():
    disk.replace(folder / "last", name * 20000)
"""


def test_of_many_processes_one_publishes_and_nobody_reads_half_a_file(tmp_path):
    arguments = [[sys.executable, "-c", WRITER, tmp_path, f"{n}", f"{ROUNDS}"] for n in range(WRITERS)]
    writers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for words in arguments]
    while len(list(tmp_path.glob("ready-*"))) < WRITERS:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    disk, whole = Disk(LONG), {f"{n}" * 20000 for n in range(WRITERS)}
    try:
        for number in range(READS):
            for name in ("last", f"round-{number % ROUNDS}"):
                found = disk.read(tmp_path / name)
                assert found is None or found.text in whole
    finally:
        (tmp_path / "enough").touch()
    won = [[int(word) for word in writer.communicate()[0].split()] for writer in writers]
    assert all(writer.returncode == 0 for writer in writers)
    assert [sum(column) for column in zip(*won, strict=True)] == [1] * ROUNDS
    for number in range(ROUNDS):
        winner = next(n for n in range(WRITERS) if won[n][number])
        assert (tmp_path / f"round-{number}").read_text() == f"{winner}" * 20000
    assert list(tmp_path.glob(".*")) == []


def test_a_mark_differs_after_each_write(tmp_path):
    """The file system may give a new file the number of an old one: then their times differ."""
    clock, marks = Clock(), []
    disk = ClockedDisk(clock)
    for _ in range(5):
        disk.replace(tmp_path / "beat", "the same")
        marks.append(disk.read(tmp_path / "beat").mark)
        clock.sleep(2.0)  # some file systems keep whole seconds
    assert len(set(marks)) == 5
    assert disk.read(tmp_path / "beat").mark == marks[-1]
    assert disk.read(tmp_path / "none") is None


def test_the_clock_is_the_disks(tmp_path, monkeypatch):
    class Server(ClockedDisk):
        def _stamp(self, descriptor):
            os.utime(descriptor, (5000.0, 5000.0))

    clock = Clock()
    disk = Server(clock)
    assert disk.now(tmp_path) == 5000.0 and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(time, "time", lambda: 1 / 0)
    clock.sleep(1.5)
    assert disk.now(tmp_path) == 5001.5


def test_a_disk_that_hangs_is_lost_in_time(tmp_path):
    """A pipe without a writer: who opens it hangs, as on a disk whose server is gone."""
    disk = Disk(0.5)
    os.mkfifo(tmp_path / "over")
    began = time.monotonic()
    with pytest.raises(LostDiskError, match=r"over.*does not respond \(the call took too long\)"):
        disk.read(tmp_path / "over")
    assert time.monotonic() - began >= 0.5
    disk.bound = 1e6  # at once, as long as the first call hangs: who waited for this would never come back
    with pytest.raises(LostDiskError, match=r"over.*does not respond \(an earlier call has not returned yet\)"):
        disk.read(tmp_path / "over")
    (tmp_path / "over").write_text("back")  # frees the one that hangs
    assert disk._last.done.wait(LONG)
    (tmp_path / "over").unlink()
    assert disk.read(tmp_path / "over") is None


def test_several_threads_share_a_disk(tmp_path):
    """Several threads can use a disk at once: a call that has not returned yet does not count as a lost disk."""
    disk, wrong = Disk(LONG), []

    def work(name):
        try:
            for number in range(100):
                disk.replace(tmp_path / name, f"{number}")
                assert disk.read(tmp_path / name).text == f"{number}"
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(f"{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_disk_that_is_gone_or_refuses_is_lost_in_time(tmp_path):
    clock = Clock()
    folder, disk = tmp_path / "run", ClockedDisk(clock, 0.5)
    folder.mkdir()
    disk.replace(folder / "beat", "alive")
    folder.rename(tmp_path / "moved")
    for call, bound in ((disk.replace, 0.5), (disk.publish, 0.5)):
        began = clock.now
        with pytest.raises(LostDiskError, match="No such file"):
            call(folder / "beat", "x")
        assert bound - 0.2 <= clock.now - began <= bound
    around = SimpleNamespace(meeting=SimpleNamespace(disk=disk), host="a", plan=None)
    phases = SimpleNamespace(logs=tmp_path, ranks=range(1))
    lost = Lookout(phases, around, None, lambda: None, -1.0, Link()).tick()
    assert lost.message == f"lost disk: {folder}/beat: the shared disk cannot be used (No such file or directory)"
    (tmp_path / "moved").rename(folder)
    assert disk.publish(folder / "beat2", "x") and disk.trouble == ""


def test_a_run_whose_folder_was_removed_says_so_beside_the_failure_of_a_worker(tmp_path, monkeypatch):
    """It named only the worker, and a log that was gone."""
    plan, said = Plan(0, 1.0, ["here"], 2, "here", 9000), []
    job = Job(load_recipe(ROOT / "recipes/mini/pretrain_dp2.yaml"), tmp_path, "here", ("here",), say=said.append)
    agent, failure = Agent(job), Failure("worker 1 failed", tmp_path, cause="exit")
    ended = Outcome(1, failure), SimpleNamespace(outcome="failed")
    monkeypatch.setattr(loop, "Part", lambda *given: SimpleNamespace(run=lambda: ended))
    monkeypatch.setattr(agent, "_planned", lambda number: plan)
    agent.meeting = SimpleNamespace(end=mock.Mock(side_effect=LostDiskError("end.json: the disk is gone")))
    assert agent._attempt(0) is None and agent.outcome.failure is failure
    assert said == ["tc3: end.json: the disk is gone"]


def test_a_disk_that_comes_back_within_the_bound_is_not_lost(tmp_path, monkeypatch):
    failures = iter([OSError(errno.EIO, "I/O error")] * 3)

    def replace(*paths):
        for failure in failures:
            raise failure
        shutil.move(*paths)

    monkeypatch.setattr(launch.agent.disk.os, "replace", replace)
    ClockedDisk(Clock(), 2.0).replace(tmp_path / "beat", "alive")
    assert (tmp_path / "beat").read_text() == "alive"


def test_on_a_full_disk_a_beat_still_shows_life(tmp_path, monkeypatch):
    disk = ClockedDisk(Clock(), 0.3)
    disk.replace(tmp_path / "beat", "alive")
    before = disk.read(tmp_path / "beat")  # the clock's time, which is long ago

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(launch.agent.disk.os, "write", full)
    disk.replace(tmp_path / "beat", "still alive")
    after = disk.read(tmp_path / "beat")
    assert after.text == "alive" and after.mark != before.mark
    for write in (disk.replace, disk.publish):
        with pytest.raises(LostDiskError, match="No space left"):
            write(tmp_path / "new", "x")
    assert os.listdir(tmp_path) == ["beat"], "a part stayed behind"


def test_a_lost_answer_does_not_make_two_winners_or_none(tmp_path, monkeypatch):
    """NFS may link, lose the answer, ask again and hear that the name exists."""
    link = os.link

    def twice(source, target):
        link(source, target)
        raise FileExistsError(errno.EEXIST, "exists")

    monkeypatch.setattr(launch.agent.disk.os, "link", twice)
    assert Disk(LONG).publish(tmp_path / "plan", "first")
    monkeypatch.setattr(launch.agent.disk.os, "link", link)
    assert not Disk(LONG).publish(tmp_path / "plan", "second")
    assert (tmp_path / "plan").read_text() == "first"


def test_what_is_published_stays_where_its_unfinished_name_could_not_be_removed(tmp_path, monkeypatch):
    """The second call wrote into the file that the first one had published."""
    disk = Disk(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda path: (_ for _ in ()).throw(OSError(errno.EIO, "lost")))
        assert disk.publish(tmp_path / "over.json", "first")
    assert not disk.publish(tmp_path / "over.json", "second")
    assert (tmp_path / "over.json").read_text() == "first"


def test_a_disk_without_hard_links_is_refused(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(launch.agent.disk.os, "link", none)
    with pytest.raises(ClusterError, match="hard links"):
        Disk(LONG).publish(Path(tmp_path / "plan"), "x")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which needs root")
def test_a_run_that_filled_its_disk_still_says_how_it_ended(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", tmp_path], check=True)
    try:
        disk = Disk(LONG)
        disk.keep_room(tmp_path / "room")
        disk.replace(tmp_path / "beat", "alive")
        with pytest.raises(OSError, match="No space"), (tmp_path / "checkpoint").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        disk.replace(tmp_path / "beat", "alive")  # costs nothing of the room
        assert all(disk.publish(tmp_path / name, "words" * 100) for name in ("end", "over", "verdict"))
        assert disk.read(tmp_path / "verdict").text == "words" * 100
        Disk(LONG).keep_room(tmp_path / "later")  # where there is little left, there is none to keep
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_planner_whose_disk_of_checkpoints_hangs_ends_and_no_longer_seems_to_plan(tmp_path):
    """Such a planner went on to give signs of life, so all other agents waited for its plan without end."""
    os.mkfifo(tmp_path / "pipe")  # opening it does not return until somebody writes
    both = {"hosts": ("here", "there"), "nodes": 2, "patience": 1.0, "lost_after": 0.5}
    choose = (tmp_path / "pipe").read_text
    recipe = load_recipe(ROOT / "recipes/mini/pretrain_dp2.yaml")
    recipe["checkpoint"] = {"save_path": str(tmp_path / "checkpoint")}
    try:
        with ThreadPoolExecutor(2) as pool:
            jobs = [Job(recipe, tmp_path, host, choose=choose, watchful=True, **both) for host in both["hosts"]]
            outcomes = [pool.submit(Agent(job).run, 0) for job in jobs]
            said = sorted(str(each.exception() or each.result().failure.message) for each in outcomes)
        beats = list((tmp_path / "attempts/0000").glob("beat-*"))
        before = [beat.stat().st_mtime_ns for beat in beats]
        time.sleep(1.5 * planning.BEAT)
        assert beats and [beat.stat().st_mtime_ns for beat in beats] == before
    finally:
        with suppress(OSError):
            os.close(os.open(tmp_path / "pipe", os.O_WRONLY | os.O_NONBLOCK))
    words = f"{tmp_path}/checkpoint: the disk of the checkpoints does not respond (no answer for 1 s)"
    assert said[0] == words and said[1].startswith((words, "attempt 0 cannot start: only "))


def test_an_agent_whose_disk_of_checkpoints_hangs_while_it_renames_one_ends(tmp_path, monkeypatch):
    """Its signs of life went on, so all other agents waited for its workers without end."""
    hangs = threading.Event()
    monkeypatch.setattr(part, "follow", lambda job, plan: hangs.wait(60.0))
    recipe = load_recipe(ROOT / "recipes/mini/pretrain_dp2.yaml")
    recipe["checkpoint"] = {"save_path": str(tmp_path / "checkpoint")}
    job = Job(recipe, tmp_path, "here", ("here",), watchful=True, patience=0.3)
    looks = SimpleNamespace(tick=lambda: None)
    own = part.Part(job, Plan(0, 1.0, ["here"], 2, "here", 9000), SimpleNamespace(), Limits(), lookout=looks)
    with pytest.raises(LostDiskError, match=r"checkpoint: the disk of the checkpoints .* \(no answer for 0.3 s\)"):
        own._supervised(recipe, tmp_path, range(2))
    hangs.set()


def test_a_signal_ends_an_agent_that_hangs_while_it_reads_checkpoints_for_its_verdict(tmp_path, monkeypatch):
    def newest_saved(saves):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(5.0)

    monkeypatch.setattr(loop, "newest_saved", newest_saved)
    agent = Agent(Job(load_recipe(ROOT / "recipes/mini/pretrain_dp2.yaml"), tmp_path, "here", ("here",)))
    agent.meeting = SimpleNamespace(now=lambda: 1.0, verdict=lambda number, decide: decide(None))
    with pytest.raises(loop.Interrupted):
        agent._verdict(Plan(0, 1.0, ["here"], 2, "here", 9000))


def test_an_agent_that_leaves_does_not_wait_for_a_read_that_hangs(tmp_path, monkeypatch):
    """Without --restarts such an agent waited without end, and further signals had no effect."""
    plan, hangs = Plan(0, 1.0, ["here"], 2, "here", 9000), threading.Event()
    agent = Agent(Job(load_recipe(ROOT / "recipes/mini/pretrain_dp2.yaml"), tmp_path, "here", ("here",)))
    part = SimpleNamespace(run=lambda: (Outcome(130), SimpleNamespace(outcome="interrupted")))
    monkeypatch.setattr(loop, "LEAVE", 0.3)
    monkeypatch.setattr(loop, "Part", lambda *given: part)
    read = []
    monkeypatch.setattr(loop, "newest_saved", lambda saves: hangs.wait(60.0) or read.append(saves))
    monkeypatch.setattr(agent, "_planned", lambda number: plan)
    verdict = mock.Mock(side_effect=lambda number, decide: decide(None))
    agent.meeting = SimpleNamespace(end=mock.Mock(), now=lambda: 1.0, verdict=verdict)
    assert agent._attempt(0) is None and agent.outcome.code == 130
    assert read == [], "it has waited until the read gave up"
    hangs.set()
