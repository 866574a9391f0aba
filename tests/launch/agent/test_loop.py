"""The agent of one host, with a stand-in for msrun: what it starts again, what it does not, what it leaves on disk."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from launch.agent import loop, part, planning
from launch.agent.decide import Rules, Smaller
from launch.agent.lookout import stopped_worker
from launch.agent.loop import Agent
from launch.agent.phases import DEFAULTS, Limits
from launch.agent.planning import Job
from launch.run.msrun import ROOT
from launch.run.preflight import only_run_in
from plugins.errors import CheckpointError, TC3Error
from plugins.sealed_checkpoint.plan import write_seal
from tests.launch.agent.clock import Clock
from tests.launch.agent.ends import A, B, attempt, end
from tools.checkpoint.scan import CheckpointInfo
from tools.recipe.load import load_recipe
from tools.runs.attempts import Plan, Verdict, folder_of, read_attempts, write

FAKE = ROOT / "tests/launch/run/fake_msrun.py"
LONG = 300.0  # seconds: a bound against hangs


def job(run_dir, restarts, said=None, **more):
    recipe = load_recipe(ROOT / "recipes/mini/pretrain_dp2.yaml")
    recipe["checkpoint"] = {"save_path": str(run_dir / "checkpoint")}
    rules = Rules(restarts=restarts, first=0.0, hosts=["here"])
    say = {"say": said.append} if said is not None else {}
    return Job(
        recipe, run_dir, "here", ("here",), 1, bind=False, rules=rules, lost_after=60.0, watchful=True, **say, **more
    )


def fake(monkeypatch, *attempts):
    """Attempt n starts workers that do `attempts[n]`."""
    commands = iter(attempts)

    def command(recipe, run_dir, *rest):
        return [sys.executable, str(FAKE), str(run_dir), *next(commands)]

    monkeypatch.setattr(part, "msrun_command", command)


def save(run_dir, step):
    folder = run_dir / "checkpoint" / f"iteration_{step:08d}"
    folder.mkdir(parents=True)
    for rank in range(2):
        (folder / f"mini-model-{rank:07d}-0000002.safetensors").write_bytes(b"weights")
        write_seal(folder, rank, world_size=2, step=step)
    (folder / "common.json").write_text("{}")
    return folder


def left(run_dir):
    """Names of the stand-in's processes that still run."""
    found = [path.name.rsplit("_", 1) for path in (run_dir / "pids").glob("*_*")]
    return [name for name, pid in found if psutil.pid_exists(int(pid)) and not zombie(int(pid))]


def zombie(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


@pytest.mark.slow
def test_a_killed_worker_is_followed_by_an_attempt_from_the_newest_checkpoint(tmp_path, monkeypatch):
    fake(monkeypatch, ["ok", "killed"], ["ok", "ok"])
    saved, said = save(tmp_path, 4), []
    assert Agent(job(tmp_path, 1, said)).run(0).code == 0
    first, second = read_attempts(tmp_path)
    assert (first.plan.resume, first.plan.step) == (None, 0)
    assert (second.plan.resume, second.plan.step, second.plan.hosts) == (str(saved), 4, ["here"])
    end = first.ends["here"]
    assert (end.outcome, end.cause, end.rank, end.code) == ("failed", "signal", 1, -signal.SIGKILL)
    assert end.log == str(tmp_path / "attempts/0000/logs/worker_1.log")
    assert (first.verdict.decision, first.verdict.initiator, second.verdict.decision) == ("restart", "here", "done")
    assert said[1:] == ["tc3: 1 restart in all"] and said[0].startswith(
        "tc3: attempt 0 ended: here: worker 1 was killed (SIGKILL)"
    )
    assert said[0].endswith(f"attempt 1 goes on from step 4: {saved}")
    assert first.plan.port != second.plan.port and not left(tmp_path)


@pytest.mark.slow
def test_restarts_of_an_earlier_launch_are_not_counted_again(tmp_path, monkeypatch):
    for number in range(3):
        write(folder_of(tmp_path, number) / "plan.json", Plan(number, 1.0, ["here"], 2, "here", 9000))
        decision = "give up" if number == 2 else "restart"
        write(folder_of(tmp_path, number) / "verdict.json", Verdict(2.0, decision, "because"))
    fake(monkeypatch, ["ok", "killed"], ["ok", "ok"])
    said = []
    assert Agent(job(tmp_path, 1, said)).run(3).code == 0
    assert said[-1] == "tc3: 1 restart in all"


@pytest.mark.slow
def test_nothing_of_an_attempt_is_overwritten_and_logs_leads_to_the_newest(tmp_path, monkeypatch):
    fake(monkeypatch, ["ok", "fail"], ["ok", "ok"])
    said = []
    assert Agent(job(tmp_path, 1, said)).run(0).code == 0
    assert "RuntimeError: the first error" in (tmp_path / "attempts/0000/logs/worker_1.log").read_text()
    assert (tmp_path / "attempts/0001/logs/worker_1.log").read_text() == ""
    assert os.readlink(tmp_path / "logs") == "attempts/0001/logs"
    assert "the first error" in said[0] and said[0].endswith("attempt 1 starts from the beginning")


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (["a", "c"], "attempt 1 on a, c (c in place of b) starts"),
        (["a", "b"], "attempt 1 on a, b starts"),
        (["a"], "attempt 1 on a (without b) starts"),
        (["a", "b", "c"], "attempt 1 on a, b, c (c in addition) starts"),
    ],
)
def test_who_takes_part_is_said_by_the_plan_and_not_by_what_was_expected(tmp_path, hosts, words):
    """The verdict was to start again; then node b was not fit, and a spare took its place."""
    said = []
    agent = Agent(replace(job(tmp_path, 1, said), hosts=("a", "b", "c")))
    first = Plan(0, 1.0, ["a", "b"], 1, "a", 9000, ["c"])
    write(folder_of(tmp_path, 0) / "plan.json", first)
    agent.last = 0, Verdict(2.0, "restart", "b: eth0 has no link. The run starts again", "b", cause="lost node")
    agent._say_plan(replace(first, attempt=1, hosts=hosts))
    assert words in said[0] and "same hosts" not in said[0]


@pytest.mark.slow
def test_it_gives_up_after_as_many_failures(tmp_path, monkeypatch):
    fake(monkeypatch, *[["ok", "fail"]] * 3)
    outcome = Agent(job(tmp_path, 1)).run(0)
    assert (outcome.code, outcome.failure.message) == (1, "worker 1 failed with exit code 1")
    assert [each.verdict.decision for each in read_attempts(tmp_path)] == ["restart", "give up"]


def test_what_the_user_has_to_mend_is_not_tried_again(tmp_path, monkeypatch):
    fake(monkeypatch, ["user_error", "user_error"])
    outcome = Agent(job(tmp_path, 5)).run(0)
    assert (outcome.code, outcome.failure.message) == (2, "plugins.x: no such plugin")
    attempt = read_attempts(tmp_path)[-1]
    assert (attempt.number, attempt.verdict.decision, attempt.verdict.cause) == (0, "give up", "user error")


def test_what_keeps_an_attempt_from_being_planned_is_said_to_all(tmp_path):
    def prepare(plan):
        raise CheckpointError("iteration_00000004: of another model")

    both = {"hosts": ("here", "there"), "nodes": 2, "patience": 60.0}
    here = Agent(replace(job(tmp_path, 5), **both), prepare=prepare)
    there = Agent(replace(job(tmp_path, 5), **both, host="there"), prepare=prepare)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(agent.run, 0) for agent in (here, there)]
    raised = [each for each in ends if each.exception()]
    (told,) = [each.result() for each in ends if each not in raised]
    assert [type(each.exception()) for each in raised] == [CheckpointError]
    assert (told.code, told.failure.message) == (2, "iteration_00000004: of another model")
    (attempt,) = read_attempts(tmp_path)
    assert (attempt.plan, attempt.verdict.decision, attempt.verdict.cause) == (None, "give up", "user error")


def test_a_refusal_on_a_single_host_leaves_nothing(tmp_path, monkeypatch):
    def prepare(plan):
        raise CheckpointError("iteration_00000004: of another model")

    run_dir = tmp_path / "run"
    with pytest.raises(CheckpointError), only_run_in(run_dir, together=True):
        Agent(job(run_dir, 5), prepare=prepare).run(0)
    assert not run_dir.exists()
    fake(monkeypatch, ["ok", "ok"])
    assert Agent(job(run_dir, 5)).run(0).code == 0
    with pytest.raises(CheckpointError):
        Agent(job(run_dir, 5), prepare=prepare).run(1)
    (attempt,) = read_attempts(run_dir)
    assert attempt.verdict.decision == "done"


@pytest.mark.parametrize("again", [False, True], ids=["one agent", "an agent that was started again"])
def test_a_restart_that_cannot_be_planned_is_the_end_of_the_run(tmp_path, monkeypatch, again):
    def prepare(plan):
        if plan.attempt:
            raise CheckpointError("the data was replaced")

    if again:
        write(folder_of(tmp_path, 0) / "plan.json", Plan(0, 1.0, ["here"], 2, "here", 9000))
        write(folder_of(tmp_path, 0) / "verdict.json", Verdict(2.0, "restart", "because"))
    fake(monkeypatch, ["ok", "fail"])
    with pytest.raises(CheckpointError):
        Agent(job(tmp_path, 5), prepare=prepare).run(int(again))
    assert [each.verdict.decision for each in read_attempts(tmp_path)] == ["restart", "give up"]


@pytest.mark.parametrize("number", [0, 1])
def test_hosts_that_never_come_are_given_up_at_every_attempt(tmp_path, number):
    both = {"hosts": ("here", "there"), "nodes": 2, "patience": 0.5}
    here = Agent(replace(job(tmp_path, 5), **both))
    with pytest.raises(TC3Error, match=f"attempt {number} cannot start: only here joined within 0.5 s, but") as error:
        here.run(number)
    assert str(error.value).endswith(f"start tc3 agent, with this run folder ({tmp_path}), on there")


def test_who_waits_for_a_plan_that_takes_long_does_not_give_up(tmp_path):
    """The planner reads a whole checkpoint, of terabytes; the others left after their patience, and named themselves as
    too few.
    """
    both = {"hosts": ("here", "there"), "nodes": 2, "patience": 1.5, "lost_after": 2.0}

    def choose():
        until = time.monotonic() + 4.0
        while time.monotonic() < until:
            time.sleep(0.05)  # it reads one piece after another
        raise CheckpointError("no checkpoint is whole")

    with ThreadPoolExecutor(2) as pool:
        agents = [Agent(replace(job(tmp_path, 0), host=host, choose=choose, **both)) for host in both["hosts"]]
        outcomes = [pool.submit(agent.run, 0) for agent in agents]
        said = sorted(str(each.exception() or each.result().failure.message) for each in outcomes)
    assert said == ["no checkpoint is whole"] * 2


@pytest.mark.parametrize("there", [["here"], ["here", "spare"]])
def test_who_waited_for_a_planner_that_died_waits_for_another_plan(tmp_path, monkeypatch, there):
    """The planner died after the others' patience; they gave up at its death, although one of them took over."""
    clock, planned = SimpleNamespace(now=0.0), [math.inf]
    for module in (loop, planning):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    agent = Agent(replace(job(tmp_path, 0), hosts=("here", "spare"), nodes=2, patience=600.0))
    plan = Plan(0, 1.0, ["here", "spare"], 2, "here", 9000)
    agent.meeting = SimpleNamespace(
        come=lambda number: None,
        gone=lambda number: None,
        there=lambda number: there,
        plan=lambda number, wanted: plan if clock.now > planned[0] else None,
        is_planned=lambda number: clock.now < 900.0,
    )
    agent._sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    with pytest.raises(TC3Error, match="but the run needs more nodes") as error:
        agent._planned(0)
    assert 1300.0 < clock.now < 1700.0 and (" on spare" in str(error.value)) is ("spare" not in there)
    clock.now, planned[0] = 0.0, 1200.0
    assert agent._planned(0) is plan


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_agent_that_reads_a_checkpoint_for_its_plan(tmp_path, number):
    def choose():
        signal.raise_signal(number)
        time.sleep(5.0)
        raise CheckpointError("the signal did not end it")

    assert Agent(job(tmp_path, 0, choose=choose)).run(0).code == 128 + number


@pytest.mark.slow
def test_a_host_that_does_not_become_fit_is_given_up(tmp_path, monkeypatch):
    fake(monkeypatch, ["ok", "fail"])
    said = []
    monkeypatch.setattr(loop, "time", Clock())
    here = Agent(replace(job(tmp_path, 5, said), patience=0.5), fit=lambda: ["an NPU is gone"])
    words = "here cannot take part in attempt 1: an NPU is gone"
    with pytest.raises(TC3Error, match=words):
        here.run(0)
    assert f"tc3: {words}" in said


@pytest.mark.slow
def test_a_hang_is_ended_within_the_limit_of_its_phase(tmp_path, monkeypatch):
    fake(monkeypatch, ["sleep", "stubborn"])
    limits = dict.fromkeys(DEFAULTS, 2.0)  # the workers would sleep for an hour
    assert Agent(job(tmp_path, 0), limits=Limits(limits, limits)).run(0).code == 1
    end = read_attempts(tmp_path)[0].ends["here"]
    assert (end.outcome, end.cause, end.phase) == ("failed", "hang", "start") and "limit 2 s" in end.message
    assert not left(tmp_path)


@pytest.mark.slow
def test_a_stopped_worker_is_the_one_that_hangs(tmp_path, monkeypatch):
    class FromThenOn(Limits):
        """No phase is too long until the worker has stopped itself; then each is."""

        def limit(self, phase):
            return math.inf if stopped_worker() is None else 0.0

    fake(monkeypatch, ["sleep", "stopped"])
    assert Agent(job(tmp_path, 0), limits=FromThenOn()).run(0).code == 1
    end = read_attempts(tmp_path)[0].ends["here"]
    assert (end.cause, end.rank) == ("hang", 1) and "worker 1 is stopped" in end.message


@pytest.mark.slow
def test_a_port_that_is_taken_fails_at_once_and_another_is_chosen(tmp_path, monkeypatch):
    fake(monkeypatch, [], ["ok", "ok"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert Agent(job(tmp_path, 1, port=port)).run(0).code == 0
    first, second = read_attempts(tmp_path)
    assert (first.plan.port, first.ends["here"].cause, first.verdict.decision) == (port, "port", "restart")
    assert second.plan.port != port


SOURCE = """
import sys
from pathlib import Path
from tests.launch.agent import test_loop
from launch.agent.loop import Agent
import pytest
with pytest.MonkeyPatch.context() as patch:
    test_loop.fake(patch, sys.argv[2:])
    sys.exit(Agent(test_loop.job(Path(sys.argv[1]), 3)).run(0).code)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "outcome"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "preempted")], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_ends_it_all_and_is_no_reason_to_go_on(tmp_path, number, outcome):
    process = subprocess.Popen([sys.executable, "-c", SOURCE, str(tmp_path), "sleep", "stubborn"], cwd=ROOT)
    until = time.monotonic() + LONG
    while len(list((tmp_path / "pids").glob("worker_*"))) < 2:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(timeout=LONG) == 128 + number
    attempt = read_attempts(tmp_path)[-1]
    assert attempt.number == 0 and attempt.ends["here"].outcome == outcome
    assert attempt.verdict.decision == "leave" and not left(tmp_path)


def ramped(run_dir):
    """An agent whose batch grows after step 3."""
    made = job(run_dir, 3)
    made.recipe["plugins"] = {**made.recipe.get("plugins", {}), "batch_ramp": {"stages": [[3, 2]]}}
    return made


@pytest.mark.slow
def test_ctrl_c_while_a_later_stage_of_a_batch_ramp_compiles_ends_it_all(tmp_path):
    source = SOURCE.replace("job(Path(sys.argv[1]), 3)", "ramped(Path(sys.argv[1]))")
    process = subprocess.Popen([sys.executable, "-c", source, str(tmp_path), "grows", "grows"], cwd=ROOT)
    until = time.monotonic() + LONG
    # the step is that of the fastest worker, the phase that of the slowest one, which also compiles at first
    while not (
        (beats := [each.beats["here"] for each in read_attempts(tmp_path) if each.beats])
        and (beats[0].step, beats[0].phase) == (3, "first step")
    ):
        assert time.monotonic() < until and process.poll() is None, "the agent does not know that it compiles"
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=LONG) == 130
    (attempt,) = read_attempts(tmp_path)
    end = attempt.ends["here"]
    assert (end.outcome, end.phase, end.step, attempt.verdict.decision) == ("interrupted", "first step", 3, "leave")
    assert not left(tmp_path)


@pytest.mark.slow
def test_at_a_notice_the_ranks_save_and_leave_together(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", SOURCE, str(tmp_path), "heeds", "heeds"], cwd=ROOT)
    metrics, until = [tmp_path / "metrics" / f"rank_{rank}.jsonl" for rank in range(2)], time.monotonic() + LONG
    while not all(file.exists() and len(file.read_text().splitlines()) > 2 for file in metrics):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=LONG) == 143
    (attempt,) = read_attempts(tmp_path)
    end, steps = attempt.ends["here"], [len(file.read_text().splitlines()) for file in metrics]
    assert (end.outcome, end.phase, end.message) == ("preempted", "save", f"saved on request at step {end.step}")
    assert steps == [end.step] * 2 and attempt.verdict.decision == "leave" and not left(tmp_path)


@pytest.mark.slow
def test_beats_tell_the_phase_and_the_step(tmp_path, monkeypatch):
    fake(monkeypatch, ["sleep", "sleep"])
    limits = dict.fromkeys(DEFAULTS, 2.0)
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    for rank in range(2):
        (metrics / f"rank_{rank}.jsonl").write_text(json.dumps({"step": 9}) + "\n")  # of before
    began = time.monotonic()
    Agent(job(tmp_path, 0), limits=Limits(limits, limits)).run(0)
    beat = read_attempts(tmp_path)[0].beats["here"]
    assert (beat.phase, beat.step) == ("start", 0) and 0 <= beat.time - beat.since <= time.monotonic() - began + 0.001


@pytest.mark.slow
def test_a_checkpoint_that_holds_all_steps_is_the_end(tmp_path, monkeypatch):
    fake(monkeypatch, ["ok", "killed"])
    folder, said = save(tmp_path, 10_000), []
    (folder / "common.json").write_text(json.dumps({"global_batch_size": 8}))
    assert Agent(job(tmp_path, 1, said)).run(0).code == 0
    assert "the run is complete" in said[1]
    assert Path(tmp_path / "attempts/0001/verdict.json").exists()


def test_a_mistake_beside_the_workers_ends_them_and_is_not_hidden(tmp_path, monkeypatch):
    fake(monkeypatch, ["sleep", "sleep"])

    def show():
        raise ZeroDivisionError("a mistake")

    with pytest.raises(ZeroDivisionError):
        Agent(job(tmp_path, 1, show=lambda: nullcontext(show))).run(0)
    assert not left(tmp_path)


@pytest.mark.parametrize(
    ("step", "batch", "progress"), [(52, 16, True), (50, 16, False), (48, 16, False), (101, 8, True)]
)
def test_a_save_after_a_larger_batch_is_progress_although_its_number_is_smaller(tmp_path, step, batch, progress):
    """The attempt began from step 100 of 8 samples; a failure after a save counted as one that had saved nothing."""
    folders = {}
    for number, size in ((100, 8), (step, batch)):
        folders[number] = tmp_path / f"iteration_{number:08d}"
        folders[number].mkdir()
        (folders[number] / "common.json").write_text(json.dumps({"global_batch_size": size}))
    plan = Plan(1, 0.0, ["here"], 1, "here", 1, resume=str(folders[100]), step=100)
    assert (loop._saved(plan, CheckpointInfo(folders[step], step)) > plan.step) == progress
    assert loop._saved(replace(plan, resume=None, step=0), CheckpointInfo(folders[step], step)) == step


@pytest.mark.parametrize(("attempt", "progress"), [("0002-abc", True), ("0001-def", False)])
def test_an_attempts_own_save_is_progress_although_what_it_began_from_is_gone(tmp_path, attempt, progress):
    """With `checkpoint.save_max: 1` the first save removes it, and the larger batch gave the save a smaller number."""
    folder = tmp_path / "iteration_00000052"
    folder.mkdir()
    (folder / "common.json").write_text(json.dumps({"global_batch_size": 16}))
    (folder / "mini-model-0000000-0000001.safetensors").write_bytes(b"weights")
    write_seal(folder, 0, 1, 52, made={"attempt": attempt})
    plan = Plan(2, 0.0, ["a"], 1, "a", 1, resume=str(tmp_path / "iteration_00000100"), step=100, name="0002-abc")
    assert (loop._saved(plan, CheckpointInfo(folder, 52)) > plan.step) == progress


def test_a_checkpoint_that_cannot_be_read_hides_no_end(tmp_path, monkeypatch):
    """The agent said only this, with exit code 2, although all steps were trained."""

    def unread(root):
        raise CheckpointError(f"{root}: this path cannot be read (Input/output error)")

    monkeypatch.setattr(loop, "newest_saved", unread)
    agent, over = Agent(job(tmp_path, 0)), attempt(end(A, 100, outcome="done"), hosts=[A])
    agent.meeting = SimpleNamespace(now=lambda: 200.0, verdict=lambda number, decide: decide(over))
    assert agent._verdict(over.plan).decision == "done"


def test_a_checkpoint_that_cannot_be_read_hides_no_host_that_is_gone(tmp_path, monkeypatch):
    """Agents ended with the error of the checkpoint before they said which host was gone."""

    def unread(root):
        raise CheckpointError(f"{root}: this path cannot be read (Input/output error)")

    monkeypatch.setattr(loop, "newest_saved", unread)
    monkeypatch.setattr(loop, "smaller", lambda recipe, hosts, slots, step: Smaller(1, [], f"on {hosts} host"))
    agent, over = Agent(job(tmp_path, 1)), attempt(end(A, 100), end(B, 90, cause="lost node", by=A), hosts=[A, B])
    agent.meeting = SimpleNamespace(now=lambda: 200.0, verdict=lambda number, decide: decide(over))
    found = agent._verdict(over.plan)
    assert (found.decision, found.initiator) == ("smaller", B) and "on 1 host" in found.why


@pytest.mark.parametrize(("batch", "done"), [(4, 4), (8, 8), (16, 16)])
def test_whether_fewer_hosts_can_go_on_is_asked_for_the_step_of_the_present_batch(tmp_path, monkeypatch, batch, done):
    """Of a checkpoint with another batch, step 8 was asked for: other samples, perhaps within a window of steps."""
    folder, asked = save(tmp_path, 8), []
    (folder / "common.json").write_text(json.dumps({"global_batch_size": batch}))
    monkeypatch.setattr(loop, "smaller", lambda recipe, hosts, slots, step: asked.append(step))
    Agent(job(tmp_path, 0))._can(["here"])
    assert asked == [done]


def test_an_agent_that_joins_a_long_run_reads_only_its_newest_steps(tmp_path, monkeypatch):
    """It held the records of all steps in memory, with the digests of their samples."""
    monkeypatch.setattr(loop, "RECENT", 2_000)
    metrics = tmp_path / "metrics" / "rank_0.jsonl"
    metrics.parent.mkdir()
    metrics.write_text("".join(json.dumps({"step": step, "seconds": float(step)}) + "\n" for step in range(1, 1001)))
    seen = Agent(job(tmp_path, 0)).limits.seen["step"]
    assert seen[-1] == 1000.0 and 900 < seen[0] < 1000
